"""Logs as text or as JSON lines; each line about a request names it, and its trace."""

from __future__ import annotations

import datetime
import json
import logging
from contextvars import ContextVar
from typing import Literal, get_args

LogFormat = Literal["text", "json"]
FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
LEVELS = ("warning", "info")

#: Of the request that this task is about; "" for none.
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
TRACE_ID: ContextVar[str] = ContextVar("trace_id", default="")

_TEXT = "%(asctime)s %(name)s: %(message)s"
_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonLines(logging.Formatter):
    """One JSON object per line: what was said, by whom, when; ``extra`` fields as they are."""

    def format(self, record: logging.LogRecord) -> str:
        """What JSON cannot hold is told as text."""
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _KNOWN}
        for name, variable in (("request_id", REQUEST_ID), ("trace_id", TRACE_ID)):
            if value := variable.get():
                line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, skipkeys=True)


def configure(form: LogFormat = "text", level: str = "warning") -> None:
    """Of the whole process, on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
