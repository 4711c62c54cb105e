"""What a node holds in its own tiers, what it knows of shared ones, and how far a prompt reaches.

Own tiers have a `Ledger` each; of shared ones (`object`, `peer`) it knows what it wrote and what
it was told: that may be out of date, which a load that fails corrects. A point counts only when
it is *sealed*: its resume record, committed last, says that all that it needs was written.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvatlas.core.agent_values import Source
from kvatlas.core.events import Event, UnitsGone, UnitsHeld
from kvatlas.core.forgetting import payer_of
from kvatlas.core.ledger import Ledger
from kvatlas.core.ledger_values import Entry
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Sizes, Unit, name_of

OWN = (Tier.DRAM, Tier.DISK)
Place = tuple[Tier, str]  # a tier, of the node named where it is a peer's


def name_in(entry: Entry) -> bytes:
    """Of which unit an entry of one of our ledgers is."""
    assert isinstance(entry.key, bytes)
    return entry.key


def unit_of(entry: Entry) -> Unit:
    """That unit."""
    name = name_in(entry)
    return Unit(name[:-1], Part(name[-1]), entry.facts.index, entry.facts.size_bytes)


def sources_of(found: Mapping[Place, Sequence[Unit]]) -> tuple[Source, ...]:
    """Units by where they are, as what to load."""
    return tuple(Source(tier, tuple(units), node) for (tier, node), units in found.items())


class Reach:
    """How far one prompt is held outside the engine, from ``start`` blocks on.

    ``positions``: counts of blocks up to which it can be loaded, ascending; where there are none
    ``why`` says the reason.
    """

    def __init__(self, keys: Sequence[bytes], start: int, sizes: Sizes) -> None:
        self._keys = keys
        self._start = start
        self._sizes = sizes
        self.bodies: list[Place] = []  # of block start, start + 1, …
        self.points: dict[int, Place] = {}
        self.positions: list[int] = []
        self.why = ""

    def changes(self) -> list[int]:
        """Counts of blocks after which the bodies lie elsewhere."""
        bodies, start = self.bodies, self._start
        return [start + i for i in range(1, len(bodies)) if bodies[i] != bodies[i - 1]]

    def loads(self, positions: Sequence[int]) -> Iterator[tuple[int, dict[Tier, int]]]:
        """For each of some positions, ascending, the bytes to be loaded from each tier."""
        count: dict[Tier, int] = {}
        done, body = 0, self._sizes.body_bytes
        for position in positions:
            for tier, _ in self.bodies[done : position - self._start]:
                count[tier] = count.get(tier, 0) + body
            done = position - self._start
            sizes = dict(count)
            if self._sizes.has_points:
                tier = self.points[position][0]
                sizes[tier] = sizes.get(tier, 0) + self._sizes.point_bytes(position - 1)
            yield position, sizes

    def sources(self, position: int) -> tuple[Source, ...]:
        """All that has to be loaded to resume at ``position``, by place."""
        found: dict[Place, list[Unit]] = {}
        size_bytes = self._sizes.body_bytes
        for index in range(self._start, position):
            unit = Unit(self._keys[index], Part.BODY, index, size_bytes)
            found.setdefault(self.bodies[index - self._start], []).append(unit)
        if self._sizes.has_points:
            unit = self._sizes.point(self._keys, position - 1)
            found.setdefault(self.points[position], []).append(unit)
        return sources_of(found)


class Inventory:
    """Books and knowledge of one node. `said` collects what the directory has to be told."""

    def __init__(self, ledgers: dict[Tier, Ledger], known_max: int, counts: Counter[str]) -> None:
        self.ledgers = ledgers
        self.sealed: dict[Tier, set[bytes]] = {tier: set() for tier in ledgers}  # names of points
        self.known: dict[Tier, OrderedDict[bytes, str]] = {
            tier: OrderedDict() for tier in (Tier.OBJECT, Tier.PEER)
        }
        self.owners: dict[bytes, str] = {}  # of what we put into the store, where it has one
        self.lost: set[bytes] = set()  # by the store, and still in an own tier when that was told
        self._known_max = known_max
        self._counts = counts
        self._said: dict[tuple[Tier, bytes], bool] = {}

    # -- questions ------------------------------------------------------------------------------

    def place(self, name: bytes, order: Iterable[Tier]) -> Place | None:
        """The first tier of ``order`` from which a unit can be read (a point: sealed)."""
        for tier in order:
            ledger = self.ledgers.get(tier)
            if ledger is None:
                node = self.known[tier].get(name) if tier in self.known else None
                if node is not None:
                    return tier, node
            elif name in ledger and (name[-1] == Part.BODY or name in self.sealed[tier]):
                return tier, ""
        return None

    def held(self, name: bytes, tiers: Iterable[Tier] = OWN) -> bool:
        """Whether an own tier has it, or room for it is being filled."""
        for tier in tiers:  # asked for every block of every prompt
            ledger = self.ledgers.get(tier)
            if ledger is not None and (name in ledger or ledger.writing(name)):
                return True
        return False

    def since(self, name: bytes, owner: str) -> float:
        """When an own tier first had it for that tenant; infinity where none has it."""
        found = (ledger.peek(name) for ledger in self.ledgers.values())
        mine = (e for e in found if e is not None and payer_of(e.tenant) == payer_of(owner))
        return min((entry.since for entry in mine), default=math.inf)

    def writing(self, name: bytes) -> bool:
        """Whether room for it is being filled in an own tier."""
        return any(ledger.writing(name) for ledger in self.ledgers.values())

    def coming(self, name: bytes) -> bool:
        """Whether room for it is being filled, and no own tier has it yet."""
        return self.writing(name) and self.place(name, OWN) is None

    def whole(self, keys: Sequence[bytes], count: int, order: Sequence[Tier]) -> bool:
        """Whether the bodies of the first ``count`` blocks can all be read."""
        return all(self.place(name_of(k, Part.BODY), order) is not None for k in keys[:count])

    def reach(
        self, keys: Sequence[bytes], start: int, sizes: Sizes, order: Sequence[Tier]
    ) -> Reach:
        """How far a prompt of which an engine has ``start`` blocks can be loaded."""
        reach = Reach(keys, start, sizes)
        # As `place` says, for many bodies: 400 of them are asked for before a request goes on.
        looks: list[tuple[Place, Callable[[bytes], Entry | str | None]]] = [
            ((tier, ""), self.ledgers[tier].peek if tier in self.ledgers else self.known[tier].get)
            for tier in order
            if tier in self.ledgers or self.known.get(tier)
        ]
        for key in keys[start:]:
            name = name_of(key, Part.BODY)
            for own, look in looks:
                if (found := look(name)) is not None:
                    reach.bodies.append((own[0], found) if isinstance(found, str) else own)
                    break
            else:
                break
        first, end = start + 1, start + len(reach.bodies)
        if not sizes.has_points:
            reach.positions = list(range(first, end + 1))
        else:
            ends = {name_of(keys[at - 1], Part.POINT): at for at in range(first, end + 1)}
            told = (*self.sealed.values(), *(known.keys() for known in self.known.values()))
            few = {name for names in told for name in ends.keys() & names}
            for name in sorted(few, key=ends.__getitem__):
                if (place := self.place(name, order)) is not None:
                    reach.points[ends[name]] = place
            reach.positions = list(reach.points)
        if not reach.positions:
            reach.why = "no resume point" if reach.bodies else "not held"
        return reach

    # -- changes --------------------------------------------------------------------------------

    def arrived(self, tier: Tier, unit: Unit) -> None:
        """A body was committed."""
        if unit.part is Part.BODY:
            self._said[tier, unit.name] = True

    def seal(self, tier: Tier, name: bytes) -> bool:
        """A point's record is written; False: the point is not there (any more)."""
        if name not in self.ledgers[tier]:
            return False
        self.sealed[tier].add(name)
        self._said[tier, name] = True
        return True

    def hidden(self, tier: Tier, name: bytes) -> None:
        """Nobody finds a unit of an own tier from now on."""
        self.sealed[tier].discard(name)
        self._said[tier, name] = False

    def know(self, tier: Tier, name: bytes, node: str, *, ours: bool, owner: str = "") -> None:
        """A shared tier has it. ``ours``: we put it there, for ``owner``, and say so."""
        known = self.known[tier]
        known[name] = node
        known.move_to_end(name)
        if tier is Tier.OBJECT:
            self.lost.discard(name)
        if ours:
            self._said[tier, name] = True
            if owner:
                self.owners[name] = owner
        if len(known) > self._known_max:
            oldest, _ = known.popitem(last=False)
            if tier is Tier.OBJECT:
                self.owners.pop(oldest, None)
            self._counts["known_forgotten"] += 1

    def unknow(self, tier: Tier, name: bytes, node: str, *, ours: bool) -> None:
        """A shared tier (the peer ``node``) has it no more. ``ours``: we found that out."""
        if self.known[tier].get(name) == node:
            del self.known[tier][name]
            if tier is Tier.OBJECT:
                self.owners.pop(name, None)
            if ours and tier is Tier.OBJECT:
                self._said[tier, name] = False

    def lose(self, tier: Tier, node: str) -> None:
        """A shared tier is gone."""
        known = self.known[tier]
        names = [n for n, at in known.items() if at == node]
        for name in names:
            self.unknow(tier, name, node, ours=True)
        if tier is Tier.OBJECT:
            self.lost = {n for n in self.lost.union(names) if self.place(n, OWN) is not None}

    def take_said(self) -> tuple[Event, ...]:
        """What the directory has to be told since the last call: first what is gone."""
        said, self._said = self._said, {}
        return _events(said)

    def all_said(self) -> tuple[Event, ...]:
        """Everything that is held, in the same words."""
        events = [UnitsHeld(Tier.OBJECT, *_by_part(self.known[Tier.OBJECT]))]
        for tier, ledger in self.ledgers.items():
            sealed = self.sealed[tier]
            names = map(name_in, ledger.entries())
            can_be_read = (n for n in names if n[-1] == Part.BODY or n in sealed)
            events.append(UnitsHeld(tier, *_by_part(can_be_read)))
        return tuple(event for event in events if event.bodies or event.points)


def _events(said: dict[tuple[Tier, bytes], bool]) -> tuple[Event, ...]:
    """First what is gone, by tier and part."""
    events: list[Event] = []
    for truth in (False, True):
        by_tier: dict[Tier, list[bytes]] = {}
        for (tier, name), now in said.items():
            if now is truth:
                by_tier.setdefault(tier, []).append(name)
        kind = UnitsHeld if truth else UnitsGone
        events += [kind(tier, *_by_part(names)) for tier, names in by_tier.items()]
    return tuple(events)


def _by_part(names: Iterable[bytes]) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Block keys of bodies and of points."""
    keys: tuple[list[bytes], list[bytes]] = ([], [])
    for name in names:
        keys[name[-1]].append(name[:-1])
    return tuple(keys[Part.BODY]), tuple(keys[Part.POINT])
