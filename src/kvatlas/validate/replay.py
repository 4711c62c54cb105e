"""Does a recorded gateway decide the same again, every price to its last digit?"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvatlas.core.directory import Directory
from kvatlas.core.dispatch import Again, Dispatcher, Question
from kvatlas.core.keys import Keyring
from kvatlas.core.router import Decision, Router
from kvatlas.service import recording

DIFFERENCES_MAX = 100  # kept to be shown; all are counted

# Keys never leave the dispatcher, so any secret decides the same.
_SECRET = b"a replay needs no secret"


class Difference(msgspec.Struct, frozen=True):
    """One decision that came out otherwise."""

    recorded: Decision
    replayed: Decision


class Replay(msgspec.Struct):
    """``different`` decisions of ``decisions``, the first of them in ``differences``."""

    version: str
    inputs: dict[str, int] = {}
    decisions: int = 0
    different: int = 0
    differences: list[Difference] = []
    duration_s: float = 0.0


def replay(path: Path) -> Replay:
    """Raises TraceError where the file is no recording or is damaged."""
    header, frames = recording.read(path)
    keyring = Keyring(_SECRET)
    dispatcher = Dispatcher(Directory(keyring, header.limits), Router(header.params), keyring)
    result = Replay(header.version)
    first_at = None
    for frame in frames:
        kind = type(frame.event).__name__
        result.inputs[kind] = result.inputs.get(kind, 0) + 1
        first_at = frame.at if first_at is None else first_at
        result.duration_s = frame.at - first_at
        answer = dispatcher.handle(frame.event, frame.at)
        if isinstance(frame.event, Question | Again):
            _compare(result, frame.answer, answer)
    return result


def _compare(result: Replay, recorded: Decision | None, replayed: Decision | None) -> None:
    result.decisions += 1
    if recorded != replayed:
        result.different += 1
        if recorded is None or replayed is None:
            return
        if len(result.differences) < DIFFERENCES_MAX:
            result.differences.append(Difference(recorded, replayed))
