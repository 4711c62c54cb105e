"""Recorded runs of a real vLLM beside the engine model: the same requests, hit for hit.

Three comparisons for each recording. The engine model (as the simulator runs it) gets the recorded
requests: its hits and its KV events, as wire fields, must be vLLM's. The layout comes from the
recorded model's own config, as it would for a cluster. And a directory that hears the recorded
frames must promise, before each request, what vLLM then reported.

vLLM's block hashes are others than the model's, so hashes are compared by what they name: two
streams agree when one renaming makes them equal.
"""

from __future__ import annotations

import itertools
import lzma
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvatlas.connectors.stub_wire import EventEncoder
from kvatlas.core.directory import Directory
from kvatlas.core.events import Batch, BlockStored, Event
from kvatlas.core.families import layout_from_config
from kvatlas.core.keys import Keyring, salt_scope
from kvatlas.core.layout import Layout
from kvatlas.core.records import Publisher
from kvatlas.errors import ConfigError, KvatlasError, TraceError
from kvatlas.service.wire import Decoder
from kvatlas.sim.world import fingerprint
from kvatlas.validate.parity import Comparison
from kvatlas.workload.engine import Engine
from kvatlas.workload.protocol import Admitted, Arrive, Effect, Published
from kvatlas.workload.spec import EngineSpec

BYTES_MAX = 1 << 30  # of a recording, unpacked
_US = Publisher("recorded")
_SOME = msgspec.Meta(min_length=1)
Ids = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]], _SOME]
_Event = dict[str, Any]  # as on the wire
_Batch = tuple[float, list[_Event], int | None]
_NO_EVENT: _Event = {}
_NO_EVENTS: list[_Event] = []
_HASHES = ("block_hashes", "parent_block_hash")

_CAUSES = {
    "cached tokens": "the engine model kept, evicted or found other blocks than vLLM",
    "batches": "vLLM published in other steps",
    "kind": "the engine model stored where vLLM evicted, or the other way, or at another step",
    "block_hashes": "other blocks of the same range were kept or evicted",
    "parent_block_hash": "the range starts elsewhere",
    "token_ids": "another range of tokens was announced",
    "stored blocks": "the engine model made other blocks findable",
    "removed blocks": "the engine model took other blocks, or more, or fewer",
    "promise": "the directory lacks an event, or believes one that does not hold",
    "event": "what the directory refused: an unknown parent, group or form",
}


_ASYNC = (
    "async scheduling: vLLM schedules a step, and evicts for it, before the tokens of the step "
    "before are known, so that a block of generated tokens is stored a step later than here"
)


class Settings(msgspec.Struct, frozen=True):
    """The arguments of `vllm.LLM` that count, under vLLM's names."""

    num_gpu_blocks_override: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    prefix_cache_retention_interval: int | None = None
    block_size: int | None = None


class Asked(msgspec.Struct, frozen=True):
    """One recorded request, with what vLLM made of it."""

    prompt: Ids
    output: Ids
    cached_tokens: int
    salt: str = ""


class Recording(msgspec.Struct, frozen=True):
    """One run. Requests of one round were in flight together; ``frames`` are (topic, sequence
    number, payload in hex) as published."""

    engine: str
    model: dict[str, Any]
    settings: Settings
    rounds: Annotated[list[Annotated[list[Asked], _SOME]], _SOME]
    frames: list[tuple[str, int, str]]
    async_scheduling: bool = False

    def layout(self) -> Layout:
        """From the model's own config. Raises LayoutError where it tells none."""
        block = self.settings.block_size
        return layout_from_config(self.model, engine="vllm", block_tokens=block)

    def spec(self) -> EngineSpec:
        """The engine model's parameters; its times do not matter."""
        settings = self.settings
        return EngineSpec(
            blocks=settings.num_gpu_blocks_override - 1,  # without the null block
            max_running=settings.max_num_seqs,
            step_tokens=settings.max_num_batched_tokens,
            context_tokens=settings.max_model_len,
            retention_tokens=settings.prefix_cache_retention_interval,
            async_scheduling=self.async_scheduling,
            prefill_tokens_per_s=1e5,
            decode_step_s=0.01,
        )

    def batches(self) -> list[bytes]:
        """Payloads in the order of their numbers. Raises TraceError where one is missing."""
        numbers = [seq for _, seq, _ in self.frames]
        if numbers != list(range(len(numbers))):
            raise TraceError("its frames are not numbered from 0 without a gap")
        try:
            return [bytes.fromhex(payload) for _, _, payload in self.frames]
        except ValueError as error:
            raise TraceError(f"a frame is not in hex: {error}") from error


class Recorded(Comparison):
    """One recording's result; what is "served" in a difference is the real engine's. ``promises``
    of the directory could be checked for so many requests (not for those of a round that saw each
    other's blocks)."""

    name: str
    engine: str
    async_scheduling: bool
    requests: int = 0
    hits: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    batches: int = 0
    events: dict[str, int] = msgspec.field(default_factory=dict)
    promises: int = 0

    def cause(self, field: str) -> str:
        """As the engine model and vLLM come to differ."""
        if self.async_scheduling and field not in ("promise", "event"):
            return _ASYNC
        return _CAUSES.get(field, "vLLM's event has another form")


