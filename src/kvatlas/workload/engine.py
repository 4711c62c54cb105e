"""The engine model: continuous batching over one block pool, with time from the hardware.

A pure machine (DESIGN §3). `handle` takes requests in, `tick` ends the step that is due and
starts the next, `next_deadline` says when to call it. The scheduler follows vLLM 0.32 without
speculative decoding and without asynchronous scheduling: running requests first, oldest first,
the youngest preempted when the pool is full, then waiting ones in order of arrival.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from zlib import crc32

import msgspec

from kvatlas.core.layout import Layout
from kvatlas.workload.holding import TOKEN_BYTES, Hit, Holding
from kvatlas.workload.pool import Pool
from kvatlas.workload.protocol import (
    Abort,
    Admitted,
    Arrive,
    BlockRef,
    ClearCache,
    Cleared,
    Computed,
    Effect,
    Input,
    Model,
    Produced,
    Published,
    Rejected,
)
from kvatlas.workload.spec import EngineSpec
from kvatlas.workload.step_time import StepTime


class CountingModel:
    """The model of an engine without state: output ids depend on request and position alone."""

    def resume(self, request: Arrive, admitted: Admitted) -> None:
        """Nothing to read."""

    def compute(self, computed: Computed, tokens: bytes) -> None:
        """Nothing to write."""

    def token(self, id: str, index: int) -> int:
        """An id below 2**15, the same on every run."""
        return crc32(f"{id}:{index}".encode()) & 0x7FFF

    def release(self, id: str) -> None:
        """Nothing to drop."""


class _Request:
    __slots__ = ("arrive", "computed", "holding", "produced", "running")

    def __init__(self, arrive: Arrive, holding: Holding) -> None:
        self.arrive = arrive
        self.holding = holding
        self.computed = 0
        self.produced = 0
        self.running = False


class _Work:
    """One request's share of the step in flight."""

    __slots__ = ("end", "filled", "request", "size", "start")

    def __init__(self, request: _Request, start: int, end: int) -> None:
        self.request = request
        self.start = start
        self.end = end
        self.size = request.holding.size
        self.filled = request.holding.take_fresh()


