"""An engine that takes many decode steps as one does exactly what one does that takes each.

Same times to the bit, same events in the same order, same evictions, preemptions and admissions,
same answers; the state agrees after every input.
"""

from __future__ import annotations

import itertools
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.core.layout import Component, Compute, Group, Layout, Rule
from kvatlas.workload.device import device
from kvatlas.workload.engine import Engine
from kvatlas.workload.protocol import (
    Abort,
    Arrive,
    ClearCache,
    Computed,
    Effect,
    Input,
    Model,
    Produced,
    Retime,
)
from kvatlas.workload.spec import EngineSpec
from kvatlas.workload.state import Memory

GROUPS = {
    "chain": (Group("kv", "full_attention", 8),),
    "v4": (
        Group("swa", "sliding_window_mla", 16, 32, copies=2),
        Group("global", "mla_attention", 64),
        Group("c4", "sliding_window_mla", 4, 8),
        Group("c128", "sliding_window_mla", 8, 32),
    ),
    "wide": (Group("full", "full_attention", 8), Group("swa", "sliding_window", 8, 50)),
    "odd": (Group("full", "full_attention", 16), Group("swa", "sliding_window", 8, 21)),
    "windows": (Group("swa", "sliding_window", 8, 20), Group("short", "sliding_window", 4, 6)),
    "draft": (
        Group("full", "full_attention", 16),
        Group("draft", "sliding_window", 4, 12, required=False),
    ),
}
LONGEST = 400


def layout(name: str) -> Layout:
    groups = GROUPS[name]
    part = Component("kv", Rule.CHAIN, 1, 8, 8 << 16, 8.0, group=groups[0].name)
    compute = Compute(linear=2e9, attention=5e6, attended_max=90, scoring=1e5)
    grid = max(g.block_tokens for g in groups)
    return Layout(name, "", "", grid, (part,), groups, compute)


def engine(
    name: str, *, spare: int, retention: int | None, state: bool, leap: bool, **changes: Any
) -> Engine:
    shape = layout(name)
    spec = EngineSpec(
        blocks=9000,
        max_running=5,
        step_tokens=96,
        context_tokens=LONGEST,
        retention_tokens=retention * shape.grid_tokens if retention else retention,
        device=device("H20"),
    )
    least = Engine(shape, spec).pool.peak_blocks(LONGEST)
    spec = msgspec.structs.replace(spec, blocks=least + spare, **changes)
    model: Model | None = Memory(shape) if state else None
    return Engine(shape, spec, model=model, leap=leap)


class Driven:
    """An engine whose due ticks all come before an input, and what it did, token by token.

    ``plain``: who was refused is looked at again in every step, as vLLM does.
    """

    def __init__(self, made: Engine, *, plain: bool = False) -> None:
        self.engine = made
        self.plain = plain
        self.ticks = 0
        self.effects: list[tuple[float, Effect]] = []

    def run(self, now: float) -> None:
        while (due := self.engine.next_deadline()) is not None and due <= now:
            if self.plain:
                self.engine._scheduler.retry()
            self._take(due, self.engine.tick(due))
            self.ticks += 1

    def handle(self, event: Input, now: float) -> None:
        self.run(now)
        self._take(now, self.engine.handle(event, now))

    def _take(self, now: float, effects: tuple[Effect, ...]) -> None:
        for effect, after in itertools.zip_longest(effects, effects[1:]):
            if isinstance(effect, Computed) and isinstance(after, Produced) and after.times_s:
                for i, at in enumerate(after.times_s):
                    one = Computed(effect.id, effect.start + i, effect.start + i + 1, ())
                    self.effects.append((at, one))
            elif isinstance(effect, Produced) and effect.times_s:
                assert len(effect.times_s) == effect.count
                last = effect.index + effect.count - 1
                for i, at in enumerate(effect.times_s, effect.index):
                    token = effect.token if i == last else -1
                    one = Produced(effect.id, i, effect.finished and i == last, token)
                    self.effects.append((at, one))
            else:
                self.effects.append((now, effect))

    def told(self) -> list[tuple[float, Effect]]:
        """All effects in the order in which they happened."""
        return sorted(self.effects, key=lambda each: each[0])


def agree(one: Effect, other: Effect) -> bool:
    """The same, but for the ids of tokens that a run does not name."""
    if isinstance(one, Produced) and isinstance(other, Produced) and other.token < 0:
        one = msgspec.structs.replace(one, token=-1)
    return one == other


