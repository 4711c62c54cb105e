"""``kvatlas serve``: one OpenAI URL in front of the engines of a kvatlas.toml."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from kvatlas import __version__
from kvatlas.cli.files import allow_files
from kvatlas.cli.running import add_log_options
from kvatlas.config import AgentConfig, Config, WorkerConfig, load
from kvatlas.config_tls import is_local
from kvatlas.errors import ConfigError, RequestError
from kvatlas.service import logs
from kvatlas.service.admin import Safety, safety_of
from kvatlas.service.assembly import Assembly
from kvatlas.service.audit import Audit
from kvatlas.service.cluster_metrics import ClusterMetrics
from kvatlas.service.gateway import Gateway
from kvatlas.service.http_client import origin_of
from kvatlas.service.metrics import GatewayMetrics
from kvatlas.service.pages import Page, Question, Talk
from kvatlas.service.replica import fetch_tenants
from kvatlas.service.steer import Steer
from kvatlas.service.tenants import Tenants
from kvatlas.service.tracing import Traced
from kvatlas.service.tracing_export import Exporter
from kvatlas.service.trust_metrics import trust_problems

if TYPE_CHECKING:
    from kvatlas.service.picker import Picker

log = logging.getLogger(__name__)

_EPILOG = """\
The smallest kvatlas.toml:
  [[worker]]
  name = "a"
  url = "http://127.0.0.1:8001"

While it runs:
  GET /health /ready /metrics /version    state, for people and probes
  POST /v1/chat/completions ...           as OpenAI's API

