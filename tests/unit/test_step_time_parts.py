"""What a step costs, part by part, and what must hold for all of them together."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.core.layout import Layout
from kvatlas.errors import ConfigError
from kvatlas.workload.device import DEVICES, Device
from kvatlas.workload.models import known_models, load_config, load_layout
from kvatlas.workload.shape import Shape, shape_of
from kvatlas.workload.spec import EngineSpec
from kvatlas.workload.step_time import StepTime

FITTED = msgspec.structs.replace(
    DEVICES["H200"],
    compute_efficiency=0.6,
    memory_efficiency=0.7,
    attention_efficiency=0.5,
    unhidden=0.35,
    step_s=5e-4,
    layer_s=2e-5,
    request_s=2e-5,
)


def layout_of(model: str) -> Layout:
    return load_layout(model, engine="vllm", kv_dtype="fp8")


def times(model: str, device: Device = FITTED, **more: object) -> StepTime:
    values = {"device": device, "shape": shape_of(load_config(model)), **more}
    return StepTime(EngineSpec(blocks=9, **values), layout_of(model))  # type: ignore[arg-type]


SOME = ("llama-3.1-8b", "gpt-oss-120b", "deepseek-v3", "deepseek-v4-flash", "gemma-3-12b")
SPAN = st.tuples(st.integers(0, 300_000), st.integers(1, 9000))
WORK = st.lists(SPAN.map(lambda s: (s[0], s[0] + s[1])), min_size=1, max_size=12)


@pytest.mark.parametrize("model", SOME)
@given(work=WORK, more=WORK, devices=st.sampled_from([1, 8]), ranks=st.sampled_from([1, 4]))
def test_a_batch_takes_at_least_as_long_as_each_part(
    model: str,
    work: list[tuple[int, int]],
    more: list[tuple[int, int]],
    devices: int,
    ranks: int,
) -> None:
    time = times(model, devices=devices, expert_ranks=ranks)
    whole = time.seconds(work + more)
    assert math.isfinite(whole)
    assert whole >= max(time.seconds(work), time.seconds(more)) > 0
    assert whole <= time.seconds(work) + time.seconds(more) + 1e-12  # and batching never hurts


@pytest.mark.parametrize("model", SOME)
@given(start=st.integers(0, 300_000), tokens=st.integers(1, 4000), further=st.integers(1, 4000))
def test_more_tokens_and_more_context_never_take_less(
    model: str, start: int, tokens: int, further: int
) -> None:
    time = times(model)
    assert time.seconds([(start, start + tokens + further)]) >= time.seconds(
        [(start, start + tokens)]
    )
    assert time.seconds([(start + further, start + further + tokens)]) >= (
        time.seconds([(start, start + tokens)]) * (1 - 1e-9)
    )


@pytest.mark.parametrize("name", list(DEVICES))
def test_every_device_gives_a_sane_time_for_one_token(name: str) -> None:
    device = DEVICES[name]
    precision = "bf16" if "bf16" in device.flops else "fp8"
    seconds = times("llama-3.1-8b", device, precision=precision).seconds([(1000, 1001)])
    assert 1e-3 < seconds < 2


def test_weights_are_read_once_and_experts_as_they_are_chosen() -> None:
    shape = shape_of(load_config("gpt-oss-120b"))
    bare = msgspec.structs.replace(
        FITTED, unhidden=0.0, step_s=0.0, layer_s=0.0, request_s=0.0, attention_efficiency=1.0
    )
    time = times("gpt-oss-120b", bare, precision="bf16", expert_precision="fp4")
    layout = layout_of("gpt-oss-120b")
    assert layout.compute is not None
    always = (shape.dense(layout.compute) + shape.head) * 2
    routed = shape.routed * (0.5 + 1 / 32)
    rate = bare.memory_rate()
    window = layout.resume_point_bytes() / bare.state_rate()
    one = time.seconds([(0, 1)])
    assert one == pytest.approx((always + routed * 4 / 128) / rate + window, rel=1e-6)
    # 64 tokens of 4 experts each leave (1 - 4/128)^64 = 13 % of the experts untouched.
    touched = 1 - (1 - 4 / 128) ** 64
    many = time.seconds([(0, 1)] * 64)
    assert many == pytest.approx((always + routed * touched) / rate + 64 * window, rel=1e-6)


def test_ranks_that_share_experts_read_each_a_part_of_them() -> None:
    """8 ranks with 8 tokens each touch what 64 tokens touch, and each reads an eighth of it."""
    still = msgspec.structs.replace(FITTED, unhidden=0.0, link_latency_s=0.0, link_bytes_per_s=1e30)
    shape = shape_of(load_config("deepseek-v3"))
    work = [(0, 1)] * 8
    saved = times("deepseek-v3", still).seconds(work) - times(
        "deepseek-v3", still, expert_ranks=8
    ).seconds(work)
    alone, together = (1 - (1 - shape.routed_share) ** n for n in (8, 64))
    assert saved == pytest.approx(shape.routed * (alone - together / 8) / still.memory_rate())


def test_an_exchange_costs_its_latency_and_its_bytes() -> None:
    shape = shape_of(load_config("llama-3.1-8b"))
    slow = msgspec.structs.replace(FITTED, link_latency_s=1e-3, link_bytes_per_s=1e9)
    fast = msgspec.structs.replace(FITTED, link_latency_s=0.0, link_bytes_per_s=1e30)
    work = [(0, 2048)]
    extra = times("llama-3.1-8b", slow, devices=4).seconds(work) - times(
        "llama-3.1-8b", fast, devices=4
    ).seconds(work)
    exchanges = 2 * shape.layers
    sent = 2 * 3 / 4 * shape.hidden * 2 * 2048
    assert extra == pytest.approx(exchanges * (1e-3 + sent / 1e9))
    alone = times("llama-3.1-8b", slow).seconds(work)
    assert alone == times("llama-3.1-8b", fast).seconds(work)


def test_fixed_costs_are_per_step_per_layer_and_per_request() -> None:
    none = msgspec.structs.replace(FITTED, step_s=0.0, layer_s=0.0, request_s=0.0)
    work = [(10, 11)] * 5
    fixed = times("llama-3.1-8b").seconds(work) - times("llama-3.1-8b", none).seconds(work)
    assert fixed == pytest.approx(5e-4 + 32 * 2e-5 + 5 * 2e-5)


def test_what_is_not_hidden_adds_the_shorter_of_the_two() -> None:
    hidden = msgspec.structs.replace(FITTED, unhidden=0.0)
    open_ = msgspec.structs.replace(FITTED, unhidden=1.0)
    work = [(0, 300)]
    low, mid, high = (times("llama-3.1-8b", d).seconds(work) for d in (hidden, FITTED, open_))
    assert mid - low == pytest.approx(0.35 * (high - low))
    assert high > low


def test_replicated_state_is_read_by_every_device_and_heads_are_split() -> None:
    """MLA keeps one latent per token on each rank; GQA's heads are spread over them."""
    for model, share in (("deepseek-v3", 1), ("llama-3.1-8b", 1 / 8)):
        short, long = [(1000, 1001)] * 64, [(101_000, 101_001)] * 64
        added = [
            times(model, devices=n).seconds(long) - times(model, devices=n).seconds(short)
            for n in (1, 8)
        ]
        assert added[1] == pytest.approx(added[0] * share, rel=0.01)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama-3.1-8b", 8.0),
        ("llama-3.1-70b", 70.6),
        ("qwen3-32b", 32.8),
        ("qwen3-235b-a22b", 235),
        ("gpt-oss-120b", 116.8),
        ("deepseek-v3", 671),
        ("kimi-k2", 1026),
        ("deepseek-v4-flash", 284),
    ],
)
def test_all_parameters_come_to_what_is_published(model: str, billions: float) -> None:
    """Within 2 %, the embedding added: it is looked up and not among the weights of a step."""
    config = load_config(model)
    shape = shape_of(config)
    compute = layout_of(model).compute
    assert compute is not None
    total = shape.weight_bytes(compute, "fp8") + shape.head
    assert total / 1e9 == pytest.approx(billions, rel=0.02)


