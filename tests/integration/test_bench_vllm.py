"""`kvatlas bench` on a real vLLM: two arms, empty caches, hits by the engine's counters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from chat_cases import TEMPLATES
from real_engines import MODEL, READY_S, require
from token_story import write_model

from kvatlas.connectors.child import free_ports
from kvatlas.connectors.vllm_cpu import VllmEngine
from kvatlas.report.latency import Slo
from kvatlas.service.load import LoadPlan
from kvatlas.validate.bench.run import Bench
from kvatlas.validate.bench.texts import Form
from kvatlas.validate.bench.values import Arm, BenchPlan
from kvatlas.validate.bench.verdicts import findings
from kvatlas.validate.bench.workload import Workload
from kvatlas.workload.presets import FAMILIES

pytestmark = pytest.mark.engine

PLAN = BenchPlan(
    LoadPlan("", time_scale=0.0, max_output_tokens=2, slo=Slo(ttft_s=60.0)),
    rounds=2,
    requests=12,
    warm_up=2,
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("model")
    server = VllmEngine(
        require("vllm"),
        write_model(folder, TEMPLATES["chatml"]),
        name="vllm",
        port=free_ports(1)[0],
        log=folder / "vllm.log",
        model_name=MODEL,
        kv_cache_bytes=64 << 20,
        args=["--load-format", "dummy"],
    )
    server.start()
    try:
        server.wait_ready(READY_S)
        yield server.url
    finally:
        server.stop()


@pytest.mark.parametrize("form", ["text", "chat"])
async def test_two_arms_with_the_hits_that_the_engine_counts(engine: str, form: Form) -> None:
    family = msgspec.structs.replace(FAMILIES["shared-prompt"], block_tokens=32, groups=2)
    workload = Workload("shared-prompt", family, seed=1, output_max=2)
    workload.fit(1500)
    # One engine under two names: nothing differs, and each finds only what it sent itself.
    arms = [Arm(name, engine, before="true") for name in ("one", "other")]
    plan = msgspec.structs.replace(PLAN, form=form)
    bench = Bench(plan, arms, workload, nonce="n")
    await bench.run()
    found = bench.outcome
    assert found.sound
    assert found.notes == ()
    assert found.endpoints["one"].engines == {engine: "vllm"}
    assert found.endpoints["one"].context_tokens == 4096
    assert 1.0 <= (found.endpoints["one"].tokens_per_word or 0) < 3.0
    details = {(r.clean.how, r.clean.detail) for r in found.rounds}
    assert details == {("reset", "verified: a cached prompt was computed anew")}
    for round in found.rounds:
        assert round.load is not None
        hits, answers = round.hits, round.load.hits
        assert hits.reason == ""
        assert hits.prompt_tokens == answers.prompt_tokens
        assert answers.reported_answers == 12
        assert hits.hit_tokens == hits.local_tokens == answers.reported_tokens > 0
        # The prompts that the trace asks for are as long as it says, on average.
        asked = sum(r.input_tokens for r in workload.requests(round.number, 12))
        assert answers.prompt_tokens == pytest.approx(asked, rel=0.15)
    by_round = [[r.hits.prompt_tokens for r in found.rounds if r.number == n] for n in (0, 1)]
    assert all(one == other for one, other in by_round)
    shares = findings(found, bench.rows).estimate("one", "hit tokens")
    assert len(shares.values) == 2
    assert shares.reason == "no interval: 2 rounds, 5 are needed"
