"""One engine's own counters: what its page tells, what it does not, and the difference of two."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.core.layout import plain
from kvatlas.errors import EngineError
from kvatlas.service.http import Request
from kvatlas.service.http_client import HttpClient
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.validate.counters import Counters, counters, read
from kvatlas.workload.spec import EngineSpec

VLLM = """\
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 500.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 600.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="m",source="local_compute"} 500.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 300.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 100.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="device"} 300.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="host"} 60.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="disk"} 40.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 333.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 111.0
vllm:generation_tokens_total{engine="0",model_name="m"} 64.0
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
process_start_time_seconds 1.796e+09
"""
SGLANG = """\
sglang:prompt_tokens_total{is_streaming="false",model_name="m"} 1000.0
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 200.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 500.0
sglang:cached_tokens_total{cache_source="storage",model_name="m"} 80.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 20.0
sglang:generation_tokens_total{is_streaming="false",model_name="m"} 64.0
sglang:num_retracted_requests_total{dp_rank="0",tp_rank="0"} 2.0
sglang:num_retracted_requests_total{dp_rank="0",tp_rank="1"} 2.0
sglang:num_retracted_requests_total{dp_rank="1",tp_rank="0"} 1.0
sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="0",tp_rank="1"} 3.0
sglang:num_queue_reqs{dp_rank="0",tp_rank="0"} 1.0
sglang:token_usage{dp_rank="0",tp_rank="0"} 0.5
"""


def test_vllm_over_its_ranks() -> None:
    assert counters(VLLM) == Counters(
        engine="vllm",
        started="1.796e+09",
        prompt_tokens=1500,
        computed_tokens=1100,
        local_hit_tokens=300,
        external_hit_tokens=100,
        external_by_source={"host": 60, "disk": 40},
        generation_tokens=64,
        preemptions=2,
        running=7,
        waiting=1,
        kv_usage=0.75,
    )
    assert counters(VLLM).hit_tokens == 400


def test_a_vllm_that_names_no_sources_tells_its_hits_by_older_names() -> None:
    found = counters("".join(line for line in VLLM.splitlines(True) if "by_source" not in line))
    assert (found.local_hit_tokens, found.external_hit_tokens) == (333, 111)
    assert (found.computed_tokens, found.external_by_source) == (None, None)
    assert found.hit_tokens == 444


def test_sglang_counts_each_token_once_whatever_its_tensor_parallel_ranks() -> None:
    assert counters(SGLANG) == Counters(
        engine="sglang",
        prompt_tokens=1200,
        computed_tokens=600,
        local_hit_tokens=500,
        external_hit_tokens=100,
        external_by_source={"storage": 80, "host": 20},
        generation_tokens=64,
        preemptions=3,
        running=3,
        waiting=1,
        kv_usage=0.5,
    )


def test_sglang_without_a_hit_and_without_sources() -> None:
    lines = [line for line in SGLANG.splitlines(True) if "cached_tokens" not in line]
    none = counters("".join(lines))
    assert (none.local_hit_tokens, none.external_hit_tokens, none.hit_tokens) == (0, 0, 0)
    told = 'sglang:cached_tokens_total{cache_source="total",model_name="m"} 7\n'
    total = counters("".join(lines) + told)
    assert (total.local_hit_tokens, total.external_hit_tokens, total.hit_tokens) == (None, None, 7)


@pytest.mark.parametrize("figure", ["NaN", "-Inf", "1e300", "many"])
def test_a_figure_that_is_none_takes_its_count_with_it(figure: str) -> None:
    found = counters(VLLM.replace("500.0", figure).replace("0.75", figure))
    assert (found.prompt_tokens, found.computed_tokens, found.kv_usage) == (None, None, None)
    assert (found.generation_tokens, found.local_hit_tokens) == (64, None)


def test_a_fresh_sglang_has_counted_nothing() -> None:
    before = counters('sglang:num_running_reqs{tp_rank="0"} 0.0\n')
    assert (before.prompt_tokens, before.hit_tokens, before.preemptions) == (0, 0, 0)
    change = counters(SGLANG).since(before)
    assert (change.prompt_tokens, change.hit_tokens) == (1200, 600)
    assert change.external_by_source == {"storage": 80, "host": 20}


def test_the_difference_of_two_readings() -> None:
    before = counters(VLLM)
    later = VLLM.replace("1000.0", "1700.0").replace('source="disk"} 40.0', 'source="disk"} 45.0')
    change = counters(later.replace("} 600.0", "} 1300.0")).since(before)
    assert (change.prompt_tokens, change.computed_tokens, change.hit_tokens) == (700, 700, 0)
    assert change.external_by_source == {"host": 0, "disk": 5}
    assert (change.running, change.kv_usage) == (7, 0.75)  # of now
    untold = before.since(counters("vllm:num_requests_running 1\n"))
    assert (untold.prompt_tokens, untold.external_by_source, untold.running) == (None, None, 7)


def test_no_difference_over_a_restart() -> None:
    before = counters(VLLM)
    with pytest.raises(EngineError, match="started anew between"):
        counters(VLLM.replace("1.796e+09", "1.797e+09")).since(before)
    with pytest.raises(EngineError, match="prompt_tokens went back"):
        counters(VLLM.replace("1000.0", "10.0")).since(before)


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    client = HttpClient()
    yield client
    await client.close()


async def test_a_stub_engine_counts_what_it_was_asked(client: HttpClient) -> None:
    spec = EngineSpec(blocks=1000, prefill_tokens_per_s=1e6, decode_step_s=0, step_overhead_s=0)
    async with StubCluster(StubOptions(plain(16), spec)) as cluster:
        url = cluster.addresses[0].url
        before = await read(client, url, 10.0)
        ask = {"model": "stub", "prompt": list(range(100)), "max_tokens": 4}
        for _ in range(2):
            await client.post_json(f"{url}/v1/completions", ask, timeout_s=10.0)
        change = (await read(client, url, 10.0)).since(before)
        assert (change.prompt_tokens, change.local_hit_tokens) == (200, 96)
        assert (change.generation_tokens, change.preemptions) == (8, None)


async def test_an_engine_without_metrics_is_named(client: HttpClient) -> None:
    pages = {"/metrics": "up 1\n"}

    async def handle(request: Request, reply: Reply) -> None:
        page = pages.get(request.path)
        reply.send(404 if page is None else 200, [], (page or "").encode())

    server = HttpServer(handle)
    await server.start("127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.port}"
    try:
        with pytest.raises(EngineError, match="no metric of vLLM or SGLang"):
            await read(client, url, 10.0)
        pages.clear()
        with pytest.raises(EngineError, match="status 404: start SGLang with --enable-metrics"):
            await read(client, url, 10.0)
    finally:
        await server.close()
    with pytest.raises(EngineError, match="/metrics: "):
        await read(client, url, 10.0)


def test_a_page_recorded_from_a_real_vllm() -> None:
    page = Path(__file__).resolve().parents[1] / "fixtures/recorded/nixl_decode_after.prom"
    found = counters(page.read_text())
    assert found.engine == "vllm"
    assert found.running == 0
