"""``kvatlas doctor``: canaries through a running cluster, and what they show to be wrong."""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvatlas.cli.ending import run_until_ended
from kvatlas.cli.output import print_json, status
from kvatlas.core.checks import CHECKS
from kvatlas.core.findings import Finding, Status, worst
from kvatlas.errors import ConfigError
from kvatlas.service.http_client import HttpClient
from kvatlas.service.tls import from_outside
from kvatlas.validate.doctor import Cluster, Report, examine, from_config, from_urls
from kvatlas.validate.doctor.canaries import WithKey
from kvatlas.validate.doctor.engines import Patience
from kvatlas.validate.doctor.selftest import Score, self_test

NOT_SHOWN = 3
_NOT_ALL_SEEN = "nothing wrong, but not all could be seen"

_EPILOG = """\
It asks each engine a dozen short completions with a prefix that nobody has sent before, and hears
its KV events meanwhile. It changes nothing. Engines need not be kvatlas's own, nor the router.

  kvatlas doctor --config kvatlas.toml             engines, gateway and agents of this file
  kvatlas doctor --gateway http://127.0.0.1:8000   those that a running gateway names
  kvatlas doctor --engine http://10.0.0.1:8000 --engine http://10.0.0.2:8000
  kvatlas doctor --gateway http://router:80 --engine http://10.0.0.1:8000   somebody else's router
  kvatlas doctor --self-test --json                does it see what it should? on stub engines

exit status: 0 sound, 1 something is wrong, 2 the input is at fault, 3 nothing wrong, but not all
could be seen, 130 interrupted
"""
_COLOURS: dict[Status, str] = {
    "ok": "green",
    "wrong": "bold red",
    "not shown": "yellow",
    "not applicable": "dim",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        description="Sends canaries through a running cluster and names what is wrong in it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="kvatlas.toml of the cluster")
    add("--gateway", default="", metavar="URL", help="a gateway, or any router in front")
    add("--engine", action="append", default=[], metavar="URL", help="an engine; may be repeated")
    add("--api-key-file", type=Path, metavar="FILE", help="sent to all of them as Bearer")
    add("--answer-s", type=float, default=15.0, metavar="S", help="wait for one answer (15)")
    add("--event-s", type=float, default=5.0, metavar="S", help="wait for KV events (5)")
    add("--all", action="store_true", help="show also what is right")
    add("--self-test", action="store_true", help="plant each misconfiguration on stub engines")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """See the exit status in the help. Raises ConfigError for what cannot be examined."""
    console = Console(highlight=False)
    if args.self_test:
        with _quiet():
            score = run_until_ended(self_test(status, cut_short=_say_cut_short))
        status()
        print_json(score) if args.json else _print_score(score, console)
        return int(not score.passed)
    for name in ("answer_s", "event_s"):
        if not 0 < getattr(args, name) <= 600:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} {getattr(args, name):g}: above 0, up to 600")
    report = run_until_ended(_examined(args))
    if args.json:
        print_json(report)
    else:
        _print(report, console, everything=args.all)
    return 0 if report.sound else 1 if report.counts.get("wrong") else NOT_SHOWN


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of the gateways that a self-test runs here: each of them is planted."""
    log = logging.getLogger("kvatlas")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def client(key: str) -> HttpClient:
    """To ask gateways, engines and agents with. No operator's token goes to any of them."""
    outgoing = from_outside(parts=("gateway", "engine", "agent"))
    return WithKey(key, outgoing) if key else HttpClient(outgoing=outgoing)


async def _examined(args: argparse.Namespace) -> Report:
    patience = Patience(args.answer_s, args.event_s)
    asked = client(_key(args.api_key_file) if args.api_key_file else "")
    try:
        if args.config is not None:
            if args.engine:
                raise ConfigError("--engine: --config names the engines already")
            cluster: Cluster = from_config(args.config, args.gateway)
        elif args.gateway or args.engine:
            cluster = await from_urls(asked, args.gateway, args.engine, patience)
        else:
            raise ConfigError("which cluster? --config FILE, --gateway URL or --engine URL")
        return await examine(asked, cluster, patience)
    finally:
        await asked.close()


def _key(path: Path) -> str:
    try:
        key = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: cannot be read: {error}") from error
    if not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(f"--api-key-file {path}: one key, without spaces, is needed")
    return key


def _print(report: Report, console: Console, *, everything: bool) -> None:
    table = Table("check", "state", "what is compared", box=None, pad_edge=False)
    for check, line in CHECKS.items():
        found = [finding for finding in report.findings if finding.check == check]
        state = worst(found)
        if everything or state in ("wrong", "not shown"):
            table.add_row(check, f"[{_COLOURS[state]}]{state}[/]", line)
    if table.row_count:
        console.print(table)
        console.print()
    for state in ("wrong", "not shown"):
        _print_findings((f for f in report.findings if f.status == state), console)
    if everything:
        _print_findings((f for f in report.findings if f.status == "ok"), console)
    counts = ", ".join(f"{count} {state}" for state, count in sorted(report.counts.items()))
    wrong = report.counts.get("wrong")
    word = "sound" if report.sound else "not sound" if wrong else _NOT_ALL_SEEN
    console.print(f"{word}: {counts}")


def _print_findings(findings: Iterable[Finding], console: Console) -> None:
    """What has the same reason is told once."""
    told: dict[object, list[Finding]] = {}
    for finding in findings:
        reason = (finding.why, finding.change, *finding.compared.items())
        told.setdefault(reason, []).append(finding)
    for same in told.values():
        first = same[0]
        checks = ", ".join(dict.fromkeys(finding.check for finding in same))
        whom = escape(", ".join(dict.fromkeys(finding.who for finding in same)))
        console.print(f"[{_COLOURS[first.status]}]{checks}[/] {whom}", end="")
        console.print(f": {first.why}" if first.why else "", markup=False)
        if first.compared:
            values = ", ".join(f"{name}: {value}" for name, value in first.compared.items())
            console.print(f"    {values}", markup=False)
        if first.change:
            console.print(f"    → {first.change}", markup=False)


def _say_cut_short(score: Score) -> None:
    print(f"kvatlas: the self-test was interrupted: {_line(score)}", file=sys.stderr)


def _line(score: Score) -> str:
    return (
        f"{len(score.named)} of {len(score.planted)} named, {len(score.false_alarms)} false "
        f"alarms, {score.seconds:.0f} s"
    )


def _print_score(score: Score, console: Console) -> None:
    for plant in score.planted:
        named = plant in score.named
        mark = "[green]named[/]" if named else "[bold red]missed[/]"
        console.print(f"{mark} {plant}: {score.expected[plant]}")
    for alarm in score.false_alarms:
        console.print(f"[bold red]false alarm[/] {escape(alarm)}")
    console.print(_line(score))
