"""``kvatlas bench``: live load on any endpoint, configurations side by side, and the knee."""

from __future__ import annotations

import argparse
import os
import re
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvatlas.cli.ending import run_until_ended
from kvatlas.cli.output import check_outputs, json_bytes, table_console, write_files
from kvatlas.cli.trace_input import add_trace_options, opened
from kvatlas.errors import ConfigError, KvatlasError
from kvatlas.report.axes import number
from kvatlas.report.latency import Slo
from kvatlas.report.table import seconds
from kvatlas.report.text import harmless
from kvatlas.service.http import Headers
from kvatlas.service.load import LoadPlan
from kvatlas.validate.bench import words
from kvatlas.validate.bench.page import html
from kvatlas.validate.bench.run import Bench, check
from kvatlas.validate.bench.values import Arm, BenchPlan, KneePlan, Outcome
from kvatlas.validate.bench.verdicts import METRICS, Findings, findings
from kvatlas.validate.bench.workload import Workload
from kvatlas.workload.families import Family
from kvatlas.workload.presets import FAMILIES, PRESETS
from kvatlas.workload.trace import VOCAB_SIZE

_NAME = re.compile(r"[A-Za-z0-9._-]{1,40}")
_EPILOG = """\
Each round plays every arm once, in turn, with the same requests; the next one begins with another
arm and has other requests of the same kind. A difference is called where its interval excludes
zero. Several arms on one target need commands (--before) that make the difference between them.
Hit tokens are the engines' own counts: name the engines behind a gateway (--engine).

examples:
  kvatlas bench --family multi-turn --target http://127.0.0.1:8000 --slo-ttft-s 2
  kvatlas bench --family agent --arm plain=http://10.0.0.1:8000 --arm routed=http://10.0.0.2:8000 \\
      --engine routed=http://10.0.0.3:8000 --engine routed=http://10.0.0.4:8000 \\
      --requests 200 --slo-ttft-s 2 --html bench.html
  kvatlas bench --trace trace.jsonl --form ids --arm off=http://10.0.0.1:8000 \\
      --arm on=http://10.0.0.1:8000 --before off='./start.sh off' --before on='./start.sh on'
  kvatlas bench --family multi-turn --target http://127.0.0.1:8000 --slo-ttft-s 2 --knee

exit status: 0 every request was answered, 1 some were not, 2 the input is at fault,
130 interrupted; what was measured until then is printed and written
"""


