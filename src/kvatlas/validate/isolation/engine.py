"""One engine: the engine model over a real block pool, whose blocks hold marks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvatlas.core import agent_values as words
from kvatlas.core.events import Event
from kvatlas.core.layout import Layout
from kvatlas.core.records import Publisher
from kvatlas.sim.messages import Submit
from kvatlas.sim.tier_units import Blocks, Kept, Request
from kvatlas.validate.isolation.marks import Judge, Prompt
from kvatlas.validate.isolation.node import Node
from kvatlas.workload.engine import Engine
from kvatlas.workload.holding import unroll
from kvatlas.workload.protocol import (
    Abort,
    Admitted,
    Arrive,
    BlockRef,
    Computed,
    Effect,
    HandedOff,
    HandOff,
    Input,
    Loaded,
    Loading,
    Produced,
    Published,
    Rejected,
)
from kvatlas.workload.spec import EngineSpec

PREFILL_TOKENS_PER_S = 2000.0
ENDED_MAX = 256  # requests whose blocks may still be asked for after their end


class Memory:
    """What lies in the blocks of a pool. Implements `protocol.Model`: each read is judged."""

    def __init__(self, layout: Layout, model: str, prompts: dict[str, Prompt], judge: Judge):
        self.blocks: dict[int, bytes] = {}
        self._sizes = [slot.block_tokens for slot in unroll(layout)]
        self._model = model
        self._prompts = prompts
        self._judge = judge
        self._unread: dict[str, tuple[BlockRef, ...]] = {}

    def resume(self, request: Arrive, admitted: Admitted) -> None:
        """See `Model`: what it resumes from may be filled in this very step."""
        self._unread[request.id] = admitted.resumed

    def compute(self, computed: Computed, tokens: bytes) -> None:
        """See `Model`."""
        prompt = self._prompts[computed.id]
        for ref in self._unread.pop(computed.id, ()):
            end = (ref.index + 1) * self._sizes[ref.group]
            if 4 * end <= len(prompt.tokens):  # else it is the unfinished end of a prompt
                self._judge.hit("hbm", prompt, self._model, end, self.blocks.get(ref.block_id, b""))
        for ref in computed.filled:
            end = (ref.index + 1) * self._sizes[ref.group]
            self.blocks[ref.block_id] = prompt.mark(end, self._model, self._judge.at)

    def token(self, id: str, index: int) -> int:
        """See `Model`."""
        return index

    def release(self, id: str) -> None:
        """See `Model`."""
        self._unread.pop(id, None)


class CachingEngine:
    """Driven in virtual time by its world. ``told``: takes the KV events that it publishes;
    ``over``: takes a request's end, and whether it was answered."""

    def __init__(
        self,
        name: str,
        layout: Layout,
        fingerprint: bytes,
        blocks: int,
        *,
        node: Node,
        prompts: dict[str, Prompt],
        judge: Judge,
        told: Callable[[Publisher, tuple[Event, ...]], None],
        over: Callable[[str, CachingEngine, bool], None],
        keys: Callable[[CachingEngine, Prompt, str], tuple[bytes, ...]],
    ) -> None:
        self.name = name
        self.publisher = Publisher(name)
        self.layout = layout
        self.fingerprint = fingerprint
        self.model = fingerprint.hex()[:8]
        self.node = node
        self.spec = EngineSpec(
            blocks=blocks,
            max_running=8,
            step_tokens=512,
            retention_tokens=None,
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
            decode_step_s=0.001,
        )
        self._prompts, self._judge = prompts, judge
        self._told, self._over, self._keys = told, over, keys
        self._units = Blocks(layout, minimal=False)
        self._loads: dict[str, Loading] = {}
        self._sources: dict[str, CachingEngine] = {}  # decode halves: where the state lies
        self._life = 0
        self.start()

    # -- the process ----------------------------------------------------------------------------

    def start(self) -> None:
        """A new process with an empty pool."""
        self._life += 1
        self._requests: dict[str, Request] = {}
        self._over_requests: OrderedDict[str, Request] = OrderedDict()
        self._loads.clear()
        self._sources.clear()
        self.memory = Memory(self.layout, self.model, self._prompts, self._judge)
        self.core = Engine(self.layout, self.spec, model=self.memory, connector=self)
        self.node.engines[self.name] = self
        self.attach()

    def attach(self) -> None:
        """Make itself known to the agent of its node."""
        self.node.tell(
            words.Attach(
                self.name,
                self.layout,
                self.fingerprint,
                prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
            )
        )

    def agent_gone(self) -> None:
        """Nobody brings anything any more."""
        for id, loading in list(self._loads.items()):
            self.ready(id, loading.start)

    def stop(self) -> list[str]:
        """The process ends. Returns the requests that it had."""
        self.node.tell(words.Detach(self.name))
        return list(self._requests)

    def run(self, until: float) -> None:
        """Let it work."""
        while (due := self.core.next_deadline()) is not None and due <= until:
            self._perform(self.core.tick(due))

    def _input(self, event: Input) -> None:
        self._perform(self.core.handle(event, self.node.now()))

    # -- requests -------------------------------------------------------------------------------

    def ask(
        self,
        prompt: Prompt,
        salt: str,
        *,
        hand_off: bool = False,
        source: CachingEngine | None = None,
    ) -> None:
        """A request. ``hand_off``: only its first half; ``source``: the engine that had that."""
        submit = Submit(prompt.id, prompt.tokens, 1, salt, prompt.adapter, hand_off)
        keys = self._keys(self, prompt, salt)
        self._requests[prompt.id] = Request(submit, b"", keys)
        if source is not None:
            self._sources[prompt.id] = source
        arrive = Arrive(prompt.id, prompt.tokens, 1, salt, prompt.adapter, hand_off)
        self._input(arrive)

    def abort(self, id: str) -> None:
        """Its client left."""
        if id in self._requests:
            self.drop(id)
            self._over(id, self, False)

    def drop(self, id: str) -> None:
        """Nobody wants it any more."""
        if id in self._requests:
            if id in self._loads:
                self.node.tell(words.Cancel(self.name, id))
            self._input(Abort(id))
            self._forget(id)

    def _forget(self, id: str) -> None:
        request = self._requests.pop(id, None)
        if request is not None:  # what of it waits to be saved is still to be read
            self._over_requests[id] = request
            if len(self._over_requests) > ENDED_MAX:
                self._over_requests.popitem(last=False)

    def _ended(self, id: str, *, ok: bool) -> None:
        self._forget(id)
        self._over(id, self, ok)

    def _perform(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case Published(events):
                    self._told(self.publisher, events)
                case Admitted(id, cached, resumed) if (found := self._requests.get(id)) is not None:
                    found.resumed_tokens = cached
                    found.note(resumed)
                case Loading():
                    self._load(effect)
                case Computed(id, _, end, filled) if (found := self._requests.get(id)) is not None:
                    found.note(filled)
                    if end >= found.prompt_tokens and not found.filled:
                        found.filled = True
                        self._tell_filled(id, found)
                case HandOff(id):
                    self._over(id, self, True)
                case Produced(id, finished=True) if id in self._requests:
                    if not self._requests[id].submit.hand_off:
                        self._ended(id, ok=True)
                case Rejected(id):
                    self._ended(id, ok=False)
                case _:
                    pass

    # -- what its agent can bring -----------------------------------------------------------------

    def external(self, request: Arrive, local_tokens: int) -> int:
        """See `Connector`."""
        if request.id in self._sources:
            return len(request.tokens) // 4
        found = self._requests.get(request.id)
        return 0 if found is None else self.node.agent.offer(self._wish(found, local_tokens)).tokens

    def _wish(self, request: Request, local_tokens: int) -> words.Ask:
        submit = request.submit
        keys, size = request.keys, request.prompt_tokens
        keys = keys[: self.layout.asked_blocks(size)]
        tenant = self.node.label(submit.salt)
        return words.Ask(submit.id, self.name, keys, local_tokens, size, 10.0, tenant)

    def _load(self, loading: Loading) -> None:
        request = self._requests[loading.id]
        self._loads[loading.id] = loading
        source = self._sources.pop(loading.id, None)
        if source is not None:
            self._hand_over(loading, request, source)
            return
        wish = self._wish(request, loading.start)
        self.node.tell(words.Fetch(wish, loading.end))

    def _hand_over(self, loading: Loading, request: Request, source: CachingEngine) -> None:
        """The state of a prompt from the engine that computed it: block by block."""
        theirs = source._requests.get(loading.id)
        prompt, whole = self._prompts[loading.id], True
        for ref in loading.blocks:
            size = self.memory._sizes[ref.group]
            there = theirs.refs.get((ref.group, ref.index)) if theirs is not None else None
            full = (ref.index + 1) * size <= request.prompt_tokens
            data = source.memory.blocks.get(there.block_id) if there is not None else None
            if full and data is None:
                whole = False
            elif full and data is not None:
                self._judge.hit("pair", prompt, self.model, (ref.index + 1) * size, data)
                self.memory.blocks[ref.block_id] = data
        source._input(HandedOff(loading.id))
        source._forget(loading.id)
        self.ready(loading.id, loading.end if whole else loading.start)

    def ready(self, id: str, tokens: int) -> None:
        """A load is over."""
        if self._loads.pop(id, None) is not None:
            self._input(Loaded(id, tokens))

    def write(self, id: str, kept: Kept, tier: str) -> None:
        """Bytes of a unit arrive: judged before they are written."""
        loading, prompt = self._loads.get(id), self._prompts.get(id)
        if loading is None or prompt is None:
            return
        blocks = {(ref.group, ref.index): ref.block_id for ref in loading.blocks}
        for place, data in zip(self._units.places(kept.unit), kept.data, strict=True):
            end = (place[1] + 1) * self.memory._sizes[place[0]]
            self._judge.hit(tier, prompt, self.model, end, data)
            if place in blocks:
                self.memory.blocks[blocks[place]] = data

    # -- what its agent may keep ------------------------------------------------------------------

    def _tell_filled(self, id: str, request: Request) -> None:
        tenant = self.node.label(request.submit.salt)
        points = self._units.points(request)
        self.node.tell(
            words.Filled(
                self.name,
                id,
                request.keys,
                points,
                tenant=tenant,
                resumed_tokens=request.resumed_tokens,
                prompt_tokens=request.prompt_tokens,
            )
        )

    def copied(self, save: words.Save) -> dict[bytes, Kept]:
        """The units of a save as they are in the blocks now, of those that are there still."""
        request = self._requests.get(save.request) or self._over_requests.get(save.request)
        have: dict[bytes, Kept] = {}
        if request is None:
            return have
        keys, memory = self.core.pool.blocks.keys, self.memory.blocks
        tenant = self.node.label(request.submit.salt)
        for unit in save.units:
            refs = self._units.refs(unit, request)
            there = all(keys[ref.block_id] == (ref.group, ref.key) for ref in refs)
            if there and len(refs) == len(self._units.places(unit)):
                data = tuple(memory[ref.block_id] for ref in refs)
                have[unit.name] = Kept.of(unit, data, tenant)
        return have

    @property
    def evicting(self) -> bool:
        """Blocks have left its pool in the step at hand, which it will tell at its end."""
        return bool(self.core.pool.blocks.events)

    # -- promises ---------------------------------------------------------------------------------

    def holds(self, prompt: Prompt, salt: str) -> int:
        """Tokens that its pool would give this prompt; each block is judged."""
        pool = self.core.pool
        holding = pool.open(prompt.tokens, salt=salt, adapter=prompt.adapter)
        hit = pool.lookup(holding)
        coming = {ref.block_id for work in self.core._step for ref in work.filled}
        for ref in hit.refs():
            if ref.block_id not in coming:  # else it is found before it is computed
                end = (ref.index + 1) * self.memory._sizes[ref.group]
                data = self.memory.blocks.get(ref.block_id, b"")
                self._judge.hit("promise", prompt, self.model, end, data)
        return hit.tokens
