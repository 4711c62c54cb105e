"""Bulk bytes (KV state) on their way over links that they share with others.

A *flow* goes over a path of links, such as the sender's network card and the receiver's. All flows
share the links max-min fairly at every moment (Bertsekas and Gallager, "Data Networks", 6.5), which
fair queueing and RDMA's congestion control come close to; on one link that is processor sharing.
Others' traffic (the exchange of a mixture of experts) takes its share first, steadily or in bursts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from kvatlas.errors import ConfigError
from kvatlas.sim.timeline import Timeline, Timer
from kvatlas.workload.links import LINKS

FLOWS_MAX = 100_000
_SLACK_BYTES = 0.5  # a flow with less than this left has arrived
_PERIOD_MIN_S = 1e-4
_SHORTEST_S = 1e-9  # between two looks, so that rounding cannot stop time


class LinkSpec(msgspec.Struct, frozen=True):
    """One link: reached bytes/s, seconds that the first byte takes.

    ``background_share`` of it is taken by others, on average. With ``background_period_s`` above 0
    they come in bursts: once per period they take ``background_burst_share`` of the link for as
    long as makes up that average. Raises ConfigError where a figure cannot be.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    background_share: float = 0.0
    background_period_s: float = 0.0
    background_burst_share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_s < math.inf:
            raise ConfigError(f"bytes_per_s is {self.bytes_per_s}: above 0 is needed")
        for field in ("latency_s", "background_period_s"):
            value = getattr(self, field)
            if not 0 <= value < 86_400:
                raise ConfigError(f"{field} is {value}: 0 to a day is possible")
        if not 0 <= self.background_share < 1:
            raise ConfigError(f"background_share is {self.background_share}: 0 to below 1")
        if not self.background_share <= self.background_burst_share <= 1:
            raise ConfigError(
                f"background_burst_share is {self.background_burst_share}: from "
                "background_share to 1"
            )
        if 0 < self.background_period_s < _PERIOD_MIN_S:
            raise ConfigError(f"background_period_s below {_PERIOD_MIN_S}: take the steady share")

    def rate(self, now: float) -> tuple[float, float]:
        """Bytes per second that the background leaves at ``now``, and until when that holds."""
        period_s, share = self.background_period_s, self.background_share
        if not period_s or not share:
            return self.bytes_per_s * (1.0 - share), math.inf
        start = math.floor(now / period_s) * period_s
        end = start + period_s * min(1.0, share / self.background_burst_share)
        if now < end - _SHORTEST_S:
            return self.bytes_per_s * (1.0 - self.background_burst_share), end
        return self.bytes_per_s, max(start + period_s, now + _SHORTEST_S)


#: The known links (`kvatlas.workload.links`, where their sources are), at what they reach.
PROFILES: dict[str, LinkSpec] = {
    name: LinkSpec(link.bytes_per_s, link.latency_s) for name, link in LINKS.items()
}


class Link:
    """One link and what went over it. ``speed`` (faults) multiplies its bandwidth."""

    def __init__(self, name: str, spec: LinkSpec) -> None:
        self.name = name
        self.spec = spec
        self.speed = 1.0
        self.bytes_moved = 0.0
        self.busy_s = 0.0
        self.flows = 0

    def rate(self, now: float) -> tuple[float, float]:
        """As `LinkSpec.rate`, at its present speed."""
        rate, until = self.spec.rate(now)
        return rate * self.speed, until


class Flow:
    """Bytes on their way. ``done(True)`` when the last one is there, ``done(False)`` when it was
    broken off."""

    __slots__ = ("_done", "_fabric", "left_bytes", "path", "rate")

    def __init__(
        self,
        fabric: Fabric,
        path: tuple[Link, ...],
        size_bytes: float,
        done: Callable[[bool], None],
    ) -> None:
        self._fabric = fabric
        self._done: Callable[[bool], None] | None = done
        self.path = path
        self.left_bytes = size_bytes
        self.rate = 0.0

    def end(self, arrived: bool) -> None:
        """Tell how it ended, once."""
        done, self._done = self._done, None
        if done is not None:
            done(arrived)

    def break_off(self) -> None:
        """The other end died, or nobody wants it any more."""
        self._fabric.remove(self)
        self.end(False)


