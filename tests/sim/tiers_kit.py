"""A cluster with tiers whose engines really compute, one request at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from sim_kit import Log, cluster_of, pairs_of

from kvatlas.core.agent_values import Config
from kvatlas.core.layout import Layout
from kvatlas.core.records import Tier
from kvatlas.sim.cluster import Cluster
from kvatlas.sim.gateway import Inquiry, Outcome
from kvatlas.sim.tier_node import SimNode
from kvatlas.sim.tier_spec import TierSpec
from kvatlas.sim.world import World
from kvatlas.workload.state import Memory

TURN = 256 * 8  # tokens


def prompt(turns: int, seed: int = 1) -> bytes:
    """Token ids of a session after so many turns."""
    return b"".join((seed * 100_000 + i).to_bytes(4, "little") for i in range(TURN * turns))


class Answering(Memory):
    """Remembers the first token of each answer, which depends on all state before it, and all."""

    first: dict[str, int]
    all: dict[str, list[int]]

    def token(self, id: str, index: int) -> int:
        made = super().token(id, index)
        if not index:
            self.first.setdefault(id, made)  # of a pair, the prefill half makes it first
            self.all[id] = []
        self.all[id].append(made)
        return made


def tiered(spec: TierSpec, **fields: object) -> Cluster:
    return msgspec.structs.replace(cluster_of(**fields), tiers=spec)


class Stage:
    """A cluster whose engines really compute, one request at a time."""

    def __init__(
        self,
        spec: TierSpec | None,
        *,
        paired: bool = False,
        computing: bool = True,
        **fields: object,
    ) -> None:
        self.log = Log()
        self.answers: dict[str, int] = {}
        self.texts: dict[str, list[int]] = {}
        cluster = cluster_of(**{"count": 2, "per_node": 2, **fields})
        if paired:
            cluster = pairs_of(1, 1, **fields)
        self.world = World(
            msgspec.structs.replace(cluster, tiers=spec),
            engine_watchers=[self.log],
            gateway_watchers=[self.log],
            make_model=self._model if computing else None,
        )
        for engine in self.world.engines.values():
            engine.start()
        self.world.gateway.start()

    def _model(self, layout: Layout) -> Memory:
        made = Answering(layout)
        made.first, made.all = self.answers, self.texts
        return made

    @property
    def nodes(self) -> Sequence[SimNode]:
        assert self.world.tiers is not None
        return list(self.world.tiers.nodes.values())

    def ask(
        self, id: str, tokens: bytes, *, scope: str = "", finish: bool = True, output: int = 4
    ) -> None:
        self.world.gateway.ask(Inquiry(id, tokens, output, scope), lambda outcome: None)
        if finish:
            self.until(lambda: not self.world.gateway.in_flight)
            self.wait(5.0)

    def until(self, condition: Callable[[], bool]) -> None:
        end = self.world.timeline.now + 600.0
        while not condition():
            assert self.world.timeline.step(), "it never came to that"
            assert self.world.timeline.now < end, "it takes too long"

    def wait(self, seconds: float) -> None:
        self.world.timeline.after(seconds, lambda: None)
        end = self.world.timeline.now + seconds
        self.until(lambda: self.world.timeline.now >= end)

    def moved(self, *links: str) -> float:
        """Bytes that went over these."""
        return sum(self.world.fabric.links[name].bytes_moved for name in links)

    def outcome(self, id: str) -> Outcome:
        (found,) = [outcome for outcome in self.log.outcomes if outcome.id == id]
        assert not found.fault
        return found

    def only(self, engine: str) -> None:
        """Leave one engine, with an empty cache."""
        for name, each in self.world.engines.items():
            each.stop()
            if name == engine:
                each.start()
        self.wait(10.0)

    def restart(self, engine: str) -> None:
        """A new life with an empty cache."""
        self.world.engines[engine].stop()
        self.world.engines[engine].start()
        self.wait(10.0)

    def at_rest(self) -> None:
        """Nothing is under way, nothing held that should not be; the directory says the same."""
        self.world.gateway.stop()
        while self.world.timeline.step():
            pass
        shelves = self.world.dispatcher.directory.shelves
        for node in self.nodes:
            assert not node.agent.busy
            for tier in (Tier.DRAM, Tier.DISK):
                if not node.held(tier):
                    continue
                books = node.agent.ledger(tier)
                assert set(node.held(tier)) == {entry.key for entry in books.entries()}
                usage = books.usage()
                assert not usage.reserved_bytes + usage.leases + usage.leaving_bytes
                bodies = sum(not name[-1] for name in node.held(tier))
                points = len(node.held(tier)) - bodies
                assert shelves.held(node.publisher)[tier] == (bodies, points)
        for engine in self.world.engines.values():
            assert engine.model.free_share == 1.0
            assert not engine.model.held


def right(tokens: bytes, **fields: object) -> int:
    """What an engine answers that computed everything."""
    stage = Stage(None, **fields)
    stage.ask("cold", tokens)
    return stage.answers["cold"]


POINT, BODY = 15_467_904, 1_002_240  # bytes of DeepSeek V4 Flash in vLLM, per 256 tokens
MODELS = ["deepseek-v4-flash", "llama-3.1-70b"]


def fields_of(model: str) -> dict[str, object]:
    return {"model": model, "devices": 4 if model.startswith("llama") else 2}


LLAMA = fields_of("llama-3.1-70b")  # in blocks of 16
SHARED = TierSpec(
    dram_bytes=10**12,
    object_bytes=10**13,
    agent=Config(write_through=(Tier.OBJECT,), hit_share=1.0),
)
