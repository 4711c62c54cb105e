"""Planted bugs: each patches code of the product so that one class of checker must find it.

`REGISTRY` maps a name to what plants it, a context manager; those here are named after the class of
`checkers.CLASSES` that finds them. They exist so that a checker which cannot fail is found out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import msgspec

from kvatlas.core.claims import Applied, Claims
from kvatlas.core.directory import Directory, Limits
from kvatlas.core.dispatch import Dispatcher
from kvatlas.core.events import AllBlocksCleared, BlockRemoved, Event
from kvatlas.core.keys import PUBLIC, Keyring, Scope
from kvatlas.core.lanes import Pool
from kvatlas.core.lookup import Lookup
from kvatlas.core.membership import Effect as MemberEffect
from kvatlas.core.membership import Membership
from kvatlas.core.records import Publisher, Tier
from kvatlas.core.register import Register
from kvatlas.core.register_values import Acquire, Commit, Held, Record, ToldFloors
from kvatlas.core.router import Ask, Decision, Plan, Router
from kvatlas.core.sequence import Effect, Sequencer
from kvatlas.core.steps import Steps
from kvatlas.workload.engine import Engine
from kvatlas.workload.prompt_keys import TOKEN_BYTES, PromptKeys
from kvatlas.workload.protocol import Arrive, Input
from kvatlas.workload.protocol import Effect as EngineEffect

Canary = Callable[[], AbstractContextManager[None]]


@contextlib.contextmanager
def patched(owner: object, name: str, new: object) -> Iterator[None]:
    """``owner.name`` is ``new`` meanwhile."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


def keys_of_first_tokens() -> AbstractContextManager[None]:
    """The engine's cache takes blocks for equal whose first tokens are."""
    extend = PromptKeys._extend

    def shortened(self: PromptKeys, count: int) -> None:
        whole, width = self.tokens, self.step * TOKEN_BYTES
        runs = range(0, len(whole), width)
        self.tokens = b"".join(whole[at : at + 4].ljust(width, b"\0") for at in runs)
        extend(self, count)
        self.tokens = whole

    return patched(PromptKeys, "_extend", shortened)


def scope_is_left_out() -> AbstractContextManager[None]:
    """Keys do not bind the tenant."""
    root = Keyring.root

    def public(
        self: Keyring, fingerprint: bytes, scope: Scope = PUBLIC, adapter: str = ""
    ) -> bytes:
        return root(self, fingerprint, PUBLIC, adapter)

    return patched(Keyring, "root", public)


def removals_are_ignored() -> AbstractContextManager[None]:
    """Claims outlive the blocks."""

    def removed(self: Claims, event: BlockRemoved, applied: Applied) -> None:
        pass

    return patched(Claims, "removed", removed)


def chain_alone_counts() -> AbstractContextManager[None]:
    """Matching blocks are promised, whatever windows there are."""

    def deepest(
        self: Lookup, pool: Pool, keys: Sequence[bytes], chains: Steps, tiers: Sequence[Tier]
    ) -> Steps:
        return chains

    return patched(Lookup, "_deepest", deepest)


def expectations_stay() -> AbstractContextManager[None]:
    """What a request was to compute is expected for ever."""

    def forget(self: Router, bit: int, keys: Sequence[bytes]) -> None:
        pass

    return patched(Router, "_forget", forget)


def answers_are_cut() -> AbstractContextManager[None]:
    """The last token of an answer is left out."""
    handle = Engine.handle

    def cut(self: Engine, event: Input, now: float) -> tuple[EngineEffect, ...]:
        if isinstance(event, Arrive) and event.output_tokens > 1:
            event = msgspec.structs.replace(event, output_tokens=event.output_tokens - 1)
        return handle(self, event, now)

    return patched(Engine, "handle", cut)


@contextlib.contextmanager
def one_engine_is_tried() -> Iterator[None]:
    """There is no way back from the first choice."""
    peek = Router.peek

    def first(
        self: Router, ask: Ask, now: float, among: Collection[Publisher] | None = None
    ) -> Decision:
        decision = peek(self, ask, now, among)
        return msgspec.structs.replace(decision, plans=decision.plans[:1])

    with patched(Router, "peek", first), patched(Dispatcher, "left", lambda self, id: False):
        yield


def a_connect_forgets() -> AbstractContextManager[None]:
    """Claims go with a connection and are never asked for again."""

    def connected(self: Sequencer, now: float) -> list[Effect]:
        return self.dropped("it connects")

    return patched(Sequencer, "connected", connected)


def limits_do_not_count() -> AbstractContextManager[None]:
    """The directory grows as it likes."""
    init = Directory.__init__

    def endless(self: Directory, keyring: Keyring, limits: Limits | None = None) -> None:
        init(self, keyring, Limits())

    return patched(Directory, "__init__", endless)


def a_clear_is_too_much() -> AbstractContextManager[None]:
    """An event that the code does not expect."""
    apply = Directory.apply

    def fragile(self: Directory, publisher: Publisher, events: Iterable[Event]) -> Applied:
        events = tuple(events)
        if any(isinstance(event, AllBlocksCleared) for event in events):
            raise KeyError("hashes")
        return apply(self, publisher, events)

    return patched(Directory, "apply", fragile)


def ties_go_to_who_came_first() -> AbstractContextManager[None]:
    """Of two engines that are equal the one that was made known first is chosen."""
    order = Router._order

    def by_arrival(self: Router, plan: Plan) -> tuple[bool, float, int, int, Publisher]:
        over, price, in_flight, chosen, _ = order(self, plan)
        place = list(self._engines).index(plan.publisher)
        return over, price, in_flight, chosen, Publisher(f"{place:03}")

    return patched(Router, "_order", by_arrival)


def everybody_leads() -> AbstractContextManager[None]:
    """The register gives a lease to whoever asks."""

    def held(self: Register, asked: Acquire, now_ms: int) -> Held:
        return Held(asked.what, now_ms)

    return patched(Register, "_acquire", held)


def nobody_is_missed() -> AbstractContextManager[None]:
    """Members stay where they were, whatever became of them."""

    def bury(self: Register, now_ms: int) -> None:
        pass

    return patched(Register, "_bury", bury)


def floors_are_kept_to_oneself() -> AbstractContextManager[None]:
    """What others have raised is not taken up."""

    def told(self: Membership, answer: ToldFloors) -> list[MemberEffect]:
        return []

    return patched(Membership, "_told_floors", told)


def every_record_counts() -> AbstractContextManager[None]:
    """Nothing that is committed is refused."""

    def refusal(self: Register, store: object, asked: Commit, record: Record) -> None:
        return None

    return patched(Register, "_refusal", refusal)


REGISTRY: dict[str, Canary] = {
    "wrong-bytes": keys_of_first_tokens,
    "cross-scope": scope_is_left_out,
    "resurrected": removals_are_ignored,
    "over-promise": chain_alone_counts,
    "leak": expectations_stay,
    "endings": answers_are_cut,
    "unexplained-error": one_engine_is_tried,
    "convergence": a_connect_forgets,
    "bounds": limits_do_not_count,
    "crash": a_clear_is_too_much,
    "replicas-differ": ties_go_to_who_came_first,
    "two-leaders": everybody_leads,
    "membership": nobody_is_missed,
    "lost-floor": floors_are_kept_to_oneself,
    "stale-record": every_record_counts,
}
