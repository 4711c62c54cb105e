"""A real trace through the gateway onto eight engines with DeepSeek V4's state.

The first 600 requests (200 seconds, 8.3 million prompt tokens) of Mooncake's conversation trace,
fifteen times as fast. Engines are stubs: their caches behave as vLLM's do for this layout.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "scenarios"))
from harness import Product, stub_workers

from kvatlas.config import RouterConfig
from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.service.load import LoadPlan, LoadResult, run_load
from kvatlas.workload import trace
from kvatlas.workload.device import device
from kvatlas.workload.models import load_layout
from kvatlas.workload.spec import EngineSpec

LAYOUT = "deepseek-v4-flash"
ENGINES, REQUESTS, OUTPUT_TOKENS = 8, 600, 32
TIME_SCALE = 1 / 15
# A busy machine falls behind such a pace. Then the load waits for it: a turn that overtook the one
# before it would find nothing, and that would say nothing of routing.
IN_FLIGHT_MAX = 16
# Each engine is eight H200 at their own pace (50 ms for a mean prompt: well above the noise of a
# busy machine), with room for every prompt of its share: nothing is evicted.
SPEC = EngineSpec(blocks=60_000, device=device("H200"), devices=8, precision="fp8")


async def replay(
    policy: Any, requests: list[trace.TraceRequest], log: Path, time_scale: float
) -> LoadResult:
    layout = load_layout(LAYOUT, engine="vllm")
    options = StubOptions(layout, SPEC, model_name="v4", count=ENGINES)
    router = RouterConfig(policy=policy, decision_log=str(log))
    async with (
        StubCluster(options) as cluster,
        Product(stub_workers(cluster, LAYOUT), router=router) as product,
    ):
        await product.settled()
        plan = LoadPlan(product.url, "v4", time_scale, OUTPUT_TOKENS, max_in_flight=IN_FLIGHT_MAX)
        result = await run_load(plan, requests)
        assert await product.flags() == set()
        assert await product.in_flight() == {}
    return result


def promises(log: Path) -> list[tuple[int, int]]:
    """Per request: tokens that the directory expected of the engine that got it, and the tokens
    that this engine reported."""
    found = []
    for line in log.read_text("utf-8").splitlines():
        entry = json.loads(line)
        worker = entry["outcome"]["target"]["worker"]
        plans = entry["decision"]["plans"]
        plan = next(p for p in plans if p["publisher"]["worker"] == worker)
        found.append((plan["resume_tokens"], entry["outcome"]["cached_tokens"]))
    return found


async def test_mooncake_conversations_go_where_their_state_is(
    shared_file: Callable[[str], Path], tmp_path: Path
) -> None:
    path = shared_file("traces/mooncake_conversation.jsonl.xz")
    requests = list(itertools.islice(trace.open_trace(path), REQUESTS))
    prompt_tokens = sum(request.input_tokens for request in requests)
    blind = await replay("round_robin", requests, tmp_path / "blind.jsonl", 0.0)
    ours = await replay("price", requests, tmp_path / "ours.jsonl", TIME_SCALE)
    for result in (blind, ours):
        assert result.errors == {}
        assert result.hits.prompt_tokens == prompt_tokens
        assert result.hits.reported_answers == REQUESTS
        assert sorted(result.workers) == [f"stub-{i}" for i in range(ENGINES)]
    expected, reported = ours.hits.expected_tokens, ours.hits.reported_tokens
    assert reported == pytest.approx(expected, rel=0.05)
    assert reported > 1.3 * blind.hits.reported_tokens
    # More may come than was promised (another request's blocks, just computed and not announced
    # yet), less never: here nothing is evicted between the decision and the engine's own lookup.
    pairs = promises(tmp_path / "ours.jsonl")
    assert len(pairs) == REQUESTS
    assert sum(expected for expected, _ in pairs) == ours.hits.expected_tokens
    assert [pair for pair in pairs if pair[0] > pair[1]] == []
