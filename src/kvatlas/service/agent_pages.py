"""Engines that keep track of prefixes by themselves, and name their pages by keys of their own.

Such an engine (SGLang) asks which pages there are, takes them one by one, and can do with fewer
than it took. Its keys are hashes chained over all tokens before a page, its own salts included;
ours are made of them under the engine's fingerprint, so that neither another model nor somebody
without the secret finds anything.
"""

from __future__ import annotations

from collections.abc import Callable

from kvatlas.core import agent_values as words
from kvatlas.core.agent import Agent
from kvatlas.core.compat import Member
from kvatlas.core.keys import Keyring
from kvatlas.core.units import Part
from kvatlas.errors import EngineError
from kvatlas.service import agent_wire as wire
from kvatlas.service.agent_driver import Driver


class Pages:
    """What such engines ask of a node's agent. For the event loop's thread alone."""

    def __init__(
        self,
        ring: Keyring,
        core: Agent,
        driver: Driver,
        *,
        send: Callable[[str, wire.FromAgent], None],
        seek_s: float,
        tenants_required: bool = False,
    ) -> None:
        """``send``: to an engine, where it is still there. ``seek_s``: how long shared tiers may
        take to say what they have. ``tenants_required``: nothing is done for such engines, which
        do not say whose a page is."""
        self._tenants_required = tenants_required
        self._ring = ring
        self._core = core
        self._driver = driver
        self._send = send
        self._seek_s = seek_s

    def answer(
        self, worker: str, member: Member, message: wire.Look | wire.Take | wire.Give
    ) -> wire.FromAgent | None:
        """None: the answer comes later. Raises EngineError for what is no question."""
        if self._tenants_required:
            raise EngineError("pages do not say whose they are, and --tenants required asks that")
        fingerprint = self._driver.loads.engines[worker].fingerprint
        keys = self._keys(fingerprint, message.hashes)
        if not 0 <= message.first <= len(keys):
            raise EngineError(f"page {message.first} of {len(keys)}")
        match message:
            case wire.Look():
                return self._look(worker, member, message, keys)
            case wire.Take(request, _, first, points, deadline_s):
                part = Part.POINT if points else Part.BODY
                event = words.Take(worker, request, keys, first, part, deadline_s)
                self._driver.tell(event)
                return None
            case wire.Give(request, _, first, points):
                filled = words.Filled(
                    worker,
                    request,
                    keys,
                    points,
                    prompt_tokens=len(keys) * member.layout.grid_tokens,
                    first=first,
                    ahead=True,
                )
                return wire.Orders(request, tuple(self._driver.filled(filled)))

    def _look(
        self, worker: str, member: Member, look: wire.Look, keys: tuple[bytes, ...]
    ) -> wire.Present | None:
        """What is here, and what shared tiers have that goes on where that ends."""

        def present() -> wire.Present:
            pages, points = self._core.present(worker, keys, look.first)
            if look.each:
                rest = range(look.first + pages + 1, len(keys))  # it is a hole that ended the row
                alone = (i + 1 for i in rest if self._core.present(worker, keys[i : i + 1], 0)[0])
                points = (*range(look.first + 1, look.first + pages + 1), *alone)
            return wire.Present(look.request, pages, points)

        answer, ways = present(), self._driver.ways
        if not ways.any:
            return answer
        grid = member.layout.grid_tokens
        end = look.first + answer.pages if look.each else max(answer.points, default=look.first)
        ask = words.Ask(look.request, worker, keys, end * grid, len(keys) * grid)
        beyond = self._core.unknown(ask, end * grid)

        def found() -> None:
            self._send(worker, present())

        fingerprint = self._driver.loads.engines[worker].fingerprint
        sought = any(beyond) and ways.seek(beyond, fingerprint, self._seek_s, found)
        return None if sought else answer

    def _keys(self, fingerprint: bytes, hashes: bytes) -> tuple[bytes, ...]:
        """Each hash stands for all before it: there is nothing to chain any more."""
        size = wire.HASH_BYTES
        if len(hashes) % size:
            raise EngineError(f"hashes of pages have {size} bytes each")
        root = self._ring.root(fingerprint)
        each = (hashes[at : at + size] for at in range(0, len(hashes), size))
        return tuple(self._ring.chain(root, one, size // 4)[0] for one in each)
