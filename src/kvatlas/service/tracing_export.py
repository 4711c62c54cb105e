"""What is noted of requests on its way out: kept for a moment, then given to a process that makes
it into spans and sends them.

That costs many times what noting does, and a collector may be slow, broken or away. Both are the
other process's matter (`service.tracing_child`): what it does not take in time is dropped here, and
counted. No request waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

import kvatlas
from kvatlas.config_tracing import TracingConfig
from kvatlas.errors import ConfigError
from kvatlas.service.spans import HEAD, Batch, Exporting, Record, Report

if TYPE_CHECKING:
    from kvatlas.service.steering import Problems

log = logging.getLogger(__name__)

RECORDS_MAX = 8192  # that wait here
BATCH_RECORDS = 256
EXPORT_TIMEOUT_S = 5.0
_FLUSH_S = 0.5
_RETRY_S = 5.0  # between two processes
_END_S = 2.0  # what waits at the end may take so long
_OUTCOMES = ("exported", "failed", "dropped")
_NEEDS = "opentelemetry.exporter.otlp.proto.http"


def _messages() -> ModuleType:
    """OpenTelemetry's own messages, or what another package has put in their place."""
    return importlib.import_module("opentelemetry.proto.common.v1.common_pb2")


class Exporter(Collector):
    """`start` it on a running loop, `close` it. ``error`` says why spans are lost, if they are."""

    def __init__(
        self,
        config: TracingConfig,
        *,
        flush_s: float = _FLUSH_S,
        timeout_s: float = EXPORT_TIMEOUT_S,
    ) -> None:
        """Raises ConfigError where what it needs is not installed."""
        try:
            found = importlib.util.find_spec(_NEEDS)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ConfigError(f"tracing.otlp needs {_NEEDS}: pip install 'kvatlas[otel]'")
        if not hasattr(_messages(), "InstrumentationScope"):
            raise ConfigError(
                "tracing.otlp: xds-protos, which the endpoint picker has, has put an old copy of "
                "OpenTelemetry's messages over theirs: "
                "pip install --force-reinstall --no-deps opentelemetry-proto"
            )
        url = f"{config.otlp.rstrip('/')}/v1/traces"
        self._settings = Exporting(url, config.service_name, kvatlas.__version__, timeout_s)
        self._flush_s = flush_s
        self._encode = msgspec.msgpack.Encoder().encode
        self._waiting: list[Record] = []
        self._under_way = 0  # that the process has, and of which it has said nothing yet
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.counts: Counter[str] = Counter()
        self.error = ""

    # -- requests ---------------------------------------------------------------------------------

    def take(self, record: Record) -> None:
        """It goes out soon, or is dropped and counted. Never blocks."""
        if len(self._waiting) < RECORDS_MAX:
            self._waiting.append(record)
        else:
            self.drop()

    def drop(self) -> None:
        """One that is not kept."""
        self.counts["dropped"] += 1
        self.error = self.error or f"{self._settings.url} is slower than spans come: some are lost"

    # -- for people -------------------------------------------------------------------------------

    def collect(self) -> Iterable[Metric]:
        """Called by the registry for each scrape."""
        family = CounterMetricFamily(
            "kvatlas_traces", "requests by what became of their spans", labels=["outcome"]
        )
        for outcome in _OUTCOMES:
            family.add_metric([outcome], self.counts[outcome])
        yield family

    def describe(self) -> Iterable[Metric]:
        """Nothing is asked when it is registered."""
        return ()

    def problems(self) -> Problems:
        """For /health."""
        problems: Problems = {"tracing": {"collector": self.error} if self.error else {}}
        return problems

    # -- the process ------------------------------------------------------------------------------

    async def start(self) -> None:
        self._keeper = asyncio.create_task(self._keep(), name="spans to their exporter")

    async def close(self) -> None:
        """What waits goes out, if that is quick; the process ends."""
        if self._keeper is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                while (self._waiting or self._under_way) and self._process is not None:
                    self._write()
                    await asyncio.sleep(self._flush_s / 10)
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        self.counts["dropped"] += len(self._waiting)
        self._waiting = []

    async def _keep(self) -> None:
        while True:
            try:
                await self._run()
            except OSError as error:
                self._failed(f"no process for spans: {error}")
            await asyncio.sleep(_RETRY_S)

    async def _run(self) -> None:
        """One process from its start to its end."""
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "kvatlas.service.tracing_child", msgspec.json.encode(self._settings).decode()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C at the terminal is ours to pass on
        )
        flushing = asyncio.create_task(self._flush())
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                self._reported(msgspec.json.decode(line, type=Report))
            self._failed(f"the process for spans ended with {await process.wait()}")
        finally:
            self._process = None
            flushing.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.gather(flushing, process.wait(), return_exceptions=True)
            self.counts["failed"] += self._under_way
            self._under_way = 0

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(self._flush_s)
            self._write()

    def _write(self) -> None:
        """As much as the process takes: while it is behind, spans wait."""
        process = self._process
        pipe = process.stdin if process is not None else None
        offset_s = time.time() - time.perf_counter()
        while self._waiting and pipe is not None and not pipe.transport.get_write_buffer_size():
            batch, self._waiting = self._waiting[:BATCH_RECORDS], self._waiting[BATCH_RECORDS:]
            frame = self._encode(Batch(offset_s, batch))
            pipe.write(HEAD.pack(len(frame)) + frame)
            self._under_way += len(batch)

    def _reported(self, report: Report) -> None:
        self._under_way -= report.requests
        self.counts["failed" if report.error else "exported"] += report.requests
        if report.error:
            self._failed(report.error)
        else:
            self.error = ""

    def _failed(self, error: str) -> None:
        if not self.error:
            log.warning("spans are lost: %s", error)
        self.error = error
