"""Random request sequences that try a prefix cache: pure, one seed gives one sequence.

What a later prompt is made of depends on what the engine answered before (the next turn of a
conversation has its output), so a sequence is a generator: it yields a step, and is sent the
outputs of the requests in it.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from enum import StrEnum

import msgspec

VOCABULARY = range(10, 3900)  # token ids of the tiny models that mean nothing special
_SALTS = ("tenant-a", "tenant-b")


class Kind(StrEnum):
    """How a prompt came about."""

    FRESH = "fresh"  # nothing of it was there before
    REPEAT = "repeat"  # a prompt again
    CUT = "cut"  # a shared prefix that ends at a random place
    JUNCTION = "junction"  # a prefix that was cut there before, with another end
    TURN = "turn"  # a whole conversation and what its user says next
    GROWN = "grown"  # a conversation's prompt and a part of its output
    MOVED = "moved"  # the same text under another salt
    SHORT = "short"  # shorter than a block


class Shape(msgspec.Struct, frozen=True):
    """Lengths in tokens. ``edges``: window sizes, near whose multiples cuts are frequent."""

    grid_tokens: int
    fresh_tokens: tuple[int, int]
    prompt_tokens_max: int
    output_tokens: tuple[int, ...]  # one of them is drawn
    edges: tuple[int, ...]


class Request(msgspec.Struct, frozen=True):
    """One prompt to run."""

    kind: Kind
    prompt: list[int]
    output_tokens: int
    salt: str


class Ask(msgspec.Struct, frozen=True):
    """Run these together. One alone is predicted first; of several nobody can say who sees whose
    blocks, so they only leave their traces in the cache."""

    requests: tuple[Request, ...]


class Clear(msgspec.Struct, frozen=True):
    """Empty the engine's prefix cache."""


class Restart(msgspec.Struct, frozen=True):
    """Kill the engine and start it anew."""


Step = Ask | Clear | Restart
_KINDS = {
    Kind.FRESH: 14,
    Kind.REPEAT: 14,
    Kind.CUT: 26,
    Kind.JUNCTION: 18,
    Kind.TURN: 14,
    Kind.GROWN: 6,
    Kind.MOVED: 4,
    Kind.SHORT: 4,
}
_CROWD, _CLEAR, _RESTART = 0.06, 0.015, 0.01  # how often instead of one request


class _Done(msgspec.Struct, frozen=True):
    request: Request
    output: list[int]


def sequence(shape: Shape, seed: str, count: int) -> Generator[Step, list[list[int]], None]:
    """Steps that hold ``count`` single requests, and others between them.

    Send it the outputs of each `Ask`, and [] for other steps.
    """
    writer = _Writer(shape, random.Random(seed))
    chance = writer.chance
    singles = 0
    while singles < count:
        draw = chance.random()
        if draw < _CROWD and singles:
            crowd = tuple(writer.request() for _ in range(chance.randint(2, 5)))
            writer.learn(crowd, (yield Ask(crowd)))
        elif draw < _CROWD + _CLEAR and singles:
            yield Clear()
        elif draw < _CROWD + _CLEAR + _RESTART and singles:
            yield Restart()
        else:
            one = (writer.request(),)
            writer.learn(one, (yield Ask(one)))
            singles += 1


class _Writer:
    """Makes prompts up, out of what was asked and answered so far."""

    def __init__(self, shape: Shape, chance: random.Random) -> None:
        self.chance = chance
        self._shape = shape
        self._done: list[_Done] = []
        self._cuts: list[tuple[list[int], str]] = []

    def learn(self, requests: tuple[Request, ...], outputs: list[list[int]]) -> None:
        """Remember what was asked and answered."""
        self._done += [_Done(r, o) for r, o in zip(requests, outputs, strict=True)]

    def request(self) -> Request:
        """The next one."""
        chance = self.chance
        (kind,) = chance.choices(list(_KINDS), list(_KINDS.values()))
        if not self._done and kind is not Kind.SHORT:
            kind = Kind.FRESH
        elif kind is Kind.JUNCTION and not self._cuts:
            kind = Kind.CUT
        salt, prompt = self._prompt(kind)
        return Request(
            kind,
            prompt[: self._shape.prompt_tokens_max],
            chance.choice(self._shape.output_tokens),
            salt,
        )

    def _prompt(self, kind: Kind) -> tuple[str, list[int]]:
        chance, shape = self.chance, self._shape
        if kind is Kind.SHORT:
            return "", self._text(chance.randint(1, shape.grid_tokens - 1))
        if kind is Kind.FRESH:
            salt = chance.choice(_SALTS) if chance.random() < 0.1 else ""
            return salt, self._text(chance.randint(*shape.fresh_tokens))
        if kind is Kind.JUNCTION:
            prefix, salt = chance.choice(self._cuts)
            return salt, prefix + self._tail()
        old = self._remembered()
        prompt, salt = old.request.prompt, old.request.salt
        if kind is Kind.CUT:
            prefix = prompt[: self._place(len(prompt))]
            self._cuts.append((prefix, salt))
            return salt, prefix + self._tail()
        if kind is Kind.TURN:
            return salt, prompt + old.output + self._text(chance.randint(1, 120))
        if kind is Kind.GROWN:
            return salt, prompt + old.output[: chance.randint(0, len(old.output))]
        if kind is Kind.MOVED:
            return chance.choice([s for s in ("", *_SALTS) if s != salt]), list(prompt)
        return salt, list(prompt)

    def _remembered(self) -> _Done:
        """Something asked before; what is newer is likelier, as it is in a cache."""
        if self.chance.random() < 0.5:
            return self.chance.choice(self._done[-6:])
        return self.chance.choice(self._done)

    def _place(self, length: int) -> int:
        """Where to cut: anywhere, or at the edge of a block or window and one beside it."""
        if self.chance.random() < 0.4:
            return self.chance.randint(1, length)
        step = self.chance.choice((self._shape.grid_tokens, *self._shape.edges))
        place = self.chance.randint(1, max(1, length // step)) * step
        return min(length, max(1, place + self.chance.choice((-1, 0, 0, 1))))

    def _tail(self) -> list[int]:
        """Often none or one token, or else up to two blocks."""
        if self.chance.random() < 0.2:
            return self._text(self.chance.randint(0, 1))
        return self._text(self.chance.randint(2, 2 * self._shape.grid_tokens + 10))

    def _text(self, count: int) -> list[int]:
        return self.chance.choices(VOCABULARY, k=count)
