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
from kvatlas.errors import ConfigError
from kvatlas.workload.device import Device
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

BLOCKS_MAX = 1 << 26  # of one pool; each takes memory here too


class EngineSpec(msgspec.Struct, frozen=True):
    """All parameters of one engine.

    ``blocks``: usable blocks of the pool. ``step_tokens``: tokens that one step may compute.
    ``context_tokens``: longest prompt plus output. ``retention_tokens``: see `Pool`. More than
    ``max_waiting`` waiting requests are refused.

    Time: either ``device`` (``devices`` of them working together in ``precision``, on a model of
    ``weight_bytes`` in all, its inactive experts included; 0 means that every weight is active),
    or the two measured figures ``prefill_tokens_per_s`` and ``decode_step_s``, which win where
    both are given.
    ``step_overhead_s`` is the fixed cost of a step (an assumption until calibrated). All of it is
    multiplied by ``time_scale``; 0 makes every step instant.
    """

    blocks: int
    max_running: int = 256
    max_waiting: int = 10_000
    step_tokens: int = 8192
    context_tokens: int = 1 << 20
    retention_tokens: int | None = 0
    device: Device | None = None
    devices: int = 1
    precision: str = "fp8"
    weight_bytes: int = 0
    prefill_tokens_per_s: float | None = None
    decode_step_s: float | None = None
    step_overhead_s: float = 0.001
    time_scale: float = 1.0

    def check(self, layout: Layout) -> None:
        """Raises ConfigError naming the first field that cannot work with this layout."""
        least = {"blocks": 1, "max_running": 1, "max_waiting": 1, "step_tokens": 1}
        least |= {"context_tokens": 2, "devices": 1}
        for field, bound in least.items():
            if getattr(self, field) < bound:
                raise ConfigError(f"{field} is {getattr(self, field)}: give at least {bound}")
        if self.blocks > BLOCKS_MAX:
            raise ConfigError(f"blocks is {self.blocks}: give at most {BLOCKS_MAX}")
        for field in ("weight_bytes", "step_overhead_s", "time_scale"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise ConfigError(f"{field} is {getattr(self, field)}: give a number from 0 up")
        measured = (self.prefill_tokens_per_s, self.decode_step_s)
        if measured != (None, None):
            if None in measured or self.prefill_tokens_per_s == 0:
                raise ConfigError("give prefill_tokens_per_s (above 0) and decode_step_s together")
            if any(v is not None and not 0 <= v < float("inf") for v in measured):
                raise ConfigError("prefill_tokens_per_s and decode_step_s must not be negative")
        elif layout.compute is None or layout.compute.linear <= 0:
            raise ConfigError(
                f"the layout of {layout.model!r} has no compute figures: give "
                "prefill_tokens_per_s and decode_step_s"
            )
        elif self.device is None:
            raise ConfigError("give a device, or prefill_tokens_per_s and decode_step_s")
        else:
            self.device.compute_rate(self.precision)


_WEIGHT_WIDTH = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5}  # bytes per weight


class StepTime:
    """Seconds that one step takes, from its work. Pure arithmetic on an `EngineSpec`."""

    def __init__(self, spec: EngineSpec, layout: Layout) -> None:
        spec.check(layout)
        self._layout = layout
        self._scale = spec.time_scale
        self._overhead = spec.step_overhead_s
        self._prefill_rate = spec.prefill_tokens_per_s
        self._decode_step_s = spec.decode_step_s or 0.0
        if self._prefill_rate is None:
            assert spec.device is not None
            assert layout.compute is not None
            self._compute = layout.compute
            self._flops = spec.device.compute_rate(spec.precision) * spec.devices
            self._bytes_per_s = spec.device.memory_rate() * spec.devices
            # Two operations per weight and token: half the linear FLOPs are the active weights.
            active = layout.compute.linear / 2 * _WEIGHT_WIDTH[spec.precision]
            self._weight_bytes = max(active, spec.weight_bytes)
            self._idle_share = 1 - active / self._weight_bytes
            pair = layout.compute.attention + layout.compute.scoring
            self._scored_share = layout.compute.scoring / pair if pair else 0.0
            self._bytes_per_token = layout.page_bytes_per_token()
            self._fixed_bytes = layout.resume_point_bytes()

    def seconds(self, work: list[tuple[int, int]]) -> float:
        """Duration of a step that computes tokens start…end-1 for each (start, end).

        The larger of compute and memory time, plus the overhead. Memory: the weights that the
        step's tokens touch, each token picking its experts independently, and each request's
        state before ``start``; beyond ``attended_max`` tokens a sparse attention reads only the
        share of it that scoring costs of a full pair.
        """
        if self._prefill_rate is not None:
            prefill = sum(end - start for start, end in work if end - start > 1)
            decode = any(end - start == 1 for start, end in work)
            seconds = prefill / self._prefill_rate + (self._decode_step_s if decode else 0.0)
            return (seconds + self._overhead) * self._scale
        compute = self._compute
        flops = 0.0
        tokens = sum(end - start for start, end in work)
        read = self._weight_bytes * (1 - self._idle_share**tokens)
        cap = compute.attended_max
        for start, end in work:
            flops += compute.prefill_flops(start, end)
            seen: float = start
            if cap is not None and start > cap:
                seen = cap + (start - cap) * self._scored_share
            read += seen * self._bytes_per_token + self._fixed_bytes
        seconds = max(flops / self._flops, read / self._bytes_per_s)
        return (seconds + self._overhead) * self._scale


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
        holding = self.pool.open(event.tokens, salt=event.salt, adapter=event.adapter)
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
