"""What one life of a simulated engine has outside of its pool: its node's agent."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvatlas.core import agent_values as words
from kvatlas.core.keys import salt_scope
from kvatlas.core.records import Tier
from kvatlas.core.units import Part
from kvatlas.sim.engines import SimEngine
from kvatlas.sim.messages import Message, Submit
from kvatlas.sim.tier_node import SimNode
from kvatlas.sim.tier_units import Blocks, Bytes, Kept, Request
from kvatlas.workload.protocol import (
    Admitted,
    Arrive,
    BlockRef,
    Computed,
    Effect,
    Held,
    Hold,
    Loaded,
    Loading,
    Produced,
    Release,
)

if TYPE_CHECKING:
    from kvatlas.sim.tiers import Tiers

_ENDED_MAX = 1024  # requests whose blocks may still be asked for after their end

Then = Callable[[dict[bytes, Kept], Callable[[], None]], None]


class TierSide:
    """Implements `Outside` for one life of one engine: asks its node's agent and tells it."""

    def __init__(self, tiers: Tiers, node: SimNode, engine: SimEngine) -> None:
        self._tiers = tiers
        self._node = node
        self._engine = engine
        self._blocks = Blocks(engine.layout, minimal=engine.spec.minimal_loads)
        self._requests: dict[str, Request] = {}
        self._ended: OrderedDict[str, Request] = OrderedDict()
        self._loads: dict[str, Loading] = {}
        self._holds: deque[tuple[words.Save, Request, Then]] = deque()
        self._alive = True
        if (before := node.sides.get(engine.name)) is not None:
            before._alive = False
        node.sides[engine.name] = self
        self.attach()

    def attach(self) -> None:
        """Make this life known to the agent."""
        engine = self._engine
        self._node.tell(
            words.Attach(
                engine.name,
                engine.layout,
                self._tiers.fingerprint(engine),
                minimal=engine.spec.minimal_loads,
                prefill_tokens_per_s=self._blocks.prefill_tokens_per_s(engine.spec),
            )
        )

    def agent_gone(self) -> None:
        """Nobody answers any more: what is waited for will not come."""
        for id, loading in list(self._loads.items()):
            self.ready(id, loading.start)
        self._holds = deque((save, request, _let_go) for save, request, _ in self._holds)

    # -- Outside --------------------------------------------------------------------------------

    def submitted(self, submit: Submit) -> None:
        layout, ring = self._engine.layout, self._tiers.keyring
        scope = salt_scope(submit.salt)
        root = ring.root(self._tiers.fingerprint(self._engine), scope, submit.adapter)
        full = len(submit.tokens) // 4 // layout.grid_tokens * layout.grid_tokens
        keys = ring.chain(root, memoryview(submit.tokens)[: full * 4], layout.grid_tokens)
        known = self._requests[submit.id] = Request(submit, root, tuple(keys))
        known.filled = submit.source is not None  # who computed the prompt saves it

    def external(self, request: Arrive, local_tokens: int) -> int:
        known = self._requests.get(request.id)
        if known is None or not self._node.up:
            return 0
        return self._node.agent.offer(self._ask(request.id, known, local_tokens)).tokens

    def _ask(self, id: str, request: Request, local_tokens: int) -> words.Ask:
        return words.Ask(
            id,
            self._engine.name,
            request.keys,
            local_tokens,
            request.prompt_tokens,
            self._tiers.spec.load_deadline_s,
            request.owner,
        )

    def effect(self, effect: Effect) -> None:
        match effect:
            case Loading(id):
                self._loads[id] = effect
                self._tiers.timeline.after(0.0, self._fetch, effect)
            case Admitted(id, cached, resumed):
                if (request := self._requests.get(id)) is not None:
                    request.resumed_tokens = cached
                    request.note(resumed)
            case Computed(id, _, end, filled):
                if (request := self._requests.get(id)) is not None:
                    request.note(filled)
                    self._computed(id, request, end)
            case Produced(id, finished=True, answer=answer):
                if (request := self._requests.get(id)) is not None:
                    self._answered_all(id, request, answer)
                self._end(id)
            case Held(blocks):
                self._answered(blocks)
            case _:
                pass

    def receive(self, message: Message) -> None:
        """Nothing comes here but what is for the engine itself."""

    def forget(self, id: str) -> None:
        if id in self._loads:
            self._node.tell(words.Cancel(self._engine.name, id))
        self._end(id)

    def stopped(self) -> None:
        self._alive = False
        self._loads.clear()
        self._holds.clear()
        if self._node.sides.get(self._engine.name) is self:
            del self._node.sides[self._engine.name]
            self._node.tell(words.Detach(self._engine.name))

    def _end(self, id: str) -> None:
        request = self._requests.pop(id, None)
        if request is not None:
            self._ended[id] = request
            if len(self._ended) > _ENDED_MAX:
                self._ended.popitem(last=False)

    # -- loads ----------------------------------------------------------------------------------

    def _fetch(self, loading: Loading) -> None:
        request = self._requests.get(loading.id) or self._ended.get(loading.id)
        if not self._alive:
            return
        if request is None or not self._node.up:
            self.ready(loading.id, loading.start)
            return
        ask = self._ask(loading.id, request, loading.start)
        request.sources = self._node.agent.sources(ask, loading.end)
        self._node.tell(words.Fetch(ask, loading.end))

    def ready(self, id: str, tokens: int) -> None:
        """A load is over."""
        if self._loads.pop(id, None) is not None:
            self._tiers.timeline.after(0.0, self._tell, Loaded(id, tokens))

    def _tell(self, event: Loaded | Hold | Release) -> None:
        if self._alive and self._engine.up:
            self._engine.input(event)

    def write(self, id: str, kept: Kept) -> None:
        """Bytes of a unit arrive in the engine's blocks."""
        loading, memory = self._loads.get(id), self._memory()
        if loading is None or memory is None:
            return
        blocks = {(ref.group, ref.index): ref.block_id for ref in loading.blocks}
        for place, each in zip(self._blocks.places(kept.unit), kept.data, strict=True):
            if place in blocks:
                memory.write(blocks[place], each)

    @property
    def waiting(self) -> int:
        """Loads and answers about blocks that are still to come."""
        return len(self._loads) + len(self._holds)

    def _memory(self) -> Bytes | None:
        model = self._engine.model._model
        # Mostly there is none, and to ask a protocol takes long.
        return model if model is not None and isinstance(model, Bytes) else None

    def loaded_from(self, id: str) -> dict[Tier, int]:
        request = self._requests.get(id)
        grid = self._engine.layout.grid_tokens
        split: dict[Tier, int] = {}
        for source in request.sources if request is not None else ():
            bodies = sum(unit.part is Part.BODY for unit in source.units)
            if bodies:
                split[source.tier] = split.get(source.tier, 0) + bodies * grid
        return split

    # -- saves ----------------------------------------------------------------------------------

    def _computed(self, id: str, request: Request, end: int) -> None:
        """The prompt is there: the agent may save of it what it wants."""
        if request.filled or end < request.prompt_tokens or not self._node.up:
            return
        request.filled = True
        self._tell_filled(id, request)

    def _answered_all(self, id: str, request: Request, answer: bytes) -> None:
        """So is what was said to it: what the next turn begins with, if the chat goes on."""
        grid, prompt = self._engine.layout.grid_tokens, len(request.keys)
        rest = request.submit.tokens[prompt * grid * 4 :] + answer
        parent = request.keys[-1] if request.keys else request.root
        more = self._tiers.keyring.chain(parent, rest, grid)
        if not more or not self._node.up:
            return
        request.keys += tuple(more)
        # Of a pair, the other half saved what is before.
        first = prompt if request.submit.source is not None else 0
        self._tell_filled(id, request, len(answer) // 4, first)

    def _tell_filled(
        self, id: str, request: Request, output_tokens: int = 0, first: int = 0
    ) -> None:
        filled = words.Filled(
            self._engine.name,
            id,
            request.keys,
            self._blocks.points(request),
            tenant=request.owner,
            resumed_tokens=request.resumed_tokens,
            prompt_tokens=request.prompt_tokens,
            output_tokens=output_tokens,
            first=first,
        )
        self._tiers.timeline.after(0.0, self._tell_agent, filled)

    def _tell_agent(self, event: words.Filled) -> None:
        if self._alive:
            self._node.tell(event)

    def hold(self, save: words.Save, then: Then) -> None:
        """Keep the blocks of these units; ``then(what is held, how to release it)``."""
        request = self._requests.get(save.request) or self._ended.get(save.request)
        if request is None:
            self._tiers.timeline.after(0.0, then, {}, _nothing)
            return
        refs = [ref for unit in save.units for ref in self._blocks.refs(unit, request)]
        self._holds.append((save, request, then))
        self._tiers.timeline.after(0.0, self._tell, Hold(tuple(refs)))

    def _answered(self, blocks: tuple[BlockRef, ...]) -> None:
        """Answers come in the order of the questions."""
        if not self._holds:
            return
        save, request, then = self._holds.popleft()
        held, memory = set(blocks), self._memory()
        have: dict[bytes, Kept] = {}
        for unit in save.units:
            refs = self._blocks.refs(unit, request)
            if len(refs) == len(self._blocks.places(unit)) and held.issuperset(refs):
                data = (
                    tuple(memory.read(ref.block_id) for ref in refs) if memory is not None else ()
                )
                have[unit.name] = Kept.of(unit, data, request.owner)
        release = Release(blocks)
        self._tiers.timeline.after(
            0.0, then, have, lambda: self._tiers.timeline.after(0.0, self._tell, release)
        )


def _nothing() -> None:
    """There is nothing to release."""


def _let_go(have: dict[bytes, Kept], release: Callable[[], None]) -> None:
    """Nobody wants it any more."""
    release()
