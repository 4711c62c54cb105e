"""A cluster drawn: nodes with their engines, what lies below them, and, of a run, how busy the
engines were, how much they hit and what the tiers held. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvatlas.report.html import Markup, escaped
from kvatlas.sim.cluster import Cluster, Member
from kvatlas.sim.report import EngineLoad

NODES_MAX, ENGINES_MAX = 24, 4  # drawn, of each node
_WIDTH, _ACROSS, _GAP, _ROW, _HEAD = 900, 4, 16, 34, 26
_BOX = (_WIDTH - _GAP * (_ACROSS - 1)) / _ACROSS
_COLOURS = {"combined": 0, "prefill": 1, "decode": 2}


Held = Mapping[str, Mapping[str, int]]  # bytes by node and tier


def picture(
    cluster: Cluster,
    engines: Sequence[EngineLoad] = (),
    held: Held | None = None,
    *,
    title: str = "Nodes and engines",
) -> Markup:
    """As SVG for `report.html.page`; what is not drawn is said below it. ``engines`` and ``held``
    are those of a run, ``held`` what was there in the end; without one nothing is filled."""
    nodes: dict[str, list[Member]] = {}
    for member in cluster.members:
        nodes.setdefault(member.node, []).append(member)
    loads = {load.name: load for load in engines}
    drawn = list(nodes.items())[:NODES_MAX]
    tiers = _tiers(cluster)
    rows = max(min(len(members), ENGINES_MAX) for _, members in drawn) + len(tiers)
    height = _HEAD + rows * _ROW + 8
    parts = []
    for index, (name, members) in enumerate(drawn):
        left = (index % _ACROSS) * (_BOX + _GAP)
        top = (index // _ACROSS) * (height + _GAP)
        here = None if held is None else held.get(name, {})
        parts.append(_frame(left, top, _BOX, height) + _node(name, members, loads, left, top))
        foot = top + _HEAD + min(len(members), ENGINES_MAX) * _ROW
        for row, (tier, capacity) in enumerate(tiers.items()):
            place = left + 10, foot + row * _ROW
            parts.append(_tier(tier, capacity, None if here is None else here.get(tier, 0), place))
    bottom = -(-len(drawn) // _ACROSS) * (height + _GAP)
    store = cluster.tiers.object_bytes if cluster.tiers else 0
    if store:
        parts.append(_frame(0, bottom, _WIDTH, _HEAD + 10))
        parts.append(_text(10, bottom + 22, f"store for all nodes: {store / 1e12:,.0f} TB", "ink"))
        bottom += _HEAD + 10 + _GAP
    notes = []
    if loads:
        notes.append("Filled: busy share of each engine; of a tier, what was held in the end.")
    if len(nodes) > len(drawn):
        notes.append(f"{len(nodes) - len(drawn):,} more nodes are not drawn.")
    return Markup(
        f"<figure><figcaption>{escaped(title)}<span>{escaped(' '.join(notes))}</span></figcaption>"
        f'<svg class=plot viewBox="0 0 {_WIDTH} {bottom:.0f}" role=img '
        f'aria-label="{escaped(f"{len(nodes)} nodes")}">{"".join(parts)}</svg></figure>'
    )


def _tiers(cluster: Cluster) -> dict[str, int]:
    """Bytes of each node, by tier."""
    if cluster.tiers is None:
        return {}
    sizes = {"dram": cluster.tiers.dram_bytes, "disk": cluster.tiers.disk_bytes}
    return {tier: size for tier, size in sizes.items() if size}


def _tier(name: str, capacity: int, held: int | None, place: tuple[float, float]) -> str:
    """``held`` None: not known."""
    if held is None:
        return _bar(f"{name} {capacity / 1e9:,.0f} GB", 0.0, 3, *place)
    said = f"{name} {held / 1e9:,.0f} of {capacity / 1e9:,.0f} GB"
    return _bar(said, held / capacity, 3, *place)


def _node(
    name: str, members: Sequence[Member], loads: Mapping[str, EngineLoad], left: float, top: float
) -> str:
    hidden = len(members) - ENGINES_MAX
    title = name + (f", {hidden} more engines" if hidden > 0 else "")
    out = _text(left + 10, top + 18, title, "ink")
    for row, member in enumerate(members[:ENGINES_MAX]):
        said, busy = str(member.role), 0.0
        if (load := loads.get(member.name)) is not None:
            said, busy = f"{said}: busy {load.busy:.0%}", load.busy
            if load.prompt_tokens:  # of a pair the half that prefills has them
                said += f", hit {load.hit_tokens / load.prompt_tokens:.0%}"
        place = left + 10, top + _HEAD + row * _ROW
        out += _bar(said, busy, _COLOURS[member.role], *place)
    return out


def _frame(left: float, top: float, width: float, height: float) -> str:
    return (
        f'<rect class=axis fill=none x="{left + 0.5:.1f}" y="{top + 0.5:.1f}" rx=6 '
        f'width="{width - 1:.1f}" height="{height - 1:.1f}"/>'
    )


def _bar(said: str, share: float, colour: int, left: float, top: float) -> str:
    width = _BOX - 20
    filled = width * min(1.0, max(0.0, share))
    return (
        f"{_text(left, top + 12, said, '')}"
        f'<rect class=grid fill=none x="{left:.1f}" y="{top + 18:.1f}" width="{width:.1f}" '
        f'height=7 /><rect class=f{colour} x="{left:.1f}" y="{top + 18:.1f}" '
        f'width="{filled:.1f}" height=7 />'
    )


def _text(x: float, y: float, text: str, kind: str) -> str:
    style = f" class={kind}" if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}">{escaped(text)}</text>'
