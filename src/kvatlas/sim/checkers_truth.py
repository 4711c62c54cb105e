"""What is true, told by those who made it: a record of every engine's history and of every block.

Nothing here uses the directory, its keys or the sequencer: `History` counts blocks as the engine
announced them under the engine's own hashes, and `Witness` remembers for each block of a pool whose
tokens it was filled with. A cold run of the stub's memory says what each answer must be.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from kvatlas.core.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event
from kvatlas.core.layout import Layout
from kvatlas.workload.holding import TOKEN_BYTES, unroll
from kvatlas.workload.prompt_keys import PromptKeys, key_step
from kvatlas.workload.protocol import Admitted, Arrive, BlockRef, Computed
from kvatlas.workload.state import Memory

Report = Callable[[str, str], None]  # (class of violation, what)


def answer(layout: Layout, tokens: bytes, adapter: str, output_tokens: int) -> list[int]:
    """What an engine with an empty cache answers."""
    memory = Memory(layout)
    memory.resume(Arrive("cold", tokens, output_tokens, adapter=adapter), Admitted("cold", 0, ()))
    size = len(tokens) // TOKEN_BYTES
    memory.compute(Computed("cold", 0, size, ()), tokens)
    out: list[int] = []
    for index in range(output_tokens):
        if out:
            at = size + index - 1
            memory.compute(
                Computed("cold", at, at + 1, ()), out[-1].to_bytes(TOKEN_BYTES, "little")
            )
        out.append(memory.token("cold", index))
    return out


class Held:
    """Blocks as counted from announcements: (group, hash) → how many blocks have it."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, int], int] = {}

    def apply(self, events: tuple[Event, ...]) -> None:
        """Take the announcements by their word."""
        counts = self.counts
        for event in events:
            if isinstance(event, BlockStored):
                for each in event.hashes:
                    place = (event.group or 0, each)
                    counts[place] = counts.get(place, 0) + 1
            elif isinstance(event, BlockRemoved):
                for each in event.hashes:
                    place = (event.group or 0, each)
                    left = counts.get(place, 0) - 1
                    if left > 0:
                        counts[place] = left
                    else:
                        counts.pop(place, None)
            elif isinstance(event, AllBlocksCleared):
                counts.clear()

    def resume(self, prompt: Prompt) -> int:
        """The deepest position at which every required group is there, one token left to do."""
        counts = self.counts
        position = prompt.limit
        for slot, size in prompt.chains:
            end = 0
            while end + size <= position and (slot, prompt.key(end + size)) in counts:
                end += size
            position = end // prompt.grid * prompt.grid
        while position and not all(
            (slot, prompt.key(end)) in counts
            for slot, size, need in prompt.windows
            for end in range(position, max(0, position - need * size), -size)
        ):
            position -= prompt.grid
        return position


