"""What a simulated gateway knows of one engine."""

from __future__ import annotations

from kvatlas.core.records import Publisher
from kvatlas.sim.feed import Feed


class Worker:
    """One engine, as one gateway has seen it. The gateway's own."""

    def __init__(self, publisher: Publisher, feed: Feed, role: str) -> None:
        self.publisher = publisher
        self.role = role
        self.feed = feed
        self.flights: set[str] = set()
        self.life = 0
        self.fingerprint = b""
        self.up = True
        self.asleep = False
        self.failures = 0
        self.successes = 0
        self.answered = True  # the last look
        self.reached = True  # no connection failed since the last good look
