"""What a stream's `core.sequence.Sequencer` answers, bounds, counts and waits for."""

from __future__ import annotations

import msgspec

from kvatlas.core.events import Batch


class Apply(msgspec.Struct, frozen=True):
    """Hand this batch to the directory now."""

    batch: Batch


class Reset(msgspec.Struct, frozen=True):
    """Every claim of this publisher goes, before anything else is applied."""

    reason: str


class Replay(msgspec.Struct, frozen=True):
    """Ask the engine for its batches from ``from_seq`` on.

    Answers are handed back with ``token``; those to an older token are dropped.
    """

    from_seq: int
    token: int


Effect = Apply | Reset | Replay


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one publisher's waiting room, and how patient it is."""

    waiting_batches_max: int = 4096
    waiting_bytes_max: int = 64 << 20  # of token ids
    replay_timeout_s: float = 5.0  # without any progress
    replay_attempts: int = 3
    retry_s: float = 0.5  # doubles with each attempt
    settle_s: float = 0.1  # after a connect, until the engine has surely seen our subscription
    orphan_replay_s: float = 30.0  # at least this long between two; doubles up to the next
    orphan_replay_max_s: float = 600.0
    give_up_s: float = 10.0  # after a failed replay gaps are not replayed for so long


LIMITS = Limits()


class Counters(msgspec.Struct):
    """What happened to the stream. Plain numbers, for metrics."""

    applied: int = 0
    gaps: int = 0
    duplicates: int = 0
    stale: int = 0  # of an earlier life, or in doubt
    overflowed: int = 0  # did not fit the waiting room; replayed later
    replays: int = 0
    replays_failed: int = 0
    resets: int = 0
    restarts: int = 0
    orphans_put_off: int = 0  # a rebuild is under way, or was not long ago
    rebuilds_refused: int = 0  # the engine remembers less than what is applied already


class Running(msgspec.Struct):
    """The replay under way. ``sent`` is False while it waits for its turn at ``deadline``."""

    token: int
    deadline: float
    attempt: int = 0
    sent: bool = False
    rebuild: bool = False  # start from a clean state, whatever we hold
    known: tuple[int, float] | None = None  # (seq, ts) applied last: a rebuild must meet it again
    proven: bool = False  # it told the batch that we know, or starts from nothing
    progress: bool = False  # it brought something to apply