class Fabric:
    """All links and flows of a cluster."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.links: dict[str, Link] = {}
        self._flows: list[Flow] = []
        self._seen_at = 0.0
        self._timer: Timer | None = None

    @property
    def flows(self) -> int:
        """Flows under way."""
        return len(self._flows)

    def add(self, name: str, spec: LinkSpec) -> Link:
        """A link; a name that is known gives the link that has it."""
        if name not in self.links:
            self.links[name] = Link(name, spec)
        return self.links[name]

    def start(self, path: Sequence[str], size_bytes: float, done: Callable[[bool], None]) -> Flow:
        """Move ``size_bytes`` over the named links. Raises KeyError for an unknown link,
        ValueError beyond ``FLOWS_MAX``."""
        if len(self._flows) >= FLOWS_MAX:
            raise ValueError(f"more than {FLOWS_MAX} flows at once")
        self._advance()
        links = tuple(dict.fromkeys(self.links[name] for name in path))
        flow = Flow(self, links, float(size_bytes), done)
        self._flows.append(flow)
        for link in links:
            link.flows += 1
        self._share()
        return flow

    def set_speed(self, name: str, speed: float) -> None:
        """A fault: the link runs at ``speed`` times its bandwidth from now on; 0 stops it."""
        self._advance()
        self.links[name].speed = max(speed, 0.0)
        self._share()

    def remove(self, flow: Flow) -> None:
        """Take a flow off its links; what moved was in vain."""
        if flow in self._flows:
            self._advance()
            self._take_off([flow])
            self._share()

    def _take_off(self, gone: list[Flow]) -> None:
        for flow in gone:
            self._flows.remove(flow)
            for link in flow.path:
                link.flows -= 1

    def _advance(self) -> None:
        """Move every flow on to now, at the rates that held since the last look."""
        now = self.timeline.now
        passed = now - self._seen_at
        self._seen_at = now
        if passed <= 0 or not self._flows:
            return
        busy: dict[str, Link] = {}
        for flow in self._flows:
            moved = min(flow.rate * passed, flow.left_bytes)
            flow.left_bytes -= moved
            for link in flow.path:
                link.bytes_moved += moved
                busy[link.name] = link
        for link in busy.values():
            link.busy_s += passed

    def _share(self) -> None:
        """Give every flow its max-min fair rate, and look again when something changes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._flows:
            return
        now = self.timeline.now
        room: dict[Link, float] = {}
        over: dict[Link, dict[Flow, None]] = {}
        due = math.inf
        for flow in self._flows:
            for link in flow.path:
                if link not in room:
                    room[link], until = link.rate(now)
                    due = min(due, until)
                over.setdefault(link, {})[flow] = None
        for flow in self._flows:
            flow.rate = math.inf  # of a path without links
        while over:
            link = min(over, key=lambda link: (room[link] / len(over[link]), link.name))
            rate = max(room[link], 0.0) / len(over[link])
            for flow in list(over[link]):
                flow.rate = rate
                for other in flow.path:
                    room[other] -= rate
                    over[other].pop(flow, None)
            over = {link: flows for link, flows in over.items() if flows}
        for flow in self._flows:
            if flow.left_bytes <= _SLACK_BYTES or flow.rate == math.inf:
                due = now
            elif flow.rate > 0:
                due = min(due, now + max(flow.left_bytes / flow.rate, _SHORTEST_S))
        if due < math.inf:
            self._timer = self.timeline.at(due, self._turn)

    def _turn(self) -> None:
        self._timer = None
        self._advance()
        arrived = [
            flow
            for flow in self._flows
            if flow.left_bytes <= max(_SLACK_BYTES, flow.rate * _SHORTEST_S)
        ]
        self._take_off(arrived)
        self._share()
        for flow in arrived:
            for link in flow.path:
                link.bytes_moved += flow.left_bytes
            latency_s = sum(link.spec.latency_s for link in flow.path)
            self.timeline.after(latency_s, flow.end, True)
