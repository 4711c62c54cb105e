"""The process that sends spans to a collector, by OTLP over HTTP: OpenTelemetry's own exporter.

``python -m kvatlas.service.tracing_child SETTINGS``: frames of what was noted of requests on stdin,
one line of JSON on stdout for each. It ends with its stdin. Headers and certificates are as
``OTEL_EXPORTER_OTLP_*`` of its environment says.
"""

from __future__ import annotations

import logging
import sys
from typing import BinaryIO

import msgspec
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from kvatlas.service.spans import FRAME_BYTES_MAX, HEAD, Batch, Exporting, Report, new_id
from kvatlas.service.tracing_spans import SERVER, Span, spans_of

_KINDS = tuple(SpanKind)  # by OpenTelemetry's own numbers
_ERROR_CHARS = 300


class _LastWord(logging.Handler):
    """What the exporter said last: its result does not tell why."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = " ".join(record.getMessage().split())[:_ERROR_CHARS]


class Sender:
    """One collector."""

    def __init__(self, settings: Exporting) -> None:
        names = {"service.name": settings.service_name, "service.version": settings.version}
        self._resource = Resource.create(names)
        self._scope = InstrumentationScope("kvatlas", settings.version)
        self._exporter = OTLPSpanExporter(settings.url, timeout=settings.timeout_s)
        self._url = settings.url
        self._word = _LastWord()
        log = logging.getLogger("opentelemetry")
        log.addHandler(self._word)
        log.propagate = False

    def send(self, batch: Batch) -> Report:
        """Returns once the collector has answered, or not in time."""
        self._word.text = ""
        spans = [
            self._readable(span, int(record.trace, 16), batch.offset_s)
            for record in batch.records
            for span in spans_of(record, new_id)
        ]
        done = self._exporter.export(spans) is SpanExportResult.SUCCESS
        error = "" if done else f"{self._url}: {self._word.text or 'not taken'}"
        return Report(len(batch.records), error)

    def _readable(self, span: Span, trace: int, offset_s: float) -> ReadableSpan:
        error = span.error
        return ReadableSpan(
            span.name,
            context=_context(trace, span.id, remote=False),
            parent=_context(trace, span.parent, remote=span.kind == SERVER)
            if span.parent
            else None,
            resource=self._resource,
            attributes=span.attributes | ({"error.type": error} if error else {}),
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, error) if error else Status(),
            start_time=round((span.began_s + offset_s) * 1e9),
            end_time=round((span.ended_s + offset_s) * 1e9),
            instrumentation_scope=self._scope,
        )


def _context(trace: int, span: int, *, remote: bool) -> SpanContext:
    return SpanContext(trace, span, remote, TraceFlags(TraceFlags.SAMPLED))


def _frame(pipe: BinaryIO) -> bytes:
    """The next one; b"" at the end. Raises ValueError for one that is none of ours."""
    head = pipe.read(HEAD.size)
    if len(head) < HEAD.size:
        return b""
    (size_bytes,) = HEAD.unpack(head)
    if size_bytes > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {size_bytes} bytes")
    frame = pipe.read(size_bytes)
    return frame if len(frame) == size_bytes else b""


def main() -> None:
    """Until stdin ends."""
    sender = Sender(msgspec.json.decode(sys.argv[1], type=Exporting))
    decode = msgspec.msgpack.Decoder(Batch).decode
    while frame := _frame(sys.stdin.buffer):
        report = sender.send(decode(frame))
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
