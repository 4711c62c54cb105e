"""What pairs cost beside engines that do it all, in virtual time: as `service.pairing` prices them.

The decode half itself is chosen by its load when it is needed (`sim.gateway`).
"""

from __future__ import annotations

from kvatlas.core.dispatch import Dispatcher
from kvatlas.core.layout import Layout
from kvatlas.core.pairs import first_halves, priced, second_halves
from kvatlas.core.records import Publisher
from kvatlas.core.router import Decision
from kvatlas.core.transports import Transports


class PairPrices:
    """Of one gateway: its halves, and what their hand-offs took."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._transports = Transports()
        self._prefill: dict[Publisher, Layout] = {}
        self._decode: list[Publisher] = []

    def add(self, publisher: Publisher, layout: Layout, role: str) -> None:
        """An engine with a role; one that does it all is no half."""
        if role == "prefill":
            self._prefill[publisher] = layout
        elif role == "decode":
            self._decode.append(publisher)

    def priced(self, decision: Decision, now: float) -> Decision:
        """The same with pairs at the price of pairs, in that order."""
        firsts = first_halves(decision, self._prefill)
        if not firsts:
            return decision
        plans = second_halves(self._dispatcher.router, decision.id, self._decode, now)
        allowed, tokens = dict.fromkeys(firsts, plans), decision.prompt_tokens
        return priced(decision, allowed, self._transports, lambda p: self._bytes(p, tokens), now)

    def arrived(
        self, prefill: str, decode: Publisher, prompt_tokens: int, seconds: float, now: float
    ) -> None:
        """The decode half's first token came ``seconds`` after it was asked."""
        first = Publisher(prefill)
        size_bytes = self._bytes(first, prompt_tokens)
        self._transports.sent(first, decode, size_bytes, now)
        self._transports.arrived(first, decode, size_bytes, seconds, now)

    def _bytes(self, prefill: Publisher, prompt_tokens: int) -> int:
        return self._prefill[prefill].resume_bytes(max(0, prompt_tokens))
