"""The directory: key → holders, and from that, up to where each publisher can really resume.

One *book* per (lane, tier) maps a block key to the set of publishers that hold that grid block
under that lane, as the bits of one integer. A lane is one group of the layout (copies unrolled).
A grid block is in a lane's book only when the publisher holds *every* unit of it that counts for
a resume at its end, so a lookup never has to know how an engine cuts its blocks.

Soft state: everything here is rebuilt from the engines' events. Reading never changes it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvatlas.core.claims import Applied, Claims
from kvatlas.core.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    UnitsGone,
    UnitsHeld,
)
from kvatlas.core.keys import Keyring
from kvatlas.core.lanes import Pool
from kvatlas.core.layout import Layout
from kvatlas.core.lookup import Lookup, Positions
from kvatlas.core.native import KeyTable
from kvatlas.core.records import Publisher, Resume, Tier
from kvatlas.core.shelves import Shelves

_SWEEP_PER_APPLY = 2_000
_RETIRED_MAX = 16  # lives that wait to be swept, beyond one per publisher: all may restart at once
_MASKS_MAX = 65_536


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
        self.counts = [[0] * len(Tier) for _ in pool.lanes]  # the same by lane and tier
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
        self._lookup = Lookup(self._books, self._named)
        self._free_bits: list[int] = []
        self._retired: deque[tuple[int, Iterator[bytes]]] = deque()
        self.shelves = Shelves(self.limits.holders_per_publisher_max)
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

    def settle(self, agent: Publisher, engines: Sequence[Publisher], store: str = "") -> None:
        """Listen to the agent of a node, which carries its ``engines`` further (`core.shelves`).
        It is asked for no request itself. Raises ValueError where an engine has that name."""
        if agent in self._slots:
            raise ValueError(f"{agent} is an engine: an agent needs a name of its own")
        if len(self._slots) >= self.limits.publishers_max:
            raise ValueError(f"the directory is limited to {self.limits.publishers_max} ranks")
        self.shelves.settle(agent, engines, store)

    def reset(self, publisher: Publisher) -> None:
        """A new epoch, or doubt that cannot be repaired: its claims go, nobody else's."""
        if publisher in self.shelves:
            self.shelves.reset(publisher)
            return
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

    def held(self, publisher: Publisher) -> dict[str, dict[Tier, int]]:
        """Complete grid blocks by group (copies added up) and tier, without zeros."""
        slot = self._slots.get(publisher)
        found: dict[str, dict[Tier, int]] = {}
        for lane, counts in zip(slot.pool.lanes, slot.counts, strict=True) if slot else ():
            tiers = found.setdefault(lane.group.name, {})
            for tier, count in zip(Tier, counts, strict=True):
                if count:
                    tiers[tier] = tiers.get(tier, 0) + count
        return {group: tiers for group, tiers in found.items() if tiers}

    def _new_life(self, publisher: Publisher, pool: Pool) -> None:
        slot = self._slots[publisher] = self._slot(publisher, pool)
        pool.alive |= slot.bit

    def _slot(self, publisher: Publisher, pool: Pool) -> _Slot:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = 1 << len(self._named)
            self._named.append(publisher)
        slot = _Slot(publisher, bit, pool)
        slot.claims = Claims(self, slot, self._keyring, pool)
        self._named[bit.bit_length() - 1] = publisher
        return slot

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

    # -- lives that a peer tells of (core.snapshot) -----------------------------------------------

    def life(self, publisher: Publisher) -> _Slot | None:
        """The life of a registered publisher that counts now."""
        return self._slots.get(publisher)

    def stage(self, publisher: Publisher, pool: Pool) -> _Slot:
        """A further life, which is in no answer: to be filled, then adopted or discarded."""
        return self._slot(publisher, pool)

    def adopt(self, staged: _Slot) -> bool:
        """It takes the place of the one that counts, and is in doubt until `believe` says
        otherwise. False where its publisher has left meanwhile, or is another: then it goes."""
        old = self._slots.get(staged.publisher)
        if old is None or old.pool is not staged.pool:
            self.discard(staged)
            return False
        self._retire(old)
        self._slots[staged.publisher] = staged
        staged.doubted = True
        return True

    def discard(self, staged: _Slot) -> None:
        """It will not be adopted."""
        self._retire(staged)

    def books(self, pool: Pool) -> list[list[KeyTable]]:
        """By lane and tier, to read."""
        return self._books[: len(pool.lanes)]

    # -- events -------------------------------------------------------------------------------

    def apply(self, publisher: Publisher, events: Iterable[Event]) -> Applied:
        """Apply what one publisher said, in order. Unregistered publishers are ignored."""
        applied = Applied()
        slot = self._slots.get(publisher)
        if slot is None:
            if publisher in self.shelves:
                self._apply_words(publisher, events, applied)
            else:
                applied.unregistered += 1
            return applied
        if self._retired:
            self.sweep(_SWEEP_PER_APPLY)
        for event in events:
            if isinstance(event, BlockStored):
                undeclared = applied.undeclared
                slot.claims.stored(event, applied)
                if applied.undeclared > undeclared:
                    self._mute(slot)
            elif isinstance(event, BlockRemoved):
                slot.claims.removed(event, applied)
            elif isinstance(event, AllBlocksCleared):
                self.reset(publisher)
                slot = self._slots[publisher]
                applied.cleared += 1
        return applied

    def _apply_words(self, agent: Publisher, events: Iterable[Event], applied: Applied) -> None:
        for event in events:
            if isinstance(event, UnitsHeld | UnitsGone):
                self.shelves.apply(agent, event, applied)
            elif isinstance(event, AllBlocksCleared):
                self.shelves.reset(agent)
                applied.cleared += 1
            else:
                applied.undeclared += 1

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
        if publisher in self.shelves:
            self.shelves.believe(publisher, believed)
            return
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
        slot.counts[lane][tier] += 1
        self.holders += 1
        if tier is not Tier.HBM:
            slot.pool.lower |= slot.bit
            if tier is Tier.OBJECT:
                slot.pool.shared |= slot.bit
        return True

    def set_all(self, slot: _Slot, lane: int, keys: Sequence[bytes]) -> list[int] | None:
        """`set` in hbm for each of ``keys``, no two of them equal. Returns the places of those that
        it held before; None, with nothing changed, where a limit could refuse one."""
        limits, count, bit = self.limits, len(keys), slot.bit
        if (
            self.holders + count > limits.holders_max
            or slot.holders + count > limits.holders_per_publisher_max
        ):
            return None
        held = self._books[lane][Tier.HBM].add(keys, bit, self._shared())
        new = count - len(held)
        slot.holders += new
        slot.counts[lane][Tier.HBM] += new
        self.holders += new
        return held

    def clear(self, slot: _Slot, lane: int, tier: Tier, key: bytes) -> bool:
        """The publisher no longer holds ``key`` there; False when it did not."""
        book = self._books[lane][tier]
        mask = book.get(key, 0)
        if not mask & slot.bit:
            return False
        self._store(book, key, mask & ~slot.bit)
        slot.holders -= 1
        slot.counts[lane][tier] -= 1
        self.holders -= 1
        return True

    def holds_in(self, slot: _Slot, lane: int, tier: Tier, key: bytes) -> bool:
        """Does the publisher hold ``key`` in this lane and tier?"""
        return bool(self._books[lane][tier].get(key, 0) & slot.bit)

    def holds(self, slot: _Slot, key: bytes) -> bool:
        """Does the publisher hold ``key`` in any lane and tier?"""
        bit = slot.bit
        below = slot.pool.lower & bit  # else it never announced anything there
        for tiers in self._books[: len(slot.pool.lanes)]:
            if tiers[Tier.HBM].get(key, 0) & bit:
                return True
            if below and any(book.get(key, 0) & bit for book in tiers):
                return True
        return False

    def _store(self, book: KeyTable, key: bytes, mask: int) -> None:
        if mask:
            book[key] = self._shared().setdefault(mask, mask)
        else:
            del book[key]

    def _shared(self) -> dict[int, int]:
        masks = self._masks
        if len(masks) > _MASKS_MAX:
            masks.clear()
        return masks

    # -- questions ------------------------------------------------------------------------------

    def peek(
        self, keys: Sequence[bytes], fingerprint: bytes, below: Sequence[bytes] | None = None
    ) -> list[Resume]:
        """How far each publisher of ``fingerprint`` can resume a prompt with these block keys;
        ``below``: those that agents know it by, where they are others.

        ``keys`` are the prompt's first `Layout.asked_blocks`: at the end of each of them it may
        be resumed, because one token is left to compute. Publishers that hold nothing of it are
        left out. Ordered by tokens, longest first, then by chain, then by registration.
        """
        pool = self._pools.get(fingerprint)
        if pool is None or not keys:
            return []
        resumes = self._lookup.resumes(pool, keys)
        if self.shelves:
            slots = self._slots.items()
            alive = {p for p, s in slots if s.pool is pool and s.bit & pool.alive}
            lower = keys if below is None else below
            resumes = self.shelves.extended(pool, lower, resumes, alive)
        return resumes

    def lends(self, agent: Publisher, keys: Sequence[bytes], fingerprint: bytes) -> int:
        """Blocks of a prompt up to the deepest position at which it could be resumed from this
        agent's dram alone, which its peers can read; 0 for an agent that is not known."""
        pool = self._pools.get(fingerprint)
        return self.shelves.lends(pool, keys, agent) if pool is not None else 0

    def positions(
        self, publisher: Publisher, keys: Sequence[bytes], below: Sequence[bytes] | None = None
    ) -> Positions | None:
        """Every position at which one publisher could resume this prompt, and what stops it
        elsewhere; None for a publisher that is not registered. Keys as for `peek`."""
        slot = self._slots.get(publisher)
        if slot is None:
            return None
        found = self._lookup.positions(slot.pool, keys, slot.bit)
        grid = slot.pool.layout.grid_tokens
        local = max(found.hbm, default=0) // grid
        lower = keys if below is None else below
        further = self.shelves.positions(slot.pool, lower, publisher, local)
        if further is None or not slot.bit & slot.pool.alive:
            return found
        chain = (local + len(further.tiers)) * grid
        places = {*found.lower, *(p * grid for p in further.positions)}
        return msgspec.structs.replace(
            found,
            lower=tuple(sorted(places)),
            lower_chain_tokens=max(found.lower_chain_tokens, chain),
        )

    def missing(self, publisher: Publisher, keys: Sequence[bytes], tokens: int) -> str:
        """Names the groups that are not in hbm at position ``tokens`` (for explanations)."""
        slot = self._slots.get(publisher)
        if slot is None:
            return "unknown publisher"
        position = tokens // slot.pool.layout.grid_tokens
        return ", ".join(self._lookup.missing(slot.pool, keys, position, slot.bit))

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
        total.update(self.shelves.digest())
        return total.hexdigest()
