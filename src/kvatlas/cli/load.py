"""``kvatlas load``: replay a trace against a URL and print what users would have felt."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvatlas.cli.output import check_output, json_bytes, progress, write_file
from kvatlas.cli.trace_input import add_trace_options, opened
from kvatlas.errors import ConfigError
from kvatlas.report.latency import Slo
from kvatlas.report.table import goodput_text, latency_table, seconds
from kvatlas.service.load import LoadPlan, LoadResult, check, run_load
from kvatlas.workload.trace import VOCAB_SIZE, Trace, TraceRequest

_EPILOG = """\
The trace is of any format that `kvatlas trace` reads, JSON lines of Mooncake's form for one; a log
of texts needs the tokenizer of its model (--tokenizer). Requests leave at their times, whether or
not earlier ones were answered.

examples:
  kvatlas load --trace mooncake_conversation.jsonl.xz --target http://127.0.0.1:8000 \\
      --requests 600 --max-output 32 --time-scale 0.05
  kvatlas load --trace trace.jsonl --target http://127.0.0.1:8000 \\
      --slo-ttft-s 4 --slo-tpot-s 0.05 --json result.json

exit status: 0 every request was answered, 1 some were not, 2 the input is at fault
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "load",
        description="Open-loop replay of a request trace against an OpenAI-compatible URL.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add_trace_options(parser, name="--trace")
    add("--target", required=True, metavar="URL", help="gateway or engine, http://host:port")
    add("--requests", type=int, metavar="N", help="only the first N requests")
    add("--until-s", type=float, metavar="S", help="only the first S seconds of the trace")
    add("--max-output", type=int, default=32, metavar="N", help="cap on output tokens (32)")
    add(
        "--time-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="multiply the trace's times by X: 0.1 replays ten times faster, 0 all at once (1)",
    )
    add("--model", default="", help="model name (default: the first one the target lists)")
    add("--slo-ttft-s", type=float, metavar="S", help="objective: time to first token")
    add("--slo-tpot-s", type=float, metavar="S", help="objective: time per output token")
    add("--max-in-flight", type=int, default=1024, metavar="N", help="most at once (1024)")
    add("--timeout-s", type=float, default=600.0, metavar="S", help="give up on one after (600)")
    add("--vocab-size", type=int, default=VOCAB_SIZE, help="token ids stay below this (65536)")
    add("--no-stream", action="store_true", help="ask for whole answers instead of streams")
    add("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    add("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_output("--json", args.json, args.trace)
    trace = opened(args)
    plan = LoadPlan(
        target=args.target,
        model=args.model,
        time_scale=args.time_scale,
        max_output_tokens=args.max_output,
        max_in_flight=args.max_in_flight,
        stream=not args.no_stream,
        slo=Slo(args.slo_ttft_s, args.slo_tpot_s),
        timeout_s=args.timeout_s,
        block_tokens=trace.block_tokens,
        vocab_size=args.vocab_size,
    )
    check(plan)
    if args.requests is not None and args.requests < 1:
        raise ConfigError(f"--requests {args.requests}: at least 1 is needed")
    # Counting also finds faults of the file before anything is sent.
    total = sum(1 for _ in _chosen(trace, args))
    if not total:
        raise ConfigError(f"{args.trace}: no requests in it")
    result = uvloop.run(_replay(plan, trace, args, total))
    _show(result)
    if args.json is not None:
        write_file("--json", args.json, json_bytes(result))
    return 1 if result.errors else 0


def _chosen(trace: Trace, args: argparse.Namespace) -> Iterator[TraceRequest]:
    requests = itertools.islice(trace, args.requests)
    if args.until_s is None:
        return requests
    return itertools.takewhile(lambda request: request.arrival_s < args.until_s, requests)


async def _replay(plan: LoadPlan, trace: Trace, args: argparse.Namespace, total: int) -> LoadResult:
    with progress("requests answered", total, quiet=args.quiet) as on_done:
        return await run_load(plan, _chosen(trace, args), on_done=on_done)


def _show(result: LoadResult) -> None:
    console = Console()
    latency = result.latency
    console.print(latency_table(latency))
    facts = Table(show_header=False, box=None)
    answered = latency.requests - latency.failed
    facts.add_row("answered", f"{answered} of {latency.requests} in {latency.duration_s:.1f} s")
    facts.add_row(
        "rate",
        f"{latency.requests_per_s:.1f} requests/s, {latency.output_tokens_per_s:.0f} tokens/s out",
    )
    facts.add_row("goodput", goodput_text(latency))
    hits = result.hits
    for name, tokens, answers in (
        ("hit tokens expected", hits.expected_tokens, hits.expected_answers),
        ("hit tokens reported", hits.reported_tokens, hits.reported_answers),
    ):
        share = f" ({tokens / hits.prompt_tokens:.1%} of the prompts)" if hits.prompt_tokens else ""
        known = f"{tokens:,}{share}, told by {answers} answers" if answers else "not told"
        facts.add_row(name, known)
    if result.workers:
        named = ", ".join(f"{worker} {count}" for worker, count in result.workers.items())
        facts.add_row("by worker", Text(named))
    if (result.start_lag_s.p99 or 0) > 0.01:
        lag = seconds(result.start_lag_s.p99)
        facts.add_row("client lag p99", f"{lag}: this client was late; its wait counts above")
    console.print(facts)
    for kind, count in result.errors.items():
        said = f": {result.error_examples[kind]}"  # the engine's own words: no markup
        console.print(Text.assemble((f"{count} × {kind}", "red"), said))
