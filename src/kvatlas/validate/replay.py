"""Does a recorded gateway decide the same again, every price to its last digit?"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvatlas.core.directory import Directory
from kvatlas.core.dispatch import Again, Apply, Dispatcher, Join, Question
from kvatlas.core.events import Event, UnitsGone, UnitsHeld
from kvatlas.core.keys import Keyring
from kvatlas.core.router import Decision, Router
from kvatlas.service import recording

DIFFERENCES_MAX = 100  # kept to be shown; all are counted

# Keys are made anew, so any secret decides the same. Those that agents announced are renamed.
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
    renamed = _renamed(path)
    header, frames = recording.read(path)
    keyring = Keyring(_SECRET)
    dispatcher = _dispatcher(header, keyring)
    result = Replay(header.version)
    first_at = None
    for frame in frames:
        kind = type(frame.event).__name__
        result.inputs[kind] = result.inputs.get(kind, 0) + 1
        first_at = frame.at if first_at is None else first_at
        result.duration_s = frame.at - first_at
        event = frame.event
        if renamed and isinstance(event, Apply):
            event = Apply(event.publisher, tuple(_as_ours(e, renamed) for e in event.events))
        answer = dispatcher.handle(event, frame.at)
        if isinstance(frame.event, Question | Again):
            _compare(result, frame.answer, answer)
    return result


def _renamed(path: Path) -> dict[bytes, bytes]:
    """Keys that agents may have announced → the same of this replay. Of others nobody asked."""
    header, frames = recording.read(path)
    keyring = Keyring(_SECRET)
    dispatcher = _dispatcher(header, keyring)
    found: dict[bytes, bytes] = {}
    for frame in frames:
        if isinstance(frame.event, Join):
            dispatcher.handle(frame.event, frame.at)
        elif isinstance(frame.event, Question) and frame.keys:
            adapters = dict(frame.event.among)
            for publisher, keys in frame.keys:
                asked = frame.event.tokens, frame.event.sharing(), adapters[publisher]
                found |= zip(keys, dispatcher.keys_below(publisher, *asked), strict=True)
    return found


def _dispatcher(header: recording.Header, keyring: Keyring) -> Dispatcher:
    directory = Directory(keyring, header.limits)
    return Dispatcher(directory, Router(header.params), keyring, rules=header.rules)


def _as_ours(event: Event, renamed: dict[bytes, bytes]) -> Event:
    if not isinstance(event, UnitsHeld | UnitsGone):
        return event
    bodies, points = (
        tuple(renamed.get(key, key) for key in keys) for keys in (event.bodies, event.points)
    )
    return type(event)(event.tier, bodies, points)


def _compare(result: Replay, recorded: Decision | None, replayed: Decision | None) -> None:
    result.decisions += 1
    if recorded != replayed:
        result.different += 1
        if recorded is None or replayed is None:
            return
        if len(result.differences) < DIFFERENCES_MAX:
            result.differences.append(Difference(recorded, replayed))
