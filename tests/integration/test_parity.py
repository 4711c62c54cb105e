"""One scenario in the simulator and on stub engines behind the gateway: nothing may differ.

And planted differences, of every kind that is compared, must be named.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.cli.main import main
from kvatlas.connectors import stub, stub_wire
from kvatlas.core import router
from kvatlas.core.events import BlockRemoved, Event
from kvatlas.errors import ConfigError, EngineError
from kvatlas.service import steering
from kvatlas.sim.cluster import ClusterFile, EngineTable, RouterTable
from kvatlas.sim.world import Play
from kvatlas.validate import parity_loop
from kvatlas.validate.parity import Parity, compare, parity
from kvatlas.validate.parity_served import served
from kvatlas.validate.parity_simulated import simulated
from kvatlas.validate.parity_values import Scenario, scenario
from kvatlas.workload.families import generate
from kvatlas.workload.presets import FAMILIES
from kvatlas.workload.protocol import Computed
from kvatlas.workload.trace import Trace

# Pools so small that blocks are evicted all the time.
LAYOUTS: dict[str, dict[str, Any]] = {
    "gqa": {"model": "llama-3.1-8b", "blocks": 500},
    "sliding window": {"model": "gemma-3-12b", "blocks": 4000},
    "v4": {"model": "deepseek-v4-flash", "blocks": 2000, "expert_precision": "fp4", "count": 1},
}


def made(
    family: str = "shared-prompt",
    seed: int = 1,
    *,
    policy: Any = "price",
    requests: int = 24,
    time_scale: float = 0.05,
    closed_loop: bool = False,
    layout: str = "gqa",
    output: int = 20,
    **fields: Any,
) -> Scenario:
    """A family's requests, crowded, on three engines."""
    model = msgspec.structs.replace(FAMILIES[family], requests=requests, duration_s=requests / 3)
    values = {"name": "e", "count": 3, "devices": 2, **LAYOUTS[layout], **fields}
    file = ClusterFile(engine=(EngineTable(**values),), router=RouterTable(policy=policy))
    play = Play(time_scale=time_scale, closed_loop=closed_loop, max_output_tokens=output)
    return scenario(file, generate(model, seed, family), play)


def told(result: Parity) -> list[tuple[str, str, str, str]]:
    return [(d.where, d.field, d.simulated, d.served) for d in result.differences]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_worlds_are_equal_to_the_last_digit(layout: str, seed: int) -> None:
    result = parity(made(seed=seed, layout=layout, requests=48))
    assert told(result) == []
    assert not result.different
    assert (result.requests, result.failed) == (48, 0)
    assert result.cached_tokens > 10_000  # it compares hits, not misses
    assert sum(engine.evicted_blocks for engine in result.engines.values()) > 20
    assert sum(engine.hit_tokens for engine in result.engines.values()) == result.cached_tokens


@pytest.mark.parametrize(
    ("policy", "more"),
    [
        ("round_robin", {"max_running": 2}),
        ("least_load", {"family": "multi-turn", "closed_loop": True}),
        ("price", {"family": "agent", "closed_loop": True, "blocks": 4000, "requests": 12}),
        ("price", {"layout": "v4", "async_scheduling": True}),
    ],
)
def test_so_they_are_under_every_policy_and_loop(policy: str, more: dict[str, Any]) -> None:
    result = parity(made(policy=policy, **more))
    assert told(result) == []
    assert result.cached_tokens > 0


@pytest.mark.parametrize(("waiting", "failed", "preempted"), [(3, True, False), (99, False, True)])
def test_refusals_and_preemptions_are_the_same_too(
    waiting: int, failed: bool, preempted: bool
) -> None:
    """One engine that is far too small for the crowd, and answers that outgrow its pool."""
    rates = {"prefill_tokens_per_s": 8000.0, "decode_step_s": 0.01}
    fields = {"model": "16", "blocks": 500, "count": 1, "max_waiting": waiting, **rates}
    result = parity(made(output=300, **fields))
    assert told(result) == []
    assert bool(result.failed) is failed
    assert (result.engines["e-0"].preemptions > 0) is preempted


def test_tenants_share_nothing_in_both() -> None:
    mine = made(requests=16, blocks=4000)
    scopes = ("", "tenant a", "ténant-β")
    requests = tuple(
        msgspec.structs.replace(request, scope=scopes[number % 3])
        for number, request in enumerate(mine.requests)
    )
    result = parity(msgspec.structs.replace(mine, requests=requests))
    assert told(result) == []
    assert 0 < result.cached_tokens < parity(mine).cached_tokens


def drawn(seed: int) -> Scenario:
    """Any family, layout, pool, crowd, policy and loop."""
    draw = random.Random(seed)
    layout = draw.choice(list(LAYOUTS))
    blocks = LAYOUTS[layout]["blocks"]
    return made(
        draw.choice(list(FAMILIES)),
        seed,
        policy=draw.choice(["price", "price", "round_robin", "least_load"]),
        requests=draw.choice([10, 40, 100]),
        time_scale=draw.choice([1.0, 0.1, 0.01, 0.0]),
        closed_loop=draw.random() < 0.5,
        layout=layout,
        output=draw.choice([3, 20, 150]),
        blocks=int(blocks * draw.choice([0.5, 1, 4, 20])),
        count=draw.choice([1, 2, 5]),
        max_running=draw.choice([2, 8, 256]),
        max_waiting=draw.choice([1, 10_000]),
        step_tokens=draw.choice([512, 2048, 8192]),
        retention_tokens=draw.choice([0, 0, -1]),
        async_scheduling=draw.random() < 0.3,
    )


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
def test_random_scenarios_are_equal(seed: int) -> None:
    assert told(parity(drawn(seed))) == []


