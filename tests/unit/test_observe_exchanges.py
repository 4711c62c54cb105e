"""Copied bytes become exchanges; what cannot be followed is counted and found again."""

from __future__ import annotations

import json

import pytest

from kvatlas.service.observe_copies import Kind, Piece
from kvatlas.service.observe_exchanges import Exchange, Watcher

BODY = json.dumps({"prompt": [1, 2, 3], "stream": True}).encode()
ASK = (
    b"POST /v1/completions?a=1 HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
)
USAGE = {
    "prompt_tokens": 30,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 16},
}
EVENTS = (
    b'data: {"choices":[{"text":"a"}]}\n\n',
    b'data: {"choices":[{"text":"b"}]}\r\n\r\n',
    b'data: {"choices":[],"usage":%s}\n\n' % json.dumps(USAGE).encode(),
    b"data: [DONE]\n\n",
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-By: e1\r\n"
STREAM = b"".join(b"%x\r\n%b\r\n" % (len(e), e) for e in EVENTS) + b"0\r\n\r\n"
ANSWER = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + STREAM


class Heard:
    """What a watcher told, and a carrier to feed it by."""

    def __init__(self) -> None:
        self.begun: list[Exchange] = []
        self.first: list[Exchange] = []
        self.ends: list[tuple[Exchange, bytes]] = []
        self.watcher = Watcher(self)
        self._number = 0
        self._at_s = 0.0

    def asked(self, exchange: Exchange) -> None:
        self.begun.append(exchange)

    def answering(self, exchange: Exchange) -> None:
        self.first.append(exchange)

    def over(self, exchange: Exchange) -> None:
        self.ends.append((exchange, exchange.body))

    def says(self, kind: Kind, data: bytes = b"", *, skip: int = 0) -> None:
        self._number += skip
        self._at_s += 1.0
        self.watcher.take(Piece(7, self._number, kind, self._at_s, 0, data))
        self._number += 1

    @property
    def only(self) -> Exchange:
        ((exchange, _),) = self.ends
        return exchange


def test_a_streamed_answer_is_timed_and_read() -> None:
    heard = Heard()
    heard.says(Kind.ASKED, ASK[:50])
    heard.says(Kind.ASKED, ASK[50:])  # at 2 s
    heard.says(Kind.ANSWERED, ANSWER[: len(HEAD) + 30])  # the head alone: no token yet
    heard.says(Kind.ANSWERED, ANSWER[len(HEAD) + 30 : -20])  # at 4 s
    heard.says(Kind.ANSWERED, ANSWER[-20:])
    exchange = heard.only
    assert (exchange.method, exchange.path) == ("POST", "/v1/completions")
    assert (exchange.asked_s, exchange.first_s, exchange.ended_s) == (2.0, 4.0, 5.0)
    assert (exchange.usage.cached_tokens, exchange.usage.completion_tokens) == (16, 2)
    assert exchange.told["x-by"] == "e1"
    assert exchange.whole
    assert heard.begun == heard.first == [exchange]
    assert heard.ends[0][1] == BODY
    assert not exchange.body  # not kept longer than that
    assert heard.watcher.bodies_bytes == 0


def test_pieces_may_be_cut_anywhere() -> None:
    heard = Heard()
    for byte in ASK:
        heard.says(Kind.ASKED, bytes([byte]))
    for byte in ANSWER:
        heard.says(Kind.ANSWERED, bytes([byte]))
    assert heard.only.usage.cached_tokens == 16
    assert heard.only.events == 2  # that of the usage is no token
    assert not heard.watcher.lost


def test_an_error_in_a_stream_is_seen() -> None:
    text = b'data: {"choices":[{"text":"data: {\\"error\\""}]}\n\n'
    event = b'data: {"error":{"message":"no"}}\n\n'
    for data, failed in ((text, False), (event, True), (text + event, True)):
        heard = Heard()
        heard.says(Kind.ASKED, ASK)
        heard.says(Kind.ANSWERED, HEAD + b"\r\n")
        for byte in data:
            heard.says(Kind.ANSWERED, bytes([byte]))
        heard.says(Kind.CLOSED)
        assert heard.only.failed == failed


def test_a_stream_that_ends_without_its_end_is_not_whole() -> None:
    for last, whole in ((b"", False), (EVENTS[3], True), (EVENTS[3].strip(), True)):
        heard = Heard()
        heard.says(Kind.ASKED, ASK)
        heard.says(Kind.ANSWERED, HEAD + b"\r\n" + EVENTS[0] + EVENTS[1] + last)
        heard.says(Kind.CLOSED)
        assert (heard.only.whole, heard.only.failed, heard.only.events) == (whole, False, 2)


def test_events_that_are_no_answer_are_no_tokens() -> None:
    for data in (b"data: xyz\n\n" * 8, b"data: [1]\n\n", EVENTS[3]):
        heard = Heard()
        heard.says(Kind.ASKED, ASK)
        heard.says(Kind.ANSWERED, HEAD + b"\r\n" + data)
        heard.says(Kind.CLOSED)
        assert (heard.only.failed, heard.only.events) == (True, 0)


def test_a_stream_that_cannot_be_read_is_not_counted() -> None:
    heard = Heard()
    heard.says(Kind.ASKED, ASK)
    heard.says(Kind.ANSWERED, HEAD + b"Content-Encoding: gzip\r\n\r\n" + EVENTS[0] * 9)
    heard.says(Kind.CLOSED)
    assert (heard.only.whole, heard.only.failed, heard.only.events) == (True, False, -1)


def test_an_event_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.service.load_answer.EVENT_BYTES_MAX", 99)
    heard = Heard()
    heard.says(Kind.ASKED, ASK)
    heard.says(Kind.ANSWERED, HEAD + b"\r\ndata: " + b"x" * 99)
    assert heard.only.status == -1
    assert heard.watcher.lost == {"answer too large": 1}


def test_an_answer_that_is_no_json_is_not_whole() -> None:
    for data, whole in ((b'{"choices":[]}', True), (b'{"choices":[', False)):
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
        heard = Heard()
        heard.says(Kind.ASKED, ASK)
        heard.says(Kind.ANSWERED, head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        assert heard.only.whole == whole


def test_pipelined_requests_are_told_apart() -> None:
    heard = Heard()
    heard.says(Kind.ASKED, ASK + b"HEAD /x HTTP/1.1\r\n\r\n" + ASK)
    heard.says(Kind.ANSWERED, b"HTTP/1.1 100 Continue\r\n\r\n" + ANSWER)
    heard.says(Kind.ANSWERED, b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n")
    heard.says(Kind.ANSWERED, b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\nno")
    assert [(e.method, e.status, e.whole) for e, _ in heard.ends] == [
        ("POST", 200, True),
        ("HEAD", 200, True),
        ("POST", 503, True),
    ]


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    heard = Heard()
    heard.says(Kind.ASKED, ASK)
    heard.says(Kind.ANSWERED, HEAD + b"\r\n" + b"".join(EVENTS))
    assert not heard.ends
    heard.says(Kind.CLOSED)
    assert heard.only.whole
    assert heard.only.usage.prompt_tokens == 30


@pytest.mark.parametrize("cut", [0, 120, len(ANSWER) - 30])
def test_a_connection_that_ends_early_leaves_no_whole_answer(cut: int) -> None:
    heard = Heard()
    heard.says(Kind.ASKED, ASK)
    if cut:
        heard.says(Kind.ANSWERED, ANSWER[:cut])
    heard.says(Kind.CLOSED)
    assert not heard.only.whole
    assert heard.only.status == (200 if cut > 0 else 0)
    assert not heard.watcher.lost


def test_a_lost_piece_costs_its_exchange_and_no_more() -> None:
    heard = Heard()
    heard.says(Kind.ASKED, ASK)
    heard.says(Kind.ANSWERED, ANSWER[:200])
    heard.says(Kind.ANSWERED, ANSWER[300:], skip=1)
    assert heard.only.status == -1
    assert heard.watcher.lost == {"copy dropped": 1}
    heard.says(Kind.ANSWERED, b"rest of whatever it was")
    heard.says(Kind.ASKED, b"in the middle of a body", skip=3)
    heard.says(Kind.ASKED, ASK)
    heard.says(Kind.ANSWERED, ANSWER)
    assert [e.whole for e, _ in heard.ends] == [False, True]
    assert heard.watcher.lost == {"copy dropped": 1}  # nothing was under way any more


@pytest.mark.parametrize("skipped", [Kind.ANSWERED, Kind.CLOSED])
def test_a_piece_may_be_lost_of_an_answer_without_a_length(skipped: Kind) -> None:
    heard = Heard()
    heard.says(Kind.ASKED, ASK)
    heard.says(Kind.ANSWERED, HEAD + b"Connection: close\r\n\r\n" + EVENTS[0])
    if skipped is Kind.ANSWERED:
        heard.says(Kind.ANSWERED, EVENTS[1], skip=1)
        heard.says(Kind.CLOSED)
    else:
        heard.says(Kind.CLOSED, skip=1)
    assert (heard.only.status, heard.only.whole) == (-1, False)
    assert heard.watcher.lost == {"copy dropped": 1}


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([(Kind.ASKED, b"\x16\x03\x01\x02\x00\x01")], "not HTTP"),  # TLS
        ([(Kind.ASKED, ASK), (Kind.ANSWERED, b"SSH-2.0\r\n\r\n")], "not HTTP"),
        ([(Kind.ASKED, ASK), (Kind.ANSWERED, ANSWER + ANSWER)], "an answer to nothing"),
        (
            [(Kind.ASKED, b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")],
            "upgraded",
        ),
        ([(Kind.ASKED, ASK * 65)], "too many requests without an answer"),
    ],
)
def test_what_cannot_be_followed_is_counted(pieces: list[tuple[Kind, bytes]], reason: str) -> None:
    heard = Heard()
    for kind, data in pieces:
        heard.says(kind, data)
    assert set(heard.watcher.lost) == {reason}
    heard.says(Kind.ASKED, ASK)
    heard.says(Kind.ANSWERED, ANSWER)
    assert heard.ends[-1][0].whole
    assert heard.watcher.bodies_bytes == 0


def test_bodies_beyond_the_limit_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.service.observe_exchanges.BODY_BYTES_MAX", len(BODY) - 1)
    heard = Heard()
    heard.says(Kind.ASKED, ASK)
    assert heard.watcher.lost == {"body too large": 1}
    assert heard.watcher.bodies_bytes == 0
    assert not heard.begun


def test_connections_beyond_the_limit_push_the_oldest_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvatlas.service.observe_exchanges.CONNECTIONS_MAX", 2)
    heard = Heard()
    for connection in (1, 2, 3):
        heard.watcher.take(Piece(connection, 0, Kind.ASKED, 0.0, 0, ASK))
    assert [e.status for e, _ in heard.ends] == [-1]
    heard.watcher.close()
    assert len(heard.ends) == 3
    assert heard.watcher.bodies_bytes == 0


def test_a_fault_of_the_listener_is_not_taken_for_the_routers() -> None:
    heard = Heard()
    heard.asked = None  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        heard.says(Kind.ASKED, ASK)
