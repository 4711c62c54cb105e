"""The engine model: continuous batching over one block pool, with time from the hardware.

A pure machine (DESIGN §3). `handle` takes requests in, `tick` ends the step that is due and
starts the next, `next_deadline` says when to call it. Who runs is decided in `scheduler`, how many
decode steps can be taken as one in `leap`.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from hashlib import blake2b, shake_128
from itertools import accumulate
from zlib import crc32

import msgspec

from kvatlas.core.layout import Layout
from kvatlas.workload.holding import TOKEN_BYTES
from kvatlas.workload.leap import Leaps
from kvatlas.workload.pool import Pool
from kvatlas.workload.protocol import (
    Abort,
    Admitted,
    Arrive,
    BlockRef,
    ClearCache,
    Cleared,
    Computed,
    Connector,
    Effect,
    HandedOff,
    HandOff,
    Held,
    Hold,
    Input,
    Loaded,
    Model,
    Produced,
    Published,
    Rejected,
    Release,
    Retime,
)
from kvatlas.workload.scheduler import Request, Scheduler, Work
from kvatlas.workload.spec import EngineSpec
from kvatlas.workload.step_time import StepTime

_DRAWN = 1 << 15  # ids of the one sequence that all answers are pieces of


@lru_cache(maxsize=1)
def _drawn() -> bytes:
    noise = shake_128(b"kvatlas.output.1").digest(2 * _DRAWN)
    ids = bytearray(TOKEN_BYTES * _DRAWN)
    ids[0::TOKEN_BYTES] = noise[0::2]
    ids[1::TOKEN_BYTES] = noise[1::2].translate(bytes(byte & 0x7F for byte in range(256)))
    return bytes(ids)


def output_ids(id: str, index: int, count: int) -> bytes:
    """Output tokens index…index+count-1 of an engine without a model: ids below 2**15 that depend
    on the request's id and the position alone."""
    start = (crc32(id.encode()) + index) % _DRAWN
    ids = _drawn()[start * TOKEN_BYTES : (start + count) * TOKEN_BYTES]
    while len(ids) < count * TOKEN_BYTES:
        ids += _drawn()[: count * TOKEN_BYTES - len(ids)]
    return ids