# -- planted differences --------------------------------------------------------------------------


def fields(result: Parity) -> set[str]:
    return {difference.field for difference in result.differences}


def test_another_pool_is_named_where_it_first_shows() -> None:
    mine = made()
    other = made(blocks=LAYOUTS["gqa"]["blocks"] - 1)
    result = compare(mine, simulated(other), served(mine))
    assert result.different
    assert "KV event" in fields(result)
    first = next(d for d in result.differences if d.field == "KV event")
    assert first.where.startswith("engine e-")
    assert first.simulated != first.served
    assert all(d.cause for d in result.differences)


def test_a_bit_that_turned_over_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In state that the engine resumes from: hits and times are right, and the answer is not."""
    mine = made(requests=12)
    one = simulated(mine)
    compute = stub._Voice.compute

    def damaged(self: Any, computed: Computed, tokens: bytes) -> None:
        compute(self, computed, tokens)
        for ref in computed.filled[:1]:
            self.damage(ref.block_id)

    monkeypatch.setattr(stub._Voice, "compute", damaged)
    result = compare(mine, one, served(mine))
    wrong = {d.where for d in result.differences if d.field == "answer"}
    resumed = {f"request {id}" for id, r in one.requests.items() if r.cached_tokens}
    assert wrong == resumed != set()


def test_an_eviction_that_is_not_announced_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = stub_wire.EventEncoder.payload
    lost = iter([True])

    def payload(self: Any, events: Sequence[Event], ts: float) -> bytes:
        if ts > 1 and any(isinstance(e, BlockRemoved) for e in events) and next(lost, False):
            events = [event for event in events if not isinstance(event, BlockRemoved)]
        return encode(self, events, ts)

    mine = made()
    one = simulated(mine)
    monkeypatch.setattr(stub_wire.EventEncoder, "payload", payload)
    result = compare(mine, one, served(mine))
    assert {"KV event", "directory", "block-holders"} <= fields(result)


def test_a_price_that_differs_in_its_last_digit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = made(requests=8)
    one = simulated(mine)
    monkeypatch.setattr(router, "CHARGE", math.nextafter(router.CHARGE, 5))
    result = compare(mine, one, served(mine))
    assert fields(result) == {"price"}


def test_a_time_that_is_told_late_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = made(requests=12)
    one = simulated(mine)
    first_token = steering.Steering.first_token

    def late(self: Any, route: Any, ttft_s: float) -> None:
        clock, self._clock = self._clock, lambda: clock() + 1e-6
        first_token(self, route, ttft_s)
        self._clock = clock

    monkeypatch.setattr(steering.Steering, "first_token", late)
    assert "first token after" in fields(compare(mine, one, served(mine)))


def test_what_never_arrives_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that no batch has: the feed can never catch up, and time must not go on."""
    publish = stub_wire.EventPublisher.publish

    def lossy(self: Any, events: Sequence[Event], ts: float) -> None:
        publish(self, events, ts)
        self.skip(1)

    monkeypatch.setattr(parity_loop, "STUCK_S", 0.3)
    monkeypatch.setattr(stub_wire.EventPublisher, "publish", lossy)
    with pytest.raises(EngineError, match=r"e-\d: 2 batches of KV events published, 1 applied"):
        served(made(requests=4))


# -- the command ----------------------------------------------------------------------------------

CLUSTER = """\
[[engine]]
name = "e"
count = 2
model = "16"
blocks = 600
prefill_tokens_per_s = 8000.0
decode_step_s = 0.01
"""


def test_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    options = ["--family", "shared-prompt", "--requests", "10", "--cluster", str(path)]
    assert main(["validate", "parity", *options]) == 0
    shown = capsys.readouterr().out
    assert "different 0" in shown
    assert "e-1" in shown
    assert main(["validate", "parity", *options, "--json", "--policy", "round_robin"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["requests"], result["different"], result["policy"]) == (10, 0, "round_robin")


def test_the_command_tells_differences(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stub._Voice, "token", lambda *_: 7)
    options = ["--family", "shared-prompt", "--requests", "4", "--model", "llama-3.1-8b"]
    assert main(["validate", "parity", *options]) == 1
    shown = capsys.readouterr().out
    assert "request 0: answer" in shown
    assert "likely    the engines resumed from other bytes" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--trace FILE, --family"),
        (["--family", "random", "--requests", "0"], "at least 1"),
        (["--family", "random", "--time-scale", "nan"], "from 0 up"),
        (["--family", "random", "--model", "nowhere"], "nowhere"),
        (["--family", "random", "--requests", "20000"], "--limit"),
        (["--family", "random", "--time-scale", "1e300"], "--time-scale"),
        (["--family", "random", "--model", "llama-3.1-8b", "--blocks", "99999999999"], "blocks"),
    ],
)
def test_bad_input_is_told(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "parity", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"16"', '"llama-3.1-8b"') + '[tiers]\ndram = "1GB"\n',
        lambda text: text.replace("[[engine]]", '[[engine]]\nengine = "sglang"'),
    ],
)
def test_clusters_that_stub_engines_cannot_stand_for_are_refused(
    change: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(change(CLUSTER))
    assert main(["validate", "parity", "--family", "random", "--cluster", str(path)]) == 2
    assert "stub engines" in capsys.readouterr().err


def test_an_empty_trace_is_refused() -> None:
    file = ClusterFile(engine=(EngineTable(model="llama-3.1-8b"),))
    with pytest.raises(ConfigError, match="no requests"):
        scenario(file, Trace("nothing", "made", 16, lambda: iter(())), Play())
