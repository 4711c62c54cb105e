"""Where a request stands in a trace, by what its caller says (W3C Trace Context)."""

from __future__ import annotations

import pytest

from kvatlas.service.spans import context_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("given", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f" 00-{TRACE}-{SPAN}-01 ", True),
        (f"cc-{TRACE}-{SPAN}-01-what-will-be", True),  # a later version
    ],
)
def test_a_caller_s_trace_goes_on(given: str, sampled: bool) -> None:
    context = context_of({"traceparent": given}, 0.5)
    assert (context.trace, context.parent, context.sampled) == (TRACE, int(SPAN, 16), sampled)
    assert context.id not in (0, context.parent)
    flags = "01" if sampled else "00"
    assert context.headers == (("traceparent", f"00-{TRACE}-{context.id:016x}-{flags}"),)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01",
        "x" * 10_000,
    ],
)
def test_what_is_no_traceparent_begins_a_trace_and_ends_the_caller_s_state(given: str) -> None:
    context = context_of({"traceparent": given}, 1.0)
    assert context.trace != TRACE
    assert int(context.trace, 16)
    assert (context.parent, context.sampled) == (0, True)
    assert [name for name, _ in context.headers] == ["traceparent", "tracestate"]


def test_of_those_who_say_nothing_the_ratio_is_kept() -> None:
    kept = sum(context_of({}, 0.25).sampled for _ in range(4000))
    assert 800 < kept < 1200  # 7 standard deviations
    assert not any(context_of({}, 0.0).sampled for _ in range(100))
    assert all(context_of({}, 1.0).sampled for _ in range(100))
