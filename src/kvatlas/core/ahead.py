"""Copies before anybody asks: hot prefixes to idle nodes, prompts to where their next turn will go.

It sees what the dispatcher is told and what it decides, and orders copies between nodes whose
agents hold what engines computed. A copy is ordered where it costs less than what it would have
saved lately: the wait at the holder, summed over the requests that it kept waiting. All of it is a
guess about speed: nothing waits for a copy, and an engine is routed to only once its agent has
announced what arrived. See docs/guides/tiers.md.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence, Sized
from typing import TypeVar

import msgspec

from kvatlas.core.ahead_books import Heats, Turns
from kvatlas.core.ahead_copies import Account, Copied, Copies, Effect, Params, Tally, Why
from kvatlas.core.ahead_moves import AGAIN_S, LOOK_MAX, Moves
from kvatlas.core.cost import EngineCost
from kvatlas.core.dispatch import (
    Dispatcher,
    Finished,
    Input,
    Question,
    Reset,
    Sent,
    Settle,
    Unsettle,
)
from kvatlas.core.keys import Scope
from kvatlas.core.layout import Layout
from kvatlas.core.records import Publisher, Tier
from kvatlas.core.router import Ask, Decision, Plan

T = TypeVar("T")
REQUESTS_MAX = 100_000  # in flight and remembered, as `core.router`


class _Prompt(msgspec.Struct):
    """One request, as engines of one fingerprint could serve it; ``plans`` of those with agents."""

    ask: Ask
    scope: Scope
    layout: Layout
    fingerprint: bytes
    keys: Sequence[bytes]
    plans: tuple[Plan, ...]
    chosen: Plan
    again: bool = False  # it goes on from a prompt that was answered


class _Flight(msgspec.Struct):
    """A request that is sent; ``account``: the copy that it goes by, and the price elsewhere."""

    prompt: _Prompt
    plan: Plan
    account: Account | None = None
    elsewhere_s: float = math.inf


class Ahead:
    """A machine beside one `Dispatcher`, which it reads and never changes. ``now`` must not
    decrease."""

    def __init__(self, params: Params, dispatcher: Dispatcher) -> None:
        #: Whether hot prefixes are this gateway's to copy: of several, one does it. Prompts that
        #: it has served itself are pushed by each.
        self.leads = True
        self.params = params
        self._dispatcher = dispatcher
        self._copies = Copies(params)
        self._heats = Heats(params.horizon_s)
        self._turns = Turns(params.horizon_s)
        self._moves: Moves[_Prompt] = Moves()
        self._homes: dict[Publisher, Publisher] = {}  # engine → agent of its node
        self._asked: OrderedDict[str, _Prompt] = OrderedDict()
        self._flights: OrderedDict[str, _Flight] = OrderedDict()
        self._now = 0.0

    # -- the machine ----------------------------------------------------------------------------

    def handle(
        self, event: Input | Copied, now: float, answer: Decision | None = None
    ) -> tuple[Effect, ...]:
        """Take in what the dispatcher has just taken in, with its answer; or the end of a copy."""
        self._now = now
        match event:
            case Question() if answer is not None:
                self._decided(event, answer)
            case Sent():
                self._sent(event)
            case Finished():
                self._finished(event)
            case Copied():
                self._copies.ended(event, now)
                self._move()
            case Settle(agent, engines):
                self._leave(agent)
                self._homes |= dict.fromkeys(engines, agent)
            case Unsettle(agent):
                self._leave(agent)
            case Reset(publisher):
                self._copies.gone(publisher)
            case _:
                return ()
        return self._taken()

    def tick(self, now: float) -> tuple[Effect, ...]:
        """Do what is due."""
        self._now = now
        self._copies.tick(now)
        if 0 <= self._moves.due <= now:
            self._move()
        return self._taken()

    def drain(self, agents: Collection[Publisher], now: float) -> tuple[Effect, ...]:
        """These agents drain now, and no others: nothing is copied there, and what they have is
        handed on."""
        self._now = now
        self._moves.drain(agents, now)
        if self._moves.due == now:
            self._move()
        return self._taken()

    def next_deadline(self) -> float | None:
        """When `tick` has something to do; None: nothing is due."""
        due = self._copies.next_deadline()
        if self._moves.due < 0 or not self.leads:
            return due
        return self._moves.due if due is None else min(due, self._moves.due)

    def _taken(self) -> tuple[Effect, ...]:
        out, self._copies.out = self._copies.out, []
        return tuple(out)

    @property
    def tallies(self) -> dict[Why, Tally]:
        """What copies came to, by what they were for."""
        return self._copies.tallies

    @property
    def ordered(self) -> int:
        """Copies ordered so far."""
        return sum(tally.ordered for tally in self._copies.tallies.values())

    @property
    def under_way(self) -> int:
        """Copies ordered and not over."""
        return self._copies.coming

    @property
    def watched(self) -> int:
        """Copies that arrived, and of which it is still to be seen whether they are used."""
        return self._copies.watched

    def remembered(self) -> int:
        """Entries in all books, each of which is bounded."""
        books: tuple[Sized, ...] = (
            self._heats,
            self._turns,
            self._moves,
            self._asked,
            self._flights,
            self._homes,
        )
        return sum(len(book) for book in books) + self.under_way + self.watched

    def _leave(self, agent: Publisher) -> None:
        self._homes = {e: a for e, a in self._homes.items() if a != agent}
        self._copies.gone(agent)

    # -- requests -------------------------------------------------------------------------------

    def _decided(self, event: Question, decision: Decision) -> None:
        prompt = self._prompt(event, decision)
        if prompt is None:
            return
        _remember(self._asked, decision.id, prompt)
        if self.params.push:
            self._came_back(prompt)
        if self.params.replicate and self.leads:
            self._replicate(prompt)

    def _prompt(self, event: Question, decision: Decision) -> _Prompt | None:
        """None where nothing can be said of it: no keys, no agents, or it was refused."""
        ask = self._dispatcher.asked(decision.id)
        if ask is None or ask.unkeyed or not decision.plans:
            return None
        chosen = decision.plans[0]
        facts = self._dispatcher.facts(chosen.publisher)
        if facts is None or not facts[0].components:  # else its bytes are not known
            return None
        layout, fingerprint = facts
        plans = tuple(
            plan
            for plan in decision.plans
            if plan.publisher in self._homes and self._fingerprint(plan.publisher) == fingerprint
        )
        keys = ask.lower(fingerprint)
        return _Prompt(ask, event.sharing().scope, layout, fingerprint, keys, plans, chosen)

    def _fingerprint(self, publisher: Publisher) -> bytes:
        facts = self._dispatcher.facts(publisher)
        return facts[1] if facts is not None else b""

    def _cost(self, publisher: Publisher) -> EngineCost:
        cost = self._dispatcher.router.cost(publisher)
        assert cost is not None, "an engine that has a plan is the router's"
        return cost

    def _with_copy(self, prompt: _Prompt, plan: Plan, tokens: int) -> float:
        """Its time to the first token, if the first ``tokens`` lay in the dram of its node."""
        if plan.resume_tokens >= tokens:
            return plan.price.ttft_s
        cost = self._cost(plan.publisher)
        load_s = cost.load_s((0, tokens))
        rest_s = cost.recompute_s(tokens, prompt.ask.prompt_tokens)
        return min(plan.price.ttft_s, plan.price.wait_s + load_s + rest_s)

    def _sent(self, event: Sent) -> None:
        prompt = self._asked.pop(event.id, None)
        plan = self._dispatcher.plan(event.id, event.publisher)
        if prompt is None or plan is None:
            return
        flight = _Flight(prompt, plan)
        home = self._homes.get(event.publisher)
        for account in self._copies.within(prompt.keys):
            order = account.order
            if order.agent != home:
                if order.why is Why.PUSH and account.arrived_at < 0:
                    self._copies.recall(account, "next_turn_elsewhere")
            elif plan.resume_tokens >= order.tokens and account.arrived_at >= 0:
                account.uses += 1
                if flight.account is None or order.tokens > flight.account.order.tokens:
                    flight.account = account
        if flight.account is not None:
            there = {a.order.agent for a in self._copies.of(flight.account.order.keys[-1])}
            flight.elsewhere_s = min(
                (p.price.ttft_s for p in prompt.plans if self._homes[p.publisher] not in there),
                default=math.inf,
            )
        _remember(self._flights, event.id, flight)

    def _finished(self, event: Finished) -> None:
        self._asked.pop(event.id, None)
        flight = self._flights.pop(event.id, None)
        if flight is None or not event.ok or event.publisher != flight.plan.publisher:
            return
        if flight.account is not None:
            tally = self._copies.tallies[flight.account.order.why]
            tally.served += 1
            if event.ttft_s >= 0 and flight.elsewhere_s < math.inf:
                tally.predicted_s += flight.elsewhere_s - flight.plan.price.ttft_s
                tally.measured_s += flight.elsewhere_s - event.ttft_s
        home = self._homes.get(flight.plan.publisher)
        if self.params.move and home is not None and flight.prompt.keys:
            self._moves.served(flight.prompt.keys[-1], home, flight.prompt)
        if self.params.push:
            self._answered(flight)

    # -- hot prefixes ---------------------------------------------------------------------------

    def _replicate(self, prompt: _Prompt) -> None:
        """What this request waits for at the holder, it would not have to with one holder more."""
        grid = prompt.layout.grid_tokens
        deepest = max((plan.resume_tokens for plan in prompt.plans), default=0) // grid
        if not deepest:
            return
        key, tokens = prompt.keys[deepest - 1], deepest * grid
        there = {self._homes[p.publisher] for p in prompt.plans if p.resume_tokens >= tokens}
        coming = [account for account in self._copies.of(key) if account.arrived_at < 0]
        # What lies in dram there may be the copy itself: its announcement comes before its end.
        computed = {self._homes[p.publisher] for p in prompt.plans if _in_hbm(p) >= tokens}
        for account in coming:
            if account.order.agent in computed:
                self._copies.recall(account, "held_meanwhile")
        there |= self._moves.draining
        without = [p for p in prompt.plans if self._homes[p.publisher] not in there]
        if not without:
            return
        priced = [(self._with_copy(prompt, p, tokens), p.in_flight, p) for p in without]
        with_s, _, best = min(priced, key=lambda each: (*each[:2], each[2].publisher))
        gain_s = prompt.chosen.price.ttft_s - with_s
        if gain_s <= 0:
            return
        expected_s = self._heats.add(key, gain_s, self._now)
        cost_s = self._copies.cost_s(prompt.layout.load_bytes(tokens))
        if coming:  # what it is for goes on
            for account in coming:
                account.fades_at = max(account.fades_at, self._fades_at(expected_s, cost_s))
        elif expected_s > cost_s and self._order(
            Why.REPLICATE, prompt, deepest, best.publisher, expected_s
        ):
            self._heats.drop(key)

    def _fades_at(self, expected_s: float, cost_s: float) -> float:
        """When it will be worth half of what it costs, if nothing more is seen."""
        twice = 2 * expected_s / cost_s
        return self._now + self.params.horizon_s * math.log(twice) if twice > 1 else self._now

    def _order(
        self, why: Why, prompt: _Prompt, blocks: int, engine: Publisher, expected_s: float
    ) -> bool:
        """Order a copy of the first blocks of a prompt to the node of ``engine``; False, and
        counted, where it cannot be had now."""
        agent, keys = self._homes[engine], prompt.keys[:blocks]
        if any(account.order.agent == agent for account in self._copies.of(keys[-1])):
            return False  # it came, and was let go of again, or comes already
        lends = self._dispatcher.directory.lends
        near = self._homes.get(prompt.chosen.publisher)
        others = sorted({*self._homes.values()} - {agent}, key=lambda a: (a != near, a))
        source = next(
            (a for a in others if lends(a, keys, prompt.fingerprint) == blocks),
            None,
        )
        denied = "no_source" if source is None else self._copies.room((agent, source), self._now)
        if source is None or denied:
            self._copies.tallies[why].denied[denied] += 1
            return False
        tokens = blocks * prompt.layout.grid_tokens
        size_bytes = prompt.layout.load_bytes(tokens)
        self._copies.order(
            why,
            (agent, source, engine),
            tuple(keys),
            tokens=tokens,
            size_bytes=size_bytes,
            expected_s=expected_s,
            fades_at=self._fades_at(expected_s, self._copies.cost_s(size_bytes)),
            scope=prompt.scope,
            now=self._now,
        )
        return True

    # -- nodes that drain -----------------------------------------------------------------------

    def _move(self) -> None:
        """Hand on what they have, as far as it may be copied now."""
        moves = self._moves
        if not (self.params.move and self.leads) or moves.due < 0:
            return
        moves.due = -1.0
        looked = 0
        for key, home, prompt in moves.waiting():
            if not self._moved(home, prompt):
                # Others are under way, or it has had its share of the node.
                moves.due = self._now + AGAIN_S
                return
            moves.done(key)
            looked += 1
        if looked >= LOOK_MAX:  # there may be more
            moves.due = self._now + AGAIN_S

    def _moved(self, home: Publisher, prompt: _Prompt) -> bool:
        """Whether it is ordered, or need not be; False: not now."""
        lends = self._dispatcher.directory.lends
        blocks = lends(home, prompt.keys, prompt.fingerprint)
        waits = {
            publisher: wait_s
            for publisher, wait_s in self._dispatcher.router.waits(self._now).items()
            if self._homes.get(publisher, home) not in self._moves.draining
            and self._fingerprint(publisher) == prompt.fingerprint
        }
        others = {self._homes[publisher] for publisher in waits}
        keys = prompt.keys[:blocks]
        if not blocks or any(lends(a, keys, prompt.fingerprint) == blocks for a in others):
            return True
        if not waits:
            return True  # there is nobody to have it
        target = min(waits, key=lambda p: (waits[p], p))
        tokens = blocks * prompt.layout.grid_tokens
        worth_s = self._cost(target).recompute_s(0, tokens)
        if worth_s <= self._copies.cost_s(prompt.layout.load_bytes(tokens)):
            return True
        if self._copies.room((self._homes[target], home), self._now):
            return False
        self._order(Why.MOVE, prompt, blocks, target, worth_s)
        return True

    # -- the next turn --------------------------------------------------------------------------

    def _answered(self, flight: _Flight) -> None:
        """Where would its next turn go, if it came now and its prompt lay there?"""
        prompt, router = flight.prompt, self._dispatcher.router
        home = self._homes.get(flight.plan.publisher)
        if home is None or not prompt.keys:
            return
        waits = {
            publisher: wait_s
            for publisher, wait_s in router.waits(self._now).items()
            if self._homes.get(publisher, home) not in {home, *self._moves.draining}
            and self._fingerprint(publisher) == prompt.fingerprint
        }
        if not waits:
            return
        load = router.in_flight()
        target = min(waits, key=lambda p: (waits[p], load.get(p, 0), p))
        here_s = router.waits(self._now).get(flight.plan.publisher, math.inf)
        grid = prompt.layout.grid_tokens
        load_s = self._cost(target).load_s((0, len(prompt.keys) * grid))
        looks_s = here_s - waits[target] - load_s
        key, to = prompt.keys[-1], self._homes[target]
        expected_s = self._turns.ended(key, to, looks_s, self._now, again=prompt.again)
        size_bytes = prompt.layout.load_bytes(len(prompt.keys) * grid)
        if expected_s > self._copies.cost_s(size_bytes):
            held = self._dispatcher.directory.lends(home, prompt.keys, prompt.fingerprint)
            if held:
                self._order(Why.PUSH, prompt, held, target, expected_s)
            else:
                self._copies.tallies[Why.PUSH].denied["no_source"] += 1

    def _came_back(self, prompt: _Prompt) -> None:
        """A next turn: what would it have saved to have the turn before it where it was guessed?"""
        found = self._turns.back(prompt.keys)
        if found is None:
            return
        key, end = found
        prompt.again = True
        tokens = (prompt.keys.index(key) + 1) * prompt.layout.grid_tokens
        there = [p for p in prompt.plans if self._homes[p.publisher] == end.target]
        others = [p for p in prompt.plans if self._homes[p.publisher] != end.target]
        if there and others:
            with_s = min(self._with_copy(prompt, p, tokens) for p in there)
            without_s = min(p.price.ttft_s for p in others)
            self._turns.saved(end, max(0.0, without_s - with_s), self._now)


def _in_hbm(plan: Plan) -> int:
    return plan.tier_tokens[Tier.HBM] if plan.tier_tokens else plan.resume_tokens


def _remember(book: OrderedDict[str, T], id: str, value: T) -> None:
    book[id] = value
    if len(book) > REQUESTS_MAX:
        book.popitem(last=False)
