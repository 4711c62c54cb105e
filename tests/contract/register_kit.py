"""Registers to hold against each other: the twin at a time that is told, Valkey at its own."""

from __future__ import annotations

import asyncio
import time

from kvatlas.config_register import RegisterConfig
from kvatlas.core.register import Register
from kvatlas.core.register_values import Answer, Join, Joined, Member, Question
from kvatlas.errors import RegisterError
from kvatlas.service.register import RegisterPort, ValkeyRegister, open_register

DEADLINE_S = 30.0


def member(name: str = "a", life: str = "1", **more: object) -> Member:
    values: dict[str, object] = {"kind": "gateway", "url": f"http://{name}", "version": "1"}
    return Member(name, life=life, **(values | more))  # type: ignore[arg-type]


def join(one: Member, **more: object) -> Join:
    values: dict[str, object] = {"ttl_ms": 60_000, "clock_ms": clock_ms()}
    return Join(one, "proof", **(values | more))  # type: ignore[arg-type]


def clock_ms() -> int:
    return int(time.time() * 1000)


def opened(url: str, name: str = "kvatlas", **more: object) -> ValkeyRegister:
    return open_register(RegisterConfig(url=url, name=name, **more))  # type: ignore[arg-type]


class Both:
    """Each question to Valkey, then to the twin at the time when Valkey decided."""

    def __init__(self, real: ValkeyRegister) -> None:
        self.real = real
        self.twin = Register("")

    async def ask(self, question: Question) -> Answer:
        """The answer of both."""
        now_ms, said = await self.real.decided(question, DEADLINE_S)
        if isinstance(said, Joined):
            self.twin.created = said.created  # chosen by chance
        assert self.twin.ask(question, now_ms) == said, question
        return said


async def persistent(real: RegisterPort, question: Question, within_s: float = 20.0) -> Answer:
    """Asked until it is answered, as a member does."""
    until = time.monotonic() + within_s
    while True:
        try:
            return await real.ask(question, 1.0)
        except RegisterError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.02)
