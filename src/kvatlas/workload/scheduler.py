"""Who runs in the next step, and with what blocks. Pure.

Follows vLLM 0.32's scheduler without speculative decoding and without asynchronous scheduling:
running requests first, oldest first, the youngest preempted when the pool is full; then those that
hold blocks for a load, then waiting ones in order of arrival, the first that finds no room ending
the round.
"""

from __future__ import annotations

from collections import deque
from itertools import chain

import msgspec

from kvatlas.workload.holding import Hit, Holding
from kvatlas.workload.pool import Pool
from kvatlas.workload.protocol import Admitted, Arrive, Connector, Loading
from kvatlas.workload.spec import EngineSpec


class Request:
    """One request from arrival to its end. The scheduler's and the engine's own."""

    __slots__ = (
        *("aborted", "arrive", "computed", "failed", "holding", "landed", "load_end", "loaded"),
        *("local", "produced", "running", "settled"),
    )

    def __init__(self, arrive: Arrive, holding: Holding) -> None:
        self.arrive = arrive
        self.holding = holding
        self.computed = 0
        self.settled = 0  # computed tokens before its last step: windows that those needed may go
        self.produced = 0
        self.running = False
        self.aborted = False
        # A load: where the local hit ended, where the load is to end and did; what is left of it.
        self.failed = False  # and is not tried again before the next admission
        self.local = 0
        self.load_end = 0
        self.loaded: int | None = None
        self.landed = False

    @property
    def is_loading(self) -> bool:
        """Between `Loading` and `Loaded`."""
        return self.load_end > 0 and self.loaded is None


class Work:
    """One request's share of a step. ``size``: tokens that it knew when the step began."""

    __slots__ = ("end", "filled", "request", "size", "start")

    def __init__(self, request: Request, start: int, end: int) -> None:
        self.request = request
        self.start = start
        self.end = end
        self.size = request.holding.size
        self.filled = request.holding.take_fresh() if request.holding.fresh else ()


class Round(msgspec.Struct):
    """What one call of `Scheduler.schedule` decided, in order."""

    work: list[Work] = []
    preempted: list[Request] = []
    begun: list[tuple[Request, Admitted | Loading]] = []


