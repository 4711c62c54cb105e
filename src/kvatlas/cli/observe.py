"""``kvatlas observe``: what kvatlas would gain in front of engines that another router serves."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, get_args

import uvloop
from rich.console import Console
from rich.table import Table

from kvatlas.cli.files import allow_files
from kvatlas.cli.output import (
    check_output,
    json_bytes,
    print_json,
    status,
    table_console,
    write_file,
)
from kvatlas.cli.trace_input import read_secret
from kvatlas.config import load
from kvatlas.core.router import Policy
from kvatlas.errors import ConfigError
from kvatlas.report.money import price
from kvatlas.service.http_client import Origin, origin_of
from kvatlas.service.observe_copies import CONNECTIONS_MAX, Copies
from kvatlas.service.observe_log import LogReader
from kvatlas.service.observe_record import MAX_BYTES, Mode, read
from kvatlas.service.observe_runs import TTFT, Observer, Settings, Summary, beside, mirrored
from kvatlas.service.observe_tunnel import Tunnel
from kvatlas.sim.cluster import load_cluster
from kvatlas.validate.observe import Bounds, ObserveReport, judge
from kvatlas.validate.observe_report import COLUMNS, cells, facts, live_rows, page

_EPILOG = """\
examples:
  kvatlas observe front --router http://10.0.0.5:8000 --listen 0.0.0.0:9000 --record seen.jsonl \\
      --config kvatlas.toml
  kvatlas observe mirror --listen 0.0.0.0:9000 --record seen.jsonl --tokenizer /models/m
  kvatlas observe log access.jsonl --record seen.jsonl --tokenizer /models/m
  kvatlas observe report seen.jsonl --cluster cluster.toml --html gain.html

The recording holds lengths, times and keyed hashes, no text and no token ids.

