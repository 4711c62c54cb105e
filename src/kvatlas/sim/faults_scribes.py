"""Stand-ins for what agents ask of the register about shared stores: what is whole there.

A scribe writes for a while, commits what it wrote with the generation that it knew when it began,
asks, withdraws, and says now and then that the store has lost all. What it says carries in which
content of the store it was written, by which `checkers_register` judges what is told.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvatlas.core import register_values as words
from kvatlas.core.forgetting import TAG_CHARS
from kvatlas.core.membership import Effect, Emptied
from kvatlas.core.register_values import Answer, Record
from kvatlas.sim.faults_register import SimMember

STORE = "store"
_KEYS = 12


class Scribe:
    """One process's. ``content``: which content the store has, in truth."""

    def __init__(self, member: SimMember, seed: str, content: Callable[[], int]) -> None:
        self.member = member
        self.generation = 0  # 0: not known
        self._content = content
        self._draw = random.Random(f"{seed}/{member.core.me.life}")
        self._next()

    def heard(self, effects: Sequence[Effect]) -> None:
        """The register has lost all: what the store has is not known to be whole."""
        if self.generation and any(isinstance(effect, Emptied) for effect in effects):
            self.member.ask(words.Expire(STORE, self.generation), self._told)

    def _next(self) -> None:
        loop = self.member.loop
        loop.at(loop.now + self._draw.uniform(0.5, 4.0), self._act)

    def _act(self) -> None:
        draw, ask = self._draw, self.member.ask
        self._next()
        keys = tuple(b"%d" % key for key in draw.sample(range(_KEYS), 4))
        match draw.choice(("write", "write", "ask", "ask", "ask", "withdraw", "expire")):
            case "write" if self.generation:
                self._write(keys)
            case "withdraw":
                ask(words.Withdraw(STORE, keys[:1]), self._told)
            case "expire" if self.generation and draw.random() < 0.3:
                ask(words.Expire(STORE, self.generation), self._told)
            case _:
                ask(words.AskRecords(STORE, keys), self._told)

    def _write(self, keys: tuple[bytes, ...]) -> None:
        """It takes a while until it is all there."""
        draw, loop = self._draw, self.member.loop
        owner = f"{draw.choice('0123') * TAG_CHARS}.{draw.randint(0, 5)}"
        data = b"%d %s" % (self._content(), owner.encode())
        records = tuple(Record(key, owner, 1, data) for key in keys)
        commit = words.Commit(STORE, self.generation, records)
        taking_s = draw.choice((0.1, 3.0, 30.0)) * draw.random()
        loop.at(loop.now + taking_s, self.member.ask, commit, self._told)

    def _told(self, answer: Answer) -> None:
        match answer:
            case words.ToldRecords(generation) | words.Committed(generation):
                self._know(generation)
            case words.Done(generation):
                self._know(generation)

    def _know(self, generation: int) -> None:
        """Of a register that went back: what was written since is not known to be whole there."""
        if generation < self.generation:
            self.member.ask(words.Expire(STORE, self.generation), self._told)
        else:
            self.generation = generation
