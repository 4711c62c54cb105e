"""kvatlas.toml: the operator's file, as frozen values. An unknown key is an error with its line."""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec

from kvatlas import config_register, config_tenants, config_tracing
from kvatlas.config_register import RegisterConfig
from kvatlas.config_tenants import TenantsConfig
from kvatlas.config_tls import AdminConfig, AuditConfig, TlsConfig, fault_of, is_local, right_of
from kvatlas.config_tracing import TracingConfig
from kvatlas.core.admission import Rules
from kvatlas.core.ahead_copies import Params as AheadParams
from kvatlas.core.router import BLIND, Policy
from kvatlas.core.transports import Transport
from kvatlas.errors import ConfigError

T = TypeVar("T")
DAY_S = 86_400.0
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
BytesPerSecond = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=DAY_S)]
SecondsOrNone = Annotated[float, msgspec.Meta(ge=0, le=DAY_S)]  # 0: none

Role = Literal["combined", "prefill", "decode"]
PairingProtocol = Literal["nixl", "mooncake", "sglang"]

_PORT_MAX = 65_535
_AGENTS_MIN = 2  # for copies between their nodes
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_HTTP = r"http://[^/\s?#@]+(/[^\s?#]*)?"
_HTTP_OR_HTTPS = _HTTP.replace("http", "https?", 1)
_SIZE = re.compile(r"(\d{1,19}(?:\.\d+)?)\s*([KMGTP]?B?)", re.IGNORECASE)


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where clients connect, and the limits that protect everybody else."""

    host: str = "127.0.0.1"
    port: Port = 8000
    # A million tokens as JSON numbers are 7 MB; images are larger.
    max_body_bytes: Positive = 64 << 20
    max_connections: Positive = 4096
    connect_timeout_s: Seconds = 2.0
    # Silence from an engine for this long ends a request: above any real prefill queue.
    engine_idle_timeout_s: Seconds = 600.0
    # The prefill half of a pair answers nothing until it is done; then one engine does it all.
    prefill_timeout_s: Seconds = 120.0
    # An engine that answers nothing for this long, several looks in a row, gets no requests.
    health_timeout_s: Seconds = 2.0
    drain_timeout_s: Seconds = 30.0
    # Of a request that does not name its own by header. 0: none.
    ttft_slo_s: SecondsOrNone = 0.0
    deadline_s: SecondsOrNone = 0.0
    # Other gateways of these engines; at its start this one asks them what they know.
    peers: tuple[str, ...] = ()
    warm_start_s: Seconds = 30.0


class PickerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where Envoy and other gateways ask which engine gets a request; ``listen`` "" for nowhere."""

    listen: str = ""  # HOST:PORT
    max_streams: Positive = 4096  # requests under way; each has a stream of its own


class KeysConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``secret_file`` holds at least 16 bytes; without it each start draws a fresh secret."""

    secret_file: str = ""


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``policy``: price (kvatlas); the others are baselines, and rules of other routers."""

    policy: Policy = "price"
    prefill_tokens_per_s: Rate = 8000.0  # only until the first requests were measured
    device: str = ""  # instead: a profile by name, of ours or of ``device_file``
    device_file: str = ""
    devices: Positive = 1
    precision: str = "bf16"
    decision_log: str = ""  # JSONL path; "" keeps the last decisions in memory only
    explain_max: Positive = 4096
    recording: str = ""  # a new file for `kvatlas validate replay`; it holds token ids
    recording_max_bytes: Positive = 1 << 30


class DirectoryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Caps in block-holders; beyond them new claims are refused and counted, none is dropped.

    ``proofs``: a file that ``kvatlas validate exactness --record`` has written, beside ours.
    """

    blocks_max: Positive = 20_000_000
    blocks_per_publisher_max: Positive = 2_000_000
    proofs: str = ""


class TokenizerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``path``: a directory with tokenizer.json and its chat template; "" uses the engine's own
    tokenize endpoint. ``verify_every`` samples one request in so many against the engine."""

    path: str = ""
    chat_template: str = ""
    verify_every: Count = 500
    cache_bytes: Count = 256 << 20
    engine_timeout_s: Seconds = 1.0


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine. ``events`` "auto" asks the engine where its KV events are; "" means none.

    ``layout`` is "auto", a Hugging Face config.json, or a plain block size as text ("32").
    ``dp_ranks`` counts its data-parallel ranks where ``events`` is an address: each rank's port
    is one higher than the one before. With "auto" the engine tells. ``draft`` and
    ``tensor_parallel`` are for engines that do not tell them (0: not said), and ``device`` is what
    its kernels run on, as ``kvatlas validate exactness`` names it ("cpu AVX512").

    ``draining``: it gets no new requests; those that it has end.

    ``role``: what it does of a request, all of it or one half. Halves meet by ``pairing``, the
    protocol of their engines; ``bootstrap`` is where the prefill half says where it can be met.
    ``transport``: what its hand-offs should go over; "any" for whatever the engines find.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    url: str
    engine: Literal["vllm", "sglang", "stub"] = "vllm"
    events: str = "auto"
    replay: str = ""
    layout: str = "auto"
    kv_dtype: str = "auto"
    weights_digest: str = ""
    draft: bool = False
    tensor_parallel: Count = 0
    device: str = ""
    role: Role = "combined"
    pairing: PairingProtocol = "nixl"
    bootstrap: str = ""
    transport: Transport = "any"
    dp_ranks: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    draining: bool = False


class AgentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The agent of a node (``kvatlas agent --listen``): it carries ``workers``, the engines of its
    node, further. ``store`` names the object tier that it reads: agents with the same name share
    one; "" for none."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    url: str
    workers: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    store: str = ""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    worker: tuple[WorkerConfig, ...]
    agent: tuple[AgentConfig, ...] = ()
    gateway: GatewayConfig = GatewayConfig()
    picker: PickerConfig = PickerConfig()
    keys: KeysConfig = KeysConfig()
    router: RouterConfig = RouterConfig()
    admission: Rules = Rules()
    directory: DirectoryConfig = DirectoryConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    ahead: AheadParams = AheadParams()
    tenants: TenantsConfig = TenantsConfig()
    tls: TlsConfig = TlsConfig()
    admin: AdminConfig = AdminConfig()
    audit: AuditConfig = AuditConfig()
    register: RegisterConfig = RegisterConfig()
    tracing: TracingConfig = TracingConfig()


_TABLES: dict[str, type[msgspec.Struct]] = {
    "": Config,
    "worker": WorkerConfig,
    "agent": AgentConfig,
    "gateway": GatewayConfig,
    "picker": PickerConfig,
    "keys": KeysConfig,
    "router": RouterConfig,
    "admission": Rules,
    "directory": DirectoryConfig,
    "tokenizer": TokenizerConfig,
    "ahead": AheadParams,
    "tenants": TenantsConfig,
    "tls": TlsConfig,
    "admin": AdminConfig,
    "audit": AuditConfig,
    "register": RegisterConfig,
    "tracing": TracingConfig,
}


def load(path: Path) -> Config:
    """Raises ConfigError that names the file, the line and what is wrong with it."""
    text, config = read(path, Config, _TABLES)
    _check(path, text, config)
    return config


def read_secret(path: Path, name: str) -> bytes:
    """A key secret: gateway and agents must find the same bytes in the same file. Raises
    ConfigError, with the ``name`` of the setting, where it cannot be read or is too short."""
    try:
        secret = path.read_bytes().strip()
    except FileNotFoundError as error:
        raise ConfigError(
            f"{name}: {path}: {error.strerror}; make one, the same for gateways and agents: "
            f"(umask 077; openssl rand -hex 32 > {path})"
        ) from error
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {error.strerror}") from error
    if len(secret) < 16:
        raise ConfigError(f"{name}: {path}: needs at least 16 bytes, has {len(secret)}")
    return secret


def read(path: Path, type: type[T], tables: Mapping[str, type[msgspec.Struct]]) -> tuple[str, T]:
    """A TOML file's text, and the value in it. ``tables``: of which form each table is.

    Raises ConfigError that names the file and the line; an unknown key is told with its likeliest
    name.
    """
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        return text, msgspec.toml.decode(text, type=type)
    except msgspec.ValidationError as error:
        line, message = _explain(text, str(error), tables)
        raise ConfigError(f"{path}:{line}: {message}") from error
    except msgspec.DecodeError as error:
        told = re.search(r"at line (\d+)", str(error))
        line = int(told[1]) if told else text.count("\n") + 1
        raise ConfigError(f"{path}:{line}: not valid TOML: {error}") from error
    except (RecursionError, ValueError) as error:  # nested too deeply, a number without end
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def _check(path: Path, text: str, config: Config) -> None:
    """What types alone cannot say."""
    if not config.worker:
        line = line_of(text, "worker")
        raise ConfigError(f"{path}:{line}: no [[worker]]: name at least one engine")
    kinds: dict[str, str] = {}
    for index, worker in enumerate(config.worker):
        _check_name(path, text, f"worker[{index}]", worker, kinds)
        _check_half(path, text, index, worker, config.worker)
    for index, agent in enumerate(config.agent):
        _check_name(path, text, f"agent[{index}]", agent, kinds)
    if config.ahead.on and (len(config.agent) < _AGENTS_MIN or not config.keys.secret_file):
        raise ConfigError(
            f"{path}:{line_of(text, 'ahead')}: ahead: copies go from one node's agent to another's:"
            " name at least two [[agent]], and keys.secret_file, which they share with us"
        )
    key, why = config_tenants.fault_of(
        config.tenants,
        secret=bool(config.keys.secret_file),
        blind=config.router.policy in BLIND,
    )
    if key:
        raise ConfigError(f"{path}:{line_of(text, key)}: {why}")
    key, why = config_register.fault_of(config.register, secret=bool(config.keys.secret_file))
    if key:
        raise ConfigError(f"{path}:{line_of(text, key)}: {why}")
    key, why = config_tracing.fault_of(config.tracing, tls=config.tls.on)
    if key:
        raise ConfigError(f"{path}:{line_of(text, key)}: {why}")
    if config.gateway.peers:
        _check_peers(path, text, config)
    if config.picker.listen:
        _check_picker(path, text, config)
    _check_trust(path, text, config)
    node_of: dict[str, str] = {}
    for index, agent in enumerate(config.agent):
        at = f"{path}:{line_of(text, f'agent[{index}].workers')}: agent {agent.name!r}"
        for name in agent.workers:
            if kinds.get(name) != "worker":
                raise ConfigError(f"{at}: there is no worker {name!r}")
            if name in node_of:
                raise ConfigError(
                    f"{at}: {name!r} is listed for {node_of[name]!r} already: an engine runs on "
                    "one node"
                )
            node_of[name] = agent.name