def files(path: Path) -> list[Path]:
    """A file, or all recordings of a directory. Raises ConfigError where there are none."""
    found = sorted(path.glob("*.json.xz")) if path.is_dir() else [path]
    if not found:
        raise ConfigError(f"{path}: no recordings (*.json.xz) in it")
    return found


def load(path: Path) -> Recording | None:
    """A recording; None for a file of JSON that is none. Raises TraceError where it is damaged."""
    try:
        with lzma.open(path) as file:
            data = file.read(BYTES_MAX + 1)
        if len(data) > BYTES_MAX:
            raise TraceError(f"{path}: more than {BYTES_MAX >> 20} MiB, unpacked")
        value = msgspec.json.decode(data)
        if not isinstance(value, dict) or not {"rounds", "frames", "settings"} <= value.keys():
            return None
        return msgspec.convert(value, Recording)
    except OSError as error:
        raise TraceError(
            f"{path}: cannot be read: {error.strerror or error}: give a recording (*.json.xz), or a"
            " directory of them"
        ) from error
    except (EOFError, lzma.LZMAError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: not a recording: {error}") from error


def check(name: str, recording: Recording) -> Recorded:
    """All three comparisons. Raises TraceError for a recording that contradicts itself."""
    result = Recorded(name, recording.engine, recording.async_scheduling)
    try:
        layout, batches = recording.layout(), recording.batches()
        run = _Run(recording, layout)
        run.play()
        _compare_hits(result, recording, run)
        _compare_events(result, run.batches, batches)
        _compare_promises(result, recording, layout, batches)
    except (KvatlasError, KeyError, TypeError) as error:
        raise TraceError(f"{name}: {error}") from error
    return result


# -- the engine model beside it -------------------------------------------------------------------


class _Answers:
    """A model that says what vLLM said."""

    def __init__(self, outputs: dict[str, list[int]]) -> None:
        self._outputs = outputs

    def resume(self, request: Arrive, admitted: Admitted) -> None:
        pass

    def compute(self, computed: object, tokens: bytes) -> None:
        pass

    def token(self, id: str, index: int) -> int:
        return self._outputs[id][index]

    def release(self, id: str) -> None:
        pass


class _Run:
    """The engine model as the simulator drives it, given the recorded requests. vLLM had all of a
    round before its first step, and so has this."""

    def __init__(self, recording: Recording, layout: Layout) -> None:
        self._recording = recording
        self.cached: dict[str, int] = {}
        self.batches: list[tuple[Event, ...]] = []
        outputs = {str(n): asked.output for n, asked in enumerate(_flat(recording))}
        self.engine = Engine(layout, recording.spec(), model=_Answers(outputs), leap=True)

    def play(self) -> None:
        """Round after round, each to its end."""
        number, now = 0, 0.0
        for requests in self._recording.rounds:
            for asked in requests:
                tokens = pack(asked.prompt)
                arrive = Arrive(str(number), tokens, len(asked.output), salt=asked.salt)
                self._note(self.engine.handle(arrive, now))
                number += 1
            while (due := self.engine.next_deadline()) is not None:
                now = due
                self._note(self.engine.tick(now))

    def _note(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Admitted):
                self.cached.setdefault(effect.id, effect.cached_tokens)  # before any preemption
            elif isinstance(effect, Published):
                self.batches.append(effect.events)


def _flat(recording: Recording) -> Iterator[Asked]:
    return (asked for requests in recording.rounds for asked in requests)


def pack(tokens: Sequence[int]) -> bytes:
    """As uint32, little endian."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def _compare_hits(result: Recorded, recording: Recording, run: _Run) -> None:
    number = 0
    for round, requests in enumerate(recording.rounds):
        for asked in requests:
            cached = run.cached.get(str(number), -1)
            result.note(
                f"request {number} (round {round})", "cached tokens", cached, asked.cached_tokens
            )
            result.requests += 1
            result.hits += asked.cached_tokens > 0
            result.cached_tokens += asked.cached_tokens
            number += 1
    result.preemptions = run.engine.preemptions


def _compare_events(
    result: Recorded, modelled: Sequence[Sequence[Event]], real: Sequence[bytes]
) -> None:
    """Batch by batch; where only the batches differ, that is one difference and not many."""
    encoder = EventEncoder()
    ours = [_wire(encoder.payload(events, 0.0)) for events in modelled]
    theirs = [_wire(payload) for payload in real]
    result.batches = len(theirs)
    result.events = dict(Counter(event["type"] for batch in theirs for event in batch))
    named, named_there = _named(ours), _named(theirs)
    together = [event for batch in named for event in batch]
    together_there = [event for batch in named_there for event in batch]
    if together == together_there:
        result.compared += sum(map(len, together))
        sizes, sizes_there = ([len(batch) for batch in each] for each in (ours, theirs))
        result.note("KV events", "batches", sizes, sizes_there)
        return
    _compare_counts(result, ours, theirs)
    pairs = zip_longest(named, named_there, fillvalue=_NO_EVENTS)
    for number, (batch, batch_there) in enumerate(pairs):
        twins = zip_longest(batch, batch_there, fillvalue=_NO_EVENT)
        for index, (event, twin) in enumerate(twins):
            where = f"batch {number}, event {index}"
            if not result.note(where, "kind", event.get("type"), twin.get("type")):
                return  # all that follows is shifted
            for field in sorted(event.keys() | twin.keys()):
                if not result.note(where, field, event.get(field), twin.get(field)):
                    return


def _compare_counts(
    result: Recorded, ours: Sequence[Sequence[_Event]], theirs: Sequence[Sequence[_Event]]
) -> None:
    """Blocks stored and removed in all, per group."""
    for kind, field in (("BlockStored", "stored blocks"), ("BlockRemoved", "removed blocks")):
        counts: list[Counter[object]] = [Counter(), Counter()]
        for count, batches in zip(counts, (ours, theirs), strict=True):
            for event in itertools.chain.from_iterable(batches):
                if event["type"] == kind:
                    count[event.get("group_idx")] += len(event["block_hashes"])
        for group in sorted(counts[0].keys() | counts[1].keys(), key=str):
            result.note(f"group {group}", field, counts[0][group], counts[1][group])


def _wire(payload: bytes) -> list[_Event]:
    try:
        return msgspec.msgpack.decode(payload, type=_Batch)[1]
    except msgspec.MsgspecError as error:
        raise TraceError(f"a frame is no batch of events: {error}") from error


def _named(batches: Sequence[Sequence[_Event]]) -> list[list[_Event]]:
    """Hashes by order of appearance."""
    names: dict[int, int] = {}
    return [[_renamed(event, names) for event in batch] for batch in batches]


def _renamed(event: _Event, names: dict[int, int]) -> _Event:
    renamed = dict(event)
    for field in _HASHES:
        value = event.get(field)
        if isinstance(value, list):
            renamed[field] = [names.setdefault(each, len(names)) for each in value]
        elif value is not None:
            renamed[field] = names.setdefault(value, len(names))
    return renamed


# -- the directory beside it ----------------------------------------------------------------------


def _compare_promises(
    result: Recorded, recording: Recording, layout: Layout, payloads: Sequence[bytes]
) -> None:
    """What a directory says before each request that came alone, against what vLLM reported."""
    decoder, keyring, label = Decoder(), Keyring(b"runs that were recorded"), fingerprint(layout)
    batches = [decoder.decode(seq, payload) for seq, payload in enumerate(payloads)]
    result.note("KV events", "event", decoder.reasons, {})
    directory = Directory(keyring)
    directory.register(_US, layout, label)
    grid, at = layout.grid_tokens, 0
    before: list[Asked] = []
    for number, requests in enumerate(recording.rounds):
        first = requests[0]
        # Requests of one round see each other's blocks; and where a round of several is followed
        # by one of its own prompts, nobody can say whose a frame is.
        unclear = len(before) > 1 and any(first.prompt == other.prompt for other in before)
        if len(requests) == 1 and not unclear:
            root = keyring.root(label, salt_scope(first.salt))
            usable = (len(first.prompt) - 1) // grid * grid
            found = directory.peek(keyring.chain(root, pack(first.prompt[:usable]), grid), label)
            promised = found[0].tokens if found else 0
            result.promises += 1
            result.note(f"round {number}", "promise", promised, first.cached_tokens)
        done: dict[bytes, int] = {}
        while at < len(batches) and _of_round(batches[at], requests, done, grid):
            applied = directory.apply(_US, batches[at].events)
            refused = (applied.orphans, applied.undeclared, applied.malformed, applied.refused)
            result.note(f"batch {at}", "event", refused, (0, 0, 0, 0))
            at += 1
        before = requests
    result.note("KV events", "batches", at, len(batches))


def _is_chain(event: BlockStored, grid: int) -> bool:
    """Whole blocks of the group in which every block counts."""
    return "sliding" not in (event.kind or "") and event.block_tokens == grid


def _of_round(batch: Batch, requests: Sequence[Asked], done: dict[bytes, int], grid: int) -> bool:
    """Whether a batch can stem from these requests: what it stores are parts of them, and in a
    request's chain it goes on where the hit, or the batch before, ended (``done``)."""
    steps: dict[bytes, int] = {}
    for event in batch.events:
        if not isinstance(event, BlockStored):
            continue
        wholes = [pack(asked.prompt + asked.output) for asked in requests]
        wholes = [whole for whole in wholes if event.tokens in whole]
        if not wholes:
            return False
        if len(requests) == 1 and _is_chain(event, grid):
            (whole,) = wholes
            at = steps.get(whole, done.get(whole, requests[0].cached_tokens * 4))
            if whole[at : at + len(event.tokens)] != event.tokens:
                return False
            steps[whole] = at + len(event.tokens)
    done.update(steps)
    return True
