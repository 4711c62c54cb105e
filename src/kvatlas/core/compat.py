"""Who may share KV bytes with whom, and what forbids it, named.

Two engines share only where their fingerprints have one digest. This module says the same in
words: which fields differ, and where the layouts differ, which of their parts. Weights: a digest
of them, where both engines have one, decides alone, whatever the models are called; one engine
with a digest and one without never share; without any the model's name must be the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from kvatlas.core.keys import Fingerprint
from kvatlas.core.layout import Component, Group, Layout

_PARTS_MAX = 8  # differing parts of two layouts that are named


class Member(msgspec.Struct, frozen=True):
    """One engine: the model names that it serves, and what it computes with."""

    names: tuple[str, ...]
    fingerprint: Fingerprint
    layout: Layout


def may_share(a: Fingerprint, b: Fingerprint) -> list[str]:
    """Names of the fields that forbid sharing, in declaration order; [] where they may share.

    Empty exactly where both have the same digest.
    """
    return a.canonical().differences(b.canonical())


def layout_differences(a: Layout, b: Layout) -> list[str]:
    """Which parts of two layouts differ, and how: "c4_kv: layers 21, 30"."""
    found = [
        f"{name} {getattr(a, name)}, {getattr(b, name)}"
        for name in ("engine", "kv_dtype", "grid_tokens", "tensor_parallel")
        if getattr(a, name) != getattr(b, name)
    ]
    found += _differing(a.components, b.components)
    found += _differing(a.groups, b.groups, prefix="group ")
    return found[:_PARTS_MAX]


def why_not(a: Member, b: Member) -> list[str]:
    """What forbids that ``a`` and ``b`` share, with both values; of layouts, the parts."""
    reasons = []
    for field in may_share(a.fingerprint, b.fingerprint):
        if field == "layout_digest":
            reasons += [f"layout: {part}" for part in layout_differences(a.layout, b.layout)]
        else:
            ours, theirs = (getattr(m.fingerprint, field) for m in (a, b))
            reasons.append(f"{field} {ours or 'unknown'}, {theirs or 'unknown'}")
    return reasons


def not_shared(members: Mapping[str, Member]) -> dict[str, str]:
    """For engines that serve one name and may not share: with whom not, and why.

    Per name the largest set of engines that may share is the measure; each other engine is told
    apart from it. Engines that serve different names are never expected to share.
    """
    found: dict[str, list[str]] = {}
    names = dict.fromkeys(name for member in members.values() for name in member.names)
    for name in names:
        pools: dict[bytes, list[str]] = {}
        for who, member in members.items():
            if name in member.names:
                pools.setdefault(member.fingerprint.digest(), []).append(who)
        measure, *others = sorted(pools.values(), key=len, reverse=True)
        for who in (who for pool in others for who in pool):
            reasons = why_not(members[who], members[measure[0]])
            text = f"{name!r}: not with {measure[0]}: {'; '.join(reasons)}"
            found.setdefault(who, []).append(text)
    return {who: " | ".join(texts) for who, texts in found.items()}


def _differing(
    ours: Iterable[Component | Group], theirs: Iterable[Component | Group], prefix: str = ""
) -> list[str]:
    left, right = ({part.name: part for part in parts} for parts in (ours, theirs))
    found = []
    for name in dict.fromkeys((*left, *right)):
        if name not in right:
            found.append(f"{prefix}{name}: only on one side")
        elif name not in left:
            found.append(f"{prefix}{name}: only on the other side")
        else:
            a, b = left[name], right[name]
            differ = [f for f in a.__struct_fields__ if getattr(a, f) != getattr(b, f)]
            said = [f"{field} {getattr(a, field)}, {getattr(b, field)}" for field in differ]
            if said:
                found.append(f"{prefix}{name}: {', '.join(said)}")
    return found
