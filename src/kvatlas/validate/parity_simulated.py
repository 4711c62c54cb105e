"""The same scenario in the simulator."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvatlas.connectors.stub_text import WordTokenizer
from kvatlas.connectors.stub_wire import EventEncoder
from kvatlas.core.events import Batch, Event
from kvatlas.core.layout import Layout
from kvatlas.core.router import Decision
from kvatlas.service.wire import Decoder
from kvatlas.sim.cluster import NetworkTable
from kvatlas.sim.engines import SimEngine
from kvatlas.sim.gateway import Inquiry, Outcome
from kvatlas.sim.world import Play, World
from kvatlas.validate.parity_values import (
    NEVER_S,
    End,
    Request,
    Scenario,
    Side,
    directory_digest,
    text_digest,
)
from kvatlas.workload.protocol import Admitted, Arrive
from kvatlas.workload.state import Memory
from kvatlas.workload.trace import Trace


class _Watch:
    """Sees what happens in gateway and engines."""

    def __init__(self, engines: Sequence[str]) -> None:
        self.requests: dict[str, Request] = {}
        self.raw: dict[str, list[Event]] = {name: [] for name in engines}
        self.wired: dict[str, list[Event]] = {name: [] for name in engines}  # as sockets bring them
        self._encoder, self._decoder = EventEncoder(), Decoder()

    def decided(self, inquiry: Inquiry, decision: Decision) -> None:
        self.requests[inquiry.id] = Request(inquiry.id, decision)

    def waited(self, gaps_s: Sequence[float], count: int) -> None:
        pass

    def ended(self, outcome: Outcome) -> None:
        request = self.requests[outcome.id]
        request.tried = list(outcome.tried)
        request.ttft_s = outcome.ttft_s
        request.ended_at = outcome.ended_at
        request.cached_tokens = outcome.cached_tokens
        request.fault = outcome.fault

    def admitted(
        self, engine: SimEngine, arrive: Arrive, admitted: Admitted, waited_s: float
    ) -> None:
        pass

    def published(self, engine: SimEngine, batch: Batch) -> None:
        self.raw[engine.name] += batch.events
        payload = self._encoder.payload(batch.events, batch.ts)
        self.wired[engine.name] += self._decoder.decode(batch.seq, payload).events


class _Voice(Memory):
    """Remembers what it said."""

    def __init__(self, layout: Layout, said: dict[str, dict[int, int]], vocabulary: int) -> None:
        super().__init__(layout, vocabulary=vocabulary)
        self._said = said

    def token(self, id: str, index: int) -> int:
        token = super().token(id, index)
        self._said.setdefault(id, {})[index] = token
        return token


def simulated(scenario: Scenario) -> Side:
    """Play it: messages take no time here, as none passes for them on the other side."""
    cluster = scenario.cluster
    cluster = msgspec.structs.replace(
        cluster,
        network=NetworkTable(latency_s=0.0),
        gateway=msgspec.structs.replace(
            cluster.gateway, poll_s=NEVER_S, poll_timeout_s=NEVER_S, connect_timeout_s=NEVER_S
        ),
    )
    said: dict[str, dict[int, int]] = {}
    tokenizer = WordTokenizer()
    watch = _Watch([member.name for member in cluster.members])
    world = World(
        cluster,
        engine_watchers=[watch],
        gateway_watchers=[watch],
        make_model=lambda layout: _Voice(layout, said, tokenizer.voices),
    )
    trace = Trace(scenario.name, "scenario", scenario.block_tokens, lambda: iter(scenario.requests))
    for change in scenario.changes:
        world.timeline.at(change.at_s, world.engines[change.engine].set_pace, change.pace)
    world.play(trace, Play(closed_loop=scenario.closed_loop))
    for id, request in watch.requests.items():
        tokens = [token for _, token in sorted(said.get(id, {}).items())]
        text = "".join(tokenizer.say(token, first=not i) for i, token in enumerate(tokens))
        request.answer = text_digest(text)
    return Side(
        watch.requests,
        {name: tuple(events) for name, events in watch.wired.items()},
        {
            name: End(
                engine=engine.model.digest(),
                preemptions=engine.preemptions,
                holders=world.dispatcher.directory.holders_of(engine.publisher),
            )
            for name, engine in world.engines.items()
        },
        directory_digest(scenario, watch.raw),
    )
