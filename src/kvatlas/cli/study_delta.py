"""``kvatlas study delta``: what delta coding of KV along the tokens gains, and where it pays."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable

import msgspec
from rich.console import Console
from rich.table import Table

from kvatlas.cli.output import (
    check_output,
    json_bytes,
    print_json,
    read_file,
    table_console,
    write_file,
)
from kvatlas.cli.study_input import (
    WEIGHTS,
    add_inputs,
    between,
    checked_contexts,
    inputs,
    study_table,
)
from kvatlas.validate.delta_pay import (
    SEED_RATIOS,
    Speeds,
    both,
    frames_ratio,
    needed_bytes_per_s,
    pays_below,
    seconds,
)
from kvatlas.validate.delta_study import CACHED, DISTANCES, Coding, Study, run
from kvatlas.workload.links import LINKS
from kvatlas.workload.models import load_layout

_WIDTH = 130
_FORMS = ("bf16", "fp8")
_V4 = "deepseek-v4-flash"
_CONTEXTS = (4_096, 32_768, 102_400, 1_048_576)
_LINK_BYTES_PER_S = {
    "1 Gb/s": 0.125e9,
    "10 Gb/s": 1.25e9,
    **{name: LINKS[name].bytes_per_s for name in ("TCP-100G", "NVMe-Gen4-x4", "RDMA-400G")},
}

_EPILOG = """\
What is measured is one trained model. DeepSeek V4 runs with random weights: that its components
come back bit by bit is shown, what they would shrink to stays "not known".

