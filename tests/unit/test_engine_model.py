"""The engine model: batching, time, preemption, refusals. Time is injected."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest

from kvatlas.core.events import AllBlocksCleared
from kvatlas.core.layout import Component, Compute, Group, Layout, Rule
from kvatlas.errors import ConfigError
from kvatlas.workload.device import DEVICES, device
from kvatlas.workload.engine import Engine
from kvatlas.workload.protocol import (
    Abort,
    Admitted,
    Arrive,
    ClearCache,
    Cleared,
    Computed,
    Effect,
    Held,
    Hold,
    Produced,
    Published,
    Rejected,
    Release,
)
from kvatlas.workload.spec import EngineSpec
from kvatlas.workload.step_time import StepTime

GQA = Layout("m", "vllm", "", 32, (), (Group("kv", "full_attention", 32),))
SPEC = EngineSpec(
    blocks=100,
    step_tokens=256,
    prefill_tokens_per_s=1000.0,
    decode_step_s=0.01,
    step_overhead_s=0.0,
)


def spec(**changes: Any) -> EngineSpec:
    return msgspec.structs.replace(SPEC, **changes)


def ids(count: int, seed: int = 0) -> bytes:
    return struct.pack(f"<{count}I", *((i * 7919 + seed * 31) % 30000 for i in range(count)))


def drain(engine: Engine) -> list[tuple[float, Effect]]:
    """Tick until idle. Each effect with the time at which it came."""
    effects: list[tuple[float, Effect]] = []
    while (due := engine.next_deadline()) is not None:
        effects += [(due, e) for e in engine.tick(due)]
    return effects


def of(effects: list[tuple[float, Effect]], kind: type, id: str) -> list[Any]:
    return [e for _, e in effects if isinstance(e, kind) and getattr(e, "id", None) == id]


def times(effects: list[tuple[float, Effect]], id: str) -> list[float]:
    return [t for t, e in effects if isinstance(e, Produced) and e.id == id]


def test_one_request_prefills_in_chunks_then_decodes() -> None:
    engine = Engine(GQA, SPEC)
    assert engine.next_deadline() is None
    assert engine.handle(Arrive("a", ids(600), 3), 5.0) == ()
    assert engine.next_deadline() == 5.0
    effects = drain(engine)
    spans = [(c.start, c.end) for c in of(effects, Computed, "a")]
    assert spans == [(0, 256), (256, 512), (512, 600), (600, 601), (601, 602)]
    assert times(effects, "a") == pytest.approx([5.6, 5.61, 5.62])
    assert [(p.index, p.finished) for p in of(effects, Produced, "a")] == [
        (0, False),
        (1, False),
        (2, True),
    ]
    assert engine.next_deadline() is None
    assert (engine.running, engine.waiting, engine.free_share) == (0, 0, 1.0)
    assert engine.cached_blocks == 18


def test_decodes_go_first_and_prefills_take_what_is_left_of_the_budget() -> None:
    engine = Engine(GQA, SPEC)
    engine.handle(Arrive("a", ids(100), 5), 0.0)
    engine.tick(0.0)
    engine.handle(Arrive("b", ids(600, seed=1), 2), 0.05)
    assert (engine.running, engine.waiting) == (1, 1)
    effects = drain(engine)
    spans = [(c.start, c.end) for c in of(effects, Computed, "b")]
    assert spans == [(0, 255), (255, 510), (510, 600), (600, 601)]


def test_arrivals_at_one_instant_share_the_first_step() -> None:
    engine = Engine(GQA, SPEC)
    for name in "ab":
        engine.handle(Arrive(name, ids(100, seed=ord(name)), 1), 1.0)
    effects = drain(engine)
    assert times(effects, "a") == times(effects, "b") == pytest.approx([1.2])


def test_a_hit_is_reported_and_saves_its_time() -> None:
    engine = Engine(GQA, SPEC)
    engine.handle(Arrive("a", ids(200), 1), 0.0)
    drain(engine)
    engine.handle(Arrive("b", ids(200) + ids(50, seed=3), 1), 10.0)
    effects = drain(engine)
    (admitted,) = of(effects, Admitted, "b")
    assert admitted.cached_tokens == 192
    assert [r.index for r in admitted.resumed] == list(range(6))
    assert times(effects, "b") == pytest.approx([10.0 + 58 / 1000])


def test_output_becomes_part_of_the_cache() -> None:
    engine = Engine(GQA, SPEC)
    engine.handle(Arrive("a", ids(90), 80), 0.0)
    tokens = [p.token for p in of(drain(engine), Produced, "a")]
    turn = ids(90) + struct.pack("<80I", *tokens) + ids(20, seed=1)
    engine.handle(Arrive("b", turn, 1), 10.0)
    assert of(drain(engine), Admitted, "b")[0].cached_tokens == 160


def test_no_more_than_max_running_run() -> None:
    engine = Engine(GQA, spec(max_running=2))
    for n in range(5):
        engine.handle(Arrive(str(n), ids(40, seed=n), 4), 0.0)
    engine.tick(0.0)
    assert (engine.running, engine.waiting) == (2, 3)
    assert sum(isinstance(e, Produced) and e.finished for _, e in drain(engine)) == 5


def test_when_the_pool_is_full_the_youngest_starts_again_and_all_finish() -> None:
    engine = Engine(GQA, spec(blocks=10, step_tokens=1000))
    for n in range(3):
        engine.handle(Arrive(str(n), ids(90, seed=n), 120), 0.0)
    effects = drain(engine)
    assert engine.preemptions > 0
    for n in range(3):
        produced = of(effects, Produced, str(n))
        assert [p.index for p in produced] == list(range(120))
        assert [p.finished for p in produced] == [False] * 119 + [True]
    assert len(of(effects, Admitted, "0")) == 1
    assert len(of(effects, Admitted, "2")) > 1
    assert engine.free_share == 1.0


def test_who_comes_back_tells_under_which_keys_its_answer_was_found() -> None:
    """Found by seed 399 at 699ded0: a request that was thrown out resumes behind its prompt, and
    nobody outside the engine knows the keys of the blocks there."""
    engine = Engine(GQA, spec(blocks=10, step_tokens=1000, max_held=3))
    for n in range(3):
        engine.handle(Arrive(str(n), ids(90, seed=n), 120), 0.0)
    resumed: list[Admitted] = []
    while (due := engine.next_deadline()) is not None:
        for effect in engine.tick(due):
            if isinstance(effect, Admitted) and effect.cached_tokens > 90:
                assert engine.handle(Hold(effect.resumed), due) == (Held(effect.resumed),)
                assert engine.handle(Release(effect.resumed), due) == ()
                resumed.append(effect)
    assert [(a.id, [ref.index for ref in a.resumed]) for a in resumed] == [
        ("1", [0, 1, 2]),
        ("2", [0, 1, 2]),
    ]


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode"])
def test_an_abort_frees_everything(when: str) -> None:
    engine = Engine(GQA, SPEC)
    engine.handle(Arrive("a", ids(600), 50), 0.0)
    for _ in range({"waiting": 0, "prefill": 1, "decode": 6}[when]):
        due = engine.next_deadline()
        assert due is not None
        engine.tick(due)
    engine.handle(Abort("a"), 1.0)
    assert (engine.running, engine.waiting, engine.free_share) == (0, 0, 1.0)
    assert not [e for _, e in drain(engine) if isinstance(e, Produced)]
    assert engine.next_deadline() is None
    assert engine.handle(Arrive("a", ids(600), 1), 2.0) == ()
    assert len(of(drain(engine), Produced, "a")) == 1


def test_an_abort_of_nobody_changes_nothing() -> None:
    engine = Engine(GQA, SPEC)
    before = engine.digest()
    assert engine.handle(Abort("nobody"), 0.0) == ()
    assert engine.digest() == before


@pytest.mark.parametrize(
    ("tokens", "output", "reason"),
    [
        (b"", 1, "the prompt is empty"),
        (b"123", 1, "not whole uint32 ids"),
        (ids(10), 0, "at least 1 is needed"),
        (ids(150), 60, "exceed the context of 200"),
        (ids(120), 20, "more than all 4 blocks"),
        (ids(10), 5, "already in use"),
    ],
)
def test_what_can_never_run_is_refused_with_the_reason(
    tokens: bytes, output: int, reason: str
) -> None:
    engine = Engine(GQA, spec(blocks=4, context_tokens=200))
    if "use" in reason:
        engine.handle(Arrive("a", ids(10), 5), 0.0)
    before = engine.digest()
    (effect,) = engine.handle(Arrive("a", tokens, output), 0.0)
    assert isinstance(effect, Rejected)
    assert reason in effect.reason
    assert engine.digest() == before


def test_a_full_queue_refuses_for_now_only() -> None:
    engine = Engine(GQA, spec(max_waiting=2))
    for n in range(2):
        assert engine.handle(Arrive(str(n), ids(40), 1), 0.0) == ()
    (refused,) = engine.handle(Arrive("2", ids(40), 1), 0.0)
    assert isinstance(refused, Rejected)
    assert refused.busy
    drain(engine)
    assert engine.handle(Arrive("2", ids(40), 1), 1.0) == ()


def test_the_largest_request_that_fits_runs() -> None:
    engine = Engine(GQA, spec(blocks=4))
    engine.handle(Arrive("a", ids(100), 28), 0.0)
    assert len(of(drain(engine), Produced, "a")) == 28


def test_clearing_is_refused_under_load_and_announced_with_the_next_step() -> None:
    engine = Engine(GQA, SPEC)
    engine.handle(Arrive("a", ids(100), 2), 0.0)
    engine.tick(0.0)
    assert engine.handle(ClearCache(), 0.0) == (Cleared(False),)
    drain(engine)
    assert engine.handle(ClearCache(), 1.0) == (Cleared(True),)
    assert engine.next_deadline() is None
    engine.handle(Arrive("b", ids(100), 1), 2.0)
    effects = [e for _, e in drain(engine)]
    (published,) = (e for e in effects if isinstance(e, Published))
    assert published.events[0] == AllBlocksCleared()
    (admitted,) = (e for e in effects if isinstance(e, Admitted))
    assert admitted.cached_tokens == 0


def test_a_late_driver_does_not_slow_the_engine_and_an_early_one_does_nothing() -> None:
    prompt = Arrive("a", ids(300), 10)
    exact, late = Engine(GQA, SPEC), Engine(GQA, SPEC)
    for engine in (exact, late):
        engine.handle(prompt, 0.0)
    drain(exact)
    assert late.tick(-1.0) == ()
    effects: list[Effect] = []
    while (due := late.next_deadline()) is not None and due <= 99.0:
        effects += late.tick(99.0)
    assert sum(isinstance(e, Produced) for e in effects) == 10
    assert late.digest() == exact.digest()


def test_the_same_inputs_give_the_same_effects() -> None:
    runs = []
    for _ in range(2):
        engine = Engine(GQA, spec(blocks=20))
        for n in range(6):
            engine.handle(Arrive(str(n), ids(100 + n, seed=n % 2), 30), 0.0)
        runs.append((drain(engine), engine.digest()))
    assert runs[0] == runs[1]


def test_without_publishing_there_are_no_events() -> None:
    engine = Engine(GQA, SPEC, publish=False)
    engine.handle(Arrive("a", ids(100), 2), 0.0)
    assert not [e for _, e in drain(engine) if isinstance(e, Published)]


# Time ------------------------------------------------------------------------------------------

COMPUTED = Layout(
    "m",
    "vllm",
    "",
    32,
    (Component("kv", Rule.CHAIN, 1, 32, 3200, 100.0, group="kv"),),
    (Group("kv", "full_attention", 32),),
    Compute(linear=2e9, attention=1e3),
)


def test_a_prefill_is_bound_by_compute_and_a_decode_by_memory() -> None:
    h200 = device("H200")
    hardware = EngineSpec(blocks=10, device=h200, step_overhead_s=0.0)
    time = StepTime(hardware, COMPUTED)
    # Attention is computed in bf16, whatever the weights are in.
    attention = 1e3 * 4096**2 / 2 / (989e12 * 0.45)
    assert time.seconds([(0, 4096)]) == pytest.approx(2e9 * 4096 / (1978e12 * 0.45) + attention)
    # One byte per active weight (1e9 of them), and 1,000 tokens of 100 bytes.
    assert time.seconds([(1000, 1001)]) == pytest.approx((1e9 + 100_000) / (4.8e12 * 0.8))
    both = StepTime(msgspec.structs.replace(hardware, devices=2), COMPUTED)
    assert both.seconds([(0, 4096)]) == pytest.approx(time.seconds([(0, 4096)]) / 2)
    slow = StepTime(msgspec.structs.replace(hardware, time_scale=3.0), COMPUTED)
    assert slow.seconds([(0, 4096)]) == pytest.approx(time.seconds([(0, 4096)]) * 3)


def test_a_larger_batch_touches_more_of_the_experts() -> None:
    sparse = EngineSpec(
        blocks=10, device=device("H200"), weight_bytes=20 * 10**9, step_overhead_s=0.0
    )
    time = StepTime(sparse, COMPUTED)
    rate = 4.8e12 * 0.8
    assert time.seconds([(0, 1)]) == pytest.approx(1e9 / rate)  # 1 of 20 is active
    assert time.seconds([(0, 1)] * 2) == pytest.approx(1.95e9 / rate)
    assert time.seconds([(0, 1)] * 500) == pytest.approx(20e9 / rate, rel=1e-6)


def test_a_sparse_attention_reads_less_of_a_long_context() -> None:
    capped = Compute(linear=2e9, attention=9e2, attended_max=1000, scoring=1e2)
    layout = msgspec.structs.replace(COMPUTED, compute=capped)
    time = StepTime(EngineSpec(blocks=9, device=device("H200"), step_overhead_s=0.0), layout)
    read = 1e9 + 100 * (1000 + 0.1 * 9000)
    assert time.seconds([(10_000, 10_001)]) == pytest.approx(read / (4.8e12 * 0.8))


def test_the_overhead_is_paid_once_per_step() -> None:
    time = StepTime(spec(step_overhead_s=0.5), GQA)
    assert time.seconds([(0, 100)] * 3 + [(7, 8)] * 5) == pytest.approx(0.5 + 0.3 + 0.01)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"blocks": 0}, "blocks is 0"),
        ({"step_tokens": 0}, "step_tokens is 0"),
        ({"max_running": 0}, "max_running is 0"),
        ({"max_held": -1}, "max_held is -1"),
        ({"time_scale": -1.0}, "time_scale is -1.0"),
        ({"step_overhead_s": float("nan")}, "step_overhead_s is nan"),
        ({"prefill_tokens_per_s": 0.0}, "above 0"),
        ({"decode_step_s": None}, "together"),
        ({"decode_step_s": -0.1}, "decode_step_s is -0.1"),
        ({"retention_tokens": 5}, "multiple of the grid"),
        ({"prefill_tokens_per_s": None, "decode_step_s": None}, "no compute figures"),
    ],
)
def test_a_spec_that_cannot_work_names_the_field(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Engine(GQA, spec(**changes))


def test_a_device_must_have_a_figure_for_the_precision() -> None:
    hardware = EngineSpec(blocks=10, device=device("H100"), precision="fp4")
    with pytest.raises(ConfigError, match="bf16 or fp8"):
        Engine(COMPUTED, hardware)
    with pytest.raises(ConfigError, match="give a device"):
        Engine(COMPUTED, EngineSpec(blocks=10))
    with pytest.raises(ConfigError, match="H20, H100"):
        device("H300")


@pytest.mark.parametrize("profile", DEVICES.values(), ids=list(DEVICES))
def test_each_device_is_plausible(profile: Any) -> None:
    assert profile.memory_bytes >= 24 * 10**9
    assert 0 < profile.compute_efficiency <= 1
    assert 0 < profile.memory_efficiency <= 1
    for precision in profile.flops:
        # No machine of this list moves a byte per operation or more.
        assert profile.compute_rate(precision) > profile.memory_rate()


def test_the_cpu_profile_reproduces_its_measurement() -> None:
    smol = Layout("s", "vllm", "", 32, (), GQA.groups, Compute(linear=2 * 135e6, attention=0.0))
    cpu = EngineSpec(
        blocks=100,
        device=device("cpu-2core"),
        precision="bf16",
        weight_bytes=269_000_000,
        step_overhead_s=0.0,
    )
    time = StepTime(cpu, smol)
    assert time.seconds([(0, 2048)]) == pytest.approx(2.35, rel=0.02)
    assert time.seconds([(2048, 2049)]) == pytest.approx(1 / 53, rel=0.02)
