"""Requests as OpenTelemetry spans, as a collector sees them, and what a bad one may not do."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from gateway_kit import STREAM_HEAD, Engine, Got, answer_plainly, ask, chunk, eventually, whole
from otlp_kit import breaks, collecting, exporting, hangs, takes, traced

from kvatlas.service import tracing_export
from kvatlas.service.spans import Record

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
RECORD = Record(TRACE, 1, 0, "r", CHAT, "m" * 200, False, -1, "", 0.0, 1.0, refused="x" * 1000)
CALLER = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}


async def test_a_streamed_request_under_its_caller_s_trace() -> None:
    async with traced(answer_plainly) as s:
        body: dict[str, object] = {"model": "m", "stream": True, "max_tokens": 7}
        await ask(s.port, CHAT, body, headers={"x-request-id": "r-1"} | CALLER)
        await s.requests(1)
        root = s.collector.named("chat m")
        assert (root.trace, root.parent, root.error) == (TRACE, SPAN, "")
        assert root.resource["service.name"] == "kvatlas"
        assert s.collector.paths == ["/v1/traces"]
        ttft_s = root.attributes.pop("gen_ai.response.time_to_first_chunk")
        assert 0 < ttft_s < root.seconds
        assert root.attributes == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "kvatlas",
            "gen_ai.request.model": "m",
            "gen_ai.request.max_tokens": 7,
            "gen_ai.request.stream": True,
            "gen_ai.usage.input_tokens": 10,
            "gen_ai.usage.cache_read.input_tokens": 4,
            "gen_ai.usage.output_tokens": 3,
            "http.request.method": "POST",
            "http.response.status_code": 200,
            "url.path": CHAT,
            "kvatlas.engine": "w0",
            "kvatlas.fallbacks": ["lookup: round_robin"],
            "kvatlas.request_id": "r-1",
        }
        route, prefill, decode = s.collector.children(root)
        assert [span.name for span in (route, prefill, decode)] == ["route", "prefill", "decode"]
        (lookup,) = s.collector.children(route)
        assert lookup.name == "lookup"
        assert lookup.attributes["kvatlas.unkeyed"] == "round_robin"
        assert prefill.attributes["kvatlas.engine"] == "w0"
        assert decode.attributes["gen_ai.usage.output_tokens"] == 3
        assert abs(root.began_ns / 1e9 - time.time()) < 60
        got = s.engines[0].got[0].headers
        assert got["traceparent"] == f"00-{TRACE}-{root.id}-01"
        assert got["tracestate"] == "vendor=1"


async def test_of_a_whole_answer_nobody_sees_where_its_prefill_ends() -> None:
    async with traced(answer_plainly) as s:
        await ask(s.port, COMPLETION, {"model": "m"})
        await s.requests(1)
        root = s.collector.named("text_completion m")
        assert root.parent == ""
        assert [span.name for span in s.collector.children(root)] == ["route", "generate"]
        assert "gen_ai.response.time_to_first_chunk" not in root.attributes


async def test_a_broken_traceparent_begins_a_trace_and_goes_no_further() -> None:
    async with traced(answer_plainly) as s:
        await ask(s.port, CHAT, {"model": "m"}, headers=CALLER | {"traceparent": "00-x-y-01"})
        await s.requests(1)
        root = s.collector.named("chat m")
        got = s.engines[0].got[0].headers
        assert got["traceparent"] == f"00-{root.trace}-{root.id}-01"
        assert got["tracestate"] == ""


async def test_what_its_caller_does_not_keep_is_not_kept_and_engines_are_told() -> None:
    async with traced(answer_plainly) as s:
        not_kept = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
        await ask(s.port, CHAT, {"model": "m"}, headers=not_kept)
        await ask(s.port, CHAT, {"model": "kept"})
        await s.requests(1)
        assert s.collector.named("chat kept").trace != TRACE
        first, second = (got.headers["traceparent"] for got in s.engines[0].got)
        assert first.startswith(f"00-{TRACE}-")
        assert (first[-2:], second[-2:]) == ("00", "01")


async def test_each_try_is_a_span_and_says_why_it_was_given_up() -> None:
    async def refuses(_: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(b"{}", 503))

    gone = {"gone": "http://127.0.0.1:1"}
    async with traced(refuses, answer_plainly, engines_more=gone) as s:
        await ask(s.port, CHAT, {"model": "m", "stream": True})
        await s.requests(1)
        tries = s.collector.children(s.collector.named("chat m"))[1:]
        assert [(t.name, t.error, t.attributes["kvatlas.engine"]) for t in tries] == [
            ("prefill", "connect", "gone"),
            ("prefill", "refused", "w0"),
            ("prefill", "", "w1"),
            ("decode", "", "w1"),
        ]


async def test_a_load_is_told_as_it_was_foreseen() -> None:
    """Only the engine sees when it loads: the span says that it is estimated."""
    async with traced(answer_plainly) as s:
        (target,) = s.steer._targets
        loads = {"tier_tokens": (1, 2, 0, 1), "load_s": 1e-6, "wait_s": 1e-7}
        s.steer._targets = [msgspec.structs.replace(target, **loads)]
        await ask(s.port, CHAT, {"model": "m", "stream": True})
        await s.requests(1)
        prefill = s.collector.named("prefill")
        (load,) = s.collector.children(prefill)
        assert load.attributes == {
            "kvatlas.load.dram_tokens": 2,
            "kvatlas.load.object_tokens": 1,
            "kvatlas.estimated": True,
        }
        assert prefill.began_ns <= load.began_ns
        assert load.seconds <= prefill.seconds


async def test_a_request_that_gets_no_engine_has_its_code() -> None:
    async with traced(answer_plainly) as s:
        s.steer._models = {"m": {"id": "m"}}
        await ask(s.port, CHAT, {"model": "other"})
        await s.requests(1)
        root = s.collector.named("chat other")
        assert root.error == root.attributes["error.type"] == "model_not_found"
        assert root.attributes["http.response.status_code"] == 404
        (route,) = s.collector.children(root)
        assert route.error == "model_not_found"


async def test_an_answer_that_breaks_off_ends_in_an_error() -> None:
    async def dies(_: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(b"data: {}\n\n"))
        await writer.drain()
        writer.close()

    async with traced(dies) as s:
        await ask(s.port, CHAT, {"model": "m", "stream": True})
        await s.requests(1)
        assert s.collector.named("decode").error == "502"
        assert s.collector.named("chat m").error == "502"


# -- a collector that is slow, broken or away -----------------------------------------------------


async def test_a_collector_that_answers_500_is_flagged_until_it_answers_well() -> None:
    async with traced(answer_plainly) as s:
        s.collector.answer = breaks
        assert (await ask(s.port, CHAT, {"model": "m"})).status == 200
        await eventually(lambda: s.exporter.counts["failed"] == 1)
        told = s.exporter.problems()["tracing"]["collector"]
        assert s.collector.url in told
        assert "500" in told
        s.collector.answer = takes
        assert (await ask(s.port, CHAT, {"model": "m"})).status == 200
        await s.requests(1)
        await eventually(lambda: not s.exporter.error)
        assert s.exporter.counts == {"failed": 1, "exported": 1}
        assert not s.exporter.problems()["tracing"]


async def test_a_collector_that_hangs_holds_no_request_up() -> None:
    """Each answer is there before the collector's time is over, and the loss is told."""
    async with traced(answer_plainly) as s:
        s.collector.answer = hangs
        await ask(s.port, CHAT, {"model": "m"})
        await eventually(lambda: bool(s.collector.paths))  # from now on its process waits
        answers = await asyncio.gather(*(ask(s.port, CHAT, {"model": "m"}) for _ in range(20)))
        assert [answer.status for answer in answers] == [200] * 20
        assert s.exporter.counts["exported"] == 0
        await eventually(lambda: s.exporter.counts["failed"] > 0)
        assert s.exporter.error


async def test_what_a_slow_collector_does_not_take_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing_export, "RECORDS_MAX", 1000)
    async with collecting() as collector:
        collector.answer = hangs
        async with exporting(collector.url, timeout_s=60.0) as exporter:
            for _ in range(50):
                for _ in range(100):
                    exporter.take(RECORD)
                await asyncio.sleep(0.01)
            assert len(exporter._waiting) <= 1000
            dropped = exporter.counts["dropped"]
            assert dropped > 0
            assert "slower than spans come" in exporter.problems()["tracing"]["collector"]
        assert sum(exporter.counts.values()) == 5000  # none is unaccounted for


async def test_a_process_for_spans_that_dies_is_told_and_followed_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing_export, "_RETRY_S", 0.0)
    async with collecting() as collector, exporting(collector.url) as exporter:
        await eventually(lambda: exporter._process is not None)
        first = exporter._process
        assert first is not None
        first.kill()
        await eventually(lambda: "ended with -9" in exporter.error)
        exporter.take(RECORD)
        await eventually(lambda: exporter.counts["exported"] == 1)
        assert not exporter.error
