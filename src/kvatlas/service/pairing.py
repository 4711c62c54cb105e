"""Pairs of engines on the deciding side: who may pair with whom, at what price, and which is next.

The prefill half is routed like any request, by what it holds of the prompt. The decode half is
chosen when it is needed, by its crowd and by what the hand-off from that prefill half takes.
Where halves cannot be had one engine does it all: decode halves first, they have the room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

import msgspec

from kvatlas.config import PairingProtocol, Role
from kvatlas.core.compat import Member, why_not
from kvatlas.core.dispatch import Dispatcher, Finished, FirstToken, Question, Sent
from kvatlas.core.layout import Layout
from kvatlas.core.pairs import HALF, HandOff, by_price, first_halves, priced, second_halves
from kvatlas.core.records import Publisher
from kvatlas.core.router import Ask, Decision, Plan
from kvatlas.core.transports import Transports
from kvatlas.service.pair_protocols import CONCURRENT, WHOLE, whole_because
from kvatlas.service.steer import Half, Inbound

_ALONE: tuple[Role, ...] = ("decode", "combined", "prefill")


class HalfRank(Protocol):
    """What is asked of a `Rank` here."""

    @property
    def role(self) -> Role: ...
    @property
    def pairing(self) -> PairingProtocol: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def member(self) -> Member | None: ...


class Leg(msgspec.Struct):
    """One part of a request at one engine after the first: its question to the dispatcher, and
    among whom it goes. ``prefill``: whose state it takes over, and whether that can be timed:
    of halves that run at once the time would have the prefill in it; ``moving``: who does so now.
    """

    id: str
    ranks: tuple[Publisher, ...]
    prefill: Publisher | None = None
    size_bytes: int = 0
    timed: bool = False
    sent_to: Publisher | None = None
    sent_at: float = 0.0
    moving: Publisher | None = None
    hand_off: HandOff | None = None


class Pairing:
    """``ranks`` is the steering's own book of engines; nothing here changes it."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        ranks: Mapping[Publisher, HalfRank],
        clock: Callable[[], float],
    ) -> None:
        self._dispatcher = dispatcher
        self._ranks = ranks
        self._clock = clock
        self._legs: dict[str, Leg] = {}
        self.transports = Transports()
        self._refused: dict[tuple[Publisher, Publisher], str] = {}

    # -- engines --------------------------------------------------------------------------------

    def settle(self, gone: Publisher | None = None) -> None:
        """Engines came, went or changed: who may pair now?"""
        if gone is not None:
            self.transports.forget(gone)
        self._refused = {
            (p, d): why
            for p, one in self._ranks.items()
            for d, other in self._ranks.items()
            if one.role == "prefill" and other.role == "decode" and (why := _why_not(one, other))
        }

    def refusals(self) -> dict[str, str]:
        """For people: halves that may not meet, and the fields that forbid it."""
        found: dict[str, list[str]] = {}
        for (p, d), why in sorted(self._refused.items()):
            if why != _OTHER_MODEL:
                found.setdefault(str(p), []).append(f"not with {d}: {why}")
        return {who: " | ".join(texts) for who, texts in found.items()}

    # -- the first decision ---------------------------------------------------------------------

    def candidates(
        self, request: Inbound, serving: Iterable[Publisher]
    ) -> tuple[list[Publisher], str]:
        """Among whom it is routed, and, where there are halves and it must not be split, why."""
        among = list(serving)
        if all(self._ranks[p].role == "combined" for p in among):
            return among, ""
        why = request.whole or whole_because(request.path, request.body)
        if not why:
            firsts = [
                p for p in among if self._ranks[p].role == "prefill" and self._seconds(p, among)
            ]
            if firsts:
                return [p for p in among if self._ranks[p].role == "combined"] + firsts, ""
            why = "no_pair"
        for role in ("combined", "decode", "prefill"):
            whole = [p for p in among if self._ranks[p].role == role and self._can_whole(p)]
            if whole:
                return whole, why
        return [], why

    def priced(self, decision: Decision, serving: Collection[Publisher]) -> Decision:
        """The same with pairs at the price of pairs, in that order."""
        firsts = first_halves(decision, {p for p, r in self._ranks.items() if r.role == "prefill"})
        if not firsts:
            return decision
        now = self._clock()
        seconds = sorted({d for p in firsts for d in self._seconds(p, serving)})
        plans = second_halves(self._dispatcher.router, decision.id, seconds, now)
        allowed = {
            p: [plan for plan in plans if (p, plan.publisher) not in self._refused] for p in firsts
        }
        tokens = decision.prompt_tokens
        return priced(decision, allowed, self.transports, lambda p: self._bytes(p, tokens), now)

    # -- legs after the first -------------------------------------------------------------------

    def decoders(
        self, id: str, prefill: Publisher, serving: Collection[Publisher], prompt_tokens: int
    ) -> list[Plan]:
        """The second half of ``id``: to be tried in this order; only those that look well."""
        self.over(id, ok=False)  # of a try before
        up = self._dispatcher.router.up()
        among = [d for d in self._seconds(prefill, serving) if d in up]
        if not among:
            return []
        size_bytes = self._bytes(prefill, prompt_tokens)
        decision = self._ask(f"{id}/decode", among, -1)
        timed = self._ranks[prefill].pairing not in CONCURRENT
        self._legs[id] = Leg(decision.id, tuple(among), prefill, size_bytes, timed)
        return by_price(prefill, decision.plans, self.transports, size_bytes, self._clock())

    def alone(
        self, id: str, serving: Iterable[Publisher], prompt_tokens: int, failed: Half
    ) -> list[Plan]:
        """One engine that does it all, after halves failed: each is asked once more at most, the
        one that failed as the second half last."""
        leg = self._legs.get(id)
        last = leg.sent_to if leg is not None and failed == "decode" else None
        self.over(id, ok=False)
        among = self._whole(serving)
        if not among:
            return []
        decision = self._ask(f"{id}/alone", among, prompt_tokens)
        self._legs[id] = Leg(decision.id, tuple(among))

        def rank(plan: Plan) -> tuple[bool, int]:
            return plan.publisher == last, _ALONE.index(self._ranks[plan.publisher].role)

        return sorted(decision.plans, key=rank)

    def alone_s(self, decision: Decision, serving: Iterable[Publisher]) -> float:
        """Seconds to the first token on one engine that does it all, should the pair be given up;
        0 where they are only guessed, inf where none can."""
        ask = Ask(decision.id, decision.prompt_tokens, {}, (), HALF)
        among = self._whole(serving)
        router = self._dispatcher.router
        prices = map(router.foreseen, router.peek(ask, self._clock(), among=among).plans)
        return min((price.ttft_s if price else 0.0 for price in prices), default=math.inf)

    def sent(self, id: str, to: Publisher) -> bool:
        """Whether it is such a leg that goes to ``to`` now; then it is in the books."""
        leg = self._legs.get(id)
        if leg is None:
            return False
        if to not in leg.ranks:  # a plan of the first decision again: that half is given up
            self.over(id, ok=False)
            return False
        self._lost(leg)
        leg.sent_to, leg.sent_at = to, self._clock()
        if leg.prefill is not None:
            self._hands_off(leg, leg.prefill, to)
        self._dispatcher.handle(Sent(leg.id, to), leg.sent_at)
        return True

    def first_token(self, id: str) -> bool:
        """Whether it was such a leg's."""
        leg = self._legs.get(id)
        if leg is None:
            return False
        now = self._clock()
        self._dispatcher.handle(FirstToken(leg.id), now)
        if leg.prefill is not None and leg.moving is not None:
            took_s = now - leg.sent_at if leg.timed else None
            self.transports.arrived(leg.prefill, leg.moving, leg.size_bytes, took_s, now)
            leg.moving = None
            if leg.hand_off is not None:
                leg.hand_off.took_s = took_s
        return True

    def over(self, id: str, *, ok: bool, cached_tokens: int = -1) -> Leg | None:
        """Such a leg, where there was one; it is over."""
        leg = self._legs.pop(id, None)
        if leg is None:
            return None
        self._lost(leg)
        end = Finished(leg.id, leg.sent_to or leg.ranks[0], ok, cached_tokens)
        self._dispatcher.handle(end, self._clock())
        return leg

    # -- inside ---------------------------------------------------------------------------------

    def _hands_off(self, leg: Leg, prefill: Publisher, to: Publisher) -> None:
        transports, now = self.transports, leg.sent_at
        foreseen_s = transports.seconds(prefill, to, leg.size_bytes, now)
        error_s = transports.error_s(prefill, to)
        leg.hand_off = HandOff(str(prefill), leg.size_bytes, foreseen_s, error_s)
        leg.moving = to
        transports.sent(prefill, to, leg.size_bytes, now)

    def _lost(self, leg: Leg) -> None:
        """What was on its way to where it was sent before will not arrive."""
        if leg.prefill is not None and leg.moving is not None:
            self.transports.lost(leg.prefill, leg.moving, self._clock())
            leg.moving = None

    def _ask(self, id: str, among: Iterable[Publisher], prompt_tokens: int) -> Decision:
        ranks = tuple((p, "") for p in among)
        question = Question(id, ranks, unkeyed=HALF, prompt_tokens=prompt_tokens, admitted=True)
        decision = self._dispatcher.handle(question, self._clock())
        assert decision is not None
        return decision

    def _seconds(self, prefill: Publisher, serving: Collection[Publisher]) -> list[Publisher]:
        return [
            d
            for d, rank in self._ranks.items()
            if rank.role == "decode" and d in serving and (prefill, d) not in self._refused
        ]

    def _whole(self, serving: Iterable[Publisher]) -> list[Publisher]:
        up = self._dispatcher.router.up()
        return [p for p in serving if p in up and self._can_whole(p)]

    def _can_whole(self, publisher: Publisher) -> bool:
        rank = self._ranks[publisher]
        return rank.role == "combined" or rank.pairing in WHOLE

    def _bytes(self, prefill: Publisher, prompt_tokens: int) -> int:
        return self._ranks[prefill].layout.resume_bytes(max(0, prompt_tokens))


_OTHER_MODEL = "it serves another model"


def _why_not(prefill: HalfRank, decode: HalfRank) -> str:
    """What forbids that state goes from one to the other; "" where nothing does."""
    if prefill.pairing != decode.pairing:
        return f"pairing {prefill.pairing}, {decode.pairing}"
    if prefill.member is None or decode.member is None:
        return "what it computes with is not known"
    if not set(prefill.member.names) & set(decode.member.names):
        return _OTHER_MODEL
    return "; ".join(why_not(prefill.member, decode.member))
