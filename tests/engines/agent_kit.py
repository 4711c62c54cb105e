"""A driver that performs an agent's effects in memory, at once or when told, right or wrong."""

from __future__ import annotations

from collections.abc import Callable

from kvatlas.core.agent import Agent
from kvatlas.core.agent_values import (
    Announce,
    Ask,
    Attach,
    Config,
    Copy,
    Done,
    Drop,
    Effect,
    Fetch,
    Filled,
    Input,
    Lent,
    Load,
    Offer,
    Ready,
    Save,
    Seal,
    Stop,
)
from kvatlas.core.events import Event
from kvatlas.core.layout import Component, Compute, Group, Layout, Rule
from kvatlas.core.ledger import Ledger
from kvatlas.core.ledger_values import Limits
from kvatlas.core.policy.lru import Lru
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Unit, name_of

GRID = 16
FP = b"\7" * 32


def chain_layout(body_bytes: int = 100) -> Layout:
    """One chain, nothing else."""
    return Layout(
        model="chain",
        engine="",
        kv_dtype="",
        grid_tokens=GRID,
        components=(Component("kv", Rule.CHAIN, 1, GRID, body_bytes, body_bytes / GRID),),
        groups=(Group("kv", "full", GRID),),
        compute=Compute(linear=1e6, attention=10.0),
    )


def window_layout(body_bytes: int = 100, window_bytes: int = 50) -> Layout:
    """A chain and a window of two blocks of 8 tokens, half of which a resume reads."""
    return Layout(
        model="window",
        engine="",
        kv_dtype="",
        grid_tokens=GRID,
        components=(
            Component("kv", Rule.CHAIN, 1, GRID, body_bytes, body_bytes / GRID, group="kv"),
            Component("swa", Rule.WINDOW, 1, 8, window_bytes, 1.0, 16, group="swa", least_blocks=1),
        ),
        groups=(Group("kv", "full", GRID), Group("swa", "sliding", 8, 16)),
        compute=Compute(linear=1e6, attention=10.0),
    )


def keys_of(prompt: int, count: int, *, shared: int = 0) -> tuple[bytes, ...]:
    """Block keys of a prompt whose first ``shared`` blocks all prompts have in common."""
    return tuple(
        (0 if i < shared else prompt).to_bytes(8, "big") + i.to_bytes(8, "big")
        for i in range(count)
    )


def content(name: bytes) -> bytes:
    """What a unit's bytes must be."""
    return b"content of " + name


def ledger(capacity_bytes: int, *, high: float = 1.0, low: float = 1.0) -> Ledger:
    return Ledger(Limits(capacity_bytes, high=high, low=low), Lru())