class Engine:
    """One engine rank. Time is seconds on the caller's clock and must not decrease.

    ``model`` is asked for output tokens and told what is computed; None: `output_ids`.
    ``connector`` knows state outside the pool. ``leap``: decode steps in which nothing else can
    happen are taken as one, and their tokens reported as one. What happens when is the same, if
    every due `tick` comes before an input of the same time; read-outs stand still meanwhile.
    Raises ConfigError when the spec does not fit the layout.
    """

    def __init__(
        self,
        layout: Layout,
        spec: EngineSpec,
        *,
        model: Model | None = None,
        connector: Connector | None = None,
        leap: bool = False,
        publish: bool = True,
    ) -> None:
        self.layout = layout
        self.spec = spec
        self._time = StepTime(spec, layout)
        self.pool = Pool(
            layout,
            spec.blocks,
            retention=spec.retention_tokens,
            step_tokens=spec.step_tokens * (1 + spec.async_scheduling),  # in flight together
            minimal=spec.minimal_loads,
            publish=publish,
        )
        self._model = model
        self._scheduler = Scheduler(spec, self.pool, connector)
        windows = any(window for _, _, window in self.pool.geometry)
        late = spec.async_scheduling and windows
        self._leaps = Leaps(self.pool) if leap and not late else None
        self._step: list[Work] = []
        self._ends: list[float] = []  # of the step in flight, or of each step of a leap
        self._due: float | None = None  # when to look for work while no step is in flight
        self._apart: dict[str, Request] = {}  # keep blocks: handed off, or aborted in mid-load
        self._holds: dict[int, int] = {}  # block -> holds
        self._max_held = spec.blocks // 4 if spec.max_held is None else spec.max_held
        self.held = 0
        self.steps = 0

    # Read-outs ---------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that hold blocks and are worked on."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Requests that wait for admission, preempted and loading ones included."""
        return len(self._scheduler.waiting) + len(self._scheduler.fetching)

    @property
    def preemptions(self) -> int:
        """How often a request was thrown out for lack of blocks."""
        return self._scheduler.preemptions

    @property
    def free_share(self) -> float:
        """Share of the pool's blocks that an allocation could take, cached ones included."""
        return self.pool.free / self.pool.capacity

    @property
    def cached_blocks(self) -> int:
        """Blocks that a lookup could find."""
        return self.pool.cached

    def next_deadline(self) -> float | None:
        """When `tick` has something to do; None while the engine is idle, or all that it has
        waits for `Loaded`, `HandedOff` or `Release`."""
        return self._ends[-1] if self._ends else self._due

    def digest(self) -> str:
        """Hex digest of the machine's state, for parity between drivers."""
        queues = self._scheduler
        state = [
            self.next_deadline(),
            self.pool.free,
            self.pool.cached,
            [[r.arrive.id, r.computed, r.produced] for r in queues.running],
            [[r.arrive.id, r.produced] for r in queues.waiting],
            [[r.arrive.id, r.produced, r.loaded] for r in queues.fetching.values()],
            sorted(self._apart),
            self.held,
        ]
        return blake2b(msgspec.json.encode(state), digest_size=8).hexdigest()

    # The machine -------------------------------------------------------------------------------

    def handle(self, event: Input, now: float) -> tuple[Effect, ...]:
        """Take one input in. Work starts at the next `tick`.

        In mid-leap the steps that ended by ``now`` are over: what they did comes first among the
        effects, and the step in flight is the last before the input counts.
        """
        effects: list[Effect] = []
        if len(self._ends) > 1:
            self._cut(now, effects)
        match event:
            case Arrive():
                effects += self._arrive(event)
            case Abort():
                self._abort(event.id)
            case ClearCache():
                effects.append(Cleared(self.pool.clear()))
            case Loaded():
                self._loaded(event)
            case HandedOff():
                self._handed_off(event.id)
            case Hold():
                effects.append(Held(self._hold(event.blocks)))
            case Release():
                self._release(event.blocks)
            case Retime():
                self._time = StepTime(event.spec, self.layout)
        self._scheduler.retry()
        if not self._ends and self._due is None and self.waiting:
            self._due = now
        return tuple(effects)

    def tick(self, now: float) -> tuple[Effect, ...]:
        """End the step that is due at ``now`` and start the next one.

        The next step starts when the last one ended, however late the call comes, so a slow
        driver does not slow the modelled engine. Call it until `next_deadline` lies ahead.
        """
        due = self.next_deadline()
        if due is None or now < due:
            return ()
        effects: list[Effect] = []
        if self._ends:
            self._finish_steps(len(self._ends), effects)
        self._start_step(due, effects)
        return tuple(effects)

    def _arrive(self, event: Arrive) -> tuple[Effect, ...]:
        reason = self._refusal(event)
        if reason:
            return (Rejected(event.id, reason),)
        if self.waiting >= self.spec.max_waiting:
            return (Rejected(event.id, f"{self.waiting} requests wait already", busy=True),)
        holding = self.pool.open(
            event.tokens, salt=event.salt, adapter=event.adapter, keys=event.keys
        )
        self._scheduler.add(Request(event, holding))
        return ()

    def _refusal(self, event: Arrive) -> str:
        """Why the request can never run here; "" when it can."""
        prompt, rest = divmod(len(event.tokens), TOKEN_BYTES)
        total = prompt + event.output_tokens
        if event.id in self._scheduler.requests:
            return f"request id {event.id!r} is already in use"
        if rest or not prompt:
            return "the prompt is empty" if not rest else "the prompt is not whole uint32 ids"
        step, keys = self.pool.key_step, event.keys
        if keys and not keys.belong(event.tokens, step, event.salt, event.adapter):
            return "the keys that came with it are not those of this prompt"
        if event.output_tokens < 1:
            return f"{event.output_tokens} output tokens asked for: at least 1 is needed"
        if total > self.spec.context_tokens:
            return (
                f"{prompt} prompt and {event.output_tokens} output tokens exceed the context of "
                f"{self.spec.context_tokens}"
            )
        if self.pool.peak_blocks(total) > self.pool.capacity:
            return f"{total} tokens need more than all {self.pool.capacity} blocks of the pool"
        return ""

    def _abort(self, id: str) -> None:
        """Free everything. The step in flight still computes it: its blocks may be found."""
        request = self._scheduler.requests.get(id)
        if request is None or request.aborted:
            return
        loading = id in self._scheduler.fetching and request.is_loading
        self._scheduler.park(request)
        request.aborted = True
        if loading:
            self._apart[id] = request
            return
        self._apart.pop(id, None)
        self._scheduler.drop(request)
        if self._model is not None and not any(work.request is request for work in self._step):
            self._model.release(id)

    # State from outside, and to elsewhere --------------------------------------------------------

    def _loaded(self, event: Loaded) -> None:
        request = self._scheduler.requests.get(event.id)
        if request is None or not request.is_loading:
            return
        if request.aborted:
            del self._apart[event.id]
            self._end(request)
        else:
            request.loaded = max(0, min(event.tokens, request.load_end))
            request.holding.unfilled.update([(ref.group, ref.index) for ref in event.unfilled])

    def _handed_off(self, id: str) -> None:
        request = self._apart.get(id)
        if request is not None and not request.aborted:
            del self._apart[id]
            self._end(request)

    def _hold(self, refs: tuple[BlockRef, ...]) -> tuple[BlockRef, ...]:
        blocks, held = self.pool.blocks, []
        for ref in refs:
            known = 0 <= ref.block_id < blocks.capacity
            if self.held >= self._max_held or not known:
                continue
            if blocks.keys[ref.block_id] == (ref.group, ref.key):
                blocks.hold(ref.block_id)
                self._holds[ref.block_id] = self._holds.get(ref.block_id, 0) + 1
                self.held += 1
                held.append(ref)
        return tuple(held)

    def _release(self, refs: tuple[BlockRef, ...]) -> None:
        for ref in refs:
            count = self._holds.get(ref.block_id, 0)
            if not count:
                continue
            self.held -= 1
            self._holds[ref.block_id] = count - 1
            if count == 1:
                del self._holds[ref.block_id]
            self.pool.blocks.let_go(ref.block_id)

    # A step ------------------------------------------------------------------------------------

    def _start_step(self, now: float, effects: list[Effect]) -> None:
        model = self._model
        decided = self._scheduler.schedule()
        if model is not None:
            for victim in decided.preempted:
                model.release(victim.arrive.id)
        for request, effect in decided.begun:
            if model is not None and isinstance(effect, Admitted):
                model.resume(request.arrive, effect)
            effects.append(effect)
        self._due = None
        self._step = step = decided.work
        if step:
            self.steps += 1
            steps = self._count(now)
            if steps == 1:
                spent = self._time.seconds([(work.start, work.end) for work in step])
                self._ends = [now + spent]
            return
        # Requests that could never run were refused on arrival, so this is idleness, or what
        # waits waits for blocks that a transfer keeps.
        queues = self._scheduler
        assert not queues.running
        assert not queues.waiting or queues.fetching or self._apart or self._holds
        self._publish(effects)

    def _count(self, now: float) -> int:
        """How many steps the one just scheduled is taken as; sets their ends beyond one."""
        if self._leaps is None:
            return 1
        step, queues = self._step, self._scheduler
        limit = self.spec.context_tokens
        for work in step:
            request = work.request
            if work.end - work.start != 1 or work.end != work.size or work.filled:
                return 1
            if not request.produced:
                return 1
            limit = min(limit, request.arrive.output_tokens - request.produced)
        wanted = 0
        busy = len(queues.running) >= min(self.spec.max_running, self.spec.step_tokens)
        if not busy and (queues.waiting or queues.ready):
            wanted = queues.refused
            if not wanted:
                return 1
        if limit < 2 or len(step) < len(queues.running) or self.pool.blocks.events:
            return 1
        steps = self._leaps.steps([work.request.holding for work in step], limit, wanted)
        if steps > 1:
            spent = self._time.run([work.start for work in step], steps)
            self._ends = list(accumulate(spent, initial=now))[1:]
        return steps

    def _cut(self, now: float, effects: list[Effect]) -> None:
        """End a leap with the step in flight at ``now``; what was done before it is done."""
        over = min(bisect_right(self._ends, now), len(self._ends) - 1)  # however late the call
        end = self._ends[over]
        if over:
            self._finish_steps(over, effects)
            decided = self._scheduler.schedule()
            assert not decided.begun
            assert not decided.preempted
            self._step = decided.work
            self.steps += 1
        self._ends = [end]

    def _finish_steps(self, steps: int, effects: list[Effect]) -> None:
        """End the first ``steps`` of the steps in flight; all but the last decode only."""
        step, ends = self._step, self._ends
        self._step, self._ends = [], []
        if steps > 1:
            self.steps += steps - 1
            assert self._leaps is not None
            self._leaps.advance([work.request.holding for work in step], steps)
        times = tuple(ends[:steps]) if len(ends) > 1 else ()
        finished = False
        for work in step:
            if work.request.running:
                finished |= self._finish_work(work, steps, times, effects)
            elif self._model is not None:  # aborted in mid-step
                self._compute(work)
                self._model.release(work.request.arrive.id)
        if finished:
            queues = self._scheduler
            queues.running = [r for r in queues.running if r.running]
        self._publish(effects)

    def _finish_work(
        self, work: Work, steps: int, times: tuple[float, ...], effects: list[Effect]
    ) -> bool:
        """One request's part of it. Returns whether the request is done."""
        request, end = work.request, work.end + steps - 1
        arrive, holding = request.arrive, request.holding
        id = arrive.id
        if self._model is not None:
            self._compute(work)
        effects.append(Computed(id, work.start, end, work.filled))
        request.computed = end
        if work.end < work.size:
            self._scheduler.retry()
            return False
        index = request.produced
        if self._model is not None:
            token = self._decode(self._model, work, steps)
        else:
            ids = output_ids(id, index, steps)
            holding.extend(ids)
            token = int.from_bytes(ids[-TOKEN_BYTES:], "little")
        request.produced += steps
        done = request.produced >= arrive.output_tokens
        answer = holding.ids(holding.prompt, end) if done and self._scheduler.connected else b""
        effects.append(Produced(id, index, done, token, steps, times, answer))
        if not done:
            return False
        request.running = False
        if arrive.hand_off:
            self._apart[id] = request
            refs = self.pool.refs(holding, holding.prompt)
            effects.append(HandOff(id, holding.prompt, refs))
        else:
            self._end(request)
        self._scheduler.retry()
        return True

    def _end(self, request: Request) -> None:
        """Nothing of the request is under way any more: free its blocks and its state."""
        self._scheduler.drop(request)
        if self._model is not None:
            self._model.release(request.arrive.id)

    def _compute(self, work: Work) -> None:
        assert self._model is not None
        id, start, end = work.request.arrive.id, work.start, work.end
        tokens = work.request.holding.ids(start, end)
        self._model.compute(Computed(id, start, end, work.filled), tokens)

    def _decode(self, model: Model, work: Work, steps: int) -> int:
        """The tokens of the first step, which is computed, and of those that follow it."""
        request = work.request
        id, holding, index = request.arrive.id, request.holding, request.produced
        token = model.token(id, index)
        holding.append(token)
        for each in range(1, steps):
            start = work.start + each
            tokens = token.to_bytes(TOKEN_BYTES, "little")
            model.compute(Computed(id, start, start + 1, ()), tokens)
            token = model.token(id, index + each)
            holding.append(token)
        return token

    def _publish(self, effects: list[Effect]) -> None:
        events = self.pool.take_events()
        if events:
            effects.append(Published(events))
