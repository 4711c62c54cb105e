"""The ends of the pass-through's figures: an engine of a given time to first token, and a client.

``python -m benchmarks.observe_child engine``: prints its port; the request's query says how it
answers (``ttft_ms``, ``gap_ms``, ``events``). ``… client``: one JSON job per line, one result each.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from typing import Any
from urllib.parse import parse_qs

import uvloop

from benchmarks.gateway_load import Texts, connect
from benchmarks.gateway_mock import STREAM, STREAM_USAGE
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer

_EVENT, _USAGE = (frame.split(b"\r\n")[1] + b"\n\n" for frame in (STREAM[0], STREAM_USAGE))


async def answer(request: Request, reply: Reply) -> None:
    """Events at the times that the query names, the usage, the end."""
    if request.method == "GET":
        reply.send_json(200, {"object": "list", "data": [{"id": "mock"}]})
        return
    asked = {name: float(values[0]) for name, values in parse_qs(request.query).items()}
    loop = asyncio.get_running_loop()
    due_s = loop.time() + asked["ttft_ms"] / 1000
    reply_started = False
    for _ in range(int(asked["events"])):
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        if not reply_started:
            reply.start(200, [(b"content-type", b"text/event-stream")])
            reply_started = True
        reply.write(_EVENT)
        due_s += asked["gap_ms"] / 1000
    reply.write(_USAGE)
    reply.end(b"data: [DONE]\n\n")


async def serve() -> None:
    """Until it is ended."""
    server = HttpServer(answer)
    await server.start()
    print(server.port, flush=True)
    await asyncio.Event().wait()


def payload(texts: Texts, number: int, job: dict[str, Any]) -> bytes:
    """One request; the prompt is some 2,000 tokens of text."""
    query = "&".join(f"{name}={job[name]}" for name in ("ttft_ms", "gap_ms", "events"))
    body = {"model": "mock", "prompt": texts.prompt(number), "max_tokens": 64, "stream": True}
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions?{query} HTTP/1.1\r\nhost: engine\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


async def pairs(job: dict[str, Any], texts: Texts) -> dict[str, dict[str, float]]:
    """Each pair: the same request direct and through, one after the other, who is first by lot.
    ``streams`` clients do so at a time. Figures of the first and of the last byte, in s."""
    draw, numbers = random.Random(1), itertools.count()
    found: list[list[float]] = []

    async def client() -> None:
        ways = [await connect(job["direct"]), await connect(job["through"])]
        while (number := next(numbers)) < job["pairs"] + 2 * job["streams"]:
            data, times = payload(texts, number % 64, job), [0.0] * 4
            order = [0, 1] if draw.random() < 0.5 else [1, 0]
            for way in order:
                start_s = time.perf_counter()
                first_s, last_s = await ways[way].ask(data)
                times[2 * way : 2 * way + 2] = [first_s - start_s, last_s - start_s]
            if number >= 2 * job["streams"]:  # before, connections and caches are cold
                found.append(times)
        for way in ways:
            way.transport.close()

    await asyncio.gather(*(client() for _ in range(job["streams"])))
    return {name: summary(found, at) for at, name in enumerate(("first", "last"))}


def summary(found: list[list[float]], at: int) -> dict[str, float]:
    """Direct, through, and what was added: the median of the pairs' differences."""
    direct = sorted(pair[at] for pair in found)
    through = sorted(pair[2 + at] for pair in found)
    return {
        "direct_p50_s": statistics.median(direct),
        "direct_p99_s": direct[int(len(direct) * 0.99)],
        "through_p50_s": statistics.median(through),
        "through_p99_s": through[int(len(through) * 0.99)],
        "added_p50_s": statistics.median(pair[2 + at] - pair[at] for pair in found),
    }


def main(role: str) -> None:
    """As the module says."""
    if role == "engine":
        uvloop.run(serve())
        return
    texts = Texts()
    for line in sys.stdin:
        print(json.dumps(uvloop.run(pairs(json.loads(line), texts))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
