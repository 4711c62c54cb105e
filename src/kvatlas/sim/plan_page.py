"""A plan as rows for people and as one page: the advice first, assumptions right behind. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvatlas.report.axes import Axis
from kvatlas.report.html import Markup, assumed, bullets, section, table
from kvatlas.report.html import page as html_page
from kvatlas.report.money import dollars_text
from kvatlas.report.plots import Line, line_plot
from kvatlas.report.table import seconds
from kvatlas.sim.cluster import Cluster
from kvatlas.sim.picture import picture
from kvatlas.sim.plan import Held, Plan, hours

REUSES = (1, 2, 4, 8, 16, 32)  # of the plot of cost against reuse

Lines = tuple[list[str], list[list[str]]]  # heads, and rows below them


def page(head: Sequence[str], guessed: Sequence[str], cluster: Cluster, found: Plan) -> str:
    """The whole file. ``head``: what was priced; ``guessed``: what nobody gave."""
    sections = [
        section("What to do", found.advice, assumed(guessed)),
        section("The cluster", bullets(head[1:]), picture(cluster)),
        section("What tokens cost", _hit_share(found), *_tables(found, "mix", "prefill", "decode")),
        section("What a hit saves", *_tables(found, "hits")),
        section("Load or compute", _loads(found), *_tables(found, "ways", "loads")),
        section("Holding", _reuse(found), *_tables(found, "held")),
        section("Block size", *_tables(found, "blocks")),
    ]
    return html_page("What it costs", sections, subtitle=head[0] if head else "")


def _tables(found: Plan, *names: str) -> list[Markup]:
    made = []
    for name in names:
        heads, lines = tables(found)[name]
        made.append(table(heads, lines, numbers_from=1, caption=CAPTIONS[name]))
    return made


CAPTIONS = {
    "mix": "The mix by the share of the prompt that is found in HBM. $/M: per million tokens, of "
    "the prompt, of the output, of both; then with engines that stand idle. 'balanced': of "
    "engines in halves, the share that should prefill.",
    "prefill": "A prompt in full steps, nothing cached.",
    "decode": "Requests that decode together; 'most': so many fit, or as many as the engine's "
    "max_running lets in.",
    "hits": "A prefix that need not be computed; 'sooner' is the first token's, with one block "
    "of new tokens behind it.",
    "ways": "From which position on a load is quicker than computing, and at each longer one.",
    "loads": "'slowest' is the break-even bandwidth.",
    "held": "What holding costs, and what one hit brings in if the devices wait for the load. "
    "'reuses' within the TTL pay for it; 'longest' is the break-even TTL of one hit.",
    "blocks": "'lost' is what of a match lies behind its last resume position, on average; "
    "'waits' the latency of all blocks, 32 at a time; 'alone' the share of the slowest way's "
    "bandwidth that one block at a time reaches.",
}


def tables(found: Plan) -> dict[str, Lines]:
    """Every table by name, as text."""
    return {
        "mix": _mix(found),
        "prefill": _prefill(found),
        "decode": _decode(found),
        "hits": _hits(found),
        "ways": _ways(found),
        "loads": _load_lines(found),
        "held": _held(found),
        "blocks": _blocks(found),
    }


def size(size_bytes: float) -> str:
    """Bytes in the unit that reads best, decimal."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes:.3g} B"


def _mix(found: Plan) -> Lines:
    heads = ["hits", "batch", "step", "prompt $/M", "output $/M", "both $/M", "requests/s", "pace"]
    lines = [
        [
            f"{row.hit_share:.0%}",
            str(row.batch),
            seconds(row.step_s),
            f"{row.prompt_dollars:.4f}",
            f"{row.output_dollars:.4f}",
            f"{row.blended_dollars:.4f}",
            f"{row.requests_per_s:.2f}",
            row.bound,
            f"{row.cluster_dollars:.4f}",
            "–" if row.balanced is None else f"{row.balanced:.0%}",
        ]
        for row in found.mix
    ]
    return [*heads, "cluster $/M", "balanced"], lines


def _prefill(found: Plan) -> Lines:
    lines = [
        [
            row.engine,
            f"{row.context:,}",
            seconds(row.engine_s),
            f"{row.tokens_per_s:,.0f}",
            f"{row.dollars_per_million:.4f}",
        ]
        for row in found.prefill
    ]
    return ["engine", "context", "engine time", "tokens/s", "$/M"], lines


def _decode(found: Plan) -> Lines:
    lines = [
        [
            row.engine,
            f"{row.context:,}",
            str(row.batch) + (" (most)" if row.batch == row.batch_max else ""),
            seconds(row.step_s),
            f"{row.batch / row.step_s:,.0f}",
            f"{row.dollars_per_million:.4f}",
        ]
        for row in found.decode
    ]
    return ["engine", "context", "batch", "step", "tokens/s", "$/M"], lines


