"""What a gateway asks of a node's agent ahead of need: bring a prompt to this node's dram.

One POST is one copy (`service.agent_orders`). It is answered when the copy is over; who leaves
before calls it off.
"""

from __future__ import annotations

import asyncio

import msgspec

from kvatlas.core.agent import Agent
from kvatlas.core.keys import Keyring
from kvatlas.core.records import Tier
from kvatlas.service import agent_wire as wire
from kvatlas.service.agent_errands import Errands
from kvatlas.service.agent_orders import ordered
from kvatlas.service.http import Request, envelope
from kvatlas.service.http_reply import JSON, Reply

PULL = "/kvatlas/pull"
PULLS_MAX = 64
_LOOK_S = 0.02  # between looks at whether it is over


class Wanted(msgspec.Struct, frozen=True):
    """A prompt by its block ``keys``, as an attached engine of that ``model`` would use it.
    ``scope``: the tenant whose it is."""

    life: str
    model: str
    keys: tuple[bytes, ...]
    scope: str = ""


class Brought(msgspec.Struct, frozen=True):
    """The answer: so many tokens of the prompt lie in dram now, of which so many bytes came."""

    tokens: int
    moved_bytes: int


class Pulls:
    """Those under way at one node. On the event loop."""

    def __init__(self, ring: Keyring, errands: Errands, core: Agent, life: str) -> None:
        self._ring = ring
        self._errands = errands
        self._core = core
        self._life = life
        self._open = 0

    async def answer(self, request: Request, reply: Reply) -> None:
        """One request to `PULL`. Cancelled when its client leaves."""
        wanted = self._wanted(request)
        if isinstance(wanted, tuple):
            _refuse(reply, *wanted)
            return
        self._open += 1
        try:
            told = await self._bring(wanted)
        finally:
            self._open -= 1
        if isinstance(told, wire.Refused):
            _refuse(reply, 409, told.why)
        else:
            reply.send(200, [JSON], msgspec.json.encode(told))

    def _wanted(self, request: Request) -> Wanted | tuple[int, str]:
        """What is asked for, or why it is not done."""
        wanted = ordered(self._ring, request, Wanted, self._life)
        if isinstance(wanted, Wanted) and self._open >= PULLS_MAX:
            return 503, f"{PULLS_MAX} copies are under way here"
        return wanted

    async def _bring(self, wanted: Wanted) -> Brought | wire.Refused:
        before = self._in_dram(wanted)
        errand = wire.Errand("pull", model=wanted.model, keys=wanted.keys, scope=wanted.scope)
        begun = await self._asked(errand)
        if isinstance(begun, wire.Refused):
            return begun
        name = str(begun["name"])
        try:
            while self._core.under_way(name):  # noqa: ASYNC110 - the machine tells nobody
                await asyncio.sleep(_LOOK_S)
        finally:
            self._call_off(name)  # where it is not over: its client left
        where = await self._asked(msgspec.structs.replace(errand, what="where"))
        if isinstance(where, wire.Refused):
            return where
        by_tier = msgspec.convert(where["by_tier"], dict[str, int])
        return Brought(by_tier.get("dram", 0), max(0, self._in_dram(wanted) - before))

    async def _asked(self, errand: wire.Errand) -> dict[str, object] | wire.Refused:
        """An errand's answer. Where nobody waits for it any more, it is called off."""
        told: asyncio.Future[wire.Status | wire.Refused] = asyncio.Future()

        def reply(answer: wire.Status | wire.Refused) -> None:
            if not told.done():
                told.set_result(answer)
            elif isinstance(answer, wire.Status):
                self._call_off(str(msgspec.json.decode(answer.json)["name"]))

        self._errands.take(errand, reply)
        answer = await told
        if isinstance(answer, wire.Refused):
            return answer
        return msgspec.json.decode(answer.json, type=dict[str, object])

    def _call_off(self, name: str) -> None:
        if self._core.under_way(name):
            self._errands.take(wire.Recall(name), lambda _: None)

    def _in_dram(self, wanted: Wanted) -> int:
        return self._core.held_bytes(wanted.keys).get(Tier.DRAM, 0)


def _refuse(reply: Reply, status: int, why: str) -> None:
    reply.send(status, [JSON], envelope(why, status=status))