class Result(msgspec.Struct, frozen=True):
    """What ``--json`` writes."""

    outcome: Outcome
    findings: Findings


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench",
        description="Live load on OpenAI-compatible endpoints: one, or several configurations in "
        "turn, with the traces, arrivals and SLO of the simulator.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    names = ", ".join(FAMILIES)
    what.add_argument("--family", metavar="NAME", help=f"{names}, or a preset of `trace generate`")
    add_trace_options(parser, name="--trace", instead_of=what, seeds="of the first round")
    add("--form", choices=("text", "chat", "ids"), default="text", help="what is sent (text)")
    add("--target", metavar="URL", help="the only arm: gateway or engine, http://host:port")
    add("--arm", action="append", default=[], metavar="NAME=URL", help="one arm; the first is the "
        "one that the others are compared with")  # fmt: skip
    add("--engine", action="append", default=[], metavar="NAME=URL", help="an engine of an arm: "
        "its counters are read and its caches emptied (the arm's own URL)")  # fmt: skip
    add("--before", action="append", default=[], metavar="NAME=COMMAND", help="run by the shell "
        "before each play of that arm, with KVATLAS_ARM and KVATLAS_ROUND")  # fmt: skip
    add("--rounds", type=int, default=5, metavar="N", help="plays of each arm (5)")
    add("--requests", type=int, default=100, metavar="N", help="in one play (100)")
    add("--warm-up", type=int, default=4, metavar="N", help="requests before each play (4)")
    add("--rate", type=float, metavar="R", help="requests per second (default: as the trace's)")
    add("--closed-loop", action="store_true", help="turns wait for the answer before them")
    add("--max-output", type=int, default=32, metavar="N", help="cap on output tokens (32)")
    add("--context", type=int, metavar="N", help="tokens of prompt and answer (as the target says)")
    add("--slo-ttft-s", type=float, metavar="S", help="objective: time to first token")
    add("--slo-tpot-s", type=float, metavar="S", help="objective: time per output token")
    _add_knee(parser)
    add("--model", default="", help="model name (default: the first one each target lists)")
    add("--api-key-env", metavar="NAME", help="environment variable with the endpoint's API key")
    add("--max-in-flight", type=int, default=1024, metavar="N", help="most at once (1024)")
    add("--timeout-s", type=float, default=600.0, metavar="S", help="give up on one after (600)")
    add("--ready-s", type=float, default=300.0, metavar="S", help="wait after --before (300)")
    add("--vocab-size", type=int, default=VOCAB_SIZE, help="--form ids: ids below this (65536)")
    add("--html", type=Path, metavar="FILE", help="also write a report, one file")
    add("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    add("--csv", type=Path, metavar="FILE", help="also write one line per request")
    add("--quiet", action="store_true", help="do not say on stderr what is going on")
    parser.set_defaults(run=run)


def _add_knee(parser: argparse.ArgumentParser) -> None:
    add, plan = parser.add_argument, KneePlan()
    add("--knee", action="store_true", help="then search each arm's highest rate within the SLO")
    add("--knee-share", type=float, default=plan.share, metavar="X", help="of requests (0.95)")
    add("--knee-tolerance", type=float, default=plan.tolerance, metavar="X", help="of it (0.1)")
    add("--knee-steps", type=int, default=plan.steps_max, metavar="N", help="most plays (12)")
    add("--knee-step-s", type=float, default=plan.step_s, metavar="S", help="of one play (30)")


def run(args: argparse.Namespace) -> int:
    check_outputs(args, ("html", "json", "csv"), args.trace)
    plan, arms = _plan(args), _arms(args)
    check(plan, arms)
    source = _family(args) if args.family is not None else opened(args)
    workload = Workload(
        args.family or str(args.trace), source, seed=args.seed, output_max=args.max_output
    )
    if args.context is not None:
        if args.context < 2:
            raise ConfigError(f"--context {args.context}: a prompt and its answer need 2 tokens")
        workload.fit(args.context)
    bench = Bench(
        plan,
        arms,
        workload,
        headers=_headers(args),
        nonce=uuid.uuid4().hex,
        told=_telling(args.quiet),
    )
    failure: BaseException | None = None
    try:
        run_until_ended(bench.run(), uvloop.run)
    except (KvatlasError, KeyboardInterrupt) as error:
        failure = error
        if not bench.rows:
            raise failure from None  # else: what was measured is not lost
    outcome = bench.outcome
    found = findings(outcome, bench.rows)
    try:  # files first: whoever reads the tables may be gone
        write_files(
            ("--csv", args.csv, lambda: words.csv_text(bench.rows).encode()),
            ("--json", args.json, lambda: json_bytes(Result(outcome, found))),
            ("--html", args.html, lambda: html(outcome, found, bench.rows).encode()),
        )
    finally:
        _show(outcome, found)
    if failure is not None:
        raise failure
    return 0 if outcome.sound else 1


def _telling(quiet: bool) -> Callable[[str], None]:
    """Lines on stderr, as long as somebody reads them."""
    heard = not quiet

    def told(text: str) -> None:
        nonlocal heard
        try:
            if heard:
                print(text, file=sys.stderr, flush=True)
        except OSError:
            heard = False

    return told


# -- what was asked for ---------------------------------------------------------------------------


def _plan(args: argparse.Namespace) -> BenchPlan:
    knee = None
    if args.knee:
        knee = KneePlan(args.knee_share, args.knee_tolerance, args.knee_steps, args.knee_step_s)
    return BenchPlan(
        load=LoadPlan(
            target="",
            model=args.model,
            max_output_tokens=args.max_output,
            max_in_flight=args.max_in_flight,
            slo=Slo(args.slo_ttft_s, args.slo_tpot_s),
            timeout_s=args.timeout_s,
            vocab_size=args.vocab_size,
            closed_loop=args.closed_loop,
        ),
        rounds=args.rounds,
        requests=args.requests,
        rate=args.rate,
        warm_up=args.warm_up,
        seed=args.seed,
        form=args.form,
        ready_s=args.ready_s,
        knee=knee,
    )


def _arms(args: argparse.Namespace) -> list[Arm]:
    if bool(args.arm) == (args.target is not None):
        raise ConfigError("--target URL is needed, or --arm NAME=URL for each arm: one of the two")
    pairs = [_named("--arm", each) for each in args.arm] or [("target", args.target)]
    names = [name for name, _ in pairs]
    engines: dict[str, list[str]] = {}
    before: dict[str, str] = {}
    for each in args.engine:
        name, url = _named("--engine", each, names)
        engines.setdefault(name, []).append(url)
    for each in args.before:
        name, command = _named("--before", each, names)
        if name in before:
            raise ConfigError(f"--before {name}: given twice")
        before[name] = command
    return [
        Arm(name, url, tuple(engines.get(name, ())), before.get(name, "")) for name, url in pairs
    ]


def _named(option: str, text: str, arms: list[str] | None = None) -> tuple[str, str]:
    """NAME=VALUE; where there is one arm, its name may be left out."""
    name, equals, value = text.partition("=")
    if arms is not None and len(arms) == 1 and name != arms[0]:
        return arms[0], text
    if not equals or not value or not _NAME.fullmatch(name):
        raise ConfigError(f"{option} {text}: NAME=VALUE is needed, a name of letters and digits")
    if arms is not None and name not in arms:
        raise ConfigError(f"{option} {text}: there is no arm {name}: {', '.join(arms)}")
    return name, value


def _family(args: argparse.Namespace) -> Family:
    known = {**FAMILIES, **PRESETS}
    if args.family not in known:
        raise ConfigError(f"--family {args.family}: use one of {', '.join(known)}")
    family = known[args.family]
    if args.block_tokens is None:
        return family
    return msgspec.structs.replace(family, block_tokens=args.block_tokens)


def _headers(args: argparse.Namespace) -> Headers:
    if args.api_key_env is None:
        return []
    key = os.environ.get(args.api_key_env, "")
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"--api-key-env {args.api_key_env}: that variable holds no key")
    return [(b"authorization", f"Bearer {key}".encode())]


