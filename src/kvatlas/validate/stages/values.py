"""What a stage comes to: a verdict per acceptance point, with its evidence. Pure.

A point ends as ``pass``, ``fail``, ``not shown`` (with the reason) or ``not applicable`` (only what
the operator declared). All but pass and not applicable stop the next stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, TypeVar

import msgspec

Status = Literal["pass", "fail", "not shown", "not applicable"]
Stage = Literal["a", "b", "c", "d", "e"]
STAGES: tuple[Stage, ...] = ("a", "b", "c", "d", "e")
TITLES: dict[Stage, str] = {
    "a": "Combined baseline",
    "b": "P/D hand-over alone",
    "c": "host memory",
    "d": "distributed store",
    "e": "one optimisation",
}
EXCERPT_MAX = 300  # characters of a log line or an answer that are kept as evidence

F = TypeVar("F")


class Missing(msgspec.Struct, frozen=True, tag=True):
    """A fact that could not be had, and why: whoever needs it is not shown."""

    reason: str


class Point(msgspec.Struct, frozen=True):
    """One acceptance point. ``seed``: its place in seed document 000; ``asks``: what that wants;
    ``shown``: how it is shown. ``declinable``: the operator may declare that it does not apply;
    ``trial``: a command of the operator's may show it instead."""

    id: str
    seed: str
    asks: str
    shown: str
    declinable: bool = False
    trial: bool = False


class Finding(msgspec.Struct, frozen=True):
    """What a rule makes of the facts. ``reason`` says what is wrong or missing; "" for a pass."""

    status: Status
    reason: str = ""
    evidence: dict[str, Any] = {}


class Verdict(msgspec.Struct, frozen=True):
    """A point and its finding, as it is kept and printed."""

    point: str
    seed: str
    asks: str
    shown: str
    status: Status
    reason: str
    evidence: dict[str, Any]


class Rule(msgspec.Struct, Generic[F], frozen=True):
    """A point and who judges it, from the facts of its stage."""

    point: Point
    judge: Callable[[F], Finding]


def passed(**evidence: Any) -> Finding:
    """It was shown to hold."""
    return Finding("pass", "", evidence)


def failed(reason: str, **evidence: Any) -> Finding:
    """It was shown not to hold."""
    return Finding("fail", reason, evidence)


def hidden(reason: str, **evidence: Any) -> Finding:
    """Nobody can say."""
    return Finding("not shown", reason, evidence)


def declined(reason: str, **evidence: Any) -> Finding:
    """The operator declared that it does not apply."""
    return Finding("not applicable", reason, evidence)


class Trial(msgspec.Struct, frozen=True):
    """What a command of the operator's said of a point: exit status 0 is a pass, 1 a fail."""

    command: str
    status: int
    output: str


def judged(
    rules: tuple[Rule[F], ...],
    facts: F,
    *,
    not_applicable: Mapping[str, str] = {},
    trials: Mapping[str, Trial] = {},
) -> tuple[Verdict, ...]:
    """A verdict per rule, in their order. ``not_applicable``: the operator's reasons by point."""
    found = []
    for rule in rules:
        point = rule.point
        if point.declinable and point.id in not_applicable:
            finding = declined(f"declared: {not_applicable[point.id]}")
        elif point.trial and point.id in trials:
            finding = _of_trial(trials[point.id])
        else:
            finding = rule.judge(facts)
        found.append(
            Verdict(
                point.id,
                point.seed,
                point.asks,
                point.shown,
                finding.status,
                finding.reason,
                finding.evidence,
            )
        )
    return tuple(found)


def _of_trial(trial: Trial) -> Finding:
    evidence = {"command": trial.command, "status": trial.status, "output": trial.output}
    if trial.status == 0:
        return passed(**evidence)
    if trial.status == 1:
        return failed("the operator's own trial says that it does not hold", **evidence)
    return hidden(f"the operator's trial ended with status {trial.status}", **evidence)


def excerpt(text: str) -> str:
    """As evidence: not longer than it is read."""
    return text if len(text) <= EXCERPT_MAX else text[:EXCERPT_MAX] + " …"