def _check_picker(path: Path, text: str, config: Config) -> None:
    """What is picked is told as ip:port, and the proxy sends the path as the client wrote it."""
    listen = config.picker.listen
    port = re.fullmatch(r"(?:[^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})", listen)
    if not port or int(port[1]) > _PORT_MAX:
        line = line_of(text, "picker.listen")
        raise ConfigError(f"{path}:{line}: picker.listen: {listen!r} is not of the form HOST:PORT")
    for index, worker in enumerate(config.worker):
        parts = urlsplit(worker.url)
        try:
            ipaddress.ip_address(parts.hostname or "")
        except ValueError:
            fault = "a proxy that asks the endpoint picker needs an IP address in it"
        else:
            fault = "a proxy that asks the endpoint picker cannot add its path"
            if not parts.path.strip("/"):
                continue
        line = line_of(text, f"worker[{index}].url")
        raise ConfigError(f"{path}:{line}: worker {worker.name!r}: {worker.url!r}: {fault}")


def _check_peers(path: Path, text: str, config: Config) -> None:
    """They prove to each other that they have one secret."""
    at = f"{path}:{line_of(text, 'gateway.peers')}: gateway.peers"
    if not config.keys.secret_file:
        raise ConfigError(f"{at}: gateways that tell each other need keys.secret_file, the same")
    if config.router.recording:
        raise ConfigError(f"{at}: a router.recording begins with nothing: take one of them away")
    wanted = "https" if config.tls.on else "http or https"
    for url in config.gateway.peers:
        if not re.fullmatch(_HTTP_OR_HTTPS, url) or (config.tls.on and url.startswith("http:")):
            raise ConfigError(f"{at}: {url!r}: {wanted}://HOST:PORT is wanted")


def _check_trust(path: Path, text: str, config: Config) -> None:
    """Where TLS is on, nothing leaves the machine in the clear but what was said to."""
    tls = config.tls
    place, fault = fault_of(tls)
    for who in config.admin.clients:
        if right_of(who) is None:
            place, fault = "admin.clients", f"admin.clients: {who!r} is not of the form NAME:RIGHT"
    for index, worker in enumerate(config.worker if tls.on else ()):
        here = is_local(worker.url)
        if worker.url.startswith("http:") and not here and not tls.plain_engines:
            place = f"worker[{index}].url"
            fault = f"{worker.name!r} is asked in the clear: write https, or tls.plain_engines"
        elif worker.events and not tls.plain_events and not _events_stay(worker):
            place = f"worker[{index}].events"
            fault = (
                f"{worker.name!r} sends its events in the clear, for engines know no other way: "
                'write events = "", or tls.plain_events'
            )
    for index, agent in enumerate(config.agent if tls.on else ()):
        if not agent.url.startswith("https:"):
            place, fault = f"agent[{index}].url", f"agent {agent.name!r}: with [tls] it is https"
    if tls.on and config.picker.listen and not is_local(f"//{config.picker.listen}"):
        place, fault = "picker.listen", "picker.listen speaks no TLS: an address of this machine"
    if fault:
        raise ConfigError(f"{path}:{line_of(text, place)}: {fault}")


def _events_stay(worker: WorkerConfig) -> bool:
    """On this machine."""
    return is_local(worker.url if worker.events == "auto" else worker.events)