# -- what people read -----------------------------------------------------------------------------


def _show(outcome: Outcome, found: Findings) -> None:
    console = table_console(140)
    _estimates(console, outcome, found)
    if found.differences:
        _differences(console, found)
    if outcome.knees:
        _knees(console, outcome)
    _grid(console, ("round", "turn", "arm", "answered", "failed", "hit tokens", "empty caches"),
          [list(row) for row in words.rounds(outcome)])  # fmt: skip
    for line in (*words.endings(outcome), *outcome.notes):
        console.print(_text(line))


def _estimates(console: Console, outcome: Outcome, found: Findings) -> None:
    names = [arm.name for arm in outcome.arms]
    rows = [
        [m.name, *(words.estimate_text(found.estimate(name, m.name)) for name in names)]
        for m in METRICS
    ]
    _grid(console, ("mean over rounds (95 %)", *names), rows)
    reasons: dict[str, list[str]] = {}
    for estimate in found.estimates:
        if estimate.reason:
            reasons.setdefault(f"{estimate.arm}: {estimate.reason}", []).append(estimate.metric)
    for reason, metrics in reasons.items():
        console.print(_text(f"{', '.join(metrics)}: {reason}."))


def _differences(console: Console, found: Findings) -> None:
    rows = [
        [d.metric, f"{d.other} against {d.base}", d.verdict, words.difference_text(d) or "–"]
        for d in found.differences
    ]
    _grid(console, ("metric", "arms", "verdict", "difference (95 %)"), rows)


def _knees(console: Console, outcome: Outcome) -> None:
    rows = [
        [
            *(knee.arm, f"{number(s.rate)}/s", f"{s.attained:.1%}", "yes" if s.held else "no"),
            *(f"{number(s.goodput_per_s)}/s", seconds(s.ttft_p95_s), f"{s.failed} of {s.requests}"),
        ]
        for knee in outcome.knees
        for s in knee.steps
    ]
    heads = ("arm", "rate", "within SLO", "held", "goodput", "TTFT p95", "failed")
    _grid(console, heads, rows)


def _grid(console: Console, heads: tuple[str, ...], rows: list[list[str]]) -> None:
    table = Table(*heads)
    for row in rows:
        table.add_row(*map(_text, row))
    console.print(table)


def _text(said: str) -> Text:
    """As it is: no markup, no emoji codes, no control characters."""
    return Text(harmless(said))