exit status: 0 recorded, or a gain is shown; 1 nothing could be recorded or shown; 2 the input is
at fault
"""
_SHADOW_STARTS_S, _SHADOW_ENDS_S = 60.0, 20.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "observe",
        description="Watch the traffic of an existing router, touch nothing, and report what "
        "kvatlas would have gained.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    front = commands.add_parser("front", help="pass everything on to one router, byte for byte")
    front.add_argument(
        "--router", required=True, metavar="URL", help="the router: http://HOST:PORT"
    )
    _add_listen(front)
    _add_recording(front)
    front.add_argument(
        "--served-by", default="", metavar="HEADER", help="header of answers that names the engine"
    )
    front.add_argument(
        "--drain-s", type=float, default=30.0, metavar="S", help="how long to wait at the end (30)"
    )
    front.set_defaults(run=_run_front)
    mirror = commands.add_parser("mirror", help="take copies that a proxy sends of its requests")
    _add_listen(mirror)
    _add_recording(mirror)
    mirror.set_defaults(run=_run_mirror)
    log = commands.add_parser("log", help="read the JSON log of a router")
    log.add_argument("log", type=Path, metavar="FILE")
    log.add_argument("--follow", action="store_true", help="go on as the file grows, until Ctrl-C")
    _add_recording(log)
    log.set_defaults(run=_run_log)
    _add_report(commands)


def _add_listen(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--listen", default="127.0.0.1:9000", metavar="HOST:PORT", help="address (%(default)s)"
    )


def _add_recording(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--record", type=Path, required=True, metavar="FILE", help="a new file: the recording")
    add("--config", type=Path, metavar="FILE", help="kvatlas.toml: engines to listen to, tokenizer")
    add("--tokenizer", default="", metavar="DIR", help="the model's directory (or as --config)")
    add("--block-tokens", type=int, default=64, metavar="N", help="tokens per recorded hash (64)")
    add("--key-file", type=Path, metavar="FILE", help="key the hashes with it (default: at random)")
    add("--max-bytes", type=int, default=MAX_BYTES, metavar="N", help="of the recording (4 GiB)")


def _add_report(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> None:
    parser = commands.add_parser("report", help="what a recording shows")
    add = parser.add_argument
    add("recording", type=Path, metavar="FILE")
    add("--cluster", type=Path, required=True, metavar="FILE", help="cluster.toml: the engines")
    add("--rule", choices=get_args(Policy), help="how the router chooses, where nothing tells it")
    bounds = Bounds()
    add(
        "--error-max",
        type=float,
        default=bounds.error_max,
        metavar="SHARE",
        help="of the model against the measured (%(default)s); beyond, nothing is shown",
    )
    add("--gpu-hour", type=float, metavar="DOLLARS", help="what an hour of one GPU costs")
    add("--seed", type=int, default=0, metavar="N", help="of what is resampled (0)")
    add("--json", type=Path, metavar="FILE", help="also write it as JSON (- for stdout)")
    add("--html", type=Path, metavar="FILE", help="also write it as one page")
    parser.set_defaults(run=_run_report)


# Recording ---------------------------------------------------------------------------------------


def _run_front(args: argparse.Namespace) -> int:
    router = _router(args.router)
    host, port = _address(args.listen)
    settings = _settings(args, "front", served_by=args.served_by, ttft=TTFT)
    allow_files(CONNECTIONS_MAX, "")
    return uvloop.run(_front(settings, router, host, port, args.drain_s))


async def _front(settings: Settings, router: Origin, host: str, port: int, drain_s: float) -> int:
    asked, again = _signals()
    print("kvatlas observe: starting; not listening yet", flush=True)
    shadow, sock = beside(settings)
    started = await _unless(asked, shadow.ready(_SHADOW_STARTS_S))
    if not started:
        sock.close()
        await shadow.end()
        if asked.is_set():
            print("kvatlas observe: ended before it listened; nothing is recorded")
            return 0
        raise ConfigError("the recording process could not start; what it said is above")
    copies = Copies()
    await asyncio.get_running_loop().create_connection(lambda: copies, sock=sock)
    tunnel = Tunnel(router, copies)
    try:
        await _listening(tunnel.start(host, port), host, port)
        print(f"kvatlas observe: http://{host}:{tunnel.port} passes on to {router.authority}")
        sys.stdout.flush()
        gone = asyncio.create_task(_gone(copies))
        await asked.wait()
        gone.cancel()
        drained = asyncio.create_task(tunnel.drain(drain_s))
        hurry = asyncio.create_task(again.wait())
        await asyncio.wait({drained, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, hurry):
            task.cancel()
    finally:
        await tunnel.close()
        copies.close()
        summary = await shadow.ended(_SHADOW_ENDS_S)
    if copies.dropped or copies.unwatched:
        print(
            f"kvatlas observe: {copies.dropped} copies dropped, {copies.unwatched} connections not "
            "copied; all of them were passed on"
        )
    return _told(settings, summary)


async def _unless(asked: asyncio.Event, ready: Coroutine[Any, Any, bool]) -> bool:
    """What ``ready`` says; False as soon as it is asked to end."""
    told, end = asyncio.create_task(ready), asyncio.create_task(asked.wait())
    await asyncio.wait({told, end}, return_when=asyncio.FIRST_COMPLETED)
    for task in (told, end):
        task.cancel()
    return not asked.is_set() and told.result()


async def _gone(copies: Copies) -> None:
    """Says once that nobody records any more; the path goes on."""
    await copies.gone.wait()
    print(
        "kvatlas observe: the recording process ended: requests are passed on, none is recorded",
        file=sys.stderr,
        flush=True,
    )


def _run_mirror(args: argparse.Namespace) -> int:
    host, port = _address(args.listen)
    settings = _settings(args, "mirror")
    allow_files(CONNECTIONS_MAX, "")
    return uvloop.run(_mirror(settings, host, port))


async def _mirror(settings: Settings, host: str, port: int) -> int:
    asked, _ = _signals()
    async with Observer(settings) as observer, _server(observer, host, port):
        await asked.wait()
    return _told(settings, observer.summary())


@contextlib.asynccontextmanager
async def _server(observer: Observer, host: str, port: int) -> AsyncIterator[None]:
    try:
        async with mirrored(observer, host, port) as server:
            print(f"kvatlas observe: mirrored requests to http://{host}:{server.port}", flush=True)
            yield
    except OSError as error:
        raise _no_address(host, port, error) from error


def _run_log(args: argparse.Namespace) -> int:
    return uvloop.run(_log(_settings(args, "log", ttft="as the log tells it"), args))


async def _log(settings: Settings, args: argparse.Namespace) -> int:
    follow: asyncio.Event | None = None
    if args.follow:
        follow, _ = _signals()
    async with Observer(settings) as observer:
        reader = LogReader(args.log, observer.shadow)
        await reader.play(follow=follow)
    if reader.example:
        print(f"kvatlas observe: lines left out, the first: {reader.example}", file=sys.stderr)
    return _told(settings, observer.summary())


def _settings(
    args: argparse.Namespace, mode: Mode, *, served_by: str = "", ttft: str = ""
) -> Settings:
    """Raises ConfigError for options that cannot be."""
    size = args.block_tokens
    if not (16 <= size <= 4096 and size & (size - 1) == 0):
        raise ConfigError(f"--block-tokens {size}: a power of two from 16 to 4096 is needed")
    if args.max_bytes < 1:
        raise ConfigError(f"--max-bytes {args.max_bytes}: at least 1 is needed")
    if args.record.exists():
        raise ConfigError(f"--record {args.record}: exists already and is not overwritten")
    check_output("--record", args.record, args.config, args.key_file)
    return Settings(
        record=str(args.record),
        mode=mode,
        block_tokens=size,
        tokenizer=args.tokenizer,
        config=load(args.config) if args.config is not None else None,
        served_by=served_by,
        secret=read_secret(args.key_file) if args.key_file is not None else b"",
        max_bytes=args.max_bytes,
        started_s=time.monotonic(),
        ttft=ttft,
    )


def _router(url: str) -> Origin:
    try:
        origin = origin_of(url)
    except ValueError as error:
        raise ConfigError(f"--router {error}") from error
    if origin.secure:
        raise ConfigError(f"--router {url}: only http:// URLs: what passes is read as it passes")
    if origin.prefix:
        raise ConfigError(f"--router {url}: requests pass as they are, so it can have no path")
    return origin


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"--listen {text!r}: is not of the form HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def _listening(start: object, host: str, port: int) -> None:
    assert asyncio.iscoroutine(start)
    try:
        await start
    except OSError as error:
        raise _no_address(host, port, error) from error


def _no_address(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"--listen {host}:{port}: {error.strerror or error}: free it, or take another"
    )


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first and by the second SIGTERM or SIGINT."""
    asked, again = asyncio.Event(), asyncio.Event()

    def heard() -> None:
        (again if asked.is_set() else asked).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, heard)
    return asked, again