class Scheduler:
    """The queues of one engine rank over its pool."""

    def __init__(self, spec: EngineSpec, pool: Pool, connector: Connector | None) -> None:
        self._spec = spec
        self._pool = pool
        self._connector = connector
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.fetching: dict[str, Request] = {}  # hold blocks for a load, in order of admission
        self.preemptions = 0
        # The last refusal: (what a lookup finds, token budget, free blocks asked for).
        self._refused: tuple[int, int, int] | None = None

    # Coming and going ----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A request that may run: to the end of the queue."""
        self.requests[request.arrive.id] = request
        self.waiting.append(request)
        self.retry()

    def drop(self, request: Request) -> None:
        """The request is gone: free its blocks. `park` comes before."""
        self._pool.release(request.holding)
        del self.requests[request.arrive.id]
        self.retry()

    def park(self, request: Request) -> None:
        """Take the request out of every queue; it keeps its blocks."""
        if request.running:
            request.running = False
            self.running.remove(request)
        elif self.fetching.pop(request.arrive.id, None) is None and request in self.waiting:
            self.waiting.remove(request)
        self.retry()

    def retry(self) -> None:
        """Something changed: who was refused for lack of room is looked at again."""
        self._refused = None

    @property
    def connected(self) -> bool:
        """Whether state may come from outside, and go there."""
        return self._connector is not None

    @property
    def refused(self) -> int:
        """Free blocks without which nobody who waits gets in; 0 when that is not known."""
        return 0 if self._refused is None else self._refused[2]

    # A round -------------------------------------------------------------------------------------

    def schedule(self) -> Round:
        """Decide one step. Empty work: there is nothing that could run now."""
        decided = Round(work=[], preempted=[], begun=[])
        budget = self._schedule_running(decided)
        if (self.waiting or self.fetching) and not decided.preempted:
            self._schedule_waiting(budget, decided)
        return decided

    def _schedule_running(self, decided: Round) -> int:
        """Give each running request its tokens. Returns what is left of the budget."""
        budget = self._spec.step_tokens
        index = 0
        running, grow, work = self.running, self._pool.grow, decided.work
        ahead = self._spec.async_scheduling
        while index < len(running) and budget > 0:
            request = running[index]
            start = request.computed
            end = min(request.holding.size, start + budget)
            while not grow(request.holding, request.settled if ahead else start, end):
                victim = running.pop()
                self._preempt(victim, decided)
                if victim is request:
                    return budget
            request.settled = start
            work.append(Work(request, start, end))
            budget -= end - start
            index += 1
        return budget

    def _preempt(self, victim: Request, decided: Round) -> None:
        self.preemptions += 1
        self._pool.release(victim.holding)
        victim.running = False
        victim.failed = False
        self.waiting.appendleft(victim)
        decided.preempted.append(victim)
        self.retry()

    def _schedule_waiting(self, budget: int, decided: Round) -> None:
        if budget > 0 and len(self.running) < self._spec.max_running:
            self._land_all()
        while budget > 0 and len(self.running) < self._spec.max_running:
            request = self._next()
            if request is None:
                return
            if self._refused is not None:
                version, before, wanted = self._refused
                same = version == self._pool.blocks.version and budget <= before
                if same and self._pool.free < wanted:
                    return
            spent = self._admit(request, budget, decided)
            if spent is None:
                self._refused = (self._pool.blocks.version, budget, self._pool.wanted)
                return
            self.retry()
            budget -= spent

    @property
    def ready(self) -> bool:
        """Whether a load is over and its request not yet admitted."""
        return any(not r.is_loading for r in self.fetching.values())

    def _next(self) -> Request | None:
        for request in self.fetching.values():
            if not request.is_loading:
                return request
        return self.waiting[0] if self.waiting else None

    def _admit(self, request: Request, budget: int, decided: Round) -> int | None:
        """Let one request in. Returns its tokens of this step, 0 for a load; None: no room."""
        holding = request.holding
        if request.landed:
            start = min(request.computed, holding.size - 1)
            end = min(holding.size, start + budget)
            local = min(request.local, start)
            refs = self._pool.refs(holding, request.computed)
            if not self._pool.resume(holding, start, end):
                return None
        else:
            hit = self._pool.lookup(holding)
            start = local = hit.tokens
            load_end = self._outside(request, local)
            if load_end > local:
                return 0 if self._load(request, hit, load_end, decided) else None
            end = min(holding.size, start + budget)
            if not self._pool.admit(holding, hit, end):
                return None
            # Behind the prompt (it was thrown out) only the pool knows what keys they have.
            refs = hit.refs() if start <= holding.prompt else self._pool.refs(holding, start)
        self._start(request, start)
        decided.begun.append((request, Admitted(request.arrive.id, start, refs, start - local)))
        decided.work.append(Work(request, start, end))
        return end - start

    def _start(self, request: Request, start: int) -> None:
        id = request.arrive.id
        if id in self.fetching:
            del self.fetching[id]
        else:
            self.waiting.popleft()
        request.running = True
        request.landed = False
        request.computed = request.settled = start
        self.running.append(request)

    # State from outside --------------------------------------------------------------------------

    def _outside(self, request: Request, local: int) -> int:
        """Position up to which the request is to be loaded; 0: it is not."""
        if self._connector is None or request.failed:
            return 0
        prompt, grid = request.holding.prompt, self._pool.grid
        end = min(self._connector.external(request.arrive, local), prompt)
        return end if end == prompt else end // grid * grid

    def _load(self, request: Request, hit: Hit, end: int, decided: Round) -> bool:
        """Allocate for a load. It cannot be preempted, so what others who have begun to prefill
        still need is left to them (vLLM's ``reserved_blocks``)."""
        begun = chain(self.running, self.fetching.values())
        reserved = sum([self._pool.remaining(r.holding) for r in begun])
        due = self._pool.admit_load(request.holding, hit, end, reserved)
        if due is None:
            return False
        self.waiting.popleft()
        request.local, request.load_end = hit.tokens, end
        self.fetching[request.arrive.id] = request
        decided.begun.append((request, Loading(request.arrive.id, hit.tokens, end, due)))
        return True

    def _land_all(self) -> None:
        """Loads that are over: what is complete becomes findable.

        With windows a load is complete or worth nothing; then, as in vLLM, the request starts
        again from a lookup. It holds no blocks any more, so it may not stand before those who do
        (in vLLM it does, and where it finds no room beside them nobody moves again).
        """
        over = [r for r in self.fetching.values() if r.loaded is not None]
        empty = [request for request in over if not self._land(request)]
        for request in empty:
            del self.fetching[request.arrive.id]
        self.waiting.extendleft(reversed(empty))

    def _land(self, request: Request) -> bool:
        """Count what is complete of one load. Returns whether anything is."""
        assert request.loaded is not None
        position, request.loaded = request.loaded, None
        if position < request.load_end:
            request.failed = True
            whole = max(position // self._pool.grid * self._pool.grid, request.local)
            position = whole if self._pool.partly() else 0
        request.load_end = 0
        if position:
            self._pool.land(request.holding, position)
            request.computed = position
            request.landed = True
        else:
            self._pool.release(request.holding)
        return bool(position)
