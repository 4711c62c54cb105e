"""How others choose an engine: rules by which ours is judged, each with its own published knobs.

They see what ours sees (the same directory, the same counts of what is in flight) and decide by
their own books. What is drawn by chance there is drawn here from the request's id.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, TypeAlias

import msgspec

from kvatlas.core.records import Publisher

#: Their names; each looks at what engines hold.
RIVALS = ("longest_prefix", "power_of_two", "block_cost")

_Knob: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Knobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the rules leave to their users, with the defaults of their makers.

    ``cache_threshold`` (share of the prompt), ``balance_abs`` (requests) and ``balance_rel``
    (ratio): smg's ``cache_aware`` (docs/concepts/routing/cache-aware.md). ``overlap_weight`` and
    ``temperature``: Dynamo's ``--router-kv-overlap-score-weight`` and ``--router-temperature``.
    """

    cache_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.3
    balance_abs: _Knob = 64.0
    balance_rel: _Knob = 1.5
    overlap_weight: _Knob = 1.0
    temperature: _Knob = 0.0


class Standing(msgspec.Struct, frozen=True):
    """One candidate. ``in_flight`` in requests; ``chosen`` grows with each choice."""

    publisher: Publisher
    keys: Sequence[bytes]
    grid_tokens: int
    held_tokens: int
    in_flight: int
    chosen: int


class _Books:
    """What was sent to one engine."""

    def __init__(self) -> None:
        self.sent_tokens = 0  # ever: how much of its cache is ours
        self.prefill_tokens = 0  # not answered yet
        self.blocks: Counter[bytes] = Counter()  # of requests in flight; shared ones once


class _Flight(msgspec.Struct):
    books: _Books
    keys: Sequence[bytes]
    prefill_tokens: int


class Rival:
    """One such rule at work. Bounded by the router's own limit of what is in flight."""

    def __init__(self, policy: str, knobs: Knobs) -> None:
        self._policy = policy
        self._knobs = knobs
        self._books: dict[Publisher, _Books] = {}
        self._flights: dict[str, _Flight] = {}

    # -- what then happened ---------------------------------------------------------------------

    def began(self, id: str, to: Standing, prompt_tokens: int) -> None:
        """The request is sent there."""
        books = self._books.setdefault(to.publisher, _Books())
        new = max(0, prompt_tokens - to.held_tokens)
        books.sent_tokens += new
        books.prefill_tokens += new
        books.blocks.update(to.keys)
        self._flights[id] = _Flight(books, to.keys, new)

    def first_token(self, id: str) -> None:
        """Its prompt is computed."""
        flight = self._flights.get(id)
        if flight is not None:
            flight.books.prefill_tokens -= flight.prefill_tokens
            flight.prefill_tokens = 0

    def ended(self, id: str) -> None:
        """It is over."""
        self.first_token(id)
        flight = self._flights.pop(id, None)
        if flight is None:
            return
        blocks = flight.books.blocks
        for key in flight.keys:
            if blocks[key] > 1:
                blocks[key] -= 1
            else:
                del blocks[key]

    def removed(self, publisher: Publisher) -> None:
        """The engine is gone."""
        self._books.pop(publisher, None)

    # -- the decision ---------------------------------------------------------------------------

    def order(self, id: str, prompt_tokens: int, standings: Sequence[Standing]) -> list[Publisher]:
        """All candidates, the choice first."""
        if self._policy == "longest_prefix":
            ranked = self._longest_prefix(prompt_tokens, standings)
        elif self._policy == "power_of_two":
            ranked = self._power_of_two(id, prompt_tokens, standings)
        else:
            ranked = self._block_cost(id, prompt_tokens, standings)
        return [standing.publisher for standing in ranked]

    def _longest_prefix(self, prompt_tokens: int, all: Sequence[Standing]) -> list[Standing]:
        """smg's ``cache_aware``: where loads differ too much the least loaded; else who holds
        most, if that is enough of the prompt; else whose cache is least filled by what was sent."""
        knobs = self._knobs
        loads = [s.in_flight for s in all]
        unequal = max(loads) - min(loads) > knobs.balance_abs
        if unequal and max(loads) > knobs.balance_rel * min(loads):
            return sorted(all, key=_load)
        most = max(s.held_tokens for s in all)
        if most > knobs.cache_threshold * max(1, prompt_tokens):
            return sorted(all, key=lambda s: (-s.held_tokens, *_load(s)))
        return sorted(all, key=lambda s: (self._of(s).sent_tokens, *_load(s)))

    def _power_of_two(self, id: str, prompt_tokens: int, all: Sequence[Standing]) -> list[Standing]:
        """Of the two that hold most, if that is enough of the prompt, the less loaded one; else of
        two drawn by chance."""
        enough = self._knobs.cache_threshold * max(1, prompt_tokens)
        holders = sorted((s for s in all if s.held_tokens > enough), key=lambda s: -s.held_tokens)
        two = holders[:2]
        if not two:
            drawn = sorted(all, key=lambda s: chance(f"{id} {s.publisher}"))
            two = drawn[:2]
        first = min(two, key=_load)
        return [first, *sorted((s for s in all if s is not first), key=_load)]

    def _block_cost(self, id: str, prompt_tokens: int, all: Sequence[Standing]) -> list[Standing]:
        """Dynamo's: weight times the blocks to prefill there, those of others included, plus the
        blocks in use there. The lowest, or drawn by a softmax of the costs put between 0 and 1."""
        costs = [self._cost(prompt_tokens, s) for s in all]
        ranked = sorted(zip(costs, all, strict=True), key=lambda pair: (pair[0], *_load(pair[1])))
        if self._knobs.temperature > 0:
            span = max(costs) - min(costs) or 1.0
            least = min(costs)
            weights = [
                math.exp(-(cost - least) / span / self._knobs.temperature) for cost, _ in ranked
            ]
            at = chance(id) * sum(weights)
            for i, weight in enumerate(weights):
                at -= weight
                if at < 0:
                    ranked.insert(0, ranked.pop(i))
                    break
        return [standing for _, standing in ranked]

    def _cost(self, prompt_tokens: int, to: Standing) -> float:
        books = self._of(to)
        new = max(0, prompt_tokens - to.held_tokens)
        prefill_blocks = (books.prefill_tokens + new) / to.grid_tokens
        more = sum(1 for key in to.keys if key not in books.blocks)
        return self._knobs.overlap_weight * prefill_blocks + len(books.blocks) + more

    def _of(self, standing: Standing) -> _Books:
        return self._books.get(standing.publisher) or _Books()


def _load(standing: Standing) -> tuple[int, int]:
    return standing.in_flight, standing.chosen


def chance(name: str) -> float:
    """From 0 up to 1, the same for the same name: what stands for a draw where runs must repeat."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") / (1 << 64)