def _told(settings: Settings, summary: Summary | None) -> int:
    if summary is None:
        print("kvatlas observe: the recording process broke down; see above", file=sys.stderr)
        return 1
    where = f"in {settings.record}" if summary.rows else "were recorded, so there is no file"
    print(f"{summary.rows:,} requests {where}")
    for reason, count in summary.lost.items():
        print(f"{count:,} not in it: {reason}")
    if summary.error:
        print(f"kvatlas observe: {summary.error}", file=sys.stderr)
    return 0 if summary.rows and not summary.error else 1


# The report --------------------------------------------------------------------------------------


def _run_report(args: argparse.Namespace) -> int:
    if str(args.json) != "-":
        check_output("--json", args.json, args.recording, args.cluster, args.html)
    check_output("--html", args.html, args.recording, args.cluster)
    if not 0 < args.error_max <= 1:
        raise ConfigError(f"--error-max {args.error_max:g}: a share above 0, up to 1, is needed")
    report = judge(
        str(args.recording),
        read(args.recording),
        load_cluster(args.cluster),
        price(args.gpu_hour),
        rule=args.rule,
        bounds=Bounds(error_max=args.error_max),
        seed=args.seed,
        status=status,
    )
    status()
    if str(args.json) == "-":
        print_json(report)
    else:
        show(report, table_console(160))
        if args.json is not None:
            write_file("--json", args.json, json_bytes(report))
    if args.html is not None:
        write_file("--html", args.html, page(report).encode())
    return 0 if report.shown else 1


def show(report: ObserveReport, console: Console) -> None:
    """The report for people."""
    table = Table()
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("", "verdict") else "right")
    for line in report.lines:
        table.add_row(*cells(line))
    console.print(table)
    rest = Table(show_header=False, box=None)
    for name, text in (*live_rows(report.live), *facts(report)):
        rest.add_row(name, text)
    console.print(rest)