def _check_name(
    path: Path, text: str, place: str, one: WorkerConfig | AgentConfig, kinds: dict[str, str]
) -> None:
    """Of a worker or an agent; ``kinds``: of those before it, by name."""
    kind = place.partition("[")[0]
    at = f"{path}:{line_of(text, f'{place}.name')}"
    if one.name in kinds:
        both = f"two {kind}s" if kinds[one.name] == kind else "a worker and an agent"
        raise ConfigError(f"{at}: {both} are named {one.name!r}: names must differ")
    kinds[one.name] = kind
    if not re.fullmatch(r'[!"$-~]+', one.name):
        raise ConfigError(
            f"{at}: {kind} {one.name!r}: a name goes into headers and metrics: "
            "use printable ASCII without spaces and without '#'"
        )
    if not re.fullmatch(_HTTP_OR_HTTPS, one.url):
        raise ConfigError(
            f"{path}:{line_of(text, f'{place}.url')}: {kind} {one.name!r}: {one.url!r} is not of "
            "the form http://host:port or https://host:port"
        )


_OTHER_HALF = {"prefill": "decode", "decode": "prefill"}


def _check_half(
    path: Path, text: str, index: int, one: WorkerConfig, all_: tuple[WorkerConfig, ...]
) -> None:
    """Half of a pair needs another half, and most protocols a place to meet."""
    place = f"worker[{index}]"
    if one.transport != "any" and one.role == "combined":
        raise ConfigError(
            f"{path}:{line_of(text, f'{place}.transport')}: worker {one.name!r} hands nothing over:"
            " transport is for the roles prefill and decode"
        )
    other = _OTHER_HALF.get(one.role, "")
    if other and not any(w.role == other and w.pairing == one.pairing for w in all_):
        raise ConfigError(
            f"{path}:{line_of(text, f'{place}.role')}: worker {one.name!r} has the role "
            f"{one.role!r}, and no worker with pairing {one.pairing!r} has the role {other!r}"
        )
    meets = one.role == "prefill" and one.pairing != "nixl"
    if meets != bool(one.bootstrap) or (meets and not re.fullmatch(_HTTP, one.bootstrap)):
        need = (
            'needs bootstrap = "http://host:port" of its bootstrap server'
            if meets
            else "has a bootstrap address, which only a prefill half with pairing mooncake or "
            "sglang uses"
        )
        at = f"{path}:{line_of(text, f'{place}.bootstrap')}"
        raise ConfigError(f"{at}: worker {one.name!r} {need}")


def _explain(
    text: str, message: str, tables: Mapping[str, type[msgspec.Struct]]
) -> tuple[int, str]:
    """The line that a msgspec message speaks of, and the message in the file's own words."""
    found = re.fullmatch(r"(.*?)(?: - at `\$\.?(.*)`)?", message, re.DOTALL)
    fault, place = (found[1], found[2] or "") if found else (message, "")
    if fault.startswith("Invalid enum value"):
        table, _, key = place.rpartition(".")
        hints = get_type_hints(tables[re.sub(r"\[\d+\]", "", table)])
        fault = f"{fault}: use one of {', '.join(get_args(hints[key]))}"
    unknown = re.search(r"unknown field `(.+)`", fault)
    if not unknown:
        return line_of(text, place), f"{place}: {fault}" if place else fault
    key = unknown[1]
    fault = f"unknown key {f'{place}.{key}' if place else key!r}"
    known = tables[place.partition("[")[0]].__struct_fields__
    near = difflib.get_close_matches(key, known, 1)
    advice = f"did you mean {near[0]!r}?" if near else f"there is: {', '.join(known)}"
    return line_of(text, f"{place}.{key}".lstrip(".")), f"{fault}: {advice}"


def line_of(text: str, place: str) -> int:
    """The line of ``worker[1].url`` and the like, or of the nearest table around it; else 1."""
    lines: dict[str, int] = {}
    arrays: Counter[str] = Counter()
    table = ""
    for number, line in enumerate(text.split("\n"), 1):
        header = re.match(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]", line)
        key = re.match(r"""\s*["']?([\w.-]+)["']?\s*=""", line)
        if header:
            table = header[2]
            lines.setdefault(table, number)
            if header[1] == "[[":
                arrays[table] += 1
                table = f"{table}[{arrays[table] - 1}]"
                lines[table] = number
        elif key:
            lines.setdefault(f"{table}.{key[1]}".lstrip("."), number)
    while place and place not in lines:
        place = place[: max(place.rfind("."), place.rfind("["), 0)]
    return lines.get(place, 1)


def size_bytes(text: str) -> int:
    """``1.5TB`` in bytes, decimal. Raises ConfigError where it is no size above zero."""
    match = _SIZE.fullmatch(text.strip())
    unit = match.group(2).upper() if match else ""
    unit = unit if unit.endswith("B") or not unit else unit + "B"
    if match is None or unit == "B" or (size := round(float(match.group(1)) * _UNITS[unit])) < 1:
        raise ConfigError(f"{text!r} is no size: write 64GB, 1.5TB or bytes")
    return size
