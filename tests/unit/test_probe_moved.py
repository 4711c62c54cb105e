"""What engines count of the KV that they hand over: a page recorded from a real one, and bad ones.

The page is of a vLLM 0.32 decode half with NixlConnector on CPU, over UCX on TCP, before and after
four hand-offs; lines of other metrics are left out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvatlas.config import WorkerConfig
from kvatlas.core.transports import Moved
from kvatlas.service import probe
from kvatlas.service.http import Request
from kvatlas.service.http_client import HttpClient
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.service.probe import Pulse

RECORDED = Path(__file__).resolve().parents[1] / "fixtures/recorded"
SGLANG = """\
sglang:num_running_reqs{dp_rank="0",engine_type="prefill",tp_rank="0"} 1.0
sglang:num_running_reqs{dp_rank="1",engine_type="prefill",tp_rank="0"} 0.0
sglang:kv_transfer_total_mb_sum{dp_rank="0",tp_rank="0"} 3.0
sglang:kv_transfer_total_mb_count{dp_rank="0",tp_rank="0"} 2.0
sglang:kv_transfer_total_mb_bucket{dp_rank="0",le="1.0",tp_rank="0"} 0.0
sglang:kv_transfer_latency_ms_sum{dp_rank="0",tp_rank="0"} 250.0
sglang:num_transfer_failed_reqs_total{dp_rank="0",tp_rank="0"} 1.0
"""


async def pulse(page: str) -> Pulse:
    """Of an engine whose metrics page is this one."""

    async def handle(request: Request, reply: Reply) -> None:
        body = page.encode() if request.path == "/metrics" else b""
        reply.send(200 if request.path in ("/health", "/metrics") else 404, [], body)

    server, client = HttpServer(handle), HttpClient()
    await server.start("127.0.0.1", 0)
    try:
        worker = WorkerConfig(name="w", url=f"http://127.0.0.1:{server.port}")
        return await probe.pulse(client, worker, 10.0)
    finally:
        await client.close()
        await server.close()


@pytest.mark.parametrize(
    ("name", "moved"),
    [("before", Moved()), ("after", Moved(5_373_952.0, 1.467759, 4.0, 0.0))],
)
async def test_a_real_page(name: str, moved: Moved) -> None:
    found = await pulse((RECORDED / f"nixl_decode_{name}.prom").read_text())
    assert (found.moved, found.malformed) == ({0: moved}, 0)
    assert found.loads[0].running == 0


async def test_sglang_counts_in_mebibytes_and_milliseconds() -> None:
    found = await pulse(SGLANG)
    assert found.moved == {0: Moved(3 * 2.0**20, 0.25, 2.0, 1.0), 1: Moved()}


@pytest.mark.parametrize("value", ["NaN", "-1.0", "+Inf", "1e300", "much", "0x10"])
async def test_a_figure_that_is_none_takes_its_rank_out(value: str) -> None:
    page = SGLANG.replace(" 250.0", f" {value}")
    found = await pulse(page)
    assert (found.moved, found.malformed) == ({1: Moved()}, 1)
    assert found.loads[0].running == 1, "the others count"


@pytest.mark.parametrize("page", ["", "\0\xff", "vllm:nixl_bytes_transferred_sum", "a b c\n" * 9])
async def test_a_page_that_is_none_tells_nothing(page: str) -> None:
    found = await pulse(page)
    assert (found.moved, found.malformed, found.loads) == ({}, 0, {})


WORK = "vllm:num_requests_running 1.0\nvllm:generation_tokens_total 7.0\n"


@pytest.mark.parametrize(
    ("before", "after", "gets_on"),
    [
        (WORK, WORK, False),
        (WORK, WORK.replace(" 7.0", " 8.0"), True),
        (WORK, WORK.replace(" 1.0", " 2.0"), False),  # somebody came
        (WORK, WORK + "process_cpu_seconds_total 3.0\n", False),  # it may wait as busily
        (SGLANG + "sglang:num_used_tokens 7\n", SGLANG + "sglang:num_used_tokens 7\n", False),
        (SGLANG + "sglang:num_used_tokens 7\n", SGLANG + "sglang:num_used_tokens 8\n", True),
        ("", "", True),  # it counts nothing: its health is all that is known
        (SGLANG, SGLANG, True),
    ],
)
async def test_whether_an_engine_gets_on(before: str, after: str, gets_on: bool) -> None:
    first, second = await pulse(before), await pulse(after)
    assert second.gets_on(first) is gets_on
