"""This process among those of its cluster: `core.membership`, driven over the register.

What the register says of others is passed on to whom it concerns; a register that is silent is
flagged, and nothing stops for it but what only the holder of a lease may do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from kvatlas.config_register import RegisterConfig
from kvatlas.core import membership as core
from kvatlas.core.forgetting import Floor
from kvatlas.core.keys import Keyring
from kvatlas.core.register_values import Answer, Member, Question
from kvatlas.errors import RegisterError
from kvatlas.service.register import RegisterPort

log = logging.getLogger(__name__)


def identity_of(ring: Keyring, name: str) -> str:
    """By which members of a cluster know each other: its name, and its secret."""
    return ring.proof(b"cluster\0" + name.encode()).hex()[:32]


class Membership:
    """Lives on the event loop; `start` and `close` it. Whoever listens sets what it calls."""

    def __init__(
        self,
        config: RegisterConfig,
        register: RegisterPort,
        me: Member,
        ring: Keyring,
        *,
        wants: Iterable[str] = (),
        tenants: core.Tenants | None = None,
        floors: Iterable[Floor] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``register`` is closed with this. ``clock``: the wall clock, for the register to judge.
        For the others see `core.membership.Membership`."""
        self.met: Callable[[tuple[Member, ...]], None] = lambda _: None
        self.learnt: Callable[[tuple[Floor, ...]], None] = lambda _: None
        self.tenants: Callable[[core.Tenants], None] = lambda _: None
        self.overruled: Callable[[str], None] = lambda _: None
        self.counts = {"asked": 0, "unanswered": 0}
        self._register = register
        self._clock = clock
        self.core = core.Membership(
            me,
            identity_of(ring, config.name),
            wants=wants,
            tenants=tenants,
            floors=floors,
            params=core.Params(config.beat_s, config.ttl_s, config.deadline_s),
        )
        self._said = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._beat: asyncio.Task[None] | None = None
        self._answered = asyncio.Event()

    async def start(self, wait_s: float = 0.0) -> None:
        """Begin, and wait so long for the first answers to have come, or not: who is there, what
        was forgotten, who the tenants are."""
        self._beat = asyncio.create_task(self._keep(), name="membership")
        if wait_s:
            with_answer = asyncio.create_task(self._answered.wait())
            await asyncio.wait([with_answer], timeout=wait_s)
            with_answer.cancel()

    async def close(self) -> None:
        """Leaves: the others need not wait for the end of this life."""
        tasks = [*self._tasks, *([self._beat] if self._beat is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            if self.core.standing is core.Standing.MEMBER:
                await self._register.ask(self.core.leave(), self.core.params.deadline_s)
        except RegisterError as error:
            log.info("register: it was not told that this process leaves: %s", error)
        finally:
            await self._register.close()

    def leads(self, what: str) -> bool:
        """Whether this process may do what only one may do."""
        return bool(self.core.leads(what, self._now()))

    def raised(self, floors: Sequence[Floor]) -> None:
        """Floors that all are to know."""
        if floors:
            self._perform(self.core.handle(core.Raised(tuple(floors)), self._now()))

    def edited(self, text: str) -> None:
        """The tenants' file, as all are to have it."""
        self._perform(self.core.handle(core.Edited(text), self._now()))

    def change(self, member: Member) -> None:
        """What this process tells of itself now."""
        self._perform(self.core.handle(core.Changed(member), self._now()))
        self._perform(self.core.tick(self._now(), self._clock_ms()))

    # -- the loop -------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            self._perform(self.core.tick(self._now(), self._clock_ms()))
            due = self.core.next_deadline()
            await asyncio.sleep(max(0.0, (due or 0.0) - self._now()) + 0.001)

    def _perform(self, effects: Sequence[core.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, core.Ask):
                asked = self._ask(effect.question, effect.deadline_s)
                task = asyncio.create_task(asked, name="ask the register")
                self._tasks.add(task)
                task.add_done_callback(self._over)
                continue
            try:
                self._pass_on(effect)
            except Exception:  # whoever listens; what follows is to be asked all the same
                log.exception("register: %s not taken in", type(effect).__name__)

    def _pass_on(self, effect: core.Effect) -> None:
        match effect:
            case core.Members(members):
                self.met(members)
            case core.Learnt(floors):
                self.learnt(floors)
            case core.Tenants():
                self.tenants(effect)
            case core.Overruled(text):
                self.overruled(text)
            case core.Emptied():
                log.warning("register: it has lost all; what is known here is said again")

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:  # what an answer made it ask is heard, too
            self._answered.set()

    async def _ask(self, question: Question, deadline_s: float) -> None:
        asked_s = self._now()
        self.counts["asked"] += 1
        event: core.Input
        try:
            answer: Answer = await self._register.ask(question, deadline_s)
            event = core.Answered(question, answer, asked_s)
        except RegisterError as error:
            self.counts["unanswered"] += 1
            event = core.Unanswered(question, str(error))
        except Exception as error:  # ours; unanswered it would never be asked again
            log.exception("register: %s was not asked", type(question).__name__)
            self.counts["unanswered"] += 1
            event = core.Unanswered(question, f"{type(error).__name__}: {error}")
        self._perform(self.core.handle(event, self._now()))
        problem = self.core.problem
        if problem != self._said:
            self._said = problem
            log.log(logging.WARNING if problem else logging.INFO, "%s", problem or "register: well")

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _clock_ms(self) -> int:
        return round(self._clock() * 1000)

    # -- for people -----------------------------------------------------------------------------

    def problems(self) -> dict[str, str]:
        """For the health page."""
        return {"register": self.core.problem} if self.core.problem else {}

    def report(self) -> dict[str, object]:
        """Who is there, and what this process holds."""
        me = self.core.me
        return {
            "standing": str(self.core.standing),
            "problem": self.core.problem,
            "me": _shown(me),
            "others": [_shown(member) for member in self.core.others],
            "leads": [what for what in self.core.wants if self.leads(what)],
            "led_by": {what: self.core.holder(what) for what in self.core.wants},
            "emptied": self.core.emptied,
            "asked": dict(self.counts),
        }


def _shown(member: Member) -> dict[str, object]:
    told: object
    try:
        told = msgspec.json.decode(member.told)
    except (ValueError, RecursionError) as error:
        told = f"cannot be read: {error}"
    return {
        "name": member.name,
        "kind": member.kind,
        "url": member.url,
        "version": member.version,
        "draining": member.draining,
        "told": told,
    }
