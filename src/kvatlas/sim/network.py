"""Messages between the actors: each takes its time, and everything that may go wrong on the way
goes through `Network.interpose`. They are small: bulk bytes travel over `sim.links`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvatlas.sim.messages import AskReplay, Cancel, Look, Message, Refused, Submit
from kvatlas.sim.timeline import Timeline


class Envelope(msgspec.Struct, frozen=True):
    """One message on its way: it arrives ``delay_s`` after it was sent."""

    source: str
    destination: str
    message: Message
    delay_s: float


Interposer = Callable[[Envelope], Sequence[Envelope]]
Receiver = Callable[[str, Message], None]  # (from whom, what)


class Network:
    """Who can be reached under which name, and how long messages take."""

    def __init__(self, timeline: Timeline, *, latency_s: float = 0.0) -> None:
        self._timeline = timeline
        self._latency_s = latency_s
        self._receivers: dict[str, Receiver] = {}
        self._interposers: list[Interposer] = []
        self.undelivered = 0  # nobody listened under that name
        self.lost = 0  # an interposer took them

    def attach(self, name: str, receive: Receiver) -> None:
        """From now on ``receive(source, message)`` gets what is sent to ``name``."""
        self._receivers[name] = receive

    def detach(self, name: str) -> None:
        """Nobody listens there any more (a process that ended): what arrives is refused."""
        self._receivers.pop(name, None)

    def interpose(self, change: Interposer) -> None:
        """Let ``change`` decide about each message: an empty answer loses it, two double it,
        another ``delay_s`` delays or reorders it. Several are asked one after another."""
        self._interposers.append(change)

    def send(self, source: str, destination: str, message: Message) -> None:
        """Put a message on its way."""
        if not self._interposers:
            self._timeline.post(self._latency_s, self._deliver, source, destination, message)
            return
        envelopes: Sequence[Envelope] = (Envelope(source, destination, message, self._latency_s),)
        for change in self._interposers:
            envelopes = [new for envelope in envelopes for new in change(envelope)]
        if not envelopes:
            self.lost += 1
        for envelope in envelopes:
            self._timeline.post(
                envelope.delay_s,
                self._deliver,
                envelope.source,
                envelope.destination,
                envelope.message,
            )

    def _deliver(self, source: str, destination: str, message: Message) -> None:
        receive = self._receivers.get(destination)
        if receive is not None:
            receive(source, message)
            return
        self.undelivered += 1
        if isinstance(message, Submit | Cancel | AskReplay | Look):
            self.send(destination, source, Refused(message))
