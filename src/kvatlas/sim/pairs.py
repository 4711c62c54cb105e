"""Prefill and decode on different engines: the state changes hands over the fabric.

As vLLM's NIXL connector does it: the prefill engine keeps the finished prompt's blocks under a
lease, the decode engine reads what it does not hold itself and says when it has them. A read that
fails, is too slow or finds the other gone ends as a recompute on the decode side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvatlas.core.records import Tier
from kvatlas.sim.engines import GATEWAY, Outside, SimEngine
from kvatlas.sim.links import Fabric, Flow
from kvatlas.sim.messages import Message, Ready, Source, Submit, Taken
from kvatlas.sim.network import Network
from kvatlas.sim.timeline import Timeline, Timer
from kvatlas.workload.protocol import (
    Abort,
    Admitted,
    Arrive,
    Effect,
    HandedOff,
    HandOff,
    Loaded,
    Loading,
)


class PairSpec(msgspec.Struct, frozen=True):
    """``lease_s``: how long a prefill engine keeps blocks that nobody takes (vLLM's
    ``VLLM_NIXL_ABORT_REQUEST_TIMEOUT``); ``transfer_timeout_s``: how long a read may take."""

    lease_s: float = 480.0
    transfer_timeout_s: float = 60.0


class PairCounts(msgspec.Struct):
    """What changed hands. ``failed``: reads that became recomputes; ``expired``: leases."""

    transfers: int = 0
    transferred_bytes: float = 0.0
    transfer_s: float = 0.0
    failed: int = 0
    expired: int = 0


class Pairs:
    """All sides of one cluster. ``path(source, destination)`` names the links between engines."""

    def __init__(
        self,
        timeline: Timeline,
        network: Network,
        fabric: Fabric,
        path: Callable[[str, str], Sequence[str]],
        *,
        spec: PairSpec | None = None,
    ) -> None:
        self.timeline = timeline
        self.network = network
        self.fabric = fabric
        self.path = path
        self.spec = spec or PairSpec()
        self.counts = PairCounts()
        self._sides: dict[str, Side] = {}

    def side(self, engine: SimEngine) -> Side:
        """The side of an engine's new life; the one before is gone."""
        side = self._sides[engine.name] = Side(self, engine)
        return side

    def holds(self, source: Source, id: str) -> bool:
        """Does that life of that engine keep the state of this request?"""
        side = self._sides.get(source.engine)
        return side is not None and side.engine.life == source.life and side.keeps(id)

    def gone(self, engine: str) -> None:
        """An engine died: whoever reads from it gets nothing more."""
        for side in self._sides.values():
            side.source_gone(engine)