def play(stepping: Engine, leaping: Engine, inputs: list[tuple[float, Input]]) -> tuple[int, int]:
    """Both through the same inputs. Returns how often each was called."""
    drivers = Driven(stepping, plain=True), Driven(leaping)
    for at, event in inputs:
        for driver in drivers:
            driver.handle(event, at)
        assert stepping.digest() == leaping.digest()
        assert (stepping.running, stepping.waiting) == (leaping.running, leaping.waiting)
    for driver in drivers:
        driver.run(float("inf"))
    one, other = (driver.told() for driver in drivers)
    for (at, effect), (also_at, twin) in zip(one, other, strict=True):
        assert at == also_at
        assert agree(effect, twin), (at, effect, twin)
    assert stepping.digest() == leaping.digest()
    assert (stepping.steps, stepping.preemptions) == (leaping.steps, leaping.preemptions)
    blocks, others = stepping.pool.blocks, leaping.pool.blocks
    assert list(blocks.idle) == list(others.idle)
    assert (blocks.spare, blocks.plain, blocks.refs) == (others.spare, others.plain, others.refs)
    assert (blocks.found, blocks.twins) == (others.found, others.twins)
    return drivers[0].ticks, drivers[1].ticks


def prompt(topic: int, shared: int, own: int) -> bytes:
    ids = [topic] * shared + [7 + i for i in range(own)]
    return struct.pack(f"<{len(ids)}I", *ids)


CLEARS = ClearCache()
SLOWS = Retime(EngineSpec(blocks=1, device=device("H20"), time_scale=3.0))
REQUESTS = st.lists(
    st.tuples(
        st.builds(
            prompt,
            topic=st.integers(0, 2),
            shared=st.integers(1, 20).map(lambda n: n * 8) | st.integers(1, 150),
            own=st.just(0) | st.integers(0, 30),
        ),
        st.integers(1, 200) | st.integers(1, 12),  # output tokens
        st.sampled_from([0.0, 0.0, 0.0123, 0.3, 2.0]),  # after the one before
        st.none() | st.none() | st.sampled_from([0.0, 0.021, 0.13, 0.9]),  # aborted after
        st.sampled_from([None, None, None, None, CLEARS, SLOWS]),  # happens before
    ),
    min_size=1,
    max_size=12,
)


def inputs_of(requests: list[tuple[Any, ...]]) -> list[tuple[float, Input]]:
    inputs: list[tuple[float, Input]] = []
    now = 0.0
    for number, (tokens, output, gap, leaves, before) in enumerate(requests):
        now += gap
        if before is not None:
            inputs.append((now, before))
        inputs.append((now, Arrive(str(number), tokens, output)))
        if leaves is not None:
            inputs.append((now + leaves, Abort(str(number))))
    return sorted(inputs, key=lambda each: each[0])


@settings(max_examples=80, deadline=None)
@given(
    how=st.fixed_dictionaries(
        {
            "name": st.sampled_from(sorted(GROUPS)),
            "spare": st.sampled_from([0, 1, 2, 3, 5, 8, 13, 40, 400]),
            "retention": st.sampled_from([0, 0, None, 2]),
            "state": st.booleans(),
            "max_running": st.sampled_from([1, 2, 5, 100]),
            "step_tokens": st.sampled_from([3, 96]),
        }
    ),
    requests=REQUESTS,
)
def test_a_leap_does_what_its_steps_do(how: Any, requests: list[tuple[Any, ...]]) -> None:
    stepping, leaping = (engine(**how, leap=leap) for leap in (False, True))
    play(stepping, leaping, inputs_of(requests))


@pytest.mark.parametrize("retention", [0, None])
@pytest.mark.parametrize("name", ["v4", "wide", "odd"])
def test_who_waits_gets_in_at_the_step_that_makes_room(name: str, retention: int | None) -> None:
    """A block that leaves a window, findable or not, may be the one that was missing."""
    alone = Driven(engine(name, spare=0, retention=retention, state=False, leap=False))
    alone.handle(Arrive("0", prompt(0, 90, 0), 120), 0.0)
    alone.run(float("inf"))
    came = [at for at, effect in alone.effects if isinstance(effect, Produced)]
    least = alone.engine.pool.capacity
    for spare, late in itertools.product(range(-least // 2, 4), (0, 70, 71, 72, 74)):
        stepping, leaping = (
            engine(name, spare=spare, retention=retention, state=False, leap=leap)
            for leap in (False, True)
        )
        requests = [
            (prompt(0, 90, 0), 100, 0.0, None, None),
            (prompt(1, 70, 9), 2, came[late], None, None),
        ]
        play(stepping, leaping, inputs_of(requests))


@pytest.mark.parametrize("name", sorted(GROUPS))
def test_leaps_are_long_however_small_the_windows_blocks(name: str) -> None:
    """Blocks of 4 and 8 tokens that come and go do not end a leap, in a full pool either."""
    stepping, leaping = (
        engine(name, spare=0, retention=0, state=False, leap=leap) for leap in (False, True)
    )
    requests = [(prompt(i, 60, 20 + i), 300, 9.0, None, None) for i in range(8)]
    steps, leaps = play(stepping, leaping, inputs_of(requests))
    assert stepping.pool.cached > 0.6 * stepping.pool.capacity / 2
    # At best one leap per grid block; each may cost a step that caches and one that evicts.
    grid = layout(name).grid_tokens
    assert leaps < 8 * (300 / grid * 3 + 40)
    assert leaps < steps
