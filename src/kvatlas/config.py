"""kvatlas.toml: the operator's file, as frozen values. An unknown key is an error with its line."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from kvatlas.errors import ConfigError

T = TypeVar("T")
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400.0)]


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
    drain_timeout_s: Seconds = 30.0


class KeysConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``secret_file`` holds at least 16 bytes; without it each start draws a fresh secret."""

    secret_file: str = ""


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``policy``: price (kvatlas), round_robin and least_load (the baselines)."""

    policy: Literal["price", "round_robin", "least_load"] = "price"
    prefill_tokens_per_s: Rate = 8000.0  # only until the first requests were measured
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
    dp_ranks: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    worker: tuple[WorkerConfig, ...]
    gateway: GatewayConfig = GatewayConfig()
    keys: KeysConfig = KeysConfig()
    router: RouterConfig = RouterConfig()
    directory: DirectoryConfig = DirectoryConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()


_TABLES: dict[str, type[msgspec.Struct]] = {
    "": Config,
    "worker": WorkerConfig,
    "gateway": GatewayConfig,
    "keys": KeysConfig,
    "router": RouterConfig,
    "directory": DirectoryConfig,
    "tokenizer": TokenizerConfig,
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
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
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
    seen: set[str] = set()
    for index, worker in enumerate(config.worker):
        if worker.name in seen:
            line = line_of(text, f"worker[{index}].name")
            raise ConfigError(
                f"{path}:{line}: two workers are named {worker.name!r}: names must differ"
            )
        seen.add(worker.name)
        if not re.fullmatch(r'[!"$-~]+', worker.name):
            line = line_of(text, f"worker[{index}].name")
            raise ConfigError(
                f"{path}:{line}: worker {worker.name!r}: a name goes into headers and metrics: "
                "use printable ASCII without spaces and without '#'"
            )
        if not re.fullmatch(r"http://[^/\s?#@]+(/[^\s?#]*)?", worker.url):
            line = line_of(text, f"worker[{index}].url")
            raise ConfigError(
                f"{path}:{line}: worker {worker.name!r}: {worker.url!r} is not of the form "
                "http://host:port"
            )


def _explain(
    text: str, message: str, tables: Mapping[str, type[msgspec.Struct]]
) -> tuple[int, str]:
    """The line that a msgspec message speaks of, and the message in the file's own words."""
    found = re.fullmatch(r"(.*?)(?: - at `\$\.?(.*)`)?", message, re.DOTALL)
    fault, place = (found[1], found[2] or "") if found else (message, "")
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
