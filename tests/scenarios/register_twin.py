"""A register without Valkey, for several gateways of one test: it can be silent, late or empty."""

from __future__ import annotations

import asyncio
import itertools
import time

from kvatlas.core.register import Register
from kvatlas.core.register_values import Answer, Question
from kvatlas.errors import RegisterError

_CREATED = itertools.count(1)


class Twin:
    """What Valkey would answer, at this machine's clock."""

    def __init__(self) -> None:
        self.silent = False
        self.asked: list[Question] = []
        self.lose()

    def lose(self) -> None:
        """A failover to an empty one."""
        self.register = Register(f"created {next(_CREATED)}")

    def port(self) -> Port:
        """One process's way to it."""
        return Port(self)


class Port:
    """See `service.register.RegisterPort`. ``cut``: nothing passes here."""

    def __init__(self, twin: Twin) -> None:
        self.twin = twin
        self.cut = False
        self.closed = False

    async def ask(self, question: Question, deadline_s: float) -> Answer:
        await asyncio.sleep(0)
        if self.twin.silent or self.cut:
            raise RegisterError(f"no answer within {deadline_s:g} s", "late")
        self.twin.asked.append(question)
        return self.twin.register.ask(question, round(time.time() * 1000))

    async def close(self) -> None:
        self.closed = True
