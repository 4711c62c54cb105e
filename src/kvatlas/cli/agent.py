"""``kvatlas agent``: the process that owns a node's memory and disk for KV state."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import uvloop

from kvatlas.cli import agent_errands as errands
from kvatlas.cli.output import print_json
from kvatlas.cli.running import add_log_options
from kvatlas.config import KeysConfig, line_of, read, read_secret, size_bytes
from kvatlas.config_register import RegisterConfig, trusting
from kvatlas.config_register import fault_of as register_fault
from kvatlas.config_tls import AdminConfig, AuditConfig, TlsConfig, fault_of
from kvatlas.core.agent_values import Config
from kvatlas.core.policy.checkpoints import spacing_of
from kvatlas.core.records import Tier
from kvatlas.dataplane.codec import Codec
from kvatlas.dataplane.keystore import FileKeys
from kvatlas.dataplane.tiers.opening import address_of
from kvatlas.dataplane.tls import Trust
from kvatlas.errors import ConfigError
from kvatlas.service import agent_wire as wire
from kvatlas.service import logs
from kvatlas.service.admin import Safety, safety_of
from kvatlas.service.agent import NodeAgent, Settings
from kvatlas.service.agent_joined import Joined, Part
from kvatlas.service.agent_peers import CHOICES
from kvatlas.service.agent_shared import SharedSettings
from kvatlas.service.http_client import origin_of
from kvatlas.service.register import open_register

_CODECS = {"raw": Codec.RAW, "zstd": Codec.ZSTD, "planes": Codec.PLANES}
SOCKET = Path("kvatlas-agent.sock")
_KEY_FILE = "kvatlas.secret"
_PORT_MAX = 65_535
_EVERYWHERE = ("0.0.0.0", "::")  # where nobody else finds it
T = TypeVar("T")


class _OfAgent(msgspec.Struct):
    """All that an agent wants of a kvatlas.toml."""

    keys: KeysConfig = KeysConfig()
    tls: TlsConfig = TlsConfig()
    admin: AdminConfig = AdminConfig()
    audit: AuditConfig = AuditConfig()
    register: RegisterConfig = RegisterConfig()


_TABLES: dict[str, type[msgspec.Struct]] = {
    "": _OfAgent,
    "keys": KeysConfig,
    "tls": TlsConfig,
    "admin": AdminConfig,
    "audit": AuditConfig,
    "register": RegisterConfig,
}


_EPILOG = (
    """\
vLLM 0.32 saves to it and resumes from it with one option:
  --kv-transfer-config '{"kv_connector": "KvatlasConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "kvatlas.connectors.vllm_offload",
    "kv_connector_extra_config": {"socket": "/run/kvatlas/agent.sock"}}'

examples:
  kvatlas agent --dram 32GB --socket /run/kvatlas/agent.sock
  kvatlas agent --dram 32GB --disk /nvme/kvatlas=500GB --config kvatlas.toml
  kvatlas agent --dram 32GB --config kvatlas.toml --object valkey://10.0.0.9:6379
  kvatlas agent --dram 32GB --config kvatlas.toml --serve-peers 10.0.0.1:7400 \\
    --peer 10.0.0.2:7400 --peer 10.0.0.3:7400
  kvatlas agent --dram 32GB --disk /nvme/kvatlas=500GB --seal-keys /etc/kvatlas/keys
  kvatlas agent status --socket /run/kvatlas/agent.sock

