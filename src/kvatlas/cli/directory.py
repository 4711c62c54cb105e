"""``kvatlas directory inspect``: what a running gateway believes to be cached, and where."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvatlas.cli.output import print_json
from kvatlas.cli.running import add_url, client, page
from kvatlas.errors import ConfigError

_EPILOG = """\
  kvatlas directory inspect                            how much each engine holds, by group and tier
  kvatlas directory inspect --prompt question.txt      where each engine could resume this prompt
  kvatlas directory inspect --tokens ids.txt --worker vllm-0
  kvatlas directory inspect --keys --prompt question.txt   its block keys, for kvatlas agent pull
  kvatlas directory inspect --body request.json        messages, salt and all, as sent to the API
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "directory",
        description="Ask a running gateway what its directory believes.",
    )
    inner = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    inspect = inner.add_parser(
        "inspect",
        help="sizes by engine, group and tier; or the resume positions of one prompt",
        description="Without a prompt: how much each engine holds. With one: at which positions "
        "each engine could resume it, what the deepest weighs, and what is missing beyond it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_url(inspect)
    add_prompt_options(inspect)
    inspect.add_argument(
        "--keys", action="store_true", help="print the block keys of the prompt, for kvatlas agent"
    )
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=run)


def add_prompt_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
) -> argparse._MutuallyExclusiveGroup:
    """Those by which commands are told a prompt; see `prompt_body`."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", type=Path, metavar="FILE", help="a prompt as text")
    source.add_argument("--tokens", type=Path, metavar="FILE", help="a prompt as token ids")
    source.add_argument("--body", type=Path, metavar="FILE", help="a request as JSON")
    parser.add_argument("--model", help="served name (default: the body's, or any)")
    parser.add_argument("--worker", metavar="NAME", help="this engine only")
    return source


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError for a file, EngineError for a gateway that does not answer."""
    body = prompt_body(args) or None
    if args.keys:
        if body is None:
            raise ConfigError("--keys: of which prompt? --prompt, --tokens or --body")
        body["keys"] = True
    answer = asyncio.run(ask(args.url, body))
    if body is None and args.worker is not None:
        if args.worker not in answer["held"]:
            known = ", ".join(answer["held"])
            raise ConfigError(f"--worker {args.worker}: there is no such engine; there is: {known}")
        answer["held"] = {n: h for n, h in answer["held"].items() if n == args.worker}
    if args.json:
        print_json(answer)
    elif args.keys:
        sys.stdout.writelines(f"{key}\n" for key in block_keys(answer))
    elif body is None:
        _print_sizes(answer, Console(highlight=False))
    else:
        _print_positions(answer, Console(highlight=False))
    return 0


async def ask(url: str, body: dict[str, Any] | None) -> Any:
    """What a gateway answers to `prompt_body`, or says of its whole directory."""
    if body is None:
        return await page(url, "/kvatlas/directory")
    async with client() as asked:
        return await asked.post_json(f"{url.rstrip('/')}/kvatlas/inspect", body, timeout_s=30.0)


def block_keys(answer: dict[str, Any]) -> list[str]:
    """Those of a prompt that was asked for with ``keys``. Raises ConfigError where there are none,
    or others for each engine."""
    if answer["unkeyed"]:
        raise ConfigError(f"this prompt cannot be keyed: {answer['unkeyed']}")
    by_worker = {name: worker["keys"] for name, worker in _workers(answer).items()}
    keys = next(iter(by_worker.values()))
    if any(other != keys for other in by_worker.values()):
        raise ConfigError(
            f"engines make other keys of it: say --model or --worker, of {', '.join(by_worker)}"
        )
    return list(keys)


def prompt_body(args: argparse.Namespace) -> dict[str, Any]:
    """The question to a gateway; empty where no prompt was told. Raises ConfigError."""
    path = args.prompt or args.tokens or args.body
    if path is None:
        return {}
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if args.prompt:
        body: dict[str, Any] = {"prompt": text}
    elif args.tokens:
        if not re.fullmatch(r"[\s,\[\]\d]*\d[\s,\[\]\d]*", text):
            raise ConfigError(f"{path}: expected token ids, divided by spaces or commas")
        body = {"prompt": [int(number) for number in re.findall(r"\d+", text)]}
    else:
        try:
            body = msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}: not a JSON object: {error}") from error
    more = {"model": args.model, "worker": args.worker}
    return body | {name: value for name, value in more.items() if value is not None}


def _print_sizes(answer: dict[str, Any], console: Console) -> None:
    table = Table("engine", "group", "tier", box=None, pad_edge=False)
    table.add_column("blocks", justify="right")
    table.add_column("MB", justify="right")
    for worker, groups in answer["held"].items():
        for group, tiers in groups.items():
            for tier, held in tiers.items():
                size = f"{held['bytes'] / 1e6:,.1f}" if held["bytes"] else "–"
                table.add_row(worker, group, tier, f"{held['blocks']:,}", size)
    console.print(table)
    for worker in answer["muted"]:
        console.print(f"not believed: {worker} (see flags in /health)")


def _workers(answer: dict[str, Any]) -> dict[str, Any]:
    if not answer["workers"]:
        raise ConfigError("no such engine there: see kvatlas directory inspect")
    found: dict[str, Any] = answer["workers"]
    return found


def _print_positions(answer: dict[str, Any], console: Console) -> None:
    if answer["unkeyed"]:
        console.print(f"this prompt cannot be keyed: {answer['unkeyed']}")
        return
    workers = _workers(answer)
    console.print(f"prompt of {answer['prompt_tokens']:,} tokens")
    for worker, found in workers.items():
        console.print(f"\n{worker}: resumes at {found['resume_tokens']:,}")
        for tier, runs in found["positions"].items():
            if runs:
                step = found["resume_grid_tokens"]
                texts = [f"{a:,}" if a == b else f"{a:,}…{b:,} by {step}" for a, b in runs]
                console.print(f"  positions, {tier}: {', '.join(texts)}")
        chain = found["chain_tokens"]
        console.print(f"  chain: {chain['hbm']:,} in hbm, {chain['with_lower']:,} with lower tiers")
        for name, size in found["bytes"].items():
            if size:
                console.print(f"  {name}: {size:,} bytes")
        point = found["resume_point"]
        if point["bytes"]:
            kind = "minimal" if point["minimal"] else "full"
            console.print(f"  resume point: {kind}, {point['bytes']:,} bytes: {point['why']}")
        for gap in found["missing"]:
            console.print(f"  missing at {gap['tokens']:,}: {', '.join(gap['groups'])}")
        if found["believed"]:
            share = 100 * found["confidence"]
            console.print(f"  windows are believed, not announced: {share:.0f} % were kept so far")
