"""Three nodes of one engine each, on the deciding side: what orders copies ahead of need."""

from __future__ import annotations

from collections.abc import Sequence

from kvatlas.core.ahead import Ahead
from kvatlas.core.ahead_copies import Copied, Copy, Effect, Params, Recall
from kvatlas.core.directory import Directory
from kvatlas.core.dispatch import Dispatcher, Input, Join, Question, Sent, Settle
from kvatlas.core.events import UnitsHeld
from kvatlas.core.keys import PUBLIC, Keyring, Scope
from kvatlas.core.records import Publisher, Tier
from kvatlas.core.router import Decision, Router
from kvatlas.core.router import Params as RouterParams
from kvatlas.workload.models import load_layout

LAYOUT = load_layout("qwen3-32b", engine="vllm")
GRID = LAYOUT.grid_tokens
FINGERPRINT = b"f" * 32
BLOCKS = 1000
ENGINES = [Publisher(f"e{i}") for i in range(3)]
AGENTS = [Publisher(f"a{i}") for i in range(3)]


def tokens(*parts: tuple[int, int]) -> bytes:
    """(seed, blocks) one after the other, and one token more."""
    made = b"".join(
        (seed * 1_000_000 + i).to_bytes(4, "little")
        for seed, blocks in parts
        for i in range(blocks * GRID)
    )
    return made + b"\0\0\0\0"


class Stand:
    """Three nodes of one engine each, driven by hand."""

    def __init__(self, **params: object) -> None:
        self.ring = Keyring(b"s" * 32)
        self.dispatcher = Dispatcher(
            Directory(self.ring), Router(RouterParams(prefill_tokens_per_s=1000.0)), self.ring
        )
        self.core = Ahead(Params(**({"replicate": True} | params)), self.dispatcher)  # type: ignore[arg-type]
        self.now = 0.0
        self.effects: list[Effect] = []
        self.dispatcher.listen(self._heard)
        for engine, agent in zip(ENGINES, AGENTS, strict=True):
            self.tell(Join(engine, LAYOUT, FINGERPRINT))
            self.tell(Settle(agent, (engine,)))

    def _heard(self, now: float, event: Input, answer: Decision | None) -> None:
        self.effects += self.core.handle(event, now, answer)

    def tell(self, event: Input) -> Decision | None:
        return self.dispatcher.handle(event, self.now)

    def keys(self, prompt: bytes, scope: Scope = PUBLIC) -> list[bytes]:
        return self.dispatcher.keys(ENGINES[0], prompt, scope)

    def hold(self, agent: Publisher, keys: Sequence[bytes]) -> None:
        self.dispatcher.apply(agent, [UnitsHeld(Tier.DRAM, tuple(keys), ())])

    def ask(self, id: str, prompt: bytes, scope: Scope = PUBLIC, *, send: bool = True) -> Publisher:
        decision = self.tell(Question(id, tuple((e, "") for e in ENGINES), prompt, scope))
        assert decision is not None
        chosen = decision.plans[0].publisher
        if send:
            self.tell(Sent(id, chosen))
        return chosen

    def crowd(self, count: int, prefix: int = 1, scope: Scope = PUBLIC, at: int = 0) -> None:
        """Requests that begin with the same blocks."""
        for i in range(count):
            self.ask(f"r{prefix}-{at + i}", tokens((prefix, BLOCKS), (100 + at + i, 50)), scope)

    def copied(self, error: str = "") -> Copy:
        """The last order ends."""
        (*_, order) = self.orders
        if not error:
            self.hold(order.agent, order.keys)
        moved = 0 if error else order.size_bytes
        self.effects += self.core.handle(Copied(order.id, moved, error), self.now)
        return order

    def later(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.core.next_deadline()) is not None and due <= end:
            self.now = due
            self.effects += self.core.tick(due)
        self.now = end

    @property
    def orders(self) -> list[Copy]:
        return [effect for effect in self.effects if isinstance(effect, Copy)]

    @property
    def recalls(self) -> list[str]:
        return [effect.reason for effect in self.effects if isinstance(effect, Recall)]


def crowded(**params: object) -> Stand:
    """The first node holds a prefix, and requests wait for its engine."""
    stand = Stand(**params)
    stand.hold(AGENTS[0], stand.keys(tokens((1, BLOCKS))))
    stand.crowd(6)
    return stand