class Driver:
    """One node: tiers and engines as dicts of bytes. ``hold``: operations end only when told."""

    def __init__(
        self,
        *,
        dram: int | None = 10_000,
        disk: int | None = None,
        config: Config | None = None,
        layout: Layout | None = None,
        hold: bool = False,
        agent: Agent | None = None,
    ) -> None:
        sizes = {Tier.DRAM: dram, Tier.DISK: disk}
        made = {tier: ledger(size) for tier, size in sizes.items() if size is not None}
        self.layout = layout or chain_layout()
        self.config = config or Config(hit_share=1.0)
        self.agent = agent or Agent(made, self.config)
        self.tiers: dict[Tier, dict[bytes, bytes]] = {tier: {} for tier in Tier}
        self.records: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        self.engines: dict[str, dict[bytes, bytes]] = {}
        self.hold = hold
        self.now = 0.0
        self.open: dict[int, Effect] = {}
        self.ready: dict[str, int] = {}
        self.said: list[Event] = []
        self.effects: list[Effect] = []
        self.lent: dict[str, tuple[bytes, ...]] = {}
        self.fail: Callable[[Effect, Unit], str] | None = None  # "", "failed", "damaged"

    # -- engines --------------------------------------------------------------------------------

    def attach(self, worker: str = "a", *, minimal: bool = False) -> None:
        self.engines[worker] = {}
        self.do(Attach(worker, self.layout, FP, minimal=minimal, prefill_tokens_per_s=1000.0))

    def fill(
        self,
        keys: tuple[bytes, ...],
        *points: int,
        worker: str = "a",
        tenant: str = "",
        request: str = "r",
    ) -> None:
        """An engine computes a prompt."""
        held = self.engines[worker]
        for key in keys:
            held[name_of(key, Part.BODY)] = content(name_of(key, Part.BODY))
        for point in points:
            name = name_of(keys[point - 1], Part.POINT)
            held[name] = content(name)
        self.do(Filled(worker, request, keys, points, tenant))

    def ask(
        self, keys: tuple[bytes, ...], local: int = 0, *, worker: str = "a", **more: float
    ) -> Ask:
        return Ask("q", worker, keys, local, len(keys) * GRID + 1, **more)

    def offer(self, keys: tuple[bytes, ...], local: int = 0, *, worker: str = "a") -> Offer:
        before = self.agent.digest()
        offer = self.agent.offer(self.ask(keys, local, worker=worker))
        assert self.agent.digest() == before, "a question changed something"
        return offer

    def load(self, keys: tuple[bytes, ...], local: int = 0, *, worker: str = "a") -> int:
        """Load as far as is offered, with nothing in the engine before; where it ends."""
        offer = self.offer(keys, local, worker=worker)
        if offer.tokens == local:
            return local
        self.do(Fetch(self.ask(keys, local, worker=worker), offer.tokens))
        return self.ready.pop("q", -1)

    # -- effects --------------------------------------------------------------------------------

    def do(self, event: Input) -> None:
        self.perform(self.agent.handle(event, self.now))

    def at(self, now: float) -> None:
        """Time goes on; what is due is done."""
        while (due := self.agent.next_deadline()) is not None and due <= now:
            self.now = max(due, self.now)
            self.perform(self.agent.tick(self.now))
        self.now = now

    def perform(self, effects: tuple[Effect, ...]) -> None:
        started: list[int] = []
        for effect in effects:
            self.effects.append(effect)
            match effect:
                case Announce(events):
                    self.said.extend(events)
                case Drop(tier, names):
                    for name in names:
                        self.tiers[tier].pop(name, None)
                        self.records[tier].discard(name[:-1])
                case Ready(_, request, tokens):
                    self.ready[request] = tokens
                case Lent(owner, names):
                    self.lent[owner] = names
                case Save() | Load() | Copy() | Seal():
                    self.open[effect.op] = effect
                    started.append(effect.op)
                case Stop(op):
                    if not self.hold and op in self.open:
                        self.end(op, error="stopped")
        for op in started if not self.hold else ():
            if op in self.open:
                self.end(op)

    def end(self, op: int, error: str = "") -> None:
        """An operation ends now."""
        effect = self.open.pop(op)
        bad: dict[str, list[bytes]] = {"failed": [], "damaged": []}
        moves: list[tuple[Unit, dict[bytes, bytes], dict[bytes, bytes]]] = []
        match effect:
            case Save(_, worker, _, tier, units):
                moves = [(unit, self.engines[worker], self.tiers[tier]) for unit in units]
            case Load(_, worker, _, _, _, sources):
                moves = [
                    (unit, self.tiers[source.tier], self.engines[worker])
                    for source in sources
                    for unit in source.units
                ]
            case Copy(_, _, source, target):
                moves = [(u, self.tiers[source.tier], self.tiers[target]) for u in source.units]
            case Seal(_, tier, keys) if not error:
                self.records[tier].update(keys)
        for unit, source_bytes, target_bytes in moves if not error else ():
            data = source_bytes.get(unit.name)
            verdict = self.fail(effect, unit) if self.fail is not None else ""
            if not verdict and data is None:
                verdict = "failed"
            elif not verdict and data != content(unit.name):
                verdict = "damaged"
            if verdict:
                bad[verdict].append(unit.name)
            elif data is not None:
                target_bytes[unit.name] = data
        self.do(Done(op, tuple(bad["failed"]), tuple(bad["damaged"]), error))
