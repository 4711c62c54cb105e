"""Whatever else the engine does meanwhile, each request is answered as if it ran alone and cold.

The oracle is the composite state: an answer depends on the bytes of every group that a request
resumed from, so a wrong hit, a block reused too early or one never written changes it.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.core.layout import Group, Layout
from kvatlas.workload.engine import Engine
from kvatlas.workload.protocol import Abort, Arrive, Effect, Produced, Rejected
from kvatlas.workload.spec import EngineSpec
from kvatlas.workload.state import Memory

LAYOUTS = {
    "v4": (
        Group("swa", "sliding_window_mla", 8, 16, copies=2),
        Group("global", "mla_attention", 16),
        Group("state", "sliding_window_mla", 2, 4),
    ),
    "wide": (Group("full", "full_attention", 8), Group("swa", "sliding_window", 8, 50)),
    "windows": (Group("swa", "sliding_window", 8, 20), Group("short", "sliding_window", 4, 6)),
}
LONGEST = 100


def make(name: str, *, spare: int, retention: int | None, roomy: bool = False) -> Engine:
    groups = LAYOUTS[name]
    layout = Layout(name, "", "", max(g.block_tokens for g in groups), (), groups)
    spec = EngineSpec(
        blocks=5000,
        step_tokens=48,
        context_tokens=LONGEST,
        retention_tokens=retention * layout.grid_tokens if retention else retention,
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.01,
    )
    if not roomy:
        least = Engine(layout, spec).pool.peak_blocks(LONGEST)
        spec = EngineSpec(**{**_fields(spec), "blocks": least + spare})
    return Engine(layout, spec, model=Memory(layout))


def _fields(spec: EngineSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__struct_fields__}


@functools.cache
def alone(name: str, prompt: bytes, output: int) -> list[int]:
    engine = make(name, spare=0, retention=0, roomy=True)
    engine.handle(Arrive("a", prompt, output), 0.0)
    effects: list[Effect] = []
    while (due := engine.next_deadline()) is not None:
        effects += engine.tick(due)
    return [e.token for e in effects if isinstance(e, Produced)]


def prompt(topic: int, shared: int, own: int) -> bytes:
    ids = [topic] * shared + [7 + i for i in range(own)]
    return struct.pack(f"<{len(ids)}I", *ids)


REQUESTS = st.lists(
    st.tuples(
        st.builds(
            prompt,
            topic=st.integers(0, 1),
            shared=st.integers(1, 7).map(lambda n: n * 8) | st.integers(1, 56),
            own=st.just(0) | st.integers(0, 14),
        ),
        st.integers(1, 30),  # output tokens
        st.sampled_from([0.0, 0.0, 0.005, 0.05, 0.3]),  # after the one before
        st.none() | st.none() | st.sampled_from([0.0, 0.01, 0.06, 0.2]),  # aborted after
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    spare=st.integers(0, 12),
    retention=st.sampled_from([0, None, 2]),
    requests=REQUESTS,
)
def test_every_answer_is_the_one_of_a_cold_run(
    name: str, spare: int, retention: int | None, requests: list[tuple[Any, ...]]
) -> None:
    engine = make(name, spare=spare, retention=retention)
    inputs: list[tuple[float, int, Arrive | Abort]] = []
    now = 0.0
    for number, (tokens, output, gap, leaves) in enumerate(requests):
        now += gap
        inputs.append((now, number, Arrive(str(number), tokens, output)))
        if leaves is not None:
            inputs.append((now + leaves, number, Abort(str(number))))
    effects: list[Effect] = []
    for at, _, event in sorted(inputs, key=lambda i: i[:2]):
        while (due := engine.next_deadline()) is not None and due <= at:
            effects += engine.tick(due)
        effects += engine.handle(event, at)
    while (due := engine.next_deadline()) is not None:
        effects += engine.tick(due)

    assert not [e for e in effects if isinstance(e, Rejected)]
    assert (engine.running, engine.waiting, engine.free_share) == (0, 0, 1.0)
    for number, (tokens, output, _, leaves) in enumerate(requests):
        got = [e for e in effects if isinstance(e, Produced) and e.id == str(number)]
        assert [e.index for e in got] == list(range(len(got)))
        assert [e.token for e in got] == alone(name, tokens, output)[: len(got)]
        assert len(got) == output or leaves is not None
