"""A cache without time: which blocks of a trace are hits under a policy and a capacity.

A prompt uses its blocks up to the first that is missing: a hit counts only as long as the chain
from the start is unbroken. What is missing is then computed and comes in. Nothing queues and
nothing takes time, so that a figure depends on the trace, the policy and the capacity alone. It
runs the policies of the production core, and is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from kvatlas.core.layout import Layout
from kvatlas.core.policy.base import Facts, Heat, Key, MayGo, Policy
from kvatlas.core.policy.speculative import Speculative
from kvatlas.errors import ConfigError
from kvatlas.workload.device import Device
from kvatlas.workload.trace import TraceRequest

SINK_TOKENS = 64  # seed document 003, chapter 2: about so many are attended to by all others


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """One request as a cache sees it: when, which blocks, and the tokens of the last of them."""

    now: float
    keys: tuple[int, ...]
    tokens: int
    last_tokens: int


class Work(msgspec.Struct, frozen=True):
    """A trace made ready for many runs. Block numbers are dense, from 0, in order of first use."""

    block_tokens: int
    prompts: list[Prompt]
    unique_blocks: int
    blocks: int
    tokens: int


def prepare(
    requests: Iterable[TraceRequest],
    block_tokens: int,
    *,
    merge: int = 1,
    blocks_max: int = 1 << 26,
) -> Work:
    """Read a trace into memory, at most ``blocks_max`` block uses of it.

    ``merge`` makes one block of so many of the trace's; equal ids must then mean equal prefixes,
    as everywhere. Raises ConfigError where the trace is empty or larger than that.
    """
    numbers: dict[tuple[str, int], int] = {}
    prompts: list[Prompt] = []
    blocks = tokens = 0
    size_tokens = block_tokens * merge
    for request in requests:
        ids = request.hash_ids
        if merge > 1:
            ids = (*ids[merge - 1 :: merge], *(ids[-1:] if len(ids) % merge else ()))
        scope = request.scope
        keys = tuple([numbers.setdefault((scope, each), len(numbers)) for each in ids])
        blocks += len(keys)
        tokens += request.input_tokens
        if blocks > blocks_max:
            raise ConfigError(
                f"the trace uses blocks more than {blocks_max:,} times: take fewer requests "
                "(--limit) or larger blocks (--merge)"
            )
        last = request.input_tokens - size_tokens * (len(keys) - 1)
        prompts.append(Prompt(request.arrival_s, keys, request.input_tokens, last))
    if not prompts:
        raise ConfigError("the trace has no requests")
    return Work(size_tokens, prompts, len(numbers), blocks, tokens)


class Counts(msgspec.Struct):
    """What came of a run. Sizes are in the unit of the capacity (blocks or tokens).

    ``hit_blocks`` and ``hit_tokens`` count unbroken prefixes, ``held_blocks`` every block that was
    there, reachable or not. ``dropped`` left the lowest tier, ``demoted`` and ``promoted`` moved
    between tiers, ``refused`` found no room. ``saved_s`` is the engine time that hits saved, of
    ``whole_s`` without any cache.
    """

    requests: int = 0
    blocks: int = 0
    tokens: int = 0
    hit_blocks: int = 0
    hit_tokens: int = 0
    held_blocks: int = 0
    full_hits: int = 0
    dropped_blocks: int = 0
    dropped: int = 0
    demoted: int = 0
    promoted: int = 0
    prefetched: int = 0
    prefetched_used: int = 0
    refused_blocks: int = 0
    saved_s: float = 0.0
    whole_s: float = 0.0
    tier_blocks: list[int] = []

    @property
    def block_hit_rate(self) -> float:
        """Share of the blocks that were hits."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Share of the prompt tokens that were hits."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    def add(
        self,
        prompt: Prompt,
        hits: int,
        block_tokens: int,
        seconds: Callable[[int], float] | None,
    ) -> None:
        """One request, whose first ``hits`` blocks were there."""
        blocks = len(prompt.keys)
        self.requests += 1
        self.blocks += blocks
        self.tokens += prompt.tokens
        self.hit_blocks += hits
        if hits == blocks:
            self.full_hits += 1
            tokens = prompt.tokens
        else:
            tokens = hits * block_tokens
        self.hit_tokens += tokens
        if seconds is not None:
            self.saved_s += seconds(tokens)
            self.whole_s += seconds(prompt.tokens)


class Level(msgspec.Struct):
    """One tier: its policy, and its capacity in the unit of the cache."""

    policy: Policy
    capacity: int
    used: int = 0


