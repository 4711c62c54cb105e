"""The directory: key → holders, and from that, up to where each publisher can really resume.

One *book* per (lane, tier) maps a block key to the set of publishers that hold that grid block
under that lane, as the bits of one integer. A lane is one group of the layout (copies unrolled).
A grid block is in a lane's book only when the publisher holds *every* unit of it that counts for
a resume at its end, so a lookup never has to know how an engine cuts its blocks.

Soft state: everything here is rebuilt from the engines' events. Reading never changes it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvatlas.core.claims import Applied, Claims
from kvatlas.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvatlas.core.keys import Keyring
from kvatlas.core.lanes import Pool
from kvatlas.core.layout import Layout
from kvatlas.core.records import Publisher, Resume, Tier
from kvatlas.core.steps import Steps, bits, by_publisher, members, stairs, union
from kvatlas.core.tables import KeyTable

_LOWER_TIERS = (Tier.DRAM, Tier.DISK, Tier.OBJECT, Tier.PEER)
_SWEEP_PER_APPLY = 2_000
_RETIRED_MAX = 16  # lives that wait to be swept, beyond one per publisher: all may restart at once


class Limits(msgspec.Struct, frozen=True):
    """Caps in block-holders (one publisher, lane, tier and block). Beyond them new claims are
    refused and counted: that under-promises, which costs a recompute and never a wrong answer."""

    holders_max: int = 20_000_000
    holders_per_publisher_max: int = 2_000_000
    publishers_max: int = 4096


class _Slot:
    """One life (epoch) of one publisher: its bit, and what it claims."""

    def __init__(self, publisher: Publisher, bit: int, pool: Pool) -> None:
        self.publisher = publisher
        self.bit = bit
        self.pool = pool
        self.holders = 0
        self.muted = False  # for the rest of this life
        self.doubted = False  # until it has caught up
        self.claims: Claims


class Directory:
    """Never raises on events, however odd: what cannot be used is counted in `Applied`."""

    def __init__(self, keyring: Keyring, limits: Limits | None = None) -> None:
        self._keyring = keyring
        self.limits = limits or Limits()
        self._books: list[list[KeyTable]] = []
        self._pools: dict[bytes, Pool] = {}
        self._slots: dict[Publisher, _Slot] = {}
        self._named: list[Publisher] = []  # by bit
        self._free_bits: list[int] = []
        self._retired: deque[tuple[int, Iterator[bytes]]] = deque()
        self._masks: dict[int, int] = {}  # one object per distinct holder set: memory, and `is`
        self.holders = 0

    # -- publishers ---------------------------------------------------------------------------

    def register(self, publisher: Publisher, layout: Layout, fingerprint: bytes) -> None:
        """Make room for a publisher; known already with another fingerprint: its claims go."""
        slot = self._slots.get(publisher)
        if slot is not None:
            if slot.pool.fingerprint == fingerprint:
                return
            self.unregister(publisher)
        if len(self._slots) >= self.limits.publishers_max:
            raise ValueError(f"the directory is limited to {self.limits.publishers_max} ranks")
        pool = self._pools.get(fingerprint)
        if pool is None:
            pool = self._pools[fingerprint] = Pool(fingerprint, layout)
            while len(self._books) < len(pool.lanes):
                self._books.append([KeyTable() for _ in Tier])
        self._new_life(publisher, pool)

    def unregister(self, publisher: Publisher) -> None:
        """The publisher is gone, with everything that it claimed."""
        slot = self._slots.pop(publisher, None)
        if slot is None:
            return
        self._retire(slot)
        if not any(s.pool is slot.pool for s in self._slots.values()):
            del self._pools[slot.pool.fingerprint]

    def reset(self, publisher: Publisher) -> None:
        """A new epoch, or doubt that cannot be repaired: its claims go, nobody else's."""
        slot = self._slots.get(publisher)
        if slot is not None and (slot.claims.touched or slot.muted):
            self._retire(slot)
            self._new_life(publisher, slot.pool)
            self.believe(publisher, not slot.doubted)

    def publishers(self) -> list[Publisher]:
        """Registered publishers, sorted."""
        return sorted(self._slots)

    def pool_of(self, publisher: Publisher) -> Pool | None:
        """The pool (fingerprint, layout) of a registered publisher."""
        slot = self._slots.get(publisher)
        return slot.pool if slot else None

    def pools(self) -> list[Pool]:
        """One pool per distinct fingerprint, in order of registration."""
        return list(self._pools.values())

    def holders_of(self, publisher: Publisher) -> int:
        """How many block-holders this publisher accounts for."""
        slot = self._slots.get(publisher)
        return slot.holders if slot else 0

    def _new_life(self, publisher: Publisher, pool: Pool) -> None:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = 1 << len(self._named)
            self._named.append(publisher)
        slot = _Slot(publisher, bit, pool)
        slot.claims = Claims(self, slot, self._keyring, pool)
        self._slots[publisher] = slot
        self._named[bit.bit_length() - 1] = publisher
        pool.alive |= bit

    def _retire(self, slot: _Slot) -> None:
        """Take a life out of every answer at once; its bits are swept up little by little."""
        pool, bit = slot.pool, slot.bit
        pool.alive &= ~bit
        pool.lower &= ~bit
        pool.shared &= ~bit
        self.holders -= slot.holders
        self._retired.append((bit, slot.claims.held_keys()))
        self.sweep(_SWEEP_PER_APPLY)
        while len(self._retired) > _RETIRED_MAX + len(self._slots):
            self.sweep(_SWEEP_PER_APPLY)

    def sweep(self, budget: int) -> int:
        """Clear up to ``budget`` keys of retired lives; returns how many lives still wait."""
        while self._retired and budget > 0:
            bit, keys = self._retired[0]
            for key in keys:
                for tiers in self._books:
                    for book in tiers:
                        mask = book.get(key, 0)
                        if mask & bit:
                            self._store(book, key, mask & ~bit)
                budget -= 1
                if budget <= 0:
                    return len(self._retired)
            self._retired.popleft()
            self._free_bits.append(bit)
        return len(self._retired)

    # -- events -------------------------------------------------------------------------------

    def apply(self, publisher: Publisher, events: Iterable[Event]) -> Applied:
        """Apply what one publisher said, in order. Unregistered publishers are ignored."""
        applied = Applied()
        slot = self._slots.get(publisher)
        if slot is None:
            applied.unregistered += 1
            return applied
        if self._retired:
            self.sweep(_SWEEP_PER_APPLY)
        for event in events:
            if isinstance(event, BlockStored):
                slot.claims.stored(event, applied)
                if applied.undeclared:
                    self._mute(slot)
            elif isinstance(event, BlockRemoved):
                slot.claims.removed(event, applied)
            elif isinstance(event, AllBlocksCleared):
                self.reset(publisher)
                slot = self._slots[publisher]
                applied.cleared += 1
        return applied

    def _mute(self, slot: _Slot) -> None:
        """Leave a publisher out of every answer until its next life.

        It announced a group that its layout does not have: then some required part of the state
        is unknown to us, and any resume position would be a guess.
        """
        slot.muted = True
        slot.pool.alive &= ~slot.bit

    def believe(self, publisher: Publisher, believed: bool) -> None:
        """While a publisher's history is being replayed its claims speak of the past: leave it
        out of every answer until it has caught up."""
        slot = self._slots.get(publisher)
        if slot is None:
            return
        slot.doubted = not believed
        if believed and not slot.muted:
            slot.pool.alive |= slot.bit
        else:
            slot.pool.alive &= ~slot.bit

    def muted(self) -> list[Publisher]:
        """Publishers whose claims are not believed, sorted."""
        return sorted(p for p, slot in self._slots.items() if slot.muted)

    # -- the claims' side: set and clear one bit ------------------------------------------------

    def set(self, slot: _Slot, lane: int, tier: Tier, key: bytes) -> bool:
        """The publisher holds ``key`` now; False when a limit refuses it."""
        book = self._books[lane][tier]
        mask = book.get(key, 0)
        if mask & slot.bit:
            return True
        limits = self.limits
        if self.holders >= limits.holders_max or slot.holders >= limits.holders_per_publisher_max:
            return False
        self._store(book, key, mask | slot.bit)
        slot.holders += 1
        self.holders += 1
        if tier is not Tier.HBM:
            slot.pool.lower |= slot.bit
            if tier is Tier.OBJECT:
                slot.pool.shared |= slot.bit
        return True

    def clear(self, slot: _Slot, lane: int, tier: Tier, key: bytes) -> bool:
        """The publisher no longer holds ``key`` there; False when it did not."""
        book = self._books[lane][tier]
        mask = book.get(key, 0)
        if not mask & slot.bit:
            return False
        self._store(book, key, mask & ~slot.bit)
        slot.holders -= 1
        self.holders -= 1
        return True

    def holds(self, slot: _Slot, key: bytes) -> bool:
        """Does the publisher hold ``key`` in any lane and tier?"""
        bit = slot.bit
        for tiers in self._books[: len(slot.pool.lanes)]:
            for book in tiers:
                if book and book.get(key, 0) & bit:
                    return True
        return False

    def _store(self, book: KeyTable, key: bytes, mask: int) -> None:
        if mask:
            if mask > 256:  # the interpreter shares smaller ones by itself
                masks = self._masks
                if len(masks) > 65_536:
                    masks.clear()
                mask = masks.setdefault(mask, mask)
            book[key] = mask
        else:
            del book[key]

    # -- questions ------------------------------------------------------------------------------

    def peek(self, keys: Sequence[bytes], fingerprint: bytes) -> list[Resume]:
        """How far each publisher of ``fingerprint`` can resume a prompt with these block keys.

        ``keys`` are the prompt's full grid blocks that may be resumed: leave out the block that
        holds the last token, because one token must be computed. Publishers that hold nothing of
        it are left out. Ordered by tokens, longest first, then by chain, then by registration.
        """
        pool = self._pools.get(fingerprint)
        if pool is None or not keys:
            return []
        near, far = self._chains(pool, keys)
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

    def _chains(self, pool: Pool, keys: Sequence[bytes]) -> tuple[Steps, Steps]:
        """Blocks of unbroken chain: in hbm, and for some publishers carried on by lower tiers.

        An engine first takes its local hit, then its connector continues from there: so the
        lower tiers count only from the end of the hbm chain on, and must be unbroken themselves.
        """
        chains = [i for i in pool.required if pool.lanes[i].span is None]
        books = [self._books[lane][Tier.HBM] for lane in chains]
        near: Steps = {}
        far: Steps = {}
        active, lower = pool.alive, 0
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
        windows = [(i, pool.lanes[i].span) for i in pool.required if pool.lanes[i].span]
        if not windows:
            return chains
        short = [i for i, span in windows if span == 1]
        long = [(i, span) for i, span in windows if span is not None and span > 1]
        waiting = dict(chains)
        deepest: Steps = {}
        eligible, position = 0, max(waiting, default=0)
        while position > 0:
            eligible |= waiting.pop(position, 0)
            held = self._held(pool, short, keys[position - 1], tiers, eligible)
            eligible ^= held
            for bit in bits(held) if long else ():
                hole = self._hole(pool, long, keys, position, tiers=tiers, bit=bit)
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
        lanes: Sequence[tuple[int, int]],
        keys: Sequence[bytes],
        position: int,
        *,
        tiers: Sequence[Tier],
        bit: int,
    ) -> int | None:
        """The last block inside a wide window before ``position`` that is missing, if any."""
        for lane, span in lanes:
            for index in range(position - 1, max(-1, position - 1 - span), -1):
                if not self._held(pool, (lane,), keys[index], tiers, bit):
                    return index
        return None

    def missing(self, publisher: Publisher, keys: Sequence[bytes], tokens: int) -> str:
        """Names the groups that are not in hbm at position ``tokens`` (for explanations)."""
        slot = self._slots.get(publisher)
        if slot is None:
            return "unknown publisher"
        pool, bit = slot.pool, slot.bit
        position = tokens // pool.layout.grid_tokens
        if not 0 < position <= len(keys):
            return ""
        names: list[str] = []
        for i in pool.required:
            lane = pool.lanes[i]
            if lane.span is None:
                held = bool(self._books[i][Tier.HBM].get(keys[position - 1], 0) & bit)
            else:
                wide = [(i, lane.span)]
                hole = self._hole(pool, wide, keys, position, tiers=(Tier.HBM,), bit=bit)
                held = hole is None
            if not held and lane.group.name not in names:
                names.append(lane.group.name)
        return ", ".join(names)

    def holdings(self, publisher: Publisher) -> Iterator[tuple[int, Tier, bytes]]:
        """Every (lane, tier, key) that a publisher holds: for inspection and tests."""
        slot = self._slots.get(publisher)
        if slot is None:
            return
        for key in dict.fromkeys(slot.claims.held_keys()):
            for lane in range(len(slot.pool.lanes)):
                for tier in Tier:
                    if self._books[lane][tier].get(key, 0) & slot.bit:
                        yield lane, tier, key

    def digest(self) -> str:
        """Hash of all that is held, whatever the order of arrival or the bits in use."""
        total = hashlib.sha256()
        for publisher in self.publishers():
            total.update(str(publisher).encode())
            for lane, tier, key in sorted(self.holdings(publisher)):
                total.update(bytes((lane, tier)) + key)
        return total.hexdigest()


def _all_of(books: Sequence[KeyTable], keys: Sequence[bytes]) -> Iterator[int]:
    for key in keys:
        mask = -1
        for book in books:
            mask &= book.get(key, 0)
        yield mask