SIGHUP: the file's workers are read again; new ones are taken up, missing ones forgotten, and
those that say draining = true get no new requests.
SIGTERM or Ctrl-C: /ready fails, running requests end, then it leaves with status 0; the same
again: at once.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "serve",
        description="Serve OpenAI's API in front of the engines that a kvatlas.toml names.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, default=Path("kvatlas.toml"), metavar="FILE")
    add_log_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError (exit status 2) for a bad file or an address that cannot be had."""
    config = load(args.config)
    check_workers(config)
    lower = " or lower [gateway] max_connections"
    allow_files(config.gateway.max_connections, lower, engines=len(config.worker))
    logs.configure(args.log_format, args.log_level)
    return uvloop.run(_serve(args.config, config))


async def _serve(path: Path, config: Config) -> int:
    if config.register.on:
        await fetch_tenants(config)
    assembly = Assembly(config)
    exporter = Exporter(config.tracing) if config.tracing.otlp else None
    closed = config.tls.on or config.tenants.on
    safety = safety_of(config.admin, config.audit, assembly.trust, "gateway", closed=closed)
    guard = safety.guard
    assembly.steering.health_parts.append(lambda: trust_problems(guard, assembly.trust))
    hangup = asyncio.Event()  # from now on it does not end the process any more
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup.set)
    await assembly.start()
    reloading = asyncio.create_task(
        _reload_on_hangup(path, assembly, hangup, guard.audit), name="reload on SIGHUP"
    )
    metrics = GatewayMetrics()
    metrics.registry.register(ClusterMetrics(assembly))
    tenants = assembly.tenancy.tenants
    steer: Steer = assembly.steering
    if exporter is not None:
        steer = Traced(steer, exporter, config.tracing)
        metrics.registry.register(exporter)
        assembly.steering.health_parts.append(exporter.problems)
        await exporter.start()
    picker = new_picker(config, steer, metrics, tenants)
    try:
        return await serve(
            config,
            steer,
            metrics=metrics,
            pages=assembly.pages(),
            questions=assembly.questions(),
            talks=assembly.talks(),
            picker=picker,
            tenants=tenants,
            safety=safety,
        )
    finally:
        reloading.cancel()
        await asyncio.gather(reloading, return_exceptions=True)
        if exporter is not None:
            await exporter.close()
        await assembly.close()
        if guard.audit is not None:
            guard.audit.close()


def new_picker(
    config: Config, steer: Steer, metrics: GatewayMetrics, tenants: Tenants | None = None
) -> Picker | None:
    """The endpoint picker, where one is wanted. Raises ConfigError where gRPC is not there."""
    if not config.picker.listen:
        return None
    try:
        from kvatlas.service.picker import Picker as Server  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise ConfigError(
            f"picker.listen needs more packages ({error}): pip install 'kvatlas[picker]'"
        ) from error
    return Server(config, steer, metrics, tenants=tenants)


async def _reload_on_hangup(
    path: Path, assembly: Assembly, asked: asyncio.Event, audit: Audit | None
) -> None:
    """A file that cannot be used is said on stderr and changes nothing."""
    while True:
        await asked.wait()
        asked.clear()
        try:
            config = load(path)
            check_workers(config)
            if audit is not None:
                audit.changing("SIGHUP", "reload", str(path))
            await assembly.reload(config)
        except (ConfigError, RequestError) as error:
            print(f"kvatlas: not reloaded: {error}", file=sys.stderr, flush=True)
        except Exception:  # one reload that went wrong must not end those to come
            log.exception("not reloaded: a fault of ours")
        else:
            print(f"kvatlas: reloaded {path}: {len(config.worker)} worker(s)", flush=True)


def check_workers(config: Config) -> None:
    """Raises ConfigError for a worker or an agent whose URL this version cannot speak to."""
    named: tuple[WorkerConfig | AgentConfig, ...] = (*config.worker, *config.agent)
    for one in named:
        kind = "worker" if isinstance(one, WorkerConfig) else "agent"
        try:
            origin_of(one.url)
        except ValueError as error:
            raise ConfigError(f"{kind} {one.name!r}: {error}") from error


async def serve(
    config: Config,
    steer: Steer,
    *,
    metrics: GatewayMetrics | None = None,
    pages: Mapping[str, Page] | None = None,
    questions: Mapping[str, Question] | None = None,
    talks: Mapping[str, Talk] | None = None,
    picker: Picker | None = None,
    tenants: Tenants | None = None,
    safety: Safety | None = None,
) -> int:
    """Runs the gateway until SIGTERM or SIGINT, then drains it. Returns the exit status."""
    gateway = Gateway(
        config.gateway,
        steer,
        metrics=metrics,
        pages=pages,
        questions=questions,
        talks=talks,
        tenants=tenants,
        trust=safety.trust if safety is not None else None,
        guard=safety.guard if safety is not None else None,
    )
    try:
        await gateway.start()
    except OSError as error:
        raise _no_address(config, error) from error
    if picker is not None:
        try:
            await picker.start()
        except ConfigError:
            await gateway.close()
            raise
    asked, again = _watch_signals()
    workers = ", ".join(f"{worker.name} {worker.url}" for worker in config.worker)
    url = f"{'http' if gateway.door is None else 'https'}://{config.gateway.host}:{gateway.port}"
    if safety is not None and safety.guard.open and not is_local(url):
        print(
            "kvatlas: whoever reaches this address can read its pages: see [admin] and [tls]",
            file=sys.stderr,
        )
    print(f"kvatlas {__version__} on {url} for {len(config.worker)} worker(s): {workers}")
    if picker is not None:
        print(f"kvatlas: endpoint picker on port {picker.port}")
    sys.stdout.flush()
    await asked.wait()
    draining = asyncio.ensure_future(_drain(gateway, picker))
    hurry = asyncio.ensure_future(again.wait())
    await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if not (draining.done() and draining.result()):
        print("kvatlas: leaving with requests still running", file=sys.stderr)
    for task in (draining, hurry):
        task.cancel()
    if picker is not None:
        await picker.close()
    await gateway.close()
    return 0


async def _drain(gateway: Gateway, picker: Picker | None) -> bool:
    if picker is None:
        return await gateway.drain()
    drained, _ = await asyncio.gather(gateway.drain(), picker.drain())
    return drained


def _watch_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first and by the second SIGTERM or SIGINT."""
    asked, again = asyncio.Event(), asyncio.Event()

    def heard() -> None:
        (again if asked.is_set() else asked).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, heard)
    return asked, again


def _no_address(config: Config, error: OSError) -> ConfigError:
    where = f"{config.gateway.host}:{config.gateway.port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{where} is in use: stop what listens there, or set [gateway] port")
    return ConfigError(f"cannot listen on {where}: {error.strerror or error}")
