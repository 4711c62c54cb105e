"""Plots of caches and tiers that several pages have: hits by capacity, and what was moved. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvatlas.report.axes import Axis, number
from kvatlas.report.html import Markup
from kvatlas.report.plots import Bars, Line, Mark, bar_plot, line_plot
from kvatlas.sim.hit_curve import HitCurve
from kvatlas.sim.pairs import PairCounts
from kvatlas.sim.tier_units import AgentUse

#: What agents do, in words, and in the order in which it is drawn.
_WAYS = {
    "save": "down: save to",
    "write": "down: copy to",
    "seal": "down: record in",
    "demote": "down: demote to",
    "load": "up: load from",
    "promote": "up: promote to",
    "hand": "across: hand",
}
_BEYOND = 4  # times the distinct tokens: what holds more is told, not drawn


def moved(agents: Iterable[AgentUse], pairs: PairCounts) -> dict[str, int]:
    """Bytes by what was done and the tier, of all nodes."""
    found: Counter[str] = Counter()
    for use in agents:
        found.update(use.moved_bytes)
    if pairs.transfers:
        found["hand over"] = round(pairs.transferred_bytes)
    return dict(found)


def hit_plot(curve: HitCurve) -> Markup:
    """Hit tokens against capacity, with what engines and tiers hold as marks."""
    points = [(float(tokens), share * 100) for tokens, share in curve.points]
    ample = [name for name, tokens in curve.holds.items() if tokens > _BEYOND * points[-1][0]]
    marks = [Mark(name, tokens, "x") for name, tokens in curve.holds.items() if name not in ample]
    note = (
        f"One cache under LRU, without time, in blocks of {number(curve.block_tokens)} tokens; the "
        "marks are about what holds so many tokens here."
    )
    if ample:
        note += f" Far to the right, with room for all of it: {', '.join(ample)}."
    return line_plot(
        "Hits by capacity",
        [Line("hits", points, dots=True)],
        Axis("capacity", "tokens", log=True),
        Axis("prompt blocks", "%", low=0, high=100),
        marks=marks,
        note=note,
    )


def flow_plot(named: Sequence[tuple[str, Mapping[str, float]]]) -> Markup:
    """Bytes between tiers, by what was done, for each of the named runs; nothing where none was
    moved."""
    order = list(_WAYS)
    moves = sorted(
        {move for _, sizes in named for move, size in sizes.items() if size},
        key=lambda move: (order.index(move.split()[0]), move),
    )
    if not moves:
        return Markup("")
    bars = [
        Bars(name, [sizes.get(move, 0.0) / 1e9 for move in moves])
        for name, sizes in named
        if any(sizes.values())
    ]
    return bar_plot("Flow between tiers", [_way(move) for move in moves], bars, Axis("moved", "GB"))


def _way(move: str) -> str:
    kind, _, tier = move.partition(" ")
    return f"{_WAYS[kind]} {tier}"
