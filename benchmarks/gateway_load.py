"""The load client of the gateway's figures: closed loop (throughput) or a fixed rate (latency).

Run as ``python -m benchmarks.gateway_load``: reads one JSON job per line on stdin, answers each
with one JSON line.

- throughput: {"port", "connections", "seconds", "stream", "prompt"}
- latency: {"ports": {name: port}, "rate", "seconds", "stream", "prompt"}: all targets take turns
  request by request, each at ``rate``, so that they meet the same noise.

``prompt`` is "short", "warm" (64 prompts of 8,000 bytes, again and again) or "cold" (each once).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httptools
import uvloop

WARM_PROMPTS = 64
PROMPT_BYTES = 8_000  # about 2,000 tokens


class Texts:
    """Slices of the standard library's English and Python; number n is always the same one."""

    def __init__(self) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        files = [library / "pydoc_data" / "topics.py", *sorted(library.glob("*.py"))]
        self._text = "".join(path.read_text("utf-8", "replace") for path in files)

    def prompt(self, number: int) -> str:
        at = random.Random(number).randrange(len(self._text) - PROMPT_BYTES)
        return f"{number:08d} {self._text[at : at + PROMPT_BYTES]}"


class Payloads:
    """Endless requests of one kind. Cold prompts never come twice, whatever job asks."""

    def __init__(self) -> None:
        self._texts = Texts()
        self._cold = itertools.count(1_000_000)

    def of(self, job: dict[str, Any]) -> Iterator[bytes]:
        stream = job["stream"]
        if job["prompt"] == "short":
            messages = [{"role": "user", "content": "word " * 8}]
            chat = {"model": "mock", "messages": messages, "max_tokens": 16, "stream": stream}
            yield from itertools.repeat(_request("/v1/chat/completions", chat))
        numbers = self._cold if job["prompt"] == "cold" else itertools.cycle(range(WARM_PROMPTS))
        for number in numbers:
            text = self._texts.prompt(number)
            body = {"model": "mock", "prompt": text, "max_tokens": 16, "stream": stream}
            yield _request("/v1/completions", body)


def _request(path: str, obj: object) -> bytes:
    body = json.dumps(obj).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class Connection(asyncio.Protocol):
    """One kept-alive connection: `ask` resolves with the times of the first and the last byte."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.parser: Any = None
        self.transport: Any = None
        self.done: Any = None
        self.first_s = 0.0
        self.last = b""  # what came last, to say what was wrong with it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.parser = httptools.HttpResponseParser(self)

    def ask(self, payload: bytes) -> asyncio.Future[tuple[float, float]]:
        self.done = self.loop.create_future()
        self.first_s = 0.0
        self.transport.write(payload)
        return self.done  # type: ignore[no-any-return]

    def data_received(self, data: bytes) -> None:
        if not self.first_s:
            self.first_s = time.perf_counter()
        self.last = data
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        if self.parser.get_status_code() != 200:
            self.done.set_exception(RuntimeError(f"not 200: {self.last[-500:]!r}"))
        else:
            self.done.set_result((self.first_s, time.perf_counter()))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(RuntimeError(f"connection lost: {exc}"))


async def connect(port: int) -> Connection:
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_connection(Connection, "127.0.0.1", port)
    return protocol


async def throughput(job: dict[str, Any], payloads: Iterator[bytes]) -> dict[str, float]:
    """Each connection asks again as soon as it was answered."""
    connections = [await connect(job["port"]) for _ in range(job["connections"])]
    begin_s = time.perf_counter()
    latencies_s: list[float] = []

    async def worker(connection: Connection) -> None:
        while (start_s := time.perf_counter()) < begin_s + job["seconds"]:
            _, last_s = await connection.ask(next(payloads))
            latencies_s.append(last_s - start_s)

    await asyncio.gather(*(worker(connection) for connection in connections))
    took_s = time.perf_counter() - begin_s
    for connection in connections:
        connection.transport.close()
    return {
        "requests": len(latencies_s),
        "requests_per_s": len(latencies_s) / took_s,
        **_percentiles(latencies_s),
    }


async def latency(job: dict[str, Any], payloads: Iterator[bytes]) -> dict[str, dict[str, float]]:
    """Open loop: one request every 1/rate seconds to every target, evenly spread."""
    names = list(job["ports"])
    total = int(job["rate"] * job["seconds"])
    ready = [next(payloads) for _ in range(total)]
    free: dict[str, list[Connection]] = {name: [] for name in names}
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    running: set[asyncio.Task[None]] = set()

    async def one(name: str, payload: bytes) -> None:
        start_s = time.perf_counter()
        connection = free[name].pop() if free[name] else await connect(job["ports"][name])
        first_s, last_s = await connection.ask(payload)
        seen[name].append((first_s - start_s, last_s - start_s))
        free[name].append(connection)

    begin_s = time.perf_counter()
    for number, (payload, name) in enumerate(itertools.product(ready, names)):
        due_s = begin_s + number / len(names) / job["rate"]
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        task = asyncio.create_task(one(name, payload))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    for connection in itertools.chain(*free.values()):
        connection.transport.close()
    result = {}
    for name, pairs in seen.items():
        kept = pairs[len(pairs) // 10 :]  # the first tenth opens connections
        result[name] = _percentiles([last_s for _, last_s in kept])
        first = _percentiles([first_s for first_s, _ in kept])
        result[name].update({f"first_{key}": value for key, value in first.items()})
    return result


def _percentiles(values_s: list[float]) -> dict[str, float]:
    ordered = sorted(values_s)
    return {"p50_s": ordered[len(ordered) // 2], "p99_s": ordered[int(len(ordered) * 0.99)]}


def main() -> None:
    """One JSON line in, one out, until stdin ends."""
    payloads = Payloads()
    for line in sys.stdin:
        job = json.loads(line)
        run = latency if "ports" in job else throughput
        print(json.dumps(uvloop.run(run(job, payloads.of(job)))), flush=True)


if __name__ == "__main__":
    main()