class Cache:
    """One tier, or several that hold no block twice.

    A hit in a lower tier moves the block to the top; what the top gives up goes to the tier below,
    and what the lowest gives up is gone. With LRU in each, that is one LRU queue over all.

    ``unit_tokens``: None counts the capacity in blocks; else a block weighs its tokens, so many
    where it is full. ``seconds`` is the price of computing the first n tokens of a prompt.
    ``running``: blocks of the prompt that is being served may not go (as they may not in an
    engine); None: where the policy of the top tier knows the tree. A block for which there is no
    room in any tier is not kept.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        *,
        block_tokens: int,
        unit_tokens: bool = False,
        seconds: Callable[[int], float] | None = None,
        running: bool | None = None,
    ) -> None:
        if not levels or any(level.capacity < 1 for level in levels):
            raise ConfigError("a cache needs at least one tier, each with a capacity of 1 or more")
        self.levels = list(levels)
        self.counts = Counts(tier_blocks=[0] * len(self.levels))
        self._block_tokens = block_tokens
        self._unit_tokens = unit_tokens
        self._seconds = seconds
        self._many = len(self.levels) > 1
        self._running = levels[0].policy.tree if running is None else running
        self._where: dict[Key, int] = {}  # block -> tier
        self._facts: dict[Key, Facts] = {}
        self._uses: dict[Key, int] = {}  # what a lower tier is told; one tier alone counts itself
        self._ahead: dict[Key, None] = {}  # brought up before they were asked for, and not used yet
        self._saves: list[float] = []  # by index: seconds to compute that block at its position
        self._heats = -(-SINK_TOKENS // block_tokens)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, key: Key) -> bool:
        return key in self._where

    def serve(self, prompt: Prompt) -> int:
        """One request; returns the blocks of its prompt that were hits."""
        where, keys = self._where, prompt.keys
        tiers = self.counts.tier_blocks
        hits = 0
        for key in keys:
            tier = where.get(key)
            if tier is None:
                break
            tiers[tier] += 1
            hits += 1
        self.counts.add(prompt, hits, self._block_tokens, self._seconds)
        if self._running:
            self._serve_running(prompt)
        else:
            self._serve_single(prompt)
        return hits

    def _serve_single(self, prompt: Prompt) -> None:
        """Block by block, each for itself: one may push out another of the same prompt."""
        where, now, touched = self._where, prompt.now, self.levels[0].policy.touched
        held = 0
        for index, key in enumerate(prompt.keys):
            tier = where.get(key)
            if tier is None:
                weight = self._weight(prompt, index)
                if not self._make_room(0, weight, now, None):
                    self.counts.refused_blocks += 1
                    continue
                self._put(key, self._new(prompt, index, weight), 0, now)
                continue
            held += 1
            if self._ahead or self._many:
                self._note_use(key)
            if tier == 0:
                touched(key, now)
            elif not self._promote(key, tier, now):
                self.counts.refused_blocks += 1
        self.counts.held_blocks += held

    def _serve_running(self, prompt: Prompt) -> None:
        """All at once: the blocks that the prompt uses stay, room is made for the others."""
        where, keys, now = self._where, prompt.keys, prompt.now
        mine = frozenset(keys)
        touched = self.levels[0].policy.touched
        coming: list[tuple[Key, Facts, bool]] = []  # the last: it is held in a lower tier
        for index, key in enumerate(keys):
            tier = where.get(key)
            if tier is None:
                facts = self._new(prompt, index, self._weight(prompt, index))
                coming.append((key, facts, False))
                continue
            self.counts.held_blocks += 1
            if self._ahead or self._many:
                self._note_use(key)
            if tier == 0:
                touched(key, now)
            else:
                coming.append((key, self._take_out(key, tier), True))
        level = self.levels[0]
        total = sum(facts.size_bytes for _, facts, _ in coming)

        def may_go(block: Key) -> bool:
            return block not in mine

        self._make_room(0, min(total, level.capacity), now, may_go)
        room = True
        for block, facts, below in coming:
            if room and level.used + facts.size_bytes <= level.capacity:
                self._put(block, facts, 0, now)
                self.counts.promoted += facts.size_bytes if below else 0
                continue
            room = room and self._put_below(block, facts, now, may_go)
            if not room:  # nor for what follows, which could not be reached
                self.counts.refused_blocks += 1
                self._uses.pop(block, None)
                self._ahead.pop(block, None)

    def _put_below(self, key: Key, facts: Facts, now: float, may_go: MayGo) -> bool:
        """Where a prompt is larger than the top tier, what follows goes to the next with room."""
        for tier in range(1, len(self.levels)):
            if self._make_room(tier, facts.size_bytes, now, may_go):
                self._put(key, facts, tier, now)
                return True
        return False

    def bring_up(self, keys: Iterable[Key], now: float) -> int:
        """Move blocks to the top tier before they are asked for; returns how much that moved."""
        moved = 0
        for key in keys:
            tier = self._where.get(key)
            if tier and self._promote(key, tier, now):
                moved += self._facts[key].size_bytes
                self._ahead[key] = None
        self.counts.prefetched += moved
        return moved

    # -- inside ---------------------------------------------------------------------------------

    def _weight(self, prompt: Prompt, index: int) -> int:
        if not self._unit_tokens:
            return 1
        return prompt.last_tokens if index == len(prompt.keys) - 1 else self._block_tokens

    def _new(self, prompt: Prompt, index: int, weight: int) -> Facts:
        return Facts(
            weight,
            prompt.keys[index - 1] if index else None,
            index,
            self._saving(index) if self._seconds is not None else 0.0,
            Heat.SINK if index < self._heats else Heat.COLD,
        )

    def _note_use(self, key: Key) -> None:
        if key in self._ahead:
            del self._ahead[key]
            self.counts.prefetched_used += self._facts[key].size_bytes
        if self._many:
            self._uses[key] = self._uses.get(key, 0) + 1

    def _promote(self, key: Key, tier: int, now: float) -> bool:
        """Its place below is given up first: what comes down may take it."""
        facts = self._take_out(key, tier)
        if not self._make_room(0, facts.size_bytes, now, None):
            self._put(key, facts, tier, now)
            return False
        self.counts.promoted += facts.size_bytes
        self._put(key, facts, 0, now)
        return True

    def _take_out(self, key: Key, tier: int) -> Facts:
        level = self.levels[tier]
        level.policy.removed(key)
        facts = self._facts.pop(key)
        level.used -= facts.size_bytes
        del self._where[key]
        return facts

    def _put(self, key: Key, facts: Facts, tier: int, now: float) -> None:
        level = self.levels[tier]
        level.used += facts.size_bytes
        self._where[key] = tier
        self._facts[key] = facts
        level.policy.added(key, facts, now)

    def _make_room(self, tier: int, weight: int, now: float, may_go: MayGo | None) -> bool:
        """Room for ``weight`` in a tier, by handing down what the policy gives up."""
        level = self.levels[tier]
        short = level.used + weight - level.capacity
        if short <= 0:
            return True
        if weight > level.capacity:
            return False
        for victim in level.policy.evict(short, now, may_go):
            facts = self._facts.pop(victim)
            del self._where[victim]
            level.used -= facts.size_bytes
            below = tier + 1
            if below < len(self.levels) and self._make_room(below, facts.size_bytes, now, None):
                uses = self._uses.get(victim, 0)
                if uses != facts.uses:
                    facts = msgspec.structs.replace(facts, uses=uses)
                self.counts.demoted += facts.size_bytes
                self._put(victim, facts, below, now)
            else:
                self.counts.dropped_blocks += 1
                self.counts.dropped += facts.size_bytes
                self._ahead.pop(victim, None)
                self._uses.pop(victim, None)
        return level.used + weight <= level.capacity

    def _saving(self, index: int) -> float:
        saves, block = self._saves, self._block_tokens
        assert self._seconds is not None
        while len(saves) <= index:
            end = (len(saves) + 1) * block
            saves.append(self._seconds(end) - self._seconds(end - block))
        return saves[index]


def run(
    cache: Cache, work: Work, *, ahead: Speculative | None = None, measure_from: int = 0
) -> Counts:
    """A whole trace through a cache. Requests before number ``measure_from`` only fill it.

    ``ahead`` predicts next turns, whose blocks are then brought to the top tier before they are
    asked for.
    """
    for number, prompt in enumerate(work.prompts):
        if number == measure_from:
            cache.counts = Counts(tier_blocks=[0] * len(cache.levels))
        if ahead is None:
            cache.serve(prompt)
            continue
        now = prompt.now
        for prediction in ahead.due(now):
            cache.bring_up(prediction.keys, now)
        full = prompt.keys[:-1]  # the last block is cut short: the next turn has another there
        turn = ahead.arrived(full, now)
        cache.serve(prompt)
        ahead.ended(full, turn, now)
    return cache.counts


def prefill_seconds(layout: Layout, device: Device, devices: int) -> Callable[[int], float]:
    """The price of the first n tokens of a prompt, in seconds of so many devices together.

    At the lowest precision up to fp8 that the device has a figure of, and the share of it that a
    prefill reaches. Raises ConfigError where the model's cost is not known.
    """
    compute = layout.compute
    if compute is None:
        raise ConfigError(f"what a prefill of {layout.model or 'this model'} costs is not known")
    rate = devices * device.compute_rate("fp8" if "fp8" in device.flops else "bf16")
    return lambda tokens: compute.prefill_flops(0, tokens) / rate
