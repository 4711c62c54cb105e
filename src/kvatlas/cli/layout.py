"""``kvatlas layout``: what a model's KV state consists of, and what it weighs."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvatlas.core.families import ENGINES
from kvatlas.core.layout import Component, Layout, Rule
from kvatlas.workload.models import known_models, load_layout

_EPILOG = """\
examples:
  kvatlas layout deepseek-v4-flash --engine vllm --kv-dtype fp8
  kvatlas layout deepseek-v4-pro --engine sglang --indexer-dtype fp4 --json
  kvatlas layout ./my-model/config.json --block-tokens 32 --context 8192
"""

_TENSOR_PARALLEL = {
    "replicated": "every rank holds all of it: one rank writes, all ranks load or none does",
    "by_head": "each rank holds its own KV heads; the bytes above are those of all ranks",
}
_CONTEXTS = (4096, 131072, 1048576)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``kvatlas layout`` and its options."""
    parser = subparsers.add_parser(
        "layout",
        help="what a model's KV state consists of, and what it weighs",
        description="Prints every part of a model's KV state in one engine: which blocks of it a "
        "resume position needs, what they weigh, and what recomputing costs instead.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL", help=f"{', '.join(known_models())}, a config.json or a directory"
    )
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="default: vllm")
    parser.add_argument(
        "--kv-dtype",
        default="auto",
        metavar="TYPE",
        help="auto, bf16, fp16, fp8, fp8_ds_mla, fp8_plain (default: auto, the engine's choice)",
    )
    parser.add_argument(
        "--indexer-dtype", default="fp8", choices=("fp8", "fp4"), help="default: fp8"
    )
    parser.add_argument(
        "--block-tokens",
        type=int,
        metavar="N",
        help="the engine's block or page in tokens (default: the engine's own)",
    )
    parser.add_argument("--draft", action="store_true", help="with the draft layers (MTP, DSpark)")
    parser.add_argument(
        "--context",
        type=_tokens,
        action="append",
        metavar="TOKENS",
        help="totals at this many tokens; may be repeated (default: 4096, 131072, 1048576)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _tokens(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1 << 30:
        raise argparse.ArgumentTypeError("must be between 1 and 2**30")
    return value


def run(args: argparse.Namespace) -> int:
    """Prints the layout; `LayoutError` where the model cannot be described."""
    layout = load_layout(
        args.model,
        engine=args.engine,
        kv_dtype=args.kv_dtype,
        indexer_dtype=args.indexer_dtype,
        block_tokens=args.block_tokens,
        draft=args.draft,
    )
    contexts = tuple(args.context or _CONTEXTS)
    if args.json:
        sys.stdout.write(
            msgspec.json.format(msgspec.json.encode(report(layout, contexts))).decode()
        )
        sys.stdout.write("\n")
    else:
        _print(layout, contexts, Console(highlight=False))
    return 0


def report(layout: Layout, contexts: tuple[int, ...]) -> dict[str, Any]:
    """The layout as plain values, in the order in which they are read."""
    return {
        "model": layout.model,
        "engine": layout.engine,
        "kv_dtype": layout.kv_dtype,
        "digest": layout.digest(),
        "bytes_per_token": layout.bytes_per_token(),
        "page_bytes_per_token": layout.page_bytes_per_token(),
        "resume_point_bytes": layout.resume_point_bytes(),
        "resume_grid_tokens": layout.grid_tokens,
        "tensor_parallel": layout.tensor_parallel,
        "components": [
            {
                **msgspec.structs.asdict(c),
                "required": c.rule is not Rule.OPTIONAL,
                "blocks_per_resume_point": c.window_blocks(),
            }
            for c in layout.components
        ],
        "groups": [msgspec.structs.asdict(g) for g in layout.groups],
        "contexts": [
            {
                "tokens": n,
                "resume_bytes": layout.resume_bytes(n),
                "prefill_flops": layout.compute.prefill_flops(0, n) if layout.compute else None,
            }
            for n in contexts
        ],
    }


def _print(layout: Layout, contexts: tuple[int, ...], console: Console) -> None:
    title = f"{layout.model} in {layout.engine}, {layout.kv_dtype}"
    parts = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for heading in ("component", "blocks at p", "group"):
        parts.add_column(heading, no_wrap=True)
    for heading in ("layers", "block", "bytes/token", "bytes at p"):
        parts.add_column(heading, justify="right", no_wrap=True)
    for c in layout.components:
        blocks = c.window_blocks()
        parts.add_row(
            c.name,
            _needed(c),
            c.group or "(no event)",
            str(c.layers),
            str(c.block_tokens),
            f"{c.exact_bytes_per_token:,.2f}" if blocks is None else "",
            f"{blocks * c.stored_block_bytes:,}" if blocks else "",
        )
    console.print(parts)
    sums = Table.grid(padding=(0, 2))
    sums.add_column()
    sums.add_column(justify="right")
    sums.add_row("bytes per token", f"{layout.bytes_per_token():,.2f}")
    sums.add_row("  as pages", f"{layout.page_bytes_per_token():,.2f}")
    sums.add_row("bytes per resume point", f"{layout.resume_point_bytes():,}")
    sums.add_row("resume grid, tokens", f"{layout.grid_tokens:,}")
    for n in contexts:
        sums.add_row(f"to resume at {n:,}", f"{layout.resume_bytes(n):,} bytes")
        if layout.compute is not None:
            flops = layout.compute.prefill_flops(0, n) / 1e12
            sums.add_row("  or to recompute it", f"{flops:,.1f} TFLOP")
    console.print(sums)
    rule = _TENSOR_PARALLEL.get(layout.tensor_parallel, "not known")
    if any(c.rule is Rule.OPTIONAL for c in layout.components):
        console.print(Text("(in brackets: its loss costs speed, not correctness; not in the sums)"))
    console.print(Text(f"tensor parallel: {rule}"))
    console.print(Text(f"groups in events: {', '.join(_groups(layout))}"))
    console.print(Text(f"digest: {layout.digest()}"))


def _needed(component: Component) -> str:
    blocks = component.window_blocks()
    if blocks is None:
        return "all"
    text = f"last {blocks}"
    return f"({text})" if component.rule is Rule.OPTIONAL else text


def _groups(layout: Layout) -> list[str]:
    texts = []
    for g in layout.groups:
        text = f"{g.name} ({g.kind}, block {g.block_tokens}"
        text += f", window {g.window_tokens})" if g.window_tokens else ")"
        texts.append(f"{g.copies}× {text}" if g.copies > 1 else text)
    return texts
