"""Running price estimates as pieces of a snapshot, and back: so that two replicas price alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from kvatlas.core.dispatch import Dispatcher
from kvatlas.core.snapshot_values import (
    EnginePrices,
    ErrorState,
    GapState,
    LineState,
    PartsState,
    PoolPrices,
)
from kvatlas.errors import SnapshotError

State = LineState | PartsState | GapState | ErrorState
S = TypeVar("S", bound=State)


def prices_of(dispatcher: Dispatcher) -> Iterator[PoolPrices | EnginePrices]:
    """Of each pool, and of its engines."""
    told: set[bytes] = set()
    for publisher in dispatcher.directory.publishers():
        facts, cost = dispatcher.facts(publisher), dispatcher.router.cost(publisher)
        if facts is None or cost is None:
            continue
        fingerprint, pool = facts[1], cost.pool
        if fingerprint not in told:
            told.add(fingerprint)
            yield PoolPrices(
                fingerprint,
                _read(pool.prefill, PartsState),
                _read(pool.crowd, LineState),
                {tier: _read(line, LineState) for tier, line in pool.loads.items()},
            )
        yield EnginePrices(
            publisher,
            fingerprint,
            None if cost.own is None else _read(cost.own, PartsState),
            cost.usual,
            cost.apart,
            _read(dispatcher.gaps[publisher], GapState),
            _read(dispatcher.errors[publisher], ErrorState),
        )


def checked(piece: PoolPrices | EnginePrices) -> None:
    """Raises SnapshotError where a price would be none."""
    if not all(map(math.isfinite, _floats(msgspec.to_builtins(piece)))):
        raise SnapshotError("it prices with figures that are none")


def adopt_prices(dispatcher: Dispatcher, pieces: Sequence[PoolPrices | EnginePrices]) -> None:
    """They count from now on, for engines that are the same here. What was measured here over all
    of a pool stays, with the prices of its engines."""
    fresh: set[bytes] = set()
    for piece in pieces:
        if isinstance(piece, PoolPrices):
            pool = dispatcher.router.pool(piece.fingerprint)
            if pool is None or pool.known:
                continue
            fresh.add(piece.fingerprint)
            _write(pool.prefill, piece.prefill)
            _write(pool.crowd, piece.crowd)
            for tier, line in piece.loads.items():
                if tier in pool.loads:
                    _write(pool.loads[tier], line)
            continue
        facts, cost = dispatcher.facts(piece.publisher), dispatcher.router.cost(piece.publisher)
        if piece.fingerprint not in fresh or cost is None or facts is None:
            continue
        if facts[1] != piece.fingerprint:
            continue
        cost.own = None if piece.own is None else cost.pool.prefill.copy()
        if cost.own is not None and piece.own is not None:
            _write(cost.own, piece.own)
        cost.usual, cost.apart = piece.usual, piece.apart
        _write(dispatcher.gaps[piece.publisher], piece.gap)
        _write(dispatcher.errors[piece.publisher], piece.error)


def _read(estimate: object, kind: type[S]) -> S:
    return msgspec.convert(estimate, kind, from_attributes=True)


def _write(estimate: object, state: State) -> None:
    for name in state.__struct_fields__:
        setattr(estimate, name, getattr(state, name))


def _floats(values: Iterable[object]) -> Iterator[float]:
    for value in values:
        if isinstance(value, float):
            yield value
        elif isinstance(value, list | tuple):
            yield from _floats(value)
        elif isinstance(value, dict):
            yield from _floats(value.values())
