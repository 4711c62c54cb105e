"""Links between the actors: messages that take time, and bulk bytes that share bandwidth.

Control messages are small: they take their path's latency and no bandwidth. Bulk bytes (KV state)
are *flows*: all flows of a link progress together, each at an equal share of what its background
traffic leaves (processor sharing), as fair queueing or RDMA's congestion control come close to.

Everything that may go wrong on the way goes through `Network.interpose`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvatlas.sim.messages import AskReplay, Cancel, Look, Message, Refused, Submit
from kvatlas.sim.timeline import Timeline, Timer

_SLACK_BYTES = 0.5  # a flow with less than this left has arrived


class LinkSpec(msgspec.Struct, frozen=True):
    """One link. ``background_share`` of its bandwidth is taken by others (MoE expert traffic),
    in bursts when ``background_period_s`` is above 0: then it takes ``background_burst_share``
    during the first ``background_share / background_burst_share`` of each period, else nothing.
    """

    name: str
    bytes_per_s: float
    latency_s: float = 0.0
    background_share: float = 0.0
    background_period_s: float = 0.0
    background_burst_share: float = 1.0


class Link:
    """Bandwidth shared by the flows that are on it. ``speed`` slows it down (faults)."""

    def __init__(self, timeline: Timeline, spec: LinkSpec) -> None:
        self._timeline = timeline
        self.spec = spec
        self.bytes_moved = 0.0
        self.busy_s = 0.0
        self.flows_ended = 0
        self._speed = 1.0
        self._flows: list[Flow] = []
        self._seen_at = 0.0
        self._timer: Timer | None = None

    @property
    def flows(self) -> int:
        """Flows under way."""
        return len(self._flows)

    def start(self, size_bytes: float, done: Callable[[], None]) -> Flow:
        """Move ``size_bytes``; ``done()`` is called when the last one has arrived."""
        self._advance()
        flow = Flow(self, float(size_bytes), done)
        self._flows.append(flow)
        self._arm()
        return flow

    def set_speed(self, speed: float) -> None:
        """A fault: the link runs at ``speed`` times its bandwidth from now on; 0 stops it."""
        self._advance()
        self._speed = max(speed, 0.0)
        self._arm()

    def estimate_s(self, size_bytes: float) -> float:
        """How long a flow of this size would take now, if no other came or went."""
        share = self._mean_rate() / (len(self._flows) + 1)
        return self.spec.latency_s + (size_bytes / share if share > 0 else float("inf"))

    def _mean_rate(self) -> float:
        return self.spec.bytes_per_s * self._speed * (1.0 - self.spec.background_share)

    def _rate(self, now: float) -> tuple[float, float]:
        """Bytes per second that the background leaves now, and until when that holds."""
        spec = self.spec
        full = spec.bytes_per_s * self._speed
        if not spec.background_period_s or not spec.background_share:
            return full * (1.0 - spec.background_share), float("inf")
        number = int(now / spec.background_period_s)
        start = number * spec.background_period_s
        burst = start + spec.background_period_s * spec.background_share / (
            spec.background_burst_share
        )
        if now < burst:
            return full * (1.0 - spec.background_burst_share), burst
        return full, max(start + spec.background_period_s, now + 1e-9)

    def _advance(self) -> None:
        """Move every flow on to now. The rate has not changed since the last call."""
        now = self._timeline.now
        passed = now - self._seen_at
        if passed > 0 and self._flows:
            rate, _ = self._rate(self._seen_at)
            share = rate * passed / len(self._flows)
            for flow in self._flows:
                moved = min(share, flow.left_bytes)
                flow.left_bytes -= moved
                self.bytes_moved += moved
            self.busy_s += passed
        self._seen_at = now

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._flows:
            return
        now = self._timeline.now
        rate, until = self._rate(now)
        due = until
        if rate > 0:
            least = min(flow.left_bytes for flow in self._flows)
            due = min(due, now + max(least, 0.0) * len(self._flows) / rate)
        if due < float("inf"):
            self._timer = self._timeline.at(due, self._turn)

    def _turn(self) -> None:
        self._timer = None
        self._advance()
        rate, _ = self._rate(self._timeline.now)
        # What is left takes no longer than time can tell apart.
        slack = max(_SLACK_BYTES, rate * self._timeline.now * 1e-15)
        ended = [flow for flow in self._flows if flow.left_bytes <= slack]
        if ended:
            self._flows = [flow for flow in self._flows if flow.left_bytes > slack]
        self._arm()
        for flow in ended:
            self.bytes_moved += flow.left_bytes
            self.flows_ended += 1
            self._timeline.after(self.spec.latency_s, flow.finish)

    def _drop(self, flow: Flow) -> None:
        if flow in self._flows:
            self._advance()
            self._flows.remove(flow)
            self._arm()


class Flow:
    """Bytes on their way over one link."""

    def __init__(self, link: Link, size_bytes: float, done: Callable[[], None]) -> None:
        self._link = link
        self._done: Callable[[], None] | None = done
        self.size_bytes = size_bytes
        self.left_bytes = size_bytes

    def finish(self) -> None:
        """The last byte is there."""
        done, self._done = self._done, None
        if done is not None:
            done()

    def cancel(self) -> None:
        """Nobody wants it any more: what moved was in vain."""
        self._done = None
        self._link._drop(self)


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
        self.links: dict[str, Link] = {}
        self.messages = 0
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

    def add_link(self, spec: LinkSpec) -> Link:
        """A link for bulk bytes; the same name again gives the same link."""
        if spec.name not in self.links:
            self.links[spec.name] = Link(self._timeline, spec)
        return self.links[spec.name]

    def send(self, source: str, destination: str, message: Message) -> None:
        """Put a message on its way."""
        self.messages += 1
        envelopes: Sequence[Envelope] = (Envelope(source, destination, message, self._latency_s),)
        for change in self._interposers:
            envelopes = [new for envelope in envelopes for new in change(envelope)]
        if not envelopes:
            self.lost += 1
        for envelope in envelopes:
            self._timeline.after(envelope.delay_s, self._deliver, envelope)

    def _deliver(self, envelope: Envelope) -> None:
        receive = self._receivers.get(envelope.destination)
        if receive is not None:
            receive(envelope.source, envelope.message)
            return
        self.undelivered += 1
        message = envelope.message
        if isinstance(message, Submit | Cancel | AskReplay | Look):
            self.send(envelope.destination, envelope.source, Refused(message))
