"""The load client of the gateway's figures: closed loop (throughput) or a fixed rate (latency).

Run as ``python -m benchmarks.gateway_load``: reads one JSON job per line on stdin, answers each
with one JSON line. Throughput job: {"port", "connections", "seconds", "stream"}. Latency job:
{"ports": {name: port}, "rate", "seconds", "stream"}: the targets take turns request by request, so
that all of them meet the same noise.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import httptools
import uvloop


class Connection(asyncio.Protocol):
    """One kept-alive connection: `ask` resolves with (first byte, last byte, body bytes)."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.parser: Any = None
        self.transport: Any = None
        self.done: Any = None
        self.first = 0.0
        self.size = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.parser = httptools.HttpResponseParser(self)

    def ask(self, payload: bytes) -> asyncio.Future[tuple[float, float, int]]:
        self.done = self.loop.create_future()
        self.first, self.size = 0.0, 0
        self.transport.write(payload)
        return self.done  # type: ignore[no-any-return]

    def data_received(self, data: bytes) -> None:
        if not self.first:
            self.first = time.perf_counter()
        self.size += len(data)
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        if self.parser.get_status_code() != 200:
            self.done.set_exception(RuntimeError(f"status {self.parser.get_status_code()}"))
        else:
            self.done.set_result((self.first, time.perf_counter(), self.size))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(RuntimeError(f"connection lost: {exc}"))


def payload(stream: bool, prompt_words: int = 8) -> bytes:
    body = json.dumps(
        {
            "model": "mock",
            "messages": [{"role": "user", "content": "word " * prompt_words}],
            "max_tokens": 16,
            "stream": stream,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json"
        f"\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def connect(port: int) -> Connection:
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_connection(Connection, "127.0.0.1", port)
    return protocol


async def throughput(job: dict[str, Any]) -> dict[str, float]:
    body = payload(job["stream"], job.get("prompt_words", 8))
    connections = [await connect(job["port"]) for _ in range(job["connections"])]
    begin = time.perf_counter()
    stop_at = begin + job["seconds"]
    latencies: list[float] = []

    async def worker(connection: Connection) -> None:
        while (start := time.perf_counter()) < stop_at:
            _, last, _ = await connection.ask(body)
            latencies.append(last - start)

    await asyncio.gather(*(worker(c) for c in connections))
    seconds = time.perf_counter() - begin
    for connection in connections:
        connection.transport.close()
    latencies.sort()
    return {
        "requests": len(latencies),
        "requests_per_s": len(latencies) / seconds,
        "p50_s": latencies[len(latencies) // 2],
        "p99_s": latencies[int(len(latencies) * 0.99)],
    }


async def latency(job: dict[str, Any]) -> dict[str, Any]:
    """Open loop: one request every 1/rate seconds to every target in turn."""
    body = payload(job["stream"], job.get("prompt_words", 8))
    free: dict[str, list[Connection]] = {name: [] for name in job["ports"]}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in job["ports"]}
    running: set[asyncio.Task[None]] = set()

    async def one(name: str, due: float) -> None:
        pool = free[name]
        connection = pool.pop() if pool else await connect(job["ports"][name])
        first, last, _ = await connection.ask(body)
        samples[name].append((first - due, last - due))
        pool.append(connection)

    start = time.perf_counter()
    total = int(job["rate"] * job["seconds"])
    names = list(job["ports"])
    for index in range(total):
        for turn, name in enumerate(names):
            due = start + (index + turn / len(names)) / job["rate"]
            while (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait if wait > 0.002 else 0)
            task = asyncio.create_task(one(name, time.perf_counter()))
            running.add(task)
            task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    for pool in free.values():
        for connection in pool:
            connection.transport.close()
    result: dict[str, Any] = {}
    for name, pairs in samples.items():
        pairs = pairs[len(pairs) // 10 :]  # the first tenth opens connections
        for which, part in (("first", 0), ("last", 1)):
            values = sorted(pair[part] for pair in pairs)
            result.setdefault(name, {})[f"{which}_p50_s"] = values[len(values) // 2]
            result[name][f"{which}_p99_s"] = values[int(len(values) * 0.99)]
    return result


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        run = latency if "ports" in job else throughput
        print(json.dumps(uvloop.run(run(job))), flush=True)


if __name__ == "__main__":
    main()