class Prompt:
    """A prompt as engines of one layout key it."""

    def __init__(self, layout: Layout, tokens: bytes, salt: str, adapter: str) -> None:
        self.grid = layout.grid_tokens
        self.limit = (len(tokens) // TOKEN_BYTES - 1) // self.grid * self.grid
        slots = [slot for slot in unroll(layout) if slot.group.required]
        self.chains = [(s.index, s.block_tokens) for s in slots if s.need is None]
        self.windows = [(s.index, s.block_tokens, s.need) for s in slots if s.need is not None]
        self.keys = PromptKeys(tokens, key_step(layout), salt=salt, adapter=adapter)
        self.key = self.keys.key


class Filled(bytes):
    """A block's bytes outside of an engine: of which model, and who filled it with what."""

    identity = b""
    place: tuple[str, str, int, int, bytes] | None = None


class Witness:
    """An engine's memory, and who filled which block of it. Implements `protocol.Model`.

    A request that resumes from a block which was filled for another scope or adapter, or with
    other tokens, is reported at once, whatever it then answers.
    """

    def __init__(self, engine: str, layout: Layout, report: Report, identity: bytes = b"") -> None:
        self.engine = engine
        self.identity = identity
        self.layout = layout
        self._report = report
        self._memory = Memory(layout)
        self._slots = unroll(layout)
        self._sizes = [slot.block_tokens for slot in self._slots]
        self._filled: dict[int, tuple[str, str, int, int, bytes]] = {}
        self._texts: dict[str, bytearray] = {}  # prompt and what was answered so far
        self._arrives: dict[str, Arrive] = {}
        self._unread: dict[str, tuple[BlockRef, ...]] = {}
        self._users: dict[int, dict[str, BlockRef]] = {}  # block → requests that read it
        self._reading: dict[str, set[int]] = {}  # the same by request
        self._done: dict[str, int] = {}  # tokens that a request has computed

    @property
    def active(self) -> int:
        """Requests that were begun and not let go of."""
        return len(self._arrives)

    def resume(self, request: Arrive, admitted: Admitted) -> None:
        """See `Model`."""
        self._arrives[request.id] = request
        self._texts.setdefault(request.id, bytearray(request.tokens))
        self._unread[request.id] = admitted.resumed
        self._done[request.id] = admitted.cached_tokens
        for ref in admitted.resumed:
            self._users.setdefault(ref.block_id, {})[request.id] = ref
        self._reading[request.id] = {ref.block_id for ref in admitted.resumed}
        self._memory.resume(request, admitted)

    def compute(self, computed: Computed, tokens: bytes) -> None:
        """See `Model`."""
        id = computed.id
        arrive, text = self._arrives[id], self._texts[id]
        for ref in self._unread.pop(id, ()):
            found = self._filled.get(ref.block_id)
            if found != self._place(arrive, text, ref):
                self._blame(arrive, ref, found)
        if text[computed.start * TOKEN_BYTES : computed.end * TOKEN_BYTES] != tokens:
            self._report("wrong-bytes", f"{self.engine} computes other tokens than {id} has")
        self._done[id] = computed.end
        for ref in computed.filled:
            self._take(id, ref)
        self._memory.compute(computed, tokens)

    def token(self, id: str, index: int) -> int:
        """See `Model`."""
        token = self._memory.token(id, index)
        text, at = self._texts[id], len(self._arrives[id].tokens) + index * TOKEN_BYTES
        text[at:] = token.to_bytes(TOKEN_BYTES, "little")
        return token

    def release(self, id: str) -> None:
        """See `Model`."""
        self._arrives.pop(id, None)
        self._unread.pop(id, None)
        self._done.pop(id, None)
        for block_id in self._reading.pop(id, ()):  # it may come again, with other blocks
            self._users[block_id].pop(id, None)
        self._memory.release(id)

    def read(self, block_id: int) -> bytes:
        """A block's bytes on their way to a tier."""
        data = Filled(self._memory.read(block_id))
        data.identity, data.place = self.identity, self._filled.get(block_id)
        return data

    def write(self, block_id: int, data: bytes) -> None:
        """A block is loaded. Bytes that lost their mark were damaged."""
        self._memory.write(block_id, bytes(data))
        self._filled.pop(block_id, None)
        if not isinstance(data, Filled):
            self._report("wrong-bytes", f"{self.engine} is given damaged bytes")
        elif data.identity != self.identity:
            self._report("cross-scope", f"{self.engine} is given bytes of another model")
        elif data.place is not None:
            self._filled[block_id] = data.place

    def _take(self, id: str, ref: BlockRef) -> None:
        """A block is filled: nobody else may still read something else in it."""
        filled = self._filled[ref.block_id] = self._place(self._arrives[id], self._texts[id], ref)
        users = self._users.get(ref.block_id, {})
        kept = {id: ref}
        for other, was in users.items():
            arrive = self._arrives.get(other)
            if arrive is None or other == id or not self._reads(was, self._done[other]):
                continue
            if self._place(arrive, self._texts[other], was) == filled:
                kept[other] = was  # it resumed from what is filled in this very step
            else:
                self._report(
                    "wrong-bytes", f"{self.engine}: {id} fills a block that {other} still reads"
                )
        self._users[ref.block_id] = kept
        self._reading[id].add(ref.block_id)

    def _reads(self, ref: BlockRef, done: int) -> bool:
        """Does a request that computed ``done`` tokens still attend to this block?"""
        slot = self._slots[ref.group]
        return slot.chain or (ref.index + 1) * slot.block_tokens > done - slot.window_tokens + 1

    def _place(
        self, arrive: Arrive, text: bytearray, ref: BlockRef
    ) -> tuple[str, str, int, int, bytes]:
        end = (ref.index + 1) * self._sizes[ref.group] * TOKEN_BYTES
        digest = blake2b(text[:end], digest_size=8).digest()
        return arrive.salt, arrive.adapter, ref.group, ref.index, digest

    def _blame(
        self, arrive: Arrive, ref: BlockRef, found: tuple[str, str, int, int, bytes] | None
    ) -> None:
        mine = (arrive.salt, arrive.adapter)
        if found is not None and found[:2] != mine:
            self._report(
                "cross-scope",
                f"{self.engine}: {arrive.id} of {mine} resumes from a block of {found[:2]}",
            )
        else:
            self._report(
                "wrong-bytes", f"{self.engine}: {arrive.id} resumes from a block of other tokens"
            )


class Life:
    """One life of one engine, and what it announced."""

    def __init__(self, number: int, layout: Layout) -> None:
        self.number = number
        self.layout = layout
        self.ever = Held()  # what was stored at any time

    def publish(self, batch: Batch) -> None:
        """It sends one more batch."""
        self.ever.apply(tuple(e for e in batch.events if isinstance(e, BlockStored)))


class Heard:
    """When what one life of an engine announced reached one gateway."""

    def __init__(self) -> None:
        self.applied = -1  # number of the latest batch that the directory ever took in
        self.delivered: list[tuple[float, int]] = []  # (when, highest number so far)

    def reached(self, seq: int, now: float) -> None:
        """A batch of it arrived, live."""
        if not self.delivered or seq > self.delivered[-1][1]:
            self.delivered.append((now, seq))

    def known_at(self, when: float) -> int:
        """Highest number that had arrived by then; -1 for none."""
        best = -1
        for at, seq in self.delivered:
            if at > when:
                break
            best = seq
        return best


class Run:
    """What was applied for one publisher since its claims were last dropped."""

    def __init__(self) -> None:
        self.life: Life | None = None
        self.last = -1
        self.held = Held()

    def copy(self) -> Run:
        """As it is now."""
        other = Run()
        other.life, other.last = self.life, self.last
        other.held.counts = dict(self.held.counts)
        return other
