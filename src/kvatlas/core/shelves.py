"""What agents hold for the engines of their nodes, by our own keys, in the tiers below hbm.

A *shelf* is one tier of one agent, or one store for all agents that use it. Soft state, like all
of the directory: an agent that starts anew, or whose word is in doubt, loses its own shelves and
nobody else's; what lies in a store stays, until somebody who uses the store says otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import msgspec

from kvatlas.core.claims import Applied
from kvatlas.core.events import UnitsGone, UnitsHeld
from kvatlas.core.lanes import Pool
from kvatlas.core.records import Publisher, Resume, Tier
from kvatlas.core.units import Part, name_of

_OWN = (Tier.DRAM, Tier.DISK)


class Shelf:
    """Block keys of the bodies and of the points that lie in one place."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.keys: tuple[set[bytes], set[bytes]] = (set(), set())  # by `Part`

    def __len__(self) -> int:
        return sum(map(len, self.keys))


class House:
    """One agent: its shelves, nearest first, and who lives there."""

    def __init__(self, engines: tuple[Publisher, ...], store: Shelf | None) -> None:
        self.engines = engines
        self.own = {tier: Shelf(tier) for tier in _OWN}
        self.store = store
        self.believed = True

    def shelves(self) -> list[Shelf]:
        """Those that its engines can be loaded from now. What is known of the store comes from
        agents, too: one that has not caught up has not heard what left it."""
        every = (*self.own.values(), self.store) if self.believed else ()
        return [shelf for shelf in every if shelf is not None and len(shelf)]


class Below(msgspec.Struct, frozen=True):
    """How far a prompt goes on outside an engine: tiers of the bodies from a start on, and the
    positions (counts of blocks) at which it can be resumed."""

    tiers: tuple[Tier, ...]
    positions: tuple[int, ...]


