"""Is the directory right? Its prediction before each request against what real vLLM then reports.

One engine, one directory fed with the engine's published bytes. For each request of a random
sequence the directory is asked up to where the engine can resume it; then the request runs, and
the engine reports how many prompt tokens it took from its cache. A prediction above that is a
*false hit*: a router would have been lied to. One below is a hit that a router would not know of.

A sequence depends on nothing but model, seed and its number, and starts on an engine of its own.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvatlas.connectors.vllm_direct import Answered, Asked
from kvatlas.core.claims import Applied
from kvatlas.core.directory import Directory
from kvatlas.core.keys import Keyring, salt_scope
from kvatlas.core.layout import Layout
from kvatlas.core.records import Publisher
from kvatlas.service.wire import Decoder
from kvatlas.validate.sequences import Ask, Clear, Request, Restart, Step, sequence
from kvatlas.validate.tiny import Tiny

_PUBLISHER = Publisher("vllm")
_FINGERPRINT = b"one engine, one fingerprint".ljust(32, b"\0")
_TICK = Asked(prompt=[5], output_tokens=1)  # too short to be cached: only makes the engine step


class Engine(Protocol):
    """What plays the requests: `vllm_direct.DirectVllm`, or the engine model (in tests).

    ``version`` names it, once it has begun.
    """

    version: str

    def begin(self, settings: Mapping[str, Any]) -> None:
        """A new life, with an empty cache."""

    def generate(self, requests: Sequence[Asked]) -> tuple[list[Answered], list[tuple[int, bytes]]]:
        """Answers in order, and all batches of events published meanwhile."""
        ...

    def clear(self) -> None:
        """Empties the prefix cache."""


class Difference(msgspec.Struct, frozen=True):
    """A request whose prediction was not what the engine reported. ``missing``: what the
    directory lacked beyond the position that it predicted."""

    request: int
    kind: str
    prompt_tokens: int
    predicted: int
    reported: int
    chain_tokens: int
    missing: list[tuple[int, list[str]]]


class Outcome(msgspec.Struct, frozen=True):
    """One sequence: ``predicted`` and ``reported`` hold one number per predicted request.

    ``steps`` counts what the sequence was made of, ``applied`` what became of the engine's events.
    """

    sequence: int
    retention: int | None
    predicted: list[int]
    reported: list[int]
    differences: list[Difference]
    steps: dict[str, int]
    applied: dict[str, int]

    def false_hits(self) -> int:
        """Requests for which more was predicted than the engine had."""
        return sum(p > r for p, r in zip(self.predicted, self.reported, strict=True))

    def exact(self) -> int:
        """Requests whose prediction was right to the token."""
        return sum(p == r for p, r in zip(self.predicted, self.reported, strict=True))


class Observer:
    """The directory's side: hears one engine's events, and says what it expects."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._keyring = Keyring(b"predictions of one engine")
        self._directory = Directory(self._keyring)
        self._directory.register(_PUBLISHER, layout, _FINGERPRINT)
        self._decoder = Decoder()
        self.applied = Applied()

    def restarted(self) -> None:
        """A new life of the engine: nothing of the last one counts."""
        self._directory.reset(_PUBLISHER)
        self._decoder = Decoder()

    def hear(self, batches: Sequence[tuple[int, bytes]]) -> None:
        """Decodes and applies what the engine published."""
        for seq, payload in batches:
            batch = self._decoder.decode(seq, payload)
            self.applied.malformed += batch.malformed + batch.unknown
            self.applied.add(self._directory.apply(_PUBLISHER, batch.events))

    def keys(self, request: Request) -> list[bytes]:
        """The keys that a router would ask with."""
        grid = self._layout.grid_tokens
        root = self._keyring.root(_FINGERPRINT, salt_scope(request.salt))
        asked = request.prompt[: self._layout.asked_blocks(len(request.prompt)) * grid]
        return self._keyring.chain(root, array("I", asked).tobytes(), grid)

    def expected(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """Resume position and length of the chain, in tokens."""
        found = self._directory.peek(keys, _FINGERPRINT)
        return (found[0].tokens, found[0].chain_tokens) if found else (0, 0)

    def missing(self, keys: Sequence[bytes]) -> list[tuple[int, list[str]]]:
        """What the directory lacks beyond the position that it expects."""
        places = self._directory.positions(_PUBLISHER, keys)
        return [(at, list(names)) for at, names in places.missing] if places else []


class Play:
    """One sequence on one engine; ``folder`` holds the model's config."""

    def __init__(self, engine: Engine, model: Tiny, folder: Path, number: int) -> None:
        self._engine = engine
        self._model = model
        self._number = number
        self._settings: dict[str, Any] = model.settings(number, folder)
        self.observer = Observer(model.layout(folder))
        self._steps: Counter[str] = Counter()
        self._predicted: list[int] = []
        self._reported: list[int] = []
        self._differences: list[Difference] = []

    def run(self, seed: int, count: int) -> Outcome:
        """Plays it with ``count`` predicted requests. Raises EngineError."""
        self._engine.begin(self._settings)
        name = f"{self._model.name}/{seed}/{self._number}"
        steps = sequence(self._model.shape, name, count)
        outputs: list[list[int]] | None = None
        while True:
            try:
                step = steps.send(outputs) if outputs is not None else next(steps)
            except StopIteration:
                break
            outputs = self._step(step)
        applied = msgspec.structs.asdict(self.observer.applied)
        return Outcome(
            sequence=self._number,
            retention=self._settings["prefix_cache_retention_interval"],
            predicted=self._predicted,
            reported=self._reported,
            differences=self._differences,
            steps=dict(sorted(self._steps.items())),
            applied={name: count for name, count in applied.items() if count},
        )

    def _step(self, step: Step) -> list[list[int]]:
        match step:
            case Restart():
                self._steps["restart"] += 1
                self._engine.begin(self._settings)
                self.observer.restarted()
                return []
            case Clear():
                # vLLM 0.32 tells of it with its next step: until then nobody can know.
                self._steps["clear"] += 1
                self._engine.clear()
                self._generate([_TICK])
                return []
            case Ask(requests=(request,)):
                return [self._single(request)]
            case Ask(requests=requests):
                self._steps["crowd"] += 1
                return [a.output for a in self._generate([_asked(r) for r in requests])]

    def _single(self, request: Request) -> list[int]:
        keys = self.observer.keys(request)
        tokens, chain = self.observer.expected(keys)
        missing = self.observer.missing(keys)
        (answer,) = self._generate([_asked(request)])
        self._steps[request.kind] += 1
        if tokens != answer.cached_tokens:
            difference = Difference(
                request=len(self._predicted),
                kind=request.kind,
                prompt_tokens=len(request.prompt),
                predicted=tokens,
                reported=answer.cached_tokens,
                chain_tokens=chain,
                missing=missing,
            )
            self._differences.append(difference)
        self._predicted.append(tokens)
        self._reported.append(answer.cached_tokens)
        return answer.output

    def _generate(self, asked: Sequence[Asked]) -> list[Answered]:
        answers, batches = self._engine.generate(asked)
        self.observer.hear(batches)
        return answers


def _asked(request: Request) -> Asked:
    return Asked(request.prompt, request.output_tokens, request.salt)
