"""A mock engine for the gateway's figures: answers at once, 16 SSE chunks or one JSON body.

Each chunk leaves in a write and an event-loop turn of its own, as an engine's tokens do.
Run as ``python -m benchmarks.gateway_mock COUNT``: prints the ports of COUNT servers as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import httptools
import uvloop

CHUNKS = 16
_HEAD = b"HTTP/1.1 200 OK\r\n"
_EVENT = {
    "id": "chatcmpl-6f0a1c2b3d4e",
    "object": "chat.completion.chunk",
    "created": 1780000000,
    "model": "mock",
    "choices": [{"index": 0, "delta": {"content": " token"}, "logprobs": None}],
}
USAGE = {
    "prompt_tokens": 2000,
    "completion_tokens": CHUNKS,
    "total_tokens": 2000 + CHUNKS,
    "prompt_tokens_details": {"cached_tokens": 1500},
}


def _json_response(body: bytes) -> bytes:
    fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return _HEAD + fields.encode() + body


def _frame(text: str) -> bytes:
    data = text.encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


STREAM_HEAD = (
    _HEAD + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
STREAM = [_frame(f"data: {json.dumps(_EVENT)}\n\n")] * CHUNKS
STREAM_USAGE = _frame(f"data: {json.dumps({**_EVENT, 'choices': [], 'usage': USAGE})}\n\n")
STREAM_END = _frame("data: [DONE]\n\n") + b"0\r\n\r\n"
COMPLETION = _json_response(
    json.dumps(
        {
            "id": "chatcmpl-6f0a1c2b3d4e",
            "object": "chat.completion",
            "model": "mock",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "token " * 16}}],
            "usage": USAGE,
        }
    ).encode()
)
_MODEL = {"id": "mock", "object": "model", "created": 0, "owned_by": "vllm", "root": "mock"}
MODELS = _json_response(json.dumps({"object": "list", "data": [_MODEL]}).encode())
PAGES = {b"/v1/models": MODELS, b"/health": _json_response(b"{}")}
MISSING = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


class Engine(asyncio.Protocol):
    """One connection of a client to the mock engine."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.parser: Any = httptools.HttpRequestParser(self)
        self.transport: Any = None
        self.url = b""
        self.body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.transport.close()  # a peer tries HTTP/2 first

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        url, body = self.url, self.body
        self.url = self.body = b""
        if b"/completions" not in url:
            self.transport.write(PAGES.get(url, MISSING))
        elif b'"stream": true' in body or b'"stream":true' in body:
            self.transport.write(STREAM_HEAD)
            self.step(0, b"include_usage" in body)
        else:
            self.transport.write(COMPLETION)

    def step(self, index: int, usage: bool) -> None:
        if index < CHUNKS:
            self.transport.write(STREAM[index])
            self.loop.call_soon(self.step, index + 1, usage)
        else:
            self.transport.write((STREAM_USAGE if usage else b"") + STREAM_END)


async def main(count: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Engine, "127.0.0.1", 0, backlog=1024) for _ in range(count)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
