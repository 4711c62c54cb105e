"""``kvatlas layout``: what a model's KV state consists of, and what it weighs."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvatlas.cli.output import print_json
from kvatlas.core.families import ENGINES
from kvatlas.core.layout import Component, Layout, Rule
from kvatlas.errors import LayoutError
from kvatlas.workload import seed_003
from kvatlas.workload.models import known_models, load_layout
from kvatlas.workload.proofs import Runtime, load_proofs, minimal_shown, settled

_EPILOG = """\
examples:
  kvatlas layout deepseek-v4-flash --engine vllm --kv-dtype fp8
  kvatlas layout deepseek-v4-pro --engine sglang --indexer-dtype fp4 --json
  kvatlas layout deepseek-v4-flash-0731 --kv-dtype fp8 --draft --prefill 8192 9000
  kvatlas layout ./my-model/config.json --block-tokens 32 --context 8192
  kvatlas layout deepseek-v4-flash --kv-dtype fp8 --on "0.32.0, cpu AVX512"
  kvatlas layout --seed       what seed document 003 says of V4's KV cache, computed anew
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
        description="Prints every part of a model's KV state in one engine: which blocks of it a "
        "resume position needs, what they weigh, and what recomputing costs instead.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"{', '.join(known_models())}, a config.json or a directory",
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
        "--on",
        type=_runtime,
        default=("", ""),
        metavar="VERSION,DEVICE",
        help='the engine that is meant, as "0.32.0, cpu AVX512": where the minimal resume point was'
        " shown to be enough there, it counts",
    )
    _add_spans(parser)
    parser.add_argument(
        "--seed",
        action="store_true",
        help="instead of a model: the figures of seed document 003 beside the computed ones",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _add_spans(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--context",
        type=_tokens,
        action="append",
        metavar="TOKENS",
        help="totals at this many tokens; may be repeated (default: 4096, 131072, 1048576)",
    )
    parser.add_argument(
        "--prefill",
        type=_tokens,
        nargs=2,
        action="append",
        metavar=("P", "N"),
        help="what computing tokens P to N costs when all before P is cached; may be repeated",
    )


def _runtime(text: str) -> tuple[str, str]:
    version, comma, device = (part.strip() for part in text.partition(","))
    if not (version and comma and device):
        raise argparse.ArgumentTypeError(f"{text!r}: a version, a comma and a device are wanted")
    return version, device


def _tokens(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 1 << 30:
        raise argparse.ArgumentTypeError("must be between 0 and 2**30")
    return value


def run(args: argparse.Namespace) -> int:
    """Prints the layout; `LayoutError` where the model cannot be described."""
    if (args.model is None) != args.seed:
        raise LayoutError("name a model, or give --seed alone: kvatlas layout --help")
    if args.seed:
        if args.json:
            print_json([row.plain() for row in seed_003.rows()])
        else:
            _print_seed(Console(highlight=False))
        return 0
    spans = [(start, end) for start, end in args.prefill or ()]
    if any(start >= end for start, end in spans):
        raise LayoutError("--prefill P N: P must be smaller than N")
    layout = load_layout(
        args.model,
        engine=args.engine,
        kv_dtype=args.kv_dtype,
        indexer_dtype=args.indexer_dtype,
        block_tokens=args.block_tokens,
        draft=args.draft,
    )
    layout, point = settled(layout, Runtime(args.engine, *args.on), load_proofs())
    contexts = tuple(args.context or _CONTEXTS)
    spans = spans or [(0, n) for n in contexts]
    if args.json:
        print_json(report(layout, contexts, spans, point))
    else:
        _print(layout, contexts, spans, point, Console(highlight=False))
    return 0


def report(
    layout: Layout, contexts: tuple[int, ...], spans: list[tuple[int, int]], point: str
) -> dict[str, Any]:
    """The layout as plain values, in the order in which they are read.

    ``block_bytes`` are those of one block over all layers, ``resume_point`` those of all blocks
    that must end at a resume position (null for a chain: there it is every block up to it).
    ``point`` says why the minimal resume point counts or does not.
    """
    return {
        "model": layout.model,
        "engine": layout.engine,
        "kv_dtype": layout.kv_dtype,
        "digest": layout.digest(),
        "bytes_per_token": layout.bytes_per_token(),
        "page_bytes_per_token": layout.page_bytes_per_token(),
        "resume_point_bytes": layout.resume_point_bytes(),
        "minimal_resume_point_bytes": layout.resume_point_bytes(minimal=True),
        "minimal_shown_on": _shown_on(layout),
        "minimal_counts": bool(layout.minimal_on),
        "minimal_why": point,
        "resume_grid_tokens": layout.grid_tokens,
        "tensor_parallel": layout.tensor_parallel,
        "components": [
            {
                **msgspec.structs.asdict(c),
                "required": c.rule is not Rule.OPTIONAL,
                "exact_block_bytes": c.exact_block_bytes(),
                "blocks_per_resume_point": c.window_blocks(),
                "resume_point_bytes": (c.window_blocks() or 0) * c.stored_block_bytes or None,
            }
            for c in layout.components
        ],
        "announced": layout.announced(),
        "groups": [
            {"engine_indexes": indexes, **msgspec.structs.asdict(g)}
            for g, indexes in zip(layout.groups, _indexes(layout), strict=True)
        ],
        "contexts": [
            {
                "tokens": n,
                "chain_bytes": layout.bytes_per_token() * n,
                "resume_bytes": layout.load_bytes(n),
                "prefill_flops": layout.compute.prefill_flops(0, n) if layout.compute else None,
            }
            for n in contexts
        ],
        "prefill": [
            {
                "from": start,
                "to": end,
                "flops": sum(layout.prefill_split(start, end)) if layout.compute else None,
                "attention_flops": layout.prefill_split(start, end)[1] if layout.compute else None,
            }
            for start, end in spans
        ],
    }


def _shown_on(layout: Layout) -> list[str]:
    """Where a resume from the minimal point was shown to be exact; elsewhere it does not count."""
    found = [p.about for p in load_proofs() if minimal_shown(layout, p.about, [p])]
    return [f"{about.engine} {about.version}, {about.device}" for about in found]


def _indexes(layout: Layout) -> list[list[int]]:
    """The numbers that vLLM gives the groups; one engine's only, and Flash's are not Pro's."""
    numbers = iter(range(sum(g.copies for g in layout.groups)))
    return [[next(numbers) for _ in range(g.copies)] for g in layout.groups]


def _print(
    layout: Layout,
    contexts: tuple[int, ...],
    spans: list[tuple[int, int]],
    point: str,
    console: Console,
) -> None:
    title = f"{layout.model} in {layout.engine}, {layout.kv_dtype}"
    columns = ("component", "blocks at p", "layers", "block", "as stored", "computed", "at p")
    parts = _table(title, columns, texts=2)
    for c in layout.components:
        blocks = c.window_blocks()
        parts.add_row(
            c.name,
            _needed(c),
            str(c.layers),
            str(c.block_tokens),
            f"{c.stored_block_bytes:,}",
            f"{c.exact_block_bytes():,.0f}",
            f"{blocks * c.stored_block_bytes:,}" if blocks else "",
        )
    console.print(parts)
    console.print(Text("bytes of one block over all layers, and of all blocks that must end at p"))
    if any(c.rule is Rule.OPTIONAL for c in layout.components):
        console.print(Text("(in brackets: its loss costs speed, not correctness; not in the sums)"))
    console.print()
    console.print(_sums(layout, contexts, spans))
    console.print()
    if layout.has_minimal():
        shown = "; ".join(_shown_on(layout)) or "nowhere yet"
        console.print(Text(f"exact from what a resume reads alone: shown on {shown}"))
    if layout.resume_point_bytes():
        console.print(Text(f"{'minimal' if layout.minimal_on else 'full'} resume point: {point}"))
    rule = _TENSOR_PARALLEL.get(layout.tensor_parallel, "not known")
    console.print(Text(f"tensor parallel: {rule}"))
    console.print(Text("groups in events, by kind, block and window:"))
    for text in _groups(layout):
        console.print(Text(f"  {text}"))
    console.print(Text(f"digest: {layout.digest()}"))


def _table(title: str, columns: tuple[str, ...], *, texts: int) -> Table:
    """The first ``texts`` columns hold words, the others figures."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for place, heading in enumerate(columns):
        table.add_column(heading, justify="left" if place < texts else "right", no_wrap=True)
    return table


def _sums(layout: Layout, contexts: tuple[int, ...], spans: list[tuple[int, int]]) -> Table:
    sums = Table.grid(padding=(0, 2))
    sums.add_column()
    sums.add_column(justify="right")
    sums.add_row("bytes per token", f"{layout.bytes_per_token():,.2f}")
    sums.add_row("  as pages", f"{layout.page_bytes_per_token():,.2f}")
    sums.add_row("bytes per resume point", f"{layout.resume_point_bytes():,}")
    if layout.has_minimal():
        sums.add_row("  of which a resume reads", f"{layout.resume_point_bytes(minimal=True):,}")
    sums.add_row("resume grid, tokens", f"{layout.grid_tokens:,}")
    for n in contexts:
        sums.add_row(f"to resume at {n:,}", f"{layout.load_bytes(n):,} bytes")
    for start, end in spans if layout.compute is not None else ():
        fixed, attention = layout.prefill_split(start, end)
        sums.add_row(f"to compute {start:,} to {end:,}", f"{(fixed + attention) / 1e12:,.1f} TFLOP")
        share = 100 * attention / (fixed + attention)
        sums.add_row("  of it attention beyond the windows", f"{share:.1f} %")
    return sums


def _print_seed(console: Console) -> None:
    console.print(Text(seed_003.ABOUT))
    console.print()
    columns = ("where", "figure", "seed", "computed", "ratio")
    table = _table("", columns, texts=2)
    for row in seed_003.rows():
        where = f"{row.where} *" if row.rebuilt else row.where
        seed, computed = seed_003.shown(row.seed, row.unit), seed_003.shown(row.computed, row.unit)
        table.add_row(where, row.what, seed, computed, f"{row.ratio():,.4g}")
    console.print(table)
    console.print()
    console.print(Text(seed_003.NOTES))


def _needed(component: Component) -> str:
    blocks = component.window_blocks()
    if blocks is None:
        return "all"
    text = f"last {blocks}"
    return f"({text})" if component.rule is Rule.OPTIONAL else text


def _groups(layout: Layout) -> list[str]:
    """Each group as the engine announces it, and what lies in it."""
    texts = []
    for g, indexes in zip(layout.groups, _indexes(layout), strict=True):
        numbers = ", ".join(str(i) for i in indexes)
        text = f"{numbers}: {g.kind}" if layout.engine == "vllm" else "no index, any kind"
        text += f", {g.block_tokens}, " + (f"{g.window_tokens}" if g.window_tokens else "all")
        members = [c.name for c in layout.components if c.group == g.name]
        texts.append(f"{text} = {g.name}: {', '.join(members)}")
    silent = [c.name for c in layout.components if not c.group]
    if silent:
        texts.append(f"no event: {', '.join(silent)} (believed from what the engine reports)")
    pools = dict.fromkeys(c.pool for c in layout.components if c.pool)
    if pools:
        texts.append(f"pools: {', '.join(pools)}")
    return texts