class Side:
    """Implements `Outside` for one life of one engine."""

    def __init__(self, pairs: Pairs, engine: SimEngine) -> None:
        self.engine = engine
        self._pairs = pairs
        self._wanted: dict[str, Source] = {}  # requests that come with state elsewhere
        self._kept: dict[str, Timer] = {}  # handed off, until taken: their leases
        self._reads: dict[str, tuple[Flow, Timer, str]] = {}  # request → read, limit, from whom

    def wants(self, id: str) -> bool:
        """Does the request's state lie in the other half?"""
        return id in self._wanted

    def keeps(self, id: str) -> bool:
        """Between `HandOff` and the end of the lease."""
        return id in self._kept

    # -- Outside --------------------------------------------------------------------------------

    def submitted(self, submit: Submit) -> None:
        if submit.source is not None:
            self._wanted[submit.id] = submit.source

    def external(self, request: Arrive, local_tokens: int) -> int:
        source = self._wanted.get(request.id)
        return source.tokens if source is not None else 0

    def effect(self, effect: Effect) -> None:
        match effect:
            case Loading():
                self._read(effect)
            case Admitted(id):
                self._taken(id)
            case HandOff(id, tokens):
                lease_s = self._pairs.spec.lease_s
                self._kept[id] = self._pairs.timeline.after(lease_s, self._expire, id)
                ready = Ready(id, self.engine.life, tokens, self.engine.cached_tokens(id))
                self._pairs.network.send(self.engine.name, GATEWAY, ready)

    def receive(self, message: Message) -> None:
        if isinstance(message, Taken) and message.life == self.engine.life:
            self.forget(message.id)

    def forget(self, id: str) -> None:
        """It is taken over, or nobody wants it any more."""
        self._wanted.pop(id, None)
        lease = self._kept.pop(id, None)
        if lease is not None:
            lease.cancel()
            self.engine.input(HandedOff(id))

    def loaded_from(self, id: str) -> dict[Tier, int]:
        return {}

    def stopped(self) -> None:
        for flow, limit, _ in list(self._reads.values()):
            limit.cancel()
            flow.break_off()
        for lease in self._kept.values():
            lease.cancel()
        self._kept.clear()
        self._wanted.clear()
        self._pairs.gone(self.engine.name)

    # -- the decode side ------------------------------------------------------------------------

    def _read(self, loading: Loading) -> None:
        id, pairs = loading.id, self._pairs
        source = self._wanted.get(id)
        if source is None or not pairs.holds(source, id):
            pairs.counts.failed += 1
            self._landed(id, loading.start)
            return
        size_bytes = transfer_bytes(self.engine, loading.start, loading.end)
        started_at, life = pairs.timeline.now, self.engine.life

        def done(arrived: bool) -> None:
            read = self._reads.pop(id, None)
            if read is not None:
                read[1].cancel()
            if self.engine.life != life or not self.engine.up:
                return
            whole = arrived and pairs.holds(source, id)
            if whole:
                pairs.counts.transfers += 1
                pairs.counts.transferred_bytes += size_bytes
                pairs.counts.transfer_s += pairs.timeline.now - started_at
            else:
                pairs.counts.failed += 1
            self._landed(id, loading.end if whole else loading.start)

        path = pairs.path(source.engine, self.engine.name)
        flow = pairs.fabric.start(path, size_bytes, done)
        limit = pairs.timeline.after(pairs.spec.transfer_timeout_s, flow.break_off)
        self._reads[id] = flow, limit, source.engine

    def _landed(self, id: str, tokens: int) -> None:
        # Not from inside the engine's own effects: it is told when it has performed them.
        self._pairs.timeline.after(0.0, self._tell, id, tokens, self.engine.life)

    def _tell(self, id: str, tokens: int, life: int) -> None:
        if self.engine.up and self.engine.life == life:
            self.engine.input(Loaded(id, tokens))

    def _taken(self, id: str) -> None:
        """It runs, with what was read or without: the other side may let go."""
        source = self._wanted.pop(id, None)
        if source is not None:
            taken = Taken(id, source.life)
            self._pairs.network.send(self.engine.name, source.engine, taken)

    def source_gone(self, engine: str) -> None:
        """An engine died: what is being read from it will never come."""
        for flow, _, source in list(self._reads.values()):
            if source == engine:
                flow.break_off()

    # -- the prefill side -----------------------------------------------------------------------

    def _expire(self, id: str) -> None:
        self._pairs.counts.expired += 1
        del self._kept[id]
        self.engine.input(Abort(id))


class PairedTiers:
    """Implements `Outside` for one life of half a pair whose node has tiers: what the other half
    has comes from there, everything else from below."""

    def __init__(self, pair: Side, below: Outside) -> None:
        self._pair = pair
        self._below = below

    def submitted(self, submit: Submit) -> None:
        self._pair.submitted(submit)
        self._below.submitted(submit)

    def external(self, request: Arrive, local_tokens: int) -> int:
        side = self._pair if self._pair.wants(request.id) else self._below
        return side.external(request, local_tokens)

    def effect(self, effect: Effect) -> None:
        if not isinstance(effect, Loading) or not self._pair.wants(effect.id):
            self._below.effect(effect)
        if not isinstance(effect, Loading) or self._pair.wants(effect.id):
            self._pair.effect(effect)

    def receive(self, message: Message) -> None:
        self._pair.receive(message)

    def forget(self, id: str) -> None:
        self._pair.forget(id)
        self._below.forget(id)

    def loaded_from(self, id: str) -> dict[Tier, int]:
        return self._below.loaded_from(id)

    def stopped(self) -> None:
        self._pair.stopped()
        self._below.stopped()


def transfer_bytes(engine: SimEngine, start: int, end: int) -> float:
    """What the decode side reads: the chain between ``start`` and ``end``, the windows at
    ``end``."""
    layout = engine.layout
    return layout.resume_bytes(end) - round(layout.page_bytes_per_token() * start)
