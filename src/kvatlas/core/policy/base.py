"""What an eviction policy is told, and what it is asked: the one interface of this package.

A policy orders the blocks of one tier. It owns no bytes and no books: the ledger of the tier
(`kvatlas.core.ledger`), or a simulated cache, tells it what happens and asks it who should go.
Time is an argument, and there is no chance: the same calls give the same victims.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol, TypeAlias

import msgspec

#: A block: its key in production (bytes), a trace's hash id in the simulator (int).
Key: TypeAlias = bytes | int

#: Whether a block may go now; what is pinned, leased or somebody else's may not.
MayGo: TypeAlias = Callable[[Key], bool]


class Heat(enum.IntEnum):
    """Classes of seed document 003, chapter 2, the warmest first."""

    SINK = 0  # P0: the first tokens of a prompt, to which every later token attends
    WINDOW = 1  # P1: the last tokens of a request that is still running
    SHARED = 2  # P2: a prefix that more than one request has used
    COLD = 3  # P3: all else


class Facts(msgspec.Struct, frozen=True, gc=False):
    """What is known of a block when it comes in.

    ``size_bytes`` is its weight in whatever unit the capacity has (the simulator also counts in
    blocks and in tokens). ``parent`` is the block before it in its prompt, None at the start,
    ``index`` its number from there. ``saves_s``: seconds of engine time that one hit saves, that
    is the price of computing this block at its position, attention included. ``uses``: how often
    it was used before it came here, in the tier above.
    """

    size_bytes: int = 1
    parent: Key | None = None
    index: int = 0
    saves_s: float = 0.0
    heat: Heat = Heat.COLD
    uses: int = 0


class Policy(Protocol):
    """The order in which the blocks of one tier go.

    Calls come from one thread, with ``now`` in seconds that never go back. A block is *held*
    between `added` and either `removed` or the `evict` that named it. The memory of a policy
    follows what is held; what it remembers of blocks that are gone has a limit.

    A prefix cache is a tree: what lies below a block that went cannot be reached any more. Where
    ``tree`` is true the policy knows that and lets a block go only after all those held below it.
    """

    tree: bool

    def added(self, key: Key, facts: Facts, now: float) -> None:
        """A block came in that is not held. Its parent may be held, or come later, or never."""

    def touched(self, key: Key, now: float) -> None:
        """A held block was used. Blocks of one prompt are touched from its start on."""

    def removed(self, key: Key) -> None:
        """A held block left for a reason of its own: its life ended, or somebody deleted it."""

    def evict(self, need_bytes: int, now: float, may_go: MayGo | None = None) -> list[Key]:
        """Take out held blocks that free ``need_bytes``, the least worth keeping first.

        Fewer where no more may go: the caller adds up. Never a block of which ``may_go`` says
        no (None: all may). The blocks that are returned are held no longer.
        """

    def __len__(self) -> int:
        """Blocks held."""
