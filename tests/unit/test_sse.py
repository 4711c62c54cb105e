"""The stream's meaning must not depend on how the network cut it (vllm-project/aibrix#2638)."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.service.body import Usage
from kvatlas.service.sse import EVENT_BYTES_MAX, EventStream

USAGE = b'"usage":{"prompt_tokens":20,"total_tokens":37,"completion_tokens":17,'
USAGE += b'"prompt_tokens_details":{"cached_tokens":16}}'
USAGE_EVENT = b'data: {"id":"c","choices":[],' + USAGE + b"}"
EXPECTED = Usage(prompt_tokens=20, completion_tokens=17, cached_tokens=16)


def delta(text: str) -> bytes:
    return json.dumps({"choices": [{"delta": {"content": text}}]}, ensure_ascii=False).encode()


def twenty_events() -> tuple[bytes, bytes]:
    """The stream of the field report, and the same without the usage-only event."""
    before = [
        b": a comment that opens the stream\n\n",
        b"data: " + delta("你好") + b"\n\n",
        b"data:" + delta("no space") + b"\n\n",
        b"data: " + delta("\U0001f9ed\U0001f469‍\U0001f680") + b"\r\n\r\n",
        b"event: message\r\ndata: " + delta("crlf") + b"\r\n\r\n",
        b": ping\n\n",
        b'data: {"choices":[{"delta":{"content":"say \\"usage\\": {}"}}]}\n\n',
        b"id: 7\nretry: 10\ndata: " + delta("fields") + b"\n\n",
        b'data: {"choices":\ndata: [{"delta":{"content":"two lines"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"x"}}],"usage":null}\n\n',
        *(b"data: " + delta(text) + b"\n\n" for text in ("日本語", "한국어", "é", "ق", " ", "\\n")),
        b"\ndata: " + delta("an empty line before") + b"\r\n\n",
        b"data: " + delta("last") + b"\n\n",
    ]
    end = b"data: [DONE]\n\n"
    assert len(before) + 2 == 20
    return b"".join((*before, USAGE_EVENT + b"\r\n\r\n", end)), b"".join((*before, end))


WHOLE, WITHOUT_USAGE = twenty_events()


def play(pieces: list[bytes], *, withhold: bool) -> tuple[bytes, EventStream]:
    stream = EventStream(withhold=withhold)
    out = [stream.feed(piece) for piece in pieces]
    out.append(stream.finish())
    return b"".join(out), stream


def cut(data: bytes, places: list[int]) -> list[bytes]:
    return [data[a:b] for a, b in pairwise([0, *sorted(places), len(data)])]


def check(pieces: list[bytes], withhold: bool) -> None:
    out, stream = play(pieces, withhold=withhold)
    assert out == (WITHOUT_USAGE if withhold else WHOLE)
    assert stream.usage == EXPECTED
    assert stream.done
    assert not stream.truncated


@pytest.mark.parametrize("withhold", [False, True])
def test_one_write_one_byte_at_a_time_and_every_split(withhold: bool) -> None:
    check([WHOLE], withhold)
    check([WHOLE[i : i + 1] for i in range(len(WHOLE))], withhold)
    for place in range(len(WHOLE) + 1):
        check([WHOLE[:place], WHOLE[place:]], withhold)


@given(st.lists(st.integers(0, len(WHOLE)), max_size=40), st.booleans())
def test_any_cut(places: list[int], withhold: bool) -> None:
    check(cut(WHOLE, places), withhold)


@given(
    st.lists(
        st.sampled_from(
            [b"\n", b"\r", b"\r\n", b"data: x", b":c", USAGE_EVENT, b"data: [DONE]", b"\n\n"]
        ),
        max_size=12,
    ).map(b"".join),
    st.data(),
    st.booleans(),
)
def test_odd_line_ends_mean_the_same_in_every_cut(
    text: bytes, data: st.DataObject, withhold: bool
) -> None:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    whole, once = play([text], withhold=withhold)
    pieces, cut_up = play(cut(text, places), withhold=withhold)
    single, bytewise = play([text[i : i + 1] for i in range(len(text))], withhold=withhold)
    assert whole == pieces == single
    assert once.usage == cut_up.usage == bytewise.usage
    assert once.truncated == cut_up.truncated == bytewise.truncated
    assert once.done == cut_up.done == bytewise.done


@pytest.mark.parametrize("end", [b"", b"\n", b"\r", b"\r\n", b"\n\n"])
def test_a_last_event_without_its_blank_line_counts(end: bytes) -> None:
    begin = b"data: " + delta("x") + b"\n\n"
    for withhold in (False, True):
        out, stream = play([begin, USAGE_EVENT + end], withhold=withhold)
        assert stream.usage == EXPECTED
        assert not stream.truncated
        assert out == begin + (b"" if withhold else USAGE_EVENT + end)


@pytest.mark.parametrize("withhold", [False, True])
def test_usage_and_end_marker_in_different_packets(withhold: bool) -> None:
    _, stream = play([USAGE_EVENT + b"\n\n", b"data: [DONE]", b"\n", b"\n"], withhold=withhold)
    assert stream.usage == EXPECTED
    assert stream.done


def test_usage_beside_text_is_counted_and_never_withheld() -> None:
    event = b'data: {"choices":[{"delta":{}}],' + USAGE + b"}\n\n"
    out, stream = play([event], withhold=True)
    assert out == event
    assert stream.usage == EXPECTED


def test_the_last_figures_win() -> None:
    first = b'data: {"choices":[{}],"usage":{"prompt_tokens":20,"completion_tokens":1}}\n\n'
    _, stream = play([first + USAGE_EVENT + b"\n\n"], withhold=False)
    assert stream.usage == EXPECTED


@pytest.mark.parametrize("tail", [b'data: {"choices":[{"del', b"data: [DO", b"dat", b"data: {"])
def test_half_an_event_is_a_truncated_stream(tail: bytes) -> None:
    begin = b"data: " + delta("x") + b"\n\n"
    for withhold in (False, True):
        stream = EventStream(withhold=withhold)
        assert stream.feed(begin) == begin
        assert stream.at_boundary
        assert stream.feed(tail) == (b"" if withhold else tail)
        assert stream.at_boundary is withhold
        assert stream.finish() == b""
        assert stream.truncated


def test_a_comment_may_end_a_stream() -> None:
    out, stream = play([b"data: [DONE]\n\n", b": bye"], withhold=True)
    assert out == b"data: [DONE]\n\n: bye"
    assert not stream.truncated


def test_the_end_marker_in_a_text_is_not_the_end() -> None:
    stream = EventStream(withhold=False)
    stream.feed(b"data: " + delta("data: [DONE]") + b"\n\n")
    assert not stream.done


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_an_event_over_the_limit_passes_unread_in_bounded_memory(line_end: bytes) -> None:
    blank = line_end * 2
    huge = b"data: " + delta("y" * (3 * EVENT_BYTES_MAX)) + blank
    text = huge + USAGE_EVENT + blank + b"data: [DONE]" + blank
    for size in (1000, EVENT_BYTES_MAX + 1, len(text)):
        stream = EventStream(withhold=True)
        out = b""
        for start in range(0, len(text), size):
            out += stream.feed(text[start : start + size])
            assert len(stream._held) <= EVENT_BYTES_MAX
        out += stream.finish()
        assert out == huge + b"data: [DONE]" + blank
        assert stream.usage == EXPECTED


def test_an_endless_event_is_truncated() -> None:
    stream = EventStream(withhold=True)
    text = b"data: " + b"z" * (EVENT_BYTES_MAX + 10)
    assert stream.feed(text) + stream.finish() == text
    assert stream.truncated
    assert not stream.at_boundary


@pytest.mark.parametrize("garbage", [b"data: [1]\n\n", b'data: {"usage"\n\n', b'data: "usage"\n\n'])
def test_events_that_are_no_objects_pass(garbage: bytes) -> None:
    out, stream = play([garbage], withhold=True)
    assert out == garbage
    assert stream.usage is None