class Engine:
    """One engine rank. Time is seconds on the caller's clock and must not decrease.

    ``model`` is asked for output tokens and told what is computed (default `CountingModel`).
    Raises ConfigError when the spec does not fit the layout.
    """

    def __init__(
        self,
        layout: Layout,
        spec: EngineSpec,
        *,
        model: Model | None = None,
        publish: bool = True,
    ) -> None:
        self.layout = layout
        self.spec = spec
        self._time = StepTime(spec, layout)
        self.pool = Pool(
            layout,
            spec.blocks,
            retention=spec.retention_tokens,
            step_tokens=spec.step_tokens,
            publish=publish,
        )
        self._model: Model = CountingModel() if model is None else model
        self._requests: dict[str, _Request] = {}
        self._running: list[_Request] = []
        self._waiting: deque[_Request] = deque()
        self._step: list[_Work] = []
        self._ends_at: float | None = None  # of the step in flight
        self._due: float | None = None  # when to look for work while no step is in flight
        self.preemptions = 0
        self.steps = 0

    # Read-outs ---------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that hold blocks and are worked on."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for admission, preempted ones included."""
        return len(self._waiting)

    @property
    def free_share(self) -> float:
        """Share of the pool's blocks that an allocation could take, cached ones included."""
        return self.pool.free / self.pool.capacity

    @property
    def cached_blocks(self) -> int:
        """Blocks that a lookup could find."""
        return self.pool.cached

    def next_deadline(self) -> float | None:
        """When `tick` has something to do; None while the engine is idle."""
        return self._due if self._ends_at is None else self._ends_at

    def digest(self) -> str:
        """Hex digest of the machine's state, for parity between drivers."""
        state = [
            self._ends_at,
            self.pool.free,
            self.pool.cached,
            [[r.arrive.id, r.computed, r.produced] for r in self._running],
            [[r.arrive.id, r.produced] for r in self._waiting],
        ]
        return blake2b(msgspec.json.encode(state), digest_size=8).hexdigest()

    # The machine -------------------------------------------------------------------------------

    def handle(self, event: Input, now: float) -> tuple[Effect, ...]:
        """Take one input in. Work starts at the next `tick`."""
        match event:
            case Arrive():
                return self._arrive(event, now)
            case Abort():
                self._abort(event.id)
                return ()
            case ClearCache():
                return (Cleared(self.pool.clear()),)

    def tick(self, now: float) -> tuple[Effect, ...]:
        """End the step that is due at ``now`` and start the next one.

        The next step starts when the last one ended, however late the call comes, so a slow
        driver does not slow the modelled engine. Call it until `next_deadline` lies ahead.
        """
        due = self.next_deadline()
        if due is None or now < due:
            return ()
        effects: list[Effect] = []
        if self._ends_at is not None:
            self._finish_step(effects)
        self._start_step(due, effects)
        return tuple(effects)

    def _arrive(self, event: Arrive, now: float) -> tuple[Effect, ...]:
        reason = self._refusal(event)
        if reason:
            return (Rejected(event.id, reason),)
        if len(self._waiting) >= self.spec.max_waiting:
            return (Rejected(event.id, f"{len(self._waiting)} requests wait already", busy=True),)
        holding = self.pool.open(
            event.tokens, salt=event.salt, adapter=event.adapter, keys=event.keys
        )
        request = _Request(event, holding)
        self._requests[event.id] = request
        self._waiting.append(request)
        if self._ends_at is None and self._due is None:
            self._due = now
        return ()

    def _refusal(self, event: Arrive) -> str:
        """Why the request can never run here; "" when it can."""
        size, rest = divmod(len(event.tokens), TOKEN_BYTES)
        total = size + event.output_tokens
        if event.id in self._requests:
            return f"request id {event.id!r} is already in use"
        if rest or not size:
            return "the prompt is empty" if not rest else "the prompt is not whole uint32 ids"
        step, keys = self.pool.key_step, event.keys
        if keys and not keys.belong(event.tokens, step, event.salt, event.adapter):
            return "the keys that came with it are not those of this prompt"
        if event.output_tokens < 1:
            return f"{event.output_tokens} output tokens asked for: at least 1 is needed"
        if total > self.spec.context_tokens:
            return (
                f"{size} prompt and {event.output_tokens} output tokens exceed the context of "
                f"{self.spec.context_tokens}"
            )
        if self.pool.peak_blocks(total) > self.pool.capacity:
            return f"{total} tokens need more than all {self.pool.capacity} blocks of the pool"
        return ""

    def _abort(self, id: str) -> None:
        """Free everything. The step in flight still computes it: its blocks may be found."""
        request = self._requests.get(id)
        if request is None:
            return
        if request.running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._drop(request)
        if not any(work.request is request for work in self._step):
            self._model.release(id)

    def _drop(self, request: _Request) -> None:
        request.running = False
        self.pool.release(request.holding)
        del self._requests[request.arrive.id]

    # A step ------------------------------------------------------------------------------------

    def _start_step(self, now: float, effects: list[Effect]) -> None:
        budget, preempted = self._schedule_running()
        if not preempted:
            self._schedule_waiting(budget, effects)
        self._due = None
        if not self._step:
            # Requests that could never run were refused on arrival, so idle means empty.
            assert not self._running
            assert not self._waiting
            return
        self.steps += 1
        self._ends_at = now + self._time.seconds([(w.start, w.end) for w in self._step])

    def _schedule_running(self) -> tuple[int, bool]:
        """Give each running request its tokens. Returns (budget left, somebody was preempted)."""
        budget = self.spec.step_tokens
        preempted = False
        index = 0
        running = self._running
        while index < len(running) and budget > 0:
            request = running[index]
            end = min(request.holding.size, request.computed + budget)
            while not self.pool.grow(request.holding, request.computed, end):
                preempted = True
                victim = running.pop()
                self._preempt(victim)
                if victim is request:
                    return budget, True
            self._step.append(_Work(request, request.computed, end))
            budget -= end - request.computed
            index += 1
        return budget, preempted

    def _preempt(self, victim: _Request) -> None:
        self.preemptions += 1
        self.pool.release(victim.holding)
        self._model.release(victim.arrive.id)
        victim.running = False
        self._waiting.appendleft(victim)

    def _schedule_waiting(self, budget: int, effects: list[Effect]) -> None:
        while self._waiting and budget > 0 and len(self._running) < self.spec.max_running:
            request = self._waiting[0]
            holding = request.holding
            hit = self.pool.lookup(holding)
            end = min(holding.size, hit.tokens + budget)
            if not self.pool.admit(holding, hit, end):
                return
            self._waiting.popleft()
            request.running = True
            request.computed = hit.tokens
            self._running.append(request)
            self._step.append(_Work(request, hit.tokens, end))
            budget -= end - hit.tokens
            admitted = Admitted(request.arrive.id, hit.tokens, _refs(hit))
            self._model.resume(request.arrive, admitted)
            effects.append(admitted)

    def _finish_step(self, effects: list[Effect]) -> None:
        step, self._step, self._ends_at = self._step, [], None
        finished = False
        for work in step:
            request, start, end = work.request, work.start, work.end
            id = request.arrive.id
            computed = Computed(id, start, end, work.filled)
            tokens = request.holding.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]
            self._model.compute(computed, bytes(tokens))
            if not request.running:  # aborted in mid-step
                self._model.release(id)
                continue
            effects.append(computed)
            request.computed = end
            if end < work.size:
                continue
            token = self._model.token(id, request.produced)
            request.holding.append(token)
            index = request.produced
            request.produced += 1
            done = request.produced >= request.arrive.output_tokens
            effects.append(Produced(id, index, done, token))
            if done:
                finished = True
                self._drop(request)
                self._model.release(id)
        if finished:
            self._running = [r for r in self._running if r.running]
        events = self.pool.take_events()
        if events:
            effects.append(Published(events))


def _refs(hit: Hit) -> tuple[BlockRef, ...]:
    return tuple(
        BlockRef(slot, index, block)
        for slot, blocks in enumerate(hit.blocks)
        for index, block in blocks
    )
