"""The policies by name, with what a reader of a table wants to know of each."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvatlas.core.policy.attention import Attention, AttentionScores
from kvatlas.core.policy.base import Policy
from kvatlas.core.policy.fifo import Fifo
from kvatlas.core.policy.gdsf import Gdsf
from kvatlas.core.policy.leaf_lru import LeafLru
from kvatlas.core.policy.lfu import Lfu
from kvatlas.core.policy.lru import Lru
from kvatlas.core.policy.lru_sink import lru_sink
from kvatlas.core.policy.prefix_tree import PrefixTree
from kvatlas.core.policy.s3fifo import S3Fifo
from kvatlas.core.records import Tier
from kvatlas.errors import ConfigError


class Known(msgspec.Struct, frozen=True):
    """One policy: how it is made for a tier, and in a word what it is. ``scores`` is what
    `attention` alone needs."""

    name: str
    about: str
    make: Callable[[Tier, AttentionScores | None], Policy]


def _attention(tier: Tier, scores: AttentionScores | None) -> Policy:
    if scores is None:
        raise ConfigError("policy attention needs measured scores: give a file of them")
    return Attention(scores)


_KNOWN = (
    Known("lru", "least recently used, block by block", lambda tier, scores: Lru()),
    Known("fifo", "first in, first out", lambda tier, scores: Fifo()),
    Known("lfu", "least frequently used", lambda tier, scores: Lfu()),
    Known("s3fifo", "small, main and ghost queue", lambda tier, scores: S3Fifo()),
    Known("leaf_lru", "least recently used leaf of the tree", lambda tier, scores: LeafLru()),
    Known("gdsf", "fewest seconds saved per byte, leaves", lambda tier, scores: Gdsf()),
    Known("lru_sink", "strategy 1: classes P0 to P3", lambda tier, scores: lru_sink(tier)),
    Known("attention", "strategy 2: attention scores", _attention),
    Known("prefix_tree", "strategy 3: hit rate and age, leaves", lambda tier, scores: PrefixTree()),
)
POLICIES = {known.name: known for known in _KNOWN}


def make_policy(
    name: str, tier: Tier = Tier.HBM, *, scores: AttentionScores | None = None
) -> Policy:
    """An empty policy for one tier. Raises ConfigError where the name is none, or scores lack."""
    known = POLICIES.get(name)
    if known is None:
        raise ConfigError(f"unknown policy {name!r}: use one of {', '.join(POLICIES)}")
    return known.make(tier, scores)