"""
    + errands.EPILOG
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "agent",
        description="Keep KV state of this node's engines in shared memory and on disk. It "
        "outlives the engines; what is on disk outlives the agent.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    what = ("run", "status", *errands.COMMANDS)
    add("what", nargs="?", choices=what, default="run", help="default: run")
    add("names", nargs="*", metavar="NAME", help="what cancel calls off; TIER=SIZE for resize")
    add(
        "--listen",
        type=_typed(_listen_at),
        metavar="[HOST:]PORT",
        help="pages for the gateway, for Prometheus (/metrics) and for people (/health), and "
        "events beside them (default host: 127.0.0.1; without it: nothing of it)",
    )
    add(
        "--events-port",
        type=int,
        default=0,
        metavar="PORT",
        help="where --listen announces what is held; the next port tells it again (default: free "
        "ones)",
    )
    add("--socket", type=Path, default=SOCKET, metavar="PATH", help=f"default: {SOCKET}")
    add(
        "--prefill-tokens-per-s",
        type=float,
        default=8000.0,
        metavar="N",
        help="how fast an engine of this node computes a prompt: what would take longer to load is "
        "not loaded (8000)",
    )
    add(
        "--seek-s",
        type=float,
        default=0.5,
        metavar="S",
        help="how long a request may wait to hear what a store and peers hold (0.5)",
    )
    _add_whose(parser)
    _add_member(parser)
    _add_tiers(parser)
    _add_shared(parser)
    add_log_options(parser)
    errands.add_options(parser)
    parser.set_defaults(run=run)


def _add_whose(parser: argparse.ArgumentParser) -> None:
    """Whose prompts it keeps."""
    add = parser.add_argument
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="kvatlas.toml of the gateway, or any with its keys.secret_file: keys agree only with "
        "the same secret; its [tls], [admin] and [audit] are this agent's (default: a secret of "
        "this node's own, beside what is on its disk)",
    )
    add(
        "--tenants",
        choices=("any", "required"),
        default="any",
        help="required: nothing is kept or loaded of requests whose cache salt no gateway with "
        "[tenants] has made; needs --config (any)",
    )


def _add_member(parser: argparse.ArgumentParser) -> None:
    """As what gateways know it, where --config has a [register]."""
    add = parser.add_argument
    add("--member", default=socket.gethostname(), metavar="NAME", help="its own (the host's)")
    add(
        "--engine",
        action="append",
        default=[],
        metavar="NAME",
        help="an engine of this node, as gateways call it; may be repeated; needs [register]",
    )
    add("--store", default="", metavar="NAME", help="of --object, the same for all who share it")
    add(
        "--advertise",
        default="",
        metavar="URL",
        help="where gateways reach --listen (default: as it listens; needed for a member that "
        "listens everywhere, at 0.0.0.0 or [::])",
    )


def _add_tiers(parser: argparse.ArgumentParser) -> None:
    """Where state is kept, and which."""
    add = parser.add_argument
    size = _typed(size_bytes)
    add("--dram", type=size, default=10**9, metavar="SIZE", help="shared memory (1GB)")
    add(
        "--points",
        type=_typed(spacing_of),
        metavar="WHERE",
        help="at which positions resume points of models with windows are saved: all that the "
        "engine has, prompt-end, ends (of prompt and output), junctions (and the ends), or every "
        "so many tokens (default: all)",
    )
    add(
        "--disk",
        type=_typed(_disk),
        metavar="DIR=SIZE",
        help="a directory on a local disk, and how much",
    )
    add(
        "--disk-codec",
        choices=tuple(_CODECS),
        default="raw",
        help="how it is written: raw, zstd, or byte planes and then zstd; all bit-exact "
        "(default: raw; of --object: ?codec=)",
    )
    add(
        "--seal-keys",
        type=Path,
        metavar="DIR",
        help="a directory of keys (kvatlas keys init): what goes to disk and to --object is sealed "
        "by AES-GCM, each tenant's under keys of its own; what lies on the disk in the clear is "
        "removed (default: nothing is sealed)",
    )


def _add_shared(parser: argparse.ArgumentParser) -> None:
    """What other nodes keep, or read from here."""
    add = parser.add_argument
    add(
        "--object",
        metavar="URL",
        default="",
        help="a store that other nodes use too: valkey://HOST:PORT, valkeys:// with "
        "TLS, mooncake://HOST:PORT (the master's) or s3://BUCKET; its settings as "
        "?name=value&...; needs --config",
    )
    add(
        "--peer",
        action="append",
        type=_typed(address_of),
        default=[],
        metavar="HOST:PORT",
        help="another node's agent, to read from its memory; may be repeated; needs --config",
    )
    add(
        "--serve-peers",
        type=_typed(address_of),
        metavar="HOST:PORT",
        help="let other nodes' agents read from this one's memory, here; needs --config",
    )
    add(
        "--peer-transport",
        choices=CHOICES,
        default="auto",
        help="what carries it: NIXL where both sides have it and it reads past the sockets, else "
        "TCP; TCP; or NIXL alone, which must be there (default: auto)",
    )


def _typed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Of an option: what ``parse`` raises is told as argparse tells it."""

    def typed(text: str) -> T:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed


def _listen_at(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > _PORT_MAX:
        raise ConfigError(f"{text!r}: HOST:PORT is wanted, as in 0.0.0.0:9470")
    return host.strip("[]") or "127.0.0.1", int(port)


def _disk(text: str) -> tuple[Path, int]:
    folder, sign, size = text.rpartition("=")
    if not sign or not folder:
        raise ConfigError(f"{text!r}: DIR=SIZE is wanted, as in /nvme/kv=100GB")
    return Path(folder), size_bytes(size)


def run(args: argparse.Namespace) -> int:
    """Until SIGTERM or Ctrl-C. Raises ConfigError (exit status 2) for what cannot be had."""
    if args.names and args.what not in errands.COMMANDS:
        raise ConfigError(f"agent {args.what}: {args.names[0]!r} means nothing here")
    if args.what == "status":
        print_json(errands.answer_of(args.socket, wire.AskStatus()))
        return 0
    if args.what in errands.COMMANDS:
        return errands.run(args)
    _check(args)
    disk, disk_bytes = args.disk or (None, 0)
    safety = _safety(args.config)
    shared = SharedSettings(
        args.object,
        tuple(args.peer),
        args.serve_peers,
        args.seek_s,
        args.peer_transport,
        safety.trust,
    )
    through = ((Tier.DISK, disk is not None), (Tier.OBJECT, bool(args.object)))
    settings = Settings(
        args.socket,
        args.dram,
        disk,
        disk_bytes,
        _CODECS[args.disk_codec],
        secret=_secret(
            args.config,
            disk,
            args.seal_keys,
            shares=bool(args.object or args.peer or args.serve_peers),
        ),
        shared=shared,
        listen=args.listen,
        events_port=args.events_port,
        prefill_tokens_per_s=args.prefill_tokens_per_s,
        seal_keys=args.seal_keys,
        tenants_required=args.tenants == "required",
        safety=safety,
        agent=Config(
            write_through=tuple(tier for tier, wanted in through if wanted), spacing=args.points
        ),
    )
    # A disk of terabytes is thousands of files, besides engines and peers.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logs.configure(args.log_format, args.log_level)
    part = Part(args.member, args.advertise, tuple(args.engine), args.store)
    return uvloop.run(_serve(settings, part, _register(args)))


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that cannot be, or that would do nothing without a word."""
    if not 0 <= args.events_port < _PORT_MAX:
        raise ConfigError(f"--events-port {args.events_port}: no port with another after it")
    if args.tenants == "required" and args.config is None:
        raise ConfigError(
            "--tenants required needs --config: only with the gateway's secret does a salt prove "
            "anything"
        )
    if args.seal_keys is not None and not (args.disk or args.object):
        raise ConfigError(
            "--seal-keys: there is nothing to seal: name a --disk or an --object; memory is never "
            "sealed"
        )
    rate = args.prefill_tokens_per_s
    if not 0 < rate < math.inf:
        raise ConfigError(f"--prefill-tokens-per-s {rate:g}: tokens per second, above zero")


def _register(args: argparse.Namespace) -> RegisterConfig | None:
    """That of the cluster which this agent is a member of; None: of none."""
    config = RegisterConfig()
    if args.config is not None:
        text, told = read(args.config, _OfAgent, _TABLES)
        config = told.register
        place, fault = register_fault(config, secret=bool(told.keys.secret_file))
        if fault:
            raise ConfigError(f"{args.config}:{line_of(text, place)}: {fault}")
    if not config.on:
        if args.engine or args.store:
            raise ConfigError("--engine and --store are for members: --config names no [register]")
        return None
    if not args.listen or not args.engine:
        raise ConfigError(
            f"{args.config} has a [register]: its agents are members, and need --listen, and the "
            "engines of their node by --engine"
        )
    if not args.advertise and args.listen[0] in _EVERYWHERE:
        raise ConfigError(
            f"--listen {args.listen[0]}: gateways cannot ask there; name where they can by "
            "--advertise URL"
        )
    try:
        if args.advertise:
            origin_of(args.advertise)
    except ValueError as error:
        raise ConfigError(f"--advertise: {error}") from error
    return trusting(config, told.tls.ca, told.tls.cert, told.tls.key)


async def _serve(settings: Settings, part: Part, config: RegisterConfig | None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as opened:
        agent = await opened.enter_async_context(NodeAgent(settings))
        print(msgspec.json.encode({"socket": str(settings.path)} | agent.status()).decode())
        sys.stdout.flush()
        if config is not None:  # first: what was forgotten meanwhile must not be served
            joined = Joined(part, config, open_register(config), agent)
            opened.push_async_callback(joined.close)
            await joined.start()
        serving = loop.create_task(agent.serve())
        ends = loop.create_task(stop.wait()), loop.create_task(agent.errands.drained.wait())
        await asyncio.wait((serving, *ends), return_when=asyncio.FIRST_COMPLETED)
        for task in (serving, *ends):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    return 0


def _safety(config: Path | None) -> Safety:
    """Raises ConfigError for files that cannot be used."""
    if config is None:
        return Safety()
    text, told = read(config, _OfAgent, _TABLES)
    place, fault = fault_of(told.tls)
    if fault:
        raise ConfigError(f"{config}:{line_of(text, place)}: {fault}")
    trust = Trust(told.tls, "agent") if told.tls.on else None
    return safety_of(told.admin, told.audit, trust, "agent", closed=trust is not None)


def _secret(
    config: Path | None, disk: Path | None, seal_keys: Path | None, *, shares: bool
) -> bytes:
    """The deployment's, else this node's own, which must last as long as what is on its disk: there
    it lies, but where that is sealed. With it, names that are on the disk test a guessed prompt."""
    if config is not None:
        secret_file = read(config, _OfAgent, _TABLES)[1].keys.secret_file
        if not secret_file:
            raise ConfigError(f"{config}: has no keys.secret_file, which is what --config is for")
        return read_secret(Path(secret_file), "keys.secret_file")
    if shares:
        raise ConfigError(
            "--object, --peer and --serve-peers need --config with keys.secret_file: nodes find"
            " each other's state only by the same secret"
        )
    if disk is None:
        return secrets.token_bytes(32)
    if seal_keys is not None:
        FileKeys(seal_keys)  # which says what is wrong with it
    path = (disk if seal_keys is None else seal_keys) / _KEY_FILE
    try:
        disk.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(fd, "wb") as file:
                file.write(secrets.token_hex(32).encode())
                file.flush()
                os.fsync(fd)
    except OSError as error:
        raise ConfigError(f"--disk: {path}: {error.strerror}") from error
    return read_secret(path, "--disk")
