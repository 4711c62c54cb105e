"""What a check found: sound, wrong, not shown, or not applicable; with both values that it set side
by side, the first that differs, and what to change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

Status = Literal["ok", "wrong", "not shown", "not applicable"]


class Finding(msgspec.Struct, frozen=True):
    """One check of one part, or of several beside each other.

    ``who``: an engine, an agent, a pair "p → d", or "gateway". ``compared``: what was set side by
    side, as text. ``field``: the first that differs. ``why``: in words; of what is not shown, the
    reason. ``change``: what to do about it.
    """

    check: str
    who: str
    status: Status
    compared: dict[str, str] = {}
    field: str = ""
    why: str = ""
    change: str = ""


def ok(check: str, who: str, compared: Mapping[str, object] | None = None) -> Finding:
    """It was seen to be right."""
    return Finding(check, who, "ok", _texts(compared))


def wrong(
    check: str,
    who: str,
    why: str,
    change: str,
    compared: Mapping[str, object] | None = None,
    *,
    field: str = "",
) -> Finding:
    """It was seen to be wrong."""
    values = _texts(compared)
    return Finding(check, who, "wrong", values, field or next(iter(values), ""), why, change)


def not_shown(
    check: str, who: str, why: str, change: str = "", compared: Mapping[str, object] | None = None
) -> Finding:
    """Nobody could see it. Never a pass."""
    return Finding(check, who, "not shown", _texts(compared), "", why, change)


def not_applicable(check: str, who: str, why: str) -> Finding:
    """There is nothing of the kind here."""
    return Finding(check, who, "not applicable", why=why)


def worst(findings: Iterable[Finding]) -> Status:
    """Of several: wrong before not shown before ok before not applicable."""
    found = {finding.status for finding in findings}
    order: tuple[Status, ...] = ("wrong", "not shown", "ok")
    return next((status for status in order if status in found), "not applicable")


def _texts(compared: Mapping[str, object] | None) -> dict[str, str]:
    return {name: str(value) for name, value in (compared or {}).items()}
