"""Questions to the directory's books: how far can a prompt be resumed, where, and why not further.

Reading only. A position is a count of grid blocks; publishers are bits (see `core.directory`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from kvatlas.core.lanes import Pool
from kvatlas.core.native import KeyTable
from kvatlas.core.records import Publisher, Resume, Tier
from kvatlas.core.steps import Steps, bits, by_publisher, members, shorter, stairs, union

_LOWER_TIERS = (Tier.DRAM, Tier.DISK, Tier.OBJECT, Tier.PEER)
_MISSING_MAX = 8  # positions of which is told what they lack


class Positions(msgspec.Struct, frozen=True):
    """Where one publisher could resume one prompt, in tokens.

    ``hbm``: positions at which all that is required lies in hbm; ``lower``: further ones for
    which its connector can load the rest from below. ``chain_tokens`` and ``lower_chain_tokens``
    are where the unbroken chain ends, in hbm and carried on below. ``missing``: for the first
    positions beyond the deepest one that the chain reaches, what is not there.
    """

    hbm: tuple[int, ...]
    lower: tuple[int, ...]
    chain_tokens: int
    lower_chain_tokens: int
    missing: tuple[tuple[int, tuple[str, ...]], ...]

    def deepest(self) -> int:
        """The position that a request would resume at; 0 for none."""
        return max((*self.hbm, *self.lower), default=0)


class Lookup:
    """Asks the books (one per lane and tier), which the directory owns and keeps up to date."""

    def __init__(self, books: list[list[KeyTable]], named: list[Publisher]) -> None:
        self._books = books
        self._named = named

    def resumes(self, pool: Pool, keys: Sequence[bytes]) -> list[Resume]:
        """Each publisher's deepest position; see `Directory.peek`."""
        near, far = self._chains(pool, keys, pool.alive)
        hbm = self._deepest(pool, keys, near, (Tier.HBM,))
        resumes = self._carried(pool, keys, near, hbm, far) if far else []
        grid, named = pool.layout.grid_tokens, self._named
        for end, blocks, holders in stairs(near, hbm, union(far)):
            tokens, chain = end * grid, blocks * grid
            split = (tokens,)
            resumes += [Resume(p, tokens, chain, split) for p in members(holders, named)]
        if far:
            resumes.sort(key=lambda r: (-r.tokens, -r.chain_tokens))
        return resumes

    def positions(self, pool: Pool, keys: Sequence[bytes], bit: int) -> Positions:
        """All positions of one publisher."""
        near, far = self._chains(pool, keys, bit & pool.alive)
        grid = pool.layout.grid_tokens
        chain, lower = max(near, default=0), max(far, default=0)

        def whole(first: int, last: int, tiers: Sequence[Tier]) -> list[int]:
            places = range(first, last + 1 - pool.ahead)
            return [p for p in places if not self._lacking(pool, keys, p, tiers, bit)]

        hbm = whole(1, chain, (Tier.HBM,))
        # A connector continues from the local hit: only where that is the whole local chain.
        local = max(hbm, default=0)
        below = whole(local + 1, lower, _LOWER_TIERS) if local == chain else []
        deepest = max((*hbm, *below), default=0)
        beyond = range(deepest + 1, min(deepest + _MISSING_MAX, len(keys)) + 1)
        lacking = [(p * grid, self.missing(pool, keys, p, bit)) for p in beyond]
        return Positions(
            hbm=tuple(p * grid for p in hbm),
            lower=tuple(p * grid for p in below),
            chain_tokens=chain * grid,
            lower_chain_tokens=lower * grid,
            missing=tuple((at, names) for at, names in lacking if names),
        )

    def missing(
        self, pool: Pool, keys: Sequence[bytes], position: int, bit: int
    ) -> tuple[str, ...]:
        """Names of the required groups that are not in hbm at ``position``, in their order."""
        if not 0 < position <= len(keys):
            return ()
        tier = (Tier.HBM,)
        names = dict.fromkeys(
            pool.lanes[i].group.name
            for i in pool.required
            if pool.lanes[i].span is None
            and not self._held(pool, (i,), keys[position - 1], tier, bit)
        )
        names |= dict.fromkeys(self._lacking(pool, keys, position, tier, bit))
        return tuple(g.name for g in pool.layout.groups if g.name in names)

    def _lacking(
        self, pool: Pool, keys: Sequence[bytes], position: int, tiers: Sequence[Tier], bit: int
    ) -> list[str]:
        """Names of the windowed groups that one publisher does not hold at ``position``."""
        windows = [i for i in pool.required if pool.lanes[i].span]
        return [
            pool.lanes[i].group.name
            for i in windows
            if self._hole(pool, (i,), keys, position, tiers=tiers, bit=bit) is not None
        ]

    def _carried(
        self, pool: Pool, keys: Sequence[bytes], near: Steps, hbm: Steps, far: Steps
    ) -> list[Resume]:
        """Those whose chain goes on, or could go on, in lower tiers."""
        low = by_publisher(self._deepest(pool, keys, far, _LOWER_TIERS))
        local, chain = by_publisher(hbm), by_publisher(near)
        grid = pool.layout.grid_tokens
        resumes = []
        for bit, blocks in by_publisher(far).items():
            held = local.get(bit, 0)
            end = max(held, low.get(bit, 0)) if held == chain.get(bit, 0) else held
            if blocks:
                split = self._split(pool, keys, bit, held, end)
                publisher = self._named[bit.bit_length() - 1]
                resumes.append(Resume(publisher, end * grid, blocks * grid, split))
        return resumes

    def _split(
        self, pool: Pool, keys: Sequence[bytes], bit: int, local: int, end: int
    ) -> tuple[int, ...]:
        """Tokens by tier, nearest first: ``local`` blocks from hbm, up to ``end`` from below."""
        grid = pool.layout.grid_tokens
        if end == local:
            return (local * grid,)
        split = [0] * len(Tier)
        split[Tier.HBM] = local * grid
        lane = next(i for i in pool.required if pool.lanes[i].span is None)
        for key in keys[local:end]:
            tier = next(
                (t for t in _LOWER_TIERS if self._books[lane][t].get(key, 0) & bit), Tier.OBJECT
            )
            split[tier] += grid
        return tuple(split)

    def _chains(self, pool: Pool, keys: Sequence[bytes], among: int) -> tuple[Steps, Steps]:
        """Blocks of unbroken chain: in hbm, and for some publishers carried on by lower tiers.

        An engine first takes its local hit, then its connector continues from there: so the
        lower tiers count only from the end of the hbm chain on, and must be unbroken themselves.
        """
        chains = [i for i in pool.required if pool.lanes[i].span is None]
        books = [self._books[lane][Tier.HBM] for lane in chains]
        near: Steps = {}
        far: Steps = {}
        active, lower = among, 0
        one = len(books) == 1
        runs = books[0].runs(keys) if one else list(enumerate(_all_of(books, keys)))
        runs.append((len(keys), 0))
        for (start, mask), (end, _) in itertools.pairwise(runs):
            lost = active & ~mask
            if lost:
                active ^= lost
                near[start] = lost
                lower |= lost & (pool.lower | pool.shared)
            for index in range(start, end) if lower else ():
                kept = self._lower_mask(pool, chains, keys[index]) & lower
                if kept != lower:
                    far[index] = lower & ~kept
                    lower = kept
            if not active and not lower:
                return near, far
        for steps, rest in ((near, active), (far, lower)):
            if rest:
                steps[len(keys)] = rest
        return near, far

    def _lower_mask(self, pool: Pool, lanes: Sequence[int], key: bytes) -> int:
        """Publishers that can load ``key`` from below hbm, in every one of ``lanes``."""
        result = pool.alive
        for lane in lanes:
            books = self._books[lane]
            mask = 0
            for tier in _LOWER_TIERS:
                held = books[tier].get(key, 0)
                # The object tier is one store for all who use it, not one per publisher.
                mask |= pool.shared if tier is Tier.OBJECT and held & pool.alive else held
            result &= mask
        return result

    def _deepest(
        self, pool: Pool, keys: Sequence[bytes], chains: Steps, tiers: Sequence[Tier]
    ) -> Steps:
        """The deepest block count at which all windowed lanes are held too."""
        if pool.ahead:
            chains = shorter(chains, pool.ahead)
        if not pool.windowed:
            return chains
        waiting = dict(chains)
        deepest: Steps = {}
        eligible, position = 0, max(waiting, default=0)
        while position > 0:
            eligible |= waiting.pop(position, 0)
            held = self._held(pool, pool.short, keys[position - 1], tiers, eligible)
            if pool.short_ahead:
                beyond = held if position < len(keys) else 0
                held = beyond and self._held(pool, pool.short_ahead, keys[position], tiers, beyond)
            eligible ^= held
            for bit in bits(held) if pool.long else ():
                hole = self._hole(pool, pool.long, keys, position, tiers=tiers, bit=bit)
                if hole is not None:
                    held ^= bit
                    waiting[hole] = waiting.get(hole, 0) | bit
            if held:
                deepest[position] = held
            position = position - 1 if eligible else max(waiting, default=0)
        return deepest

    def _held(
        self, pool: Pool, lanes: Sequence[int], key: bytes, tiers: Sequence[Tier], among: int
    ) -> int:
        for lane in lanes:
            if not among:
                return 0
            if len(tiers) == 1:
                among &= self._books[lane][tiers[0]].get(key, 0)
            else:
                among &= self._lower_mask(pool, (lane,), key)
        return among

    def _hole(
        self,
        pool: Pool,
        lanes: Sequence[int],
        keys: Sequence[bytes],
        position: int,
        *,
        tiers: Sequence[Tier],
        bit: int,
    ) -> int | None:
        """A smaller position, the greatest whose windows do not contain the same missing block;
        None where nothing is missing at ``position``."""
        for i in lanes:
            lane = pool.lanes[i]
            last = position - 1 + lane.ahead
            for index in range(last, max(-1, last - (lane.span or 0)), -1):
                if index >= len(keys) or not self._held(pool, (i,), keys[index], tiers, bit):
                    return max(index - lane.ahead, 0)
        return None


def _all_of(books: Sequence[KeyTable], keys: Sequence[bytes]) -> Iterator[int]:
    for key in keys:
        mask = -1
        for book in books:
            mask &= book.get(key, 0)
        yield mask