class Shelves:
    """All agents that the directory listens to. Reading never changes it."""

    def __init__(self, holders_max: int) -> None:
        """``holders_max``: units on one shelf; beyond them claims are refused and counted."""
        self._holders_max = holders_max
        self._houses: dict[Publisher, House] = {}
        self._stores: dict[str, Shelf] = {}

    def __contains__(self, agent: Publisher) -> bool:
        return agent in self._houses

    def __bool__(self) -> bool:
        return bool(self._houses)

    def settle(self, agent: Publisher, engines: Sequence[Publisher], store: str = "") -> None:
        """An agent, its engines, and the store that it can read ("" for none)."""
        shelf = self._stores.setdefault(store, Shelf(Tier.OBJECT)) if store else None
        self._houses[agent] = House(tuple(engines), shelf)
        self._tidy()

    def remove(self, agent: Publisher) -> None:
        """It is gone for good, with what it held; a store goes with the last who used it."""
        self._houses.pop(agent, None)
        self._tidy()

    def _tidy(self) -> None:
        used = [house.store for house in self._houses.values()]
        self._stores = {name: s for name, s in self._stores.items() if any(s is u for u in used)}

    def reset(self, agent: Publisher) -> None:
        """A new life of the agent: nothing that it said before counts."""
        self._houses[agent].own = {tier: Shelf(tier) for tier in _OWN}

    def believe(self, agent: Publisher, believed: bool) -> None:
        """Whether what it says is of the present."""
        self._houses[agent].believed = believed

    def apply(self, agent: Publisher, event: UnitsHeld | UnitsGone, applied: Applied) -> None:
        """One word of an agent. Of a tier that it cannot speak for: counted as undeclared."""
        house = self._houses[agent]
        shelf = house.store if event.tier is Tier.OBJECT else house.own.get(event.tier)
        if shelf is None:
            applied.undeclared += 1
            return
        for part, keys in ((Part.BODY, event.bodies), (Part.POINT, event.points)):
            held = shelf.keys[part]
            before = len(held)
            if isinstance(event, UnitsGone):
                held.difference_update(keys)
                applied.removed += before - len(held)
                applied.unknown_removals += len(keys) - (before - len(held))
                continue
            room = self._holders_max - len(shelf)
            held.update(keys if len(keys) <= room else keys[: max(room, 0)])
            applied.stored += len(held) - before
            applied.refused += max(len(keys) - max(room, 0), 0)

    # -- what a peer tells of (core.snapshot) -----------------------------------------------------

    def agents(self) -> list[Publisher]:
        """Those that are settled here, sorted."""
        return sorted(self._houses)

    def own(self, agent: Publisher) -> dict[Tier, Shelf]:
        """The shelves of one agent, to read."""
        return self._houses[agent].own

    def stores(self) -> dict[str, tuple[Shelf, list[Publisher]]]:
        """Each store, to read, and the agents that use it, sorted."""
        return {
            name: (shelf, [a for a in self.agents() if self._houses[a].store is shelf])
            for name, shelf in self._stores.items()
        }

    def adopt(self, agent: Publisher, own: dict[Tier, Shelf]) -> None:
        """These are its shelves; in doubt until `believe` says otherwise."""
        house = self._houses[agent]
        house.own, house.believed = own, False

    def stock(self, name: str, shelf: Shelf) -> None:
        """A store holds this, too."""
        for held, more in zip(self._stores[name].keys, shelf.keys, strict=True):
            held.update(more)

    # -- questions ------------------------------------------------------------------------------

    def extended(
        self, pool: Pool, keys: Sequence[bytes], resumes: list[Resume], asked: Collection[Publisher]
    ) -> list[Resume]:
        """The same answers, where agents of the engines ``asked`` can carry a prompt further."""
        known = {resume.publisher: resume for resume in resumes}
        grid = pool.layout.grid_tokens
        for house in self._houses.values():
            shelves = house.shelves()
            if not shelves:
                continue
            walked: dict[int, Below] = {}
            for engine in house.engines:
                if engine not in asked:
                    continue
                old = known.get(engine) or Resume(engine, 0, 0, (0,))
                local = (old.tier_tokens[Tier.HBM] if old.tier_tokens else old.tokens) // grid
                below = walked.get(local)
                if below is None:
                    below = walked[local] = _below(shelves, pool, keys, local)
                deeper = _deeper(old, local, below, grid)
                if deeper is not old:
                    known[engine] = deeper
        return sorted(known.values(), key=lambda r: (-r.tokens, -r.chain_tokens))

    def positions(
        self, pool: Pool, keys: Sequence[bytes], engine: Publisher, local: int
    ) -> Below | None:
        """The same for one engine that has ``local`` blocks; None where no agent carries it on."""
        for house in self._houses.values():
            if engine in house.engines:
                return _below(house.shelves(), pool, keys, local)
        return None

    def lends(self, pool: Pool, keys: Sequence[bytes], agent: Publisher) -> int:
        """Blocks up to the deepest position that lies in the dram of one agent; 0 for none."""
        house = self._houses.get(agent)
        if house is None or not house.believed:
            return 0
        return max(_below((house.own[Tier.DRAM],), pool, keys, 0).positions, default=0)

    def held(self, agent: Publisher) -> dict[Tier, tuple[int, int]]:
        """Bodies and points of one agent, by tier, a store's included."""
        house = self._houses[agent]
        shelves = (*house.own.values(), house.store)
        return {
            s.tier: (len(s.keys[Part.BODY]), len(s.keys[Part.POINT]))
            for s in shelves
            if s is not None and len(s)
        }

    def names(self, agent: Publisher) -> dict[Tier, set[bytes]]:
        """The same by the names of the units (for inspection and tests)."""
        house = self._houses[agent]
        return {
            shelf.tier: {name_of(key, part) for part in Part for key in shelf.keys[part]}
            for shelf in (*house.own.values(), house.store)
            if shelf is not None
        }

    def digest(self) -> bytes:
        """Hash of all that is held; b"" where there is no agent."""
        total = hashlib.sha256()
        for agent, house in sorted(self._houses.items()):
            total.update(str(agent).encode())
            for shelf in (*house.own.values(), house.store):
                for keys in shelf.keys if shelf is not None else ():
                    total.update(b"".join(sorted(keys)) + b"\0")
        return total.digest() if self._houses else b""


def _below(shelves: Sequence[Shelf], pool: Pool, keys: Sequence[bytes], start: int) -> Below:
    """Walks on from ``start`` blocks as far as bodies are held."""
    bodies = [(shelf.tier, shelf.keys[Part.BODY]) for shelf in shelves]
    tiers: list[Tier] = []
    # An engine that looks ahead is asked about a block more than it may resume at.
    asked = keys[start : len(keys) - pool.ahead]
    for key in asked:
        for tier, held in bodies:
            if key in held:
                tiers.append(tier)
                break
        else:
            break
    ends = range(1, len(tiers) + 1)
    if pool.points:
        points = [shelf.keys[Part.POINT] for shelf in shelves]
        have = {key for held in points for key in held.intersection(asked[: len(tiers)])}
        return Below(tuple(tiers), tuple([start + p for p in ends if asked[p - 1] in have]))
    return Below(tuple(tiers), tuple([start + p for p in ends]))


def _deeper(old: Resume, local: int, below: Below, grid: int) -> Resume:
    """What an engine can do with what lies below, where that is more than it could without."""
    end = below.positions[-1] if below.positions else 0
    chain = (local + len(below.tiers)) * grid
    if end * grid <= old.tokens:
        return old
    split = [0] * len(Tier)
    split[Tier.HBM] = local * grid
    for tier in below.tiers[: end - local]:
        split[tier] += grid
    chain = max(old.chain_tokens, chain)
    own = local * grid
    return Resume(old.publisher, end * grid, chain, tuple(split), own_tokens=own)