examples:
  kvatlas study delta --out delta.json            a few minutes on one core
  kvatlas study delta --text a.md --layers 3 --context-tokens 512
  kvatlas study delta --show delta.json           the tables of an earlier run
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``kvatlas study delta`` and its options."""
    parser = commands.add_parser(
        "delta",
        help="what delta coding of KV along the tokens gains, by component, and where it would pay",
        description="Writes down SmolLM2-135M-Instruct's keys and values of real text and codes "
        "them as I, P and B frames, lossless and lossy, against plain codecs: seed document 003's "
        "chapter 11, measured.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_inputs(parser, 1024)
    add = parser.add_argument
    add("--layers", type=int, default=10, help="of the model's, evenly spread (10)")
    add("--seed", type=int, default=1, help="of the tokens that V4 reads (1)")
    parser.set_defaults(run=run_delta)


def run_delta(args: argparse.Namespace) -> int:
    """Exit status 0; 2 where the input is at fault, as everywhere."""
    check_output("--out", args.out, *inputs(args))
    if args.show:
        found = Study.decode(read_file(args.show), str(args.show))
    else:
        between(args.layers, 1, 64, "--layers")
        found = run(
            args.model_dir.name,
            args.model_dir,
            WEIGHTS,
            checked_contexts(args),
            venv=args.venv,
            seed=args.seed,
            layers=args.layers,
            context_tokens_max=args.context_tokens,
        )
    if args.json:
        print_json(found)
    else:
        show(found, table_console(_WIDTH))
    if args.out:
        write_file("--out", args.out, json_bytes(found))
    return 0


def show(found: Study, console: Console) -> None:
    """What was measured, and then what follows from it for a link."""
    tokens = sum(text.tokens for text in found.texts)
    console.print(
        f"{found.model} ({found.weights}; transformers {found.transformers}, {found.device}), "
        f"{found.layers} layers, {len(found.texts)} texts of {tokens} tokens in all"
    )
    console.print(_best(found))
    for form, codec in dict.fromkeys((c.form, c.codec) for c in found.codings):
        console.print(_ways([c for c in found.codings if (c.form, c.codec) == (form, codec)]))
    console.print(_predicted(found))
    console.print(_rounded(found))
    console.print(_links(found))
    console.print(_needed(found))
    console.print(_contexts(found))
    sizes = sum(each.size_bytes for each in found.mechanism)
    console.print(
        f"DeepSeek V4, tiny, random weights: {len(found.mechanism)} files of {sizes} bytes came "
        f"back bit by bit in every way. What V4 would gain: not known."
    )


def _components(codings: Iterable[Coding]) -> list[str]:
    return list(dict.fromkeys(c.component for c in codings))


def _name(coding: Coding) -> str:
    delta = coding.delta
    return f"{delta.predictor}, {delta.difference}, {delta.distance}" if delta else "plain"


def best(codings: Iterable[Coding], component: str, form: str, *, delta: bool) -> Coding:
    """The smallest, with delta coding or without, whatever the codec."""
    fitting = (
        c for c in codings if (c.component, c.form, c.delta is not None) == (component, form, delta)
    )
    return max(fitting, key=lambda c: c.ratio)


def _best(found: Study) -> Table:
    table = study_table(
        "lossless: the smallest without and with delta coding (bytes before / behind; MB per CPU "
        "second)",
        *("component", "form", "plain", "ratio", "encode", "decode"),
        *("delta", "ratio", "encode", "decode", "gain %"),
    )
    for form in _FORMS:
        for component in _components(found.codings):
            plain, delta = (best(found.codings, component, form, delta=d) for d in (False, True))
            gain = 100 * (delta.ratio / plain.ratio - 1)
            named = f"{_name(delta)} + {delta.codec}"
            cells = [plain.codec, *_cells(plain), named, *_cells(delta)]
            table.add_row(component, form, *cells, f"{gain:+.1f}")
    return table


def _cells(coding: Coding) -> list[str]:
    speeds = (coding.encode_bytes_per_s, coding.decode_bytes_per_s)
    return [f"{coding.ratio:.3f}", *(f"{speed / 1e6:.0f}" for speed in speeds)]


def _ways(codings: list[Coding]) -> Table:
    """One row per way, one column per component: ratios, and the speeds over all."""
    components = _components(codings)
    table = study_table(
        f"{codings[0].form}, {codings[0].codec}: ratio by component",
        *("predictor, difference, distance", *components, "encode", "decode"),
    )
    for name in dict.fromkeys(map(_name, codings)):
        each = {c.component: c for c in codings if _name(c) == name}
        whole = both([(1.0, c.speeds()) for c in each.values()])
        speeds = (whole.encode_bytes_per_s, whole.decode_bytes_per_s)
        ratios = [f"{each[component].ratio:.3f}" for component in components]
        table.add_row(name, *ratios, *(f"{speed / 1e6:.0f}" for speed in speeds))
    return table


def _predicted(found: Study) -> Table:
    table = study_table(
        "prediction alone: residuals' variance over values'; bits per value that an ideal coder "
        "would save; channels helped (%)",
        *("component", "predictor", "distance", "variance", "bits saved", "helped %"),
    )
    for p in found.predicted:
        told = p.found
        cells = (told.variance_ratio, told.bits_saved, 100 * told.helped)
        row = (p.component, p.predictor, str(p.distance))
        table.add_row(*row, *(f"{x:.{d}f}" for x, d in zip(cells, (3, 3, 0), strict=True)))
    return table


def _rounded(found: Study) -> Table:
    table = study_table(
        "lossy: residuals rounded to so many bits, beside values rounded to as many",
        *("component", "bits", "predictor", "bits per value, all", "error"),
    )
    for r in found.rounded:
        row = (r.component, str(r.bits), r.predictor or "plain")
        table.add_row(*row, f"{r.bits_per_value:.2f}", f"{r.error:.3f}")
    return table


def whole(found: Study, form: str, *, delta: bool, free: bool = False) -> Speeds:
    """The whole cached state at its smallest; ``free``: as if prediction cost nothing."""
    each = [best(found.codings, component, form, delta=delta) for component in CACHED]
    return both([(1.0, c.codec_speeds() if free else c.speeds()) for c in each])


def _links(found: Study) -> Table:
    table = study_table(
        "on one core, faster than sending the bytes as they are on links below (MB/s); than the "
        "plain codec, the same",
        *("state", "coder", "ratio", "load", "hand-off", "than plain: load", "hand-off"),
    )
    for form in _FORMS:
        plain = whole(found, form, delta=False)
        table.add_row(form, "plain", f"{plain.ratio:.3f}", *_below(plain), "", "")
        for name, coder in (
            ("delta", whole(found, form, delta=True)),
            ("delta, prediction free", whole(found, form, delta=True, free=True)),
        ):
            cells = (*_below(coder), *_below(coder, plain))
            table.add_row(form, name, f"{coder.ratio:.3f}", *cells)
    for ratio in SEED_RATIOS:
        claimed = msgspec.structs.replace(whole(found, "fp8", delta=True, free=True), ratio=ratio)
        name = "the seed's claim, prediction free"
        table.add_row("fp8", name, f"{ratio:.3f}", *_below(claimed), "", "")
    frames = ", ".join(f"{frames_ratio(d):.2f} at {d}" for d in DISTANCES)
    table.caption = f"P frames of a quarter, as the seed assumes, come to {frames}; never to 4"
    return table


def _below(coder: Speeds, other: Speeds | None = None) -> list[str]:
    found = [pays_below(coder, encode=encode, other=other) for encode in (False, True)]
    return ["never" if not x else "always" if math.isinf(x) else f"{x / 1e6:.0f}" for x in found]


def _needed(found: Study) -> Table:
    ratios = {
        "plain, bf16": whole(found, "bf16", delta=False).ratio,
        "plain, fp8": whole(found, "fp8", delta=False).ratio,
        "delta, fp8": whole(found, "fp8", delta=True).ratio,
        **{f"seed, {ratio:.0f} times": ratio for ratio in SEED_RATIOS},
    }
    table = study_table(
        "GB/s that must be decoded, on all cores together, for a load over the link to break even",
        *("link", "GB/s", *(f"{name} ({ratio:.2f})" for name, ratio in ratios.items())),
    )
    for link, speed in _LINK_BYTES_PER_S.items():
        needed = [needed_bytes_per_s(ratio, speed) / 1e9 for ratio in ratios.values()]
        table.add_row(link, f"{speed / 1e9:.2f}", *(f"{x:.1f}" for x in needed))
    return table


def _contexts(found: Study) -> Table:
    layout = load_layout(_V4, engine="vllm")
    table = study_table(
        f"{_V4}, {layout.bytes_per_token():.0f} bytes a token, seconds to load as it is; saved "
        "(+) or lost (-) on one core if V4 shrank as SmolLM2's fp8, and by the seed's least claim "
        "with prediction free",
        *("link", "tokens", "as it is", "plain", "delta", f"seed, {SEED_RATIOS[0]:.0f} times"),
    )
    plain, delta = (whole(found, "fp8", delta=d) for d in (False, True))
    free = whole(found, "fp8", delta=True, free=True)
    claimed = msgspec.structs.replace(free, ratio=SEED_RATIOS[0])
    for link, speed in _LINK_BYTES_PER_S.items():
        for tokens in _CONTEXTS:
            size = layout.bytes_per_token() * tokens
            now = size / speed
            won = [now - seconds(size, speed, c, encode=False) for c in (plain, delta, claimed)]
            table.add_row(link, f"{tokens}", f"{now:.4f}", *(f"{x:+.3f}" for x in won))
    return table
