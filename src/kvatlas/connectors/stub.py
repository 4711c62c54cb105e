"""The stub engine: the engine model driven in real time, with bytes for state and text for tokens.

`workload.engine` decides what is computed, cached, evicted and announced and when;
`workload.state` holds the bytes that the answers depend on. Here they meet a clock, requests that
wait for tokens, a KV-event socket, and the faults that tests ask for.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from kvatlas.connectors.stub_pairs import Exchange
from kvatlas.connectors.stub_text import TextTokenizer
from kvatlas.connectors.stub_wire import EventPublisher
from kvatlas.core.layout import Layout
from kvatlas.errors import RequestError
from kvatlas.workload.engine import Engine
from kvatlas.workload.pace import Pace, paced
from kvatlas.workload.protocol import (
    Abort,
    Admitted,
    Arrive,
    ClearCache,
    Cleared,
    Computed,
    Effect,
    HandedOff,
    HandOff,
    Input,
    Loaded,
    Loading,
    Produced,
    Published,
    Rejected,
    Retime,
)
from kvatlas.workload.spec import EngineSpec
from kvatlas.workload.state import Memory

# Steps of an engine that is late are made up at once, but not so many that others starve.
_STEPS_PER_TURN = 16
_THAW_S = 0.1  # how often a frozen part looks whether it still is


class Numbers(msgspec.Struct):
    """What /metrics tells: gauges of now, counters since the start."""

    running: int = 0
    waiting: int = 0
    usage: float = 0.0
    queried_tokens: int = 0
    hit_tokens: int = 0
    handed_over_tokens: int = 0  # of those: from the first half of a pair
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    aborted: int = 0


class Faults(msgspec.Struct, forbid_unknown_fields=True):
    """What tests make an engine do wrong. ``fail_next`` requests are answered with
    ``fail_status``; every answer starts ``delay_s`` late; the next streamed answer breaks off after
    ``cut_after_tokens`` tokens. While ``frozen`` is "engine" it takes requests and computes
    nothing; while it is "load", the state that it wants of another engine does not come, until the
    lease of that state ends."""

    fail_next: int = 0
    fail_status: int = 500
    delay_s: float = 0.0
    cut_after_tokens: int | None = None
    health_status: int = 200
    frozen: Literal["", "engine", "load"] = ""

    def changed(self, values: dict[str, object]) -> Faults:
        """A copy with the named fields changed. Raises RequestError for others or wrong types."""
        try:
            return msgspec.convert({**msgspec.to_builtins(self), **values}, Faults)
        except msgspec.ValidationError as error:
            raise RequestError(f"faults: {error}") from error


class _Voice(Memory):
    """`Memory` whose output ids are words of the tokenizer."""

    def __init__(self, layout: Layout, tokenizer: TextTokenizer) -> None:
        super().__init__(layout, vocabulary=tokenizer.voices)
        self._tokenizer = tokenizer

    def token(self, id: str, index: int) -> int:
        return self._tokenizer.pick(super().token(id, index), first=index == 0)


class Generation:
    """One running request: iterate for the texts of its tokens, several where several are due.

    `close` must be called in the end; before the last token it aborts the request.
    """

    def __init__(self, close: Callable[[], None], prompt_tokens: int, output_tokens: int) -> None:
        self._close = close
        self.prompt_tokens = prompt_tokens
        self._pieces: list[str] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: RequestError | None = None
        self.output_tokens = output_tokens
        self.cached_tokens = -1  # until admitted
        self.made_tokens = 0  # those handed out by the iteration
        self.first_half_cached = -1  # of a pair: what the other half had
        self.handed_over: dict[str, object] | None = None  # for the second half

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[str]:
        """Raises RequestError when the engine gave the request up."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.made_tokens == self.output_tokens:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pieces, self._pieces = self._pieces, []
        self.made_tokens += len(pieces)
        return pieces

    def put(self, piece: str) -> None:
        self._pieces.append(piece)
        self._wake()

    def fail(self, error: RequestError) -> None:
        self._error = error
        self._wake()

    def close(self) -> None:
        self._close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StubEngine:
    """One engine. All calls come from the event loop that it was made in.

    ``natural_output_tokens`` is how long an answer gets when the client sets no limit: a stub has
    no end-of-text of its own.
    """

    def __init__(
        self,
        layout: Layout,
        spec: EngineSpec,
        tokenizer: TextTokenizer,
        publisher: EventPublisher | None,
        *,
        model_name: str,
        adapters: Sequence[str] = (),
        natural_output_tokens: int = 64,
        exchange: Exchange | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._tokenizer = tokenizer
        self._memory = _Voice(layout, tokenizer)
        self.pairs = (exchange or Exchange()).join(self._memory, layout.grid_tokens)
        self._engine = Engine(
            layout,
            spec,
            model=self._memory,
            publish=publisher is not None,
            connector=self.pairs,
        )
        self._spec = spec
        self._handing_off: dict[str, Generation] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._open: dict[str, Generation] = {}
        self._ids = itertools.count()
        self._groups: dict[int, int] = {}  # block id -> group that last wrote it
        self._counts = Numbers()
        self._clock = clock
        self.publisher = publisher
        self.model_name = model_name
        self.adapters = tuple(adapters)
        self.max_model_tokens = spec.context_tokens
        self.natural_output_tokens = natural_output_tokens
        self.faults = Faults()
        self.sleeping = False

    # --- requests ------------------------------------------------------------------------------

    def generate(
        self,
        tokens: bytes,
        output_tokens: int,
        *,
        salt: str = "",
        adapter: str = "",
        transfer: Mapping[str, object] | None = None,
    ) -> Generation:
        """Raises RequestError when the engine sleeps or can never run this request.

        ``transfer``: the request's ``kv_transfer_params``, where it is half of a pair.
        """
        if self.sleeping:
            raise RequestError("the engine sleeps", status=503)
        id = str(next(self._ids))
        generation = Generation(lambda: self._release(id), len(tokens) // 4, output_tokens)
        first = transfer is not None and transfer.get("do_remote_decode") is True
        if transfer is not None and transfer.get("do_remote_prefill") is True:
            self.pairs.wants(id, transfer)
            cached = transfer.get("remote_prefill_cached_tokens")
            generation.first_half_cached = cached if isinstance(cached, int) else -1
        self._open[id] = generation
        if first:
            self._handing_off[id] = generation
        for effect in self._handle(Arrive(id, tokens, output_tokens, salt, adapter, first)):
            if isinstance(effect, Rejected):
                del self._open[id]
                self._handing_off.pop(id, None)
                self.pairs.over(id)
                if effect.busy:
                    raise RequestError(effect.reason, status=503, code="overloaded")
                raise RequestError(effect.reason)
        self._counts.prompt_tokens += generation.prompt_tokens
        return generation

    def _release(self, id: str) -> None:
        if self._open.pop(id, None) is not None:
            self._counts.aborted += 1
            self._handing_off.pop(id, None)
            self._handle(Abort(id))
            self.pairs.over(id)

    # --- operator's and tests' calls -------------------------------------------------------------

    def reset_cache(self) -> bool:
        """False while requests hold blocks, as in vLLM. The event goes out with the next step."""
        return any(isinstance(e, Cleared) and e.done for e in self._handle(ClearCache()))

    def sleep(self) -> None:
        """Abort what runs, drop the cache and refuse requests until `wake_up`. Says nothing on the
        event socket before the next step: as vLLM."""
        self.sleeping = True
        for id, generation in list(self._open.items()):
            generation.fail(RequestError("aborted: the engine goes to sleep", status=503))
            self._release(id)
        self.reset_cache()

    def wake_up(self) -> None:
        self.sleeping = False

    def set_pace(self, pace: Pace) -> None:
        """The machine gets this much slower or faster than it is, for good; it tells nobody."""
        self._spec = paced(self._spec, pace)
        self._handle(Retime(self._spec))

    def damage(self, group: int) -> int:
        """Turn over the bytes of every block of one group (copies unrolled): how many there were.

        Raises RequestError for a group that the layout does not have.
        """
        slots = self._engine.pool.slots
        if not 0 <= group < len(slots):
            raise RequestError(f"group {group}: the layout has groups 0 to {len(slots) - 1}")
        blocks = [block for block, owner in self._groups.items() if owner == group]
        for block in blocks:
            self._memory.damage(block)
        return len(blocks)

    # --- read-outs -------------------------------------------------------------------------------

    def numbers(self) -> Numbers:
        numbers = self._counts
        numbers.running = self._engine.running
        numbers.waiting = self._engine.waiting
        numbers.usage = 1.0 - self._engine.free_share
        return numbers

    def cache_info(self) -> dict[str, object]:
        """Labels of vLLM's ``vllm:cache_config_info``."""
        return {
            "block_size": self._engine.layout.grid_tokens,
            "cache_dtype": self._engine.layout.kv_dtype or "auto",
            "enable_prefix_caching": True,
            "engine": 0,
            "num_gpu_blocks": self._engine.spec.blocks,
        }

    def describe(self) -> dict[str, object]:
        """What ``GET /stub/state`` answers."""
        return {
            "numbers": self.numbers(),
            "cached_blocks": self._engine.cached_blocks,
            "free_share": self._engine.free_share,
            "kept_for_others": self.pairs.kept,
            "groups": [slot.group.name for slot in self._engine.pool.slots],
            "next_seq": self.publisher.next_seq if self.publisher is not None else None,
            "preemptions": self._engine.preemptions,
            "steps": self._engine.steps,
            "digest": self._engine.digest(),
        }

    def close(self) -> None:
        """Stop the clock, give up what runs and refuse what comes."""
        self.sleeping = True
        if self._timer is not None:
            self._timer.cancel()
        for generation in self._open.values():
            generation.fail(RequestError("the engine stops", status=503))
        self._open.clear()
        self.pairs.close()

    # --- the machine and its effects -------------------------------------------------------------

    def _handle(self, event: Input) -> Sequence[Effect]:
        effects = self._engine.handle(event, self._loop.time())
        self._perform(effects)
        self._arm()
        return effects

    def _arm(self) -> None:
        due = self._engine.next_deadline()
        if self._timer is not None:
            if due is not None and self._timer_at <= due:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = self._loop.call_at(due, self._pump)
            self._timer_at = due

    def _pump(self) -> None:
        self._timer = None
        now = self._loop.time()
        if self.faults.frozen == "engine":
            self._timer, self._timer_at = self._loop.call_later(_THAW_S, self._pump), now
            return
        try:
            for _ in range(_STEPS_PER_TURN):
                due = self._engine.next_deadline()
                if due is None or due > now:
                    break
                self._perform(self._engine.tick(now))
        except Exception:
            self.close()  # nobody shall wait for an engine that broke; the loop reports why
            raise
        self._arm()

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Produced):
                self._produced(effect)
            elif isinstance(effect, Computed):
                for ref in effect.filled:
                    self._groups[ref.block_id] = ref.group
            elif isinstance(effect, Published):
                if self.publisher is not None:
                    self.publisher.publish(effect.events, self._clock())
            elif isinstance(effect, Admitted):
                self._admitted(effect)
            elif isinstance(effect, Loading):
                until = self._loop.time() + self.pairs.lease_s
                self._loop.call_soon(self._load, effect, until)  # not from inside its effects
            elif isinstance(effect, HandOff):
                self._hand_off(effect)

    def _produced(self, effect: Produced) -> None:
        self._counts.output_tokens += 1
        generation = self._open.get(effect.id)
        if generation is not None:
            generation.put(self._tokenizer.say(effect.token, first=effect.index == 0))
            if effect.finished:
                self._counts.finished += 1
                del self._open[effect.id]

    def _admitted(self, effect: Admitted) -> None:
        generation = self._open.get(effect.id)
        if generation is not None and generation.cached_tokens < 0:  # not after a preemption
            generation.cached_tokens = effect.cached_tokens
            if generation.first_half_cached >= 0:  # as vLLM over NIXL
                generation.cached_tokens = generation.first_half_cached
            self._counts.handed_over_tokens += effect.loaded_tokens
            self._counts.queried_tokens += generation.prompt_tokens
            self._counts.hit_tokens += effect.cached_tokens
        self.pairs.over(effect.id)

    def _load(self, loading: Loading, until: float) -> None:
        if self.sleeping:
            return
        if self.faults.frozen == "load" and self._loop.time() < until:
            self._loop.call_later(_THAW_S, self._load, loading, until)
        else:
            took_s = self._loop.time() - until + self.pairs.lease_s
            self._handle(Loaded(loading.id, self.pairs.fetch(loading, took_s)))

    def _hand_off(self, effect: HandOff) -> None:
        id, generation = effect.id, self._handing_off.pop(effect.id, None)

        def forget() -> None:
            self._loop.call_soon(self._handle, HandedOff(id))

        params = self.pairs.keep(effect, forget)
        if generation is not None:
            params["remote_prefill_cached_tokens"] = generation.cached_tokens
            generation.handed_over = params