def test_every_known_model_has_a_shape() -> None:
    for name in known_models():
        shape = shape_of(load_config(name))
        assert 0 < shape.routed_share <= 1
        assert shape.layers > 0


def test_golden_steps() -> None:
    """Exact figures, so that a change of the time model is a decision."""
    eight = times("llama-3.1-8b", precision="bf16")
    flash = times("deepseek-v4-flash", devices=2, expert_precision="fp4")
    assert eight.seconds([(0, 2048)]) == pytest.approx(0.052754, rel=1e-4)
    assert eight.seconds([(1000, 1001)] * 32) == pytest.approx(0.007404, rel=1e-4)
    assert flash.seconds([(0, 8192)]) == pytest.approx(0.124615, rel=1e-4)
    assert flash.seconds([(30_000, 30_001)] * 64) == pytest.approx(0.022607, rel=1e-4)


def test_an_unknown_precision_of_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="'fp3' is unknown: use one of bf16"):
        times("gpt-oss-120b", expert_precision="fp3")
    with pytest.raises(ConfigError, match="expert_ranks is 0"):
        times("gpt-oss-120b", expert_ranks=0)


def test_a_shape_never_has_fewer_than_no_dense_weights() -> None:
    compute = layout_of("llama-3.1-8b").compute
    assert compute is not None
    assert Shape(1, 1, routed=10**15).dense(compute) == 0.0


@pytest.mark.parametrize("model", SOME)
@given(start=st.integers(0, 300_000), count=st.integers(0, 40), chunk=st.none() | SPAN)
def test_requests_that_are_alike_take_what_each_of_them_takes(
    model: str, start: int, count: int, chunk: tuple[int, int] | None
) -> None:
    time = times(model, devices=2)
    span = None if chunk is None else (chunk[0], chunk[0] + chunk[1])
    work = [(start, start + 1)] * count + ([] if span is None else [span])
    assert time.alike(start, count, span) == pytest.approx(time.seconds(work), rel=1e-9)