def _hits(found: Plan) -> Lines:
    lines = [
        [
            f"{row.context:,}",
            f"{row.position:,}",
            size(row.load_bytes),
            seconds(row.sooner_s),
            f"{row.gpu_s:.3g}",
            dollars_text(row.dollars),
        ]
        for row in found.hits
    ]
    return ["context", "resumed at", "bytes", "sooner", "GPU-seconds", "saved"], lines


def _ways(found: Plan) -> Lines:
    lines = [
        [
            row.name,
            f"{row.bytes_per_s / 1e9:.3g}",
            seconds(row.latency_s),
            "never" if row.pays_from_tokens is None else f"{row.pays_from_tokens:,}",
        ]
        for row in found.ways
    ]
    return ["way", "GB/s", "latency", "pays from (tokens)"], lines


def _load_lines(found: Plan) -> Lines:
    lines = [
        [
            row.way,
            f"{row.position:,}",
            size(row.size_bytes),
            seconds(row.load_s),
            seconds(row.computed_s),
            "load" if row.load_s < row.computed_s else "compute",
            "–" if row.slowest_bytes_per_s is None else f"{row.slowest_bytes_per_s / 1e9:.3g}",
        ]
        for row in found.loads
    ]
    return ["way", "to", "bytes", "load", "compute", "quicker", "slowest GB/s"], lines


def _held(found: Plan) -> Lines:
    lines = [
        [
            row.tier,
            "a block" if not row.position else f"{row.position:,}",
            size(row.size_bytes),
            dollars_text(row.dollars_per_hour),
            dollars_text(row.ttl_dollars),
            "" if not row.position else dollars_text(row.hit_dollars),
            "" if not row.position else ("never" if row.reuses is None else str(row.reuses)),
            "" if not row.position else _longest(row),
        ]
        for row in found.held
    ]
    return ["tier", "prefix", "bytes", "$/h", "per TTL", "a hit", "reuses", "longest"], lines


def _longest(row: Held) -> str:
    if row.longest_s is None or row.dollars_per_hour == 0:
        return "never" if row.hit_dollars <= 0 else "forever"
    return hours(row.longest_s)


def _blocks(found: Plan) -> Lines:
    lines = [
        [
            f"{row.block_tokens:,}" + (" (take)" if row == found.block else ""),
            size(row.block_bytes),
            f"{row.metadata_share:.3%}",
            f"{row.lost_tokens:,.0f}",
            seconds(row.lost_s),
            seconds(row.waits_s),
            f"{row.efficiency:.0%}",
            seconds(row.overhead_s),
        ]
        for row in found.blocks
    ]
    heads = ["block", "bytes", "metadata", "lost tokens", "lost", "waits", "alone", "lost + waits"]
    return heads, lines


# -- plots --------------------------------------------------------------------------------------


def _hit_share(found: Plan) -> Markup:
    lines = [
        Line(
            "busy engines", [(r.hit_share * 100, r.blended_dollars) for r in found.mix], dots=True
        ),
        Line(
            "the whole cluster",
            [(r.hit_share * 100, r.cluster_dollars) for r in found.mix],
            dots=True,
        ),
    ]
    across = Axis("prompt tokens found in HBM", "%", low=0, high=100)
    return line_plot("Cost by hit share", lines, across, Axis("per million tokens", "$", low=0))


def _loads(found: Plan) -> Markup:
    names = list(dict.fromkeys(row.way for row in found.loads))
    lines = []
    for name in names:
        of = [row for row in found.loads if row.way == name and row.position]
        lines.append(Line(f"load: {name}", [(row.position, row.load_s) for row in of], dots=True))
    of = [row for row in found.loads if row.way == names[0] and row.position] if names else []
    lines.append(Line("compute", [(row.position, row.computed_s) for row in of], dots=True))
    across = Axis("resume position", "tokens", log=True)
    return line_plot("Load or compute", lines, across, Axis("time", "s", log=True))


def _reuse(found: Plan) -> Markup:
    """What a prefix of the longest context costs per use: computed once, held, then loaded."""
    hit = found.hits[-1]
    lines = [Line("computed each time", [(n, hit.dollars) for n in REUSES], dots=True)]
    for row in found.held:
        if row.position != hit.position:
            continue
        per_use = [
            (n, (hit.dollars + row.ttl_dollars + n * (hit.dollars - row.hit_dollars)) / (n + 1))
            for n in REUSES
        ]
        lines.append(Line(row.tier, per_use, dots=True))
    note = "One TTL: computed at the first use, held, loaded at each reuse."
    across = Axis(f"reuses of {hit.position:,} tokens", log=True)
    return line_plot("Cost by reuse", lines, across, Axis("per use", "$", log=True), note=note)
