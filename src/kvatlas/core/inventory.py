"""What a node holds in its own tiers, what it knows of shared ones, and how far a prompt reaches.

Own tiers have a `Ledger` each; of shared ones (`object`, `peer`) it knows what it wrote and what
it was told: that may be out of date, which a load that fails corrects. A point counts only when
it is *sealed*: its resume record, committed last, says that all that it needs was written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from kvatlas.core.agent_values import Source
from kvatlas.core.events import Event, UnitsGone, UnitsHeld
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
        for offset in range(position - self._start):
            unit = self._sizes.body(self._keys, self._start + offset)
            found.setdefault(self.bodies[offset], []).append(unit)
        if self._sizes.has_points:
            unit = self._sizes.point(self._keys, position - 1)
            found.setdefault(self.points[position], []).append(unit)
        return tuple(Source(t, tuple(units), node) for (t, node), units in found.items())


class Inventory:
    """Books and knowledge of one node. `said` collects what the directory has to be told."""

    def __init__(self, ledgers: dict[Tier, Ledger], known_max: int) -> None:
        self.ledgers = ledgers
        self.sealed: dict[Tier, set[bytes]] = {tier: set() for tier in ledgers}  # names of points
        self.known: dict[Tier, OrderedDict[bytes, str]] = {
            tier: OrderedDict() for tier in (Tier.OBJECT, Tier.PEER)
        }
        self.forgotten = 0  # knowledge given up for its limit
        self._known_max = known_max
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
        own = (self.ledgers[tier] for tier in tiers if tier in self.ledgers)
        return any(name in ledger or ledger.writing(name) for ledger in own)

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
        for key in keys[start:]:
            place = self.place(name_of(key, Part.BODY), order)
            if place is None:
                break
            reach.bodies.append(place)
        first, end = start + 1, start + len(reach.bodies)
        if not sizes.has_points:
            reach.positions = list(range(first, end + 1))
        else:
            for position in range(first, end + 1):
                place = self.place(name_of(keys[position - 1], Part.POINT), order)
                if place is not None:
                    reach.points[position] = place
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

    def know(self, tier: Tier, name: bytes, node: str, *, ours: bool) -> None:
        """A shared tier has it. ``ours``: we put it there, and say so."""
        known = self.known[tier]
        known[name] = node
        known.move_to_end(name)
        if ours:
            self._said[tier, name] = True
        if len(known) > self._known_max:
            known.popitem(last=False)
            self.forgotten += 1

    def unknow(self, tier: Tier, name: bytes, node: str, *, ours: bool) -> None:
        """A shared tier (the peer ``node``) has it no more. ``ours``: we found that out."""
        if self.known[tier].get(name) == node:
            del self.known[tier][name]
            if ours and tier is Tier.OBJECT:
                self._said[tier, name] = False

    def lose(self, tier: Tier, node: str) -> None:
        """A shared tier is gone."""
        known = self.known[tier]
        for name in [n for n, at in known.items() if at == node]:
            self.unknow(tier, name, node, ours=True)

    def take_said(self) -> tuple[Event, ...]:
        """What the directory has to be told since the last call: first what is gone."""
        said, self._said = self._said, {}
        events: list[Event] = []
        for truth in (False, True):
            by_tier: dict[Tier, tuple[list[bytes], list[bytes]]] = {}
            for (tier, name), now in said.items():
                if now is truth:
                    by_tier.setdefault(tier, ([], []))[name[-1]].append(name[:-1])
            for tier, (bodies, points) in by_tier.items():
                kind = UnitsHeld if truth else UnitsGone
                events.append(kind(tier, tuple(bodies), tuple(points)))
        return tuple(events)

    def say_all(self) -> None:
        """Everything that is held is to be told again."""
        for tier, ledger in self.ledgers.items():
            for entry in ledger.entries():
                name = name_in(entry)
                if name[-1] == Part.BODY or name in self.sealed[tier]:
                    self._said[tier, name] = True
        for name in self.known[Tier.OBJECT]:
            self._said[Tier.OBJECT, name] = True
