"""Where a publisher's events come from and go to, and how its stream is, as plain values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from kvatlas.core import sequence
from kvatlas.core.claims import Applied
from kvatlas.core.events import Event
from kvatlas.core.records import Publisher


class Source(msgspec.Struct, frozen=True):
    """Where one publisher's events are. ``replay`` "" means it cannot be asked again.

    ``bind`` True: the engine connects to us at ``endpoint``; False: we connect to it. None: bind
    if that address is ours and free, else connect (a vLLM engine connects to every concrete TCP
    address in its configuration, but reports one that it bound by itself in the same way).
    ``curve_key``: by which its sender is known, and what it sends is encrypted; "": in the clear.
    """

    endpoint: str
    replay: str = ""
    bind: bool | None = False
    topic: str = ""
    curve_key: str = ""


class Claims(Protocol):
    """Where events go: `core.directory.Directory`."""

    def apply(self, publisher: Publisher, events: Iterable[Event]) -> Applied: ...

    def reset(self, publisher: Publisher) -> None: ...

    def believe(self, publisher: Publisher, believed: bool) -> None: ...


class FeedStatus(msgspec.Struct):
    """One publisher's stream, as plain numbers. Live: read it, do not keep it."""

    publisher: Publisher
    source: Source
    connected: bool = False
    bound: bool = False
    error: str = ""  # why there is no stream at all, "" otherwise
    messages: int = 0
    events: int = 0
    malformed: int = 0  # events that could not be decoded, and messages of a wrong shape
    unknown: int = 0
    epoch: int = 0
    replaying: bool = False
    last_event_s: float = -1.0  # on the event loop's clock
    applied: Applied = msgspec.field(default_factory=Applied)
    stream: sequence.Counters = msgspec.field(default_factory=sequence.Counters)
    reasons: dict[str, int] = msgspec.field(default_factory=dict)
