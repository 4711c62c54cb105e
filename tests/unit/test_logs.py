"""Logs as JSON lines."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from kvatlas.service.logs import REQUEST_ID, TRACE_ID, JsonLines


def said(message: str, *args: object, **more: object) -> dict[str, object]:
    record = logging.getLogger("kvatlas.x").makeRecord(
        "kvatlas.x", logging.WARNING, "f.py", 1, message, args, None, extra=more
    )
    line = JsonLines().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert isinstance(found, dict)
    return found


def test_a_line_says_when_who_and_what() -> None:
    line = said("%s: down", "w0")
    assert line.pop("time").endswith("Z")  # type: ignore[attr-defined]
    assert line == {"level": "warning", "logger": "kvatlas.x", "message": "w0: down"}


async def test_lines_about_a_request_name_it_and_its_trace_and_no_other() -> None:
    async def handle(name: str) -> dict[str, object]:
        REQUEST_ID.set(name)
        TRACE_ID.set(f"trace of {name}")
        await asyncio.sleep(0)
        return said("failed")

    lines = await asyncio.gather(*(asyncio.create_task(handle(name)) for name in "ab"))
    assert [(line["request_id"], line["trace_id"]) for line in lines] == [
        ("a", "trace of a"),
        ("b", "trace of b"),
    ]
    assert not {"request_id", "trace_id"} & set(said("nobody's"))


def test_what_json_cannot_hold_and_lines_in_lines() -> None:
    line = said("a\nb \x00 é", odd={"what": object}, path=object())
    assert line["message"] == "a\nb \x00 é"
    assert "object" in str(line["path"])


def test_a_traceback_is_in_its_line() -> None:
    try:
        raise ValueError("why")
    except ValueError as error:
        record = logging.makeLogRecord({"msg": "m", "exc_info": (ValueError, error, None)})
    assert "ValueError: why" in json.loads(JsonLines().format(record))["exception"]


@pytest.mark.parametrize("message", ["\ud800", "%d"])
def test_nothing_fails_for_what_is_logged(message: str) -> None:
    assert said(message)["level"] == "warning"
