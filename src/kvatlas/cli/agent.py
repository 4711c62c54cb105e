"""``kvatlas agent``: the process that owns a node's memory and disk for KV state."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import sys
from pathlib import Path

import msgspec
import uvloop

from kvatlas.config import load, read_secret
from kvatlas.connectors.agent_client import ask_status
from kvatlas.core.agent_values import Config
from kvatlas.core.records import Tier
from kvatlas.errors import ConfigError, EngineError, StoreError
from kvatlas.service.agent import NodeAgent, Settings
from kvatlas.sim.tier_spec import size_bytes

SOCKET = Path("kvatlas-agent.sock")
_KEY_FILE = "kvatlas.secret"

_EPILOG = """\
vLLM 0.32 saves to it and resumes from it with one option:
  --kv-transfer-config '{"kv_connector": "KvatlasConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "kvatlas.connectors.vllm_offload",
    "kv_connector_extra_config": {"socket": "/run/kvatlas/agent.sock"}}'

examples:
  kvatlas agent --dram 32GB --socket /run/kvatlas/agent.sock
  kvatlas agent --dram 32GB --disk /nvme/kvatlas=500GB --config kvatlas.toml
  kvatlas agent status --socket /run/kvatlas/agent.sock
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "agent",
        description="Keep KV state of this node's engines in shared memory and on disk. It "
        "outlives the engines; what is on disk outlives the agent.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", nargs="?", choices=("run", "status"), default="run", help="default: run")
    add("--socket", type=Path, default=SOCKET, metavar="PATH", help=f"default: {SOCKET}")
    add("--dram", type=_size, default=10**9, metavar="SIZE", help="shared memory (1GB)")
    add("--disk", type=_disk, metavar="DIR=SIZE", help="a directory on a local disk, and how much")
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="kvatlas.toml of the gateway, for keys.secret_file: keys agree only with the same "
        "secret (default: a secret of this node's own, beside what is on its disk)",
    )
    parser.set_defaults(run=run)


def _size(text: str) -> int:
    try:
        return size_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _disk(text: str) -> tuple[Path, int]:
    folder, sign, size = text.rpartition("=")
    if not sign or not folder:
        raise argparse.ArgumentTypeError(f"{text!r}: DIR=SIZE is wanted, as in /nvme/kv=100GB")
    return Path(folder), _size(size)


def run(args: argparse.Namespace) -> int:
    """Until SIGTERM or Ctrl-C. Raises ConfigError (exit status 2) for what cannot be had."""
    if args.what == "status":
        return _status(args.socket)
    disk, disk_bytes = args.disk or (None, 0)
    settings = Settings(
        args.socket,
        args.dram,
        disk,
        disk_bytes,
        secret=_secret(args.config, disk),
        agent=Config(write_through=(Tier.DISK,) if disk is not None else ()),
    )
    return uvloop.run(_serve(settings))


async def _serve(settings: Settings) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with NodeAgent(settings) as agent:
        print(msgspec.json.encode({"socket": str(settings.path)} | agent.status()).decode())
        sys.stdout.flush()
        serving = loop.create_task(agent.serve())
        stopping = loop.create_task(stop.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        for task in (serving, stopping):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    return 0


def _status(path: Path) -> int:
    try:
        data = ask_status(path)
    except (OSError, EngineError, StoreError) as error:
        raise ConfigError(f"no agent answers at {path}: {error}") from error
    sys.stdout.write(msgspec.json.format(data, indent=2).decode() + "\n")
    return 0


def _secret(config: Path | None, disk: Path | None) -> bytes:
    """The deployment's, else this node's own, which must last as long as what is on its disk."""
    if config is not None and (secret_file := load(config).keys.secret_file):
        return read_secret(Path(secret_file), "keys.secret_file")
    if disk is None:
        return secrets.token_bytes(32)
    path = disk / _KEY_FILE
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
