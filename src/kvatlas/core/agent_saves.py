"""What engines filled and a node may save: which of it, in what order, and what has to wait.

A queue with a limit: where more comes than the tiers can take, the least valuable is dropped and
counted, and the engine is never held up.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from kvatlas.core.agent_values import Filled, Kind, Save, Source
from kvatlas.core.ledger_values import Refusal, Why
from kvatlas.core.node import Node, Worker, facts_of
from kvatlas.core.operations import Operation
from kvatlas.core.placement import saved_s
from kvatlas.core.policy.base import Facts
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Unit, name_of

_TRIES_MAX = 8  # of those that wait and find no room, in one go
_LOOK_MAX = 64
_REQUESTS_MAX = 4096  # of which is remembered where they left what others had


class Wish(msgspec.Struct, frozen=True):
    """Something to save once there is room: of ``keys`` the blocks up to the last of ``points``
    (counts of blocks), from block ``first`` on. ``value_s`` is the engine time that one hit on it
    saves."""

    number: int
    worker: str
    request: str
    tenant: str
    keys: tuple[bytes, ...]
    points: tuple[int, ...]
    value_s: float
    until: float
    first: int = 0


class Saves:
    """The queue of one node, oldest first."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._waiting: dict[int, Wish] = {}
        self.left_at: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._seen = (0, 0, 0)  # when it was last tried

    def __len__(self) -> int:
        return len(self._waiting)

    def wishes(self) -> Iterable[Wish]:
        """All that wait, oldest first."""
        return self._waiting.values()

    def next_deadline(self) -> float | None:
        """When the first is given up."""
        return next((wish.until for wish in self._waiting.values()), None)

    # -- in -------------------------------------------------------------------------------------

    def filled(self, event: Filled) -> None:
        """An engine has more of a prompt: wish for what is worth it."""
        node = self._node
        worker = node.worker(event.worker)
        if worker is None:
            return
        if len(event.keys) - event.first > node.config.units_max:
            node.counts["save_too_long"] += 1
            return
        whole = self._held_blocks(event.keys)
        points = self._chosen(event, worker, whole)
        end = points[-1] if points else 0
        if event.ahead or not worker.sizes.has_points:
            end = len(event.keys)
        if not end:
            return
        keys = event.keys[:end]
        new = self._new(keys, points, worker, max(event.first, whole))
        if not new:
            return
        value_s, size_bytes = _value_s(new), sum(unit.size_bytes for unit in new)
        if not node.pays(self._tier(size_bytes), value_s, size_bytes):
            node.counts["save_not_worth"] += 1
            return
        self.put(
            Wish(
                number=node.operations.next(),
                worker=event.worker,
                request=event.request,
                tenant=event.tenant,
                keys=keys,
                points=points,
                value_s=value_s,
                until=node.now + node.config.queue_s,
                first=event.first,
            )
        )

    def _chosen(self, event: Filled, worker: Worker, whole: int) -> tuple[int, ...]:
        """The points to save, of those that the engine has: wanted, and not held yet. ``whole``:
        how many bodies are held."""
        if not worker.sizes.has_points:
            return ()
        points = {p for p in event.points if 0 < p <= len(event.keys)}
        spacing, grid = self._node.config.spacing, worker.sizes.grid_tokens
        if spacing is not None:
            wanted = spacing.positions(
                grid, event.prompt_tokens, event.output_tokens, self._junctions(event, grid)
            )
            points &= {tokens // grid for tokens in wanted}
        held = self._node.inventory.held
        return tuple(
            p
            for p in sorted(points)
            if p > whole or not held(name_of(event.keys[p - 1], Part.POINT))
        )

    def _junctions(self, event: Filled, grid: int) -> tuple[int, ...]:
        """Where this request leaves what is held of others: looked at when it first tells us of
        itself, since from then on it is its own blocks that are held."""
        name = (event.worker, event.request)
        tokens = self.left_at.get(name)
        if tokens is None:
            tokens = self._held_blocks(event.keys) * grid
            self.left_at[name] = tokens
            if len(self.left_at) > _REQUESTS_MAX:
                self.left_at.popitem(last=False)
        return (tokens,) if tokens > event.resumed_tokens else ()

    def _held_blocks(self, keys: Iterable[bytes]) -> int:
        """Bodies from the start of a prompt on, without a hole."""
        names = (name_of(key, Part.BODY) for key in keys)
        return sum(1 for _ in itertools.takewhile(self._node.inventory.held, names))

    def _new(
        self, keys: Sequence[bytes], points: Sequence[int], worker: Worker, first: int
    ) -> dict[Unit, Facts]:
        """The units of it that no own tier holds, bodies first, with what a hit on them saves.

        A point is worth the engine time between it and the point before.
        """
        sizes, grid, held = worker.sizes, worker.sizes.grid_tokens, self._node.inventory.held
        units: dict[Unit, Facts] = {}
        for index, key in enumerate(keys[first:], first):
            if not held(name_of(key, Part.BODY)):
                value_s = saved_s(worker.cost, index * grid, (index + 1) * grid)
                unit = sizes.body(keys, index)
                units[unit] = facts_of(unit, keys, value_s)
        before = 0
        for point in points:
            unit = sizes.point(keys, point - 1)
            if not held(unit.name):
                value_s = saved_s(worker.cost, before * grid, point * grid)
                units[unit] = facts_of(unit, keys, value_s)
            before = point
        return units

    def _tier(self, size_bytes: int) -> Tier:
        """Where to: the nearest tier that is large enough for it at all."""
        ledgers = self._node.inventory.ledgers
        for tier in sorted(ledgers):
            if size_bytes <= ledgers[tier].limits.capacity_bytes:
                return tier
        return max(ledgers)

    def put(self, wish: Wish) -> None:
        """Queue one; where there are too many the least valuable goes."""
        self._waiting[wish.number] = wish
        if len(self._waiting) > self._node.config.queue_max:
            least = min(self._waiting.values(), key=lambda w: (w.value_s, w.number))
            del self._waiting[least.number]
            self._node.counts["save_dropped"] += 1

    def forget(self, worker: str, keys: Collection[bytes] | None = None) -> None:
        """An engine is gone, or (with ``keys``) blocks of it: nothing can be saved from there."""
        gone = set(keys or ())
        without = [
            wish.number
            for wish in self._waiting.values()
            if wish.worker == worker and (keys is None or not gone.isdisjoint(wish.keys))
        ]
        for number in without:
            del self._waiting[number]
            self._node.counts["save_source_gone"] += 1

    def forget_all(self) -> None:
        """Nothing more is to be saved."""
        self._node.counts["save_draining"] += len(self._waiting)
        self._waiting.clear()

    def forget_owners(self, meant: Callable[[str], bool]) -> None:
        """Nothing of some owners is to be saved."""
        for wish in [w for w in self._waiting.values() if meant(w.tenant)]:
            del self._waiting[wish.number]

    # -- out ------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Give up what waited too long."""
        now = self._node.now
        while self._waiting:
            oldest = next(iter(self._waiting.values()))
            if oldest.until > now:
                return
            del self._waiting[oldest.number]
            self._node.counts["save_waited_too_long"] += 1

    def pump(self) -> None:
        """Begin what there is room for; nothing is looked at again before something changed."""
        node = self._node
        changes = node.frees, node.operations.ended, node.operations.number
        if not self._waiting or changes == self._seen:
            return
        tries = 0
        for wish in list(itertools.islice(self._waiting.values(), _LOOK_MAX)):
            if node.operations.running[Kind.SAVE] >= node.config.saves_max or tries >= _TRIES_MAX:
                break
            if self._begin(wish):
                del self._waiting[wish.number]
            else:
                tries += 1
        self._seen = node.frees, node.operations.ended, node.operations.number

    def _begin(self, wish: Wish) -> bool:
        """Start one; False: it has to wait for room."""
        node = self._node
        worker = node.workers[wish.worker]
        if any(node.inventory.coming(name_of(key, Part.BODY)) for key in wish.keys):
            return False  # a point counts only after all bodies before it: wait for those
        units = self._new(wish.keys, wish.points, worker, wish.first)
        if not units:
            return True
        tier = self._tier(sum(unit.size_bytes for unit in units))
        rooms = node.roomy(tier, units, wish.tenant)
        if isinstance(rooms, Refusal):
            if rooms.why is Why.TOO_LARGE:
                node.counts["save_too_large"] += 1
                return True
            return False
        going = tuple(unit for unit in units if unit.name in rooms)
        if not going:
            return True
        until = node.now + node.config.save_s
        number = node.operations.next()
        node.begin(
            Operation(
                number=number,
                kind=Kind.SAVE,
                since=node.now,
                until=until,
                sources=(Source(Tier.HBM, going),),
                target=tier,
                worker=wish.worker,
                request=wish.request,
                tenant=wish.tenant,
                keys=wish.keys,
                rooms=rooms,
            )
        )
        node.out.append(Save(number, wish.worker, wish.request, tier, going, until))
        return True


def _value_s(units: dict[Unit, Facts]) -> float:
    """Engine time that a hit on all of it saves: each token once."""
    points = [f.saves_s for u, f in units.items() if u.part is Part.POINT]
    bodies = [f.saves_s for u, f in units.items() if u.part is Part.BODY]
    return max(sum(points), sum(bodies))
