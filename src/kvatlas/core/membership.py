"""One member's side of the register: to be a member, to hold leases, to know what the others know.

A machine: it asks, is answered or not, and says what changed. A register that is silent takes
nothing away but leases: who holds one stops by his own clock, before anybody else can have it.
One that comes back empty is told again what must not be lost.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import Annotated

import msgspec

from kvatlas.core import register_values as words
from kvatlas.core.forgetting import Floor, Floors
from kvatlas.core.register_values import Answer, Member, No, Question, Refused

BELIEVED = 0.8  # of a time that was granted: clocks need not run alike
RAISED_MAX = 1000  # floors in one question
Beat = Annotated[float, msgspec.Meta(ge=0.05, le=60)]


class Params(msgspec.Struct, frozen=True):
    """A member asks every ``beat_s``, and is one for ``ttl_s`` without being heard. What has no
    answer after ``deadline_s`` has none."""

    beat_s: Beat = 1.0
    ttl_s: float = 10.0
    deadline_s: float = 1.0

    @property
    def ttl_ms(self) -> int:
        return round(self.ttl_s * 1000)


class Standing(enum.StrEnum):
    """Of a member, as it knows."""

    ALONE = "alone"  # it was never heard
    MEMBER = "member"
    SILENT = "silent"  # the register does not answer: all goes on as it was, but leases
    REFUSED = "refused"


# -- inputs ----------------------------------------------------------------------------------------


class Answered(msgspec.Struct, frozen=True, tag=True):
    """What was asked at ``asked_s`` has this answer. ``clock_ms``: the wall clock now."""

    question: Question
    answer: Answer
    asked_s: float


class Unanswered(msgspec.Struct, frozen=True, tag=True):
    """It has none, and why."""

    question: Question
    why: str


class Raised(msgspec.Struct, frozen=True, tag=True):
    """Floors that this member has learnt elsewhere; all are to know them."""

    floors: tuple[Floor, ...]


class Changed(msgspec.Struct, frozen=True, tag=True):
    """What this member tells of itself is this now."""

    member: Member


class Edited(msgspec.Struct, frozen=True, tag=True):
    """The tenants' file was changed here; all are to have it so."""

    text: str


Input = Answered | Unanswered | Raised | Changed | Edited


# -- effects ---------------------------------------------------------------------------------------


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Ask it; exactly one `Answered` or `Unanswered` is to follow, by the deadline."""

    question: Question
    deadline_s: float


class Members(msgspec.Struct, frozen=True, tag=True):
    """The others are these now."""

    members: tuple[Member, ...]


class Learnt(msgspec.Struct, frozen=True, tag=True):
    """Floors that others have raised."""

    floors: tuple[Floor, ...]


class Tenants(msgspec.Struct, frozen=True, tag=True):
    """The tenants' file, as all have it."""

    revision: int
    text: str


class Overruled(msgspec.Struct, frozen=True, tag=True):
    """The file was changed elsewhere, too, and first: this text does not count."""

    text: str


class Emptied(msgspec.Struct, frozen=True, tag=True):
    """The register has lost all; what was whole in stores is not known to be."""


Effect = Ask | Members | Learnt | Tenants | Overruled | Emptied


class _Lease(msgspec.Struct):
    token: int = 0
    until_s: float = -math.inf
    highest: int = 0
    holder: str = ""


class Membership:
    """Of one process. ``wants``: leases that it would hold; ``tenants``: what it knows of them,
    None where it need not. What was in no register yet is of revision 0, and `Edited`."""

    def __init__(
        self,
        me: Member,
        identity: str,
        *,
        wants: Iterable[str] = (),
        tenants: Tenants | None = None,
        floors: Iterable[Floor] = (),
        params: Params | None = None,
    ) -> None:
        self.me = me
        self.params = params or Params()
        self.standing = Standing.ALONE
        self.problem = "not asked yet"
        self.others: tuple[Member, ...] = ()
        self.heard_s = -math.inf  # when the last answer to a join was asked for
        self.created = ""
        self.emptied = 0  # registers that were lost
        self._identity = identity
        self._leases = {what: _Lease() for what in wants}
        self._floors = Floors(floors)
        self._unsaid: list[Floor] = list(self._floors.all())
        self._tenants = tenants
        self._edited: str | None = None
        self._known = {"members": 0, "floors": 0}
        self._grace_s = -math.inf  # until then nobody is missed: all were silent alike
        self._asked: set[object] = set()  # what is under way
        self._beat_s = -math.inf

    def next_deadline(self) -> float | None:
        """When it is to be asked next."""
        return self._beat_s

    def leads(self, what: str, now: float) -> int:
        """The token of a lease that is held now, by this member's own clock; 0: it is not."""
        lease = self._leases.get(what)
        return lease.token if lease is not None and now < lease.until_s else 0

    def holder(self, what: str) -> str:
        """Who else holds it, as far as is known."""
        lease = self._leases.get(what)
        return lease.holder if lease is not None else ""

    @property
    def wants(self) -> tuple[str, ...]:
        """Leases that it would hold."""
        return tuple(self._leases)

    def leave(self) -> Question:
        """To be asked last: the others need not wait for the end of this life."""
        return words.Leave(self.me.name, self.me.life)

    def tick(self, now: float, clock_ms: int) -> list[Effect]:
        """Time to say that it lives. ``clock_ms``: the wall clock, for the register to judge."""
        if now < self._beat_s:
            return []
        self._beat_s = now + self.params.beat_s
        if now >= self.heard_s + self.params.ttl_s and self.standing is Standing.MEMBER:
            self.standing = Standing.SILENT
        join = words.Join(
            self.me,
            self._identity,
            self.params.ttl_ms,
            clock_ms,
            known=self._known["members"],
        )
        return self._ask("join", join)

    def handle(self, event: Input, now: float) -> list[Effect]:
        """One input."""
        match event:
            case Raised():
                new = [floor for floor in event.floors if self._floors.put(floor)]
                self._unsaid += new
                return self._say() if self.standing is Standing.MEMBER else []
            case Changed():
                self.me = event.member
                self._beat_s = -math.inf
                return []
            case Edited(text):
                self._edited = text
                return []
            case Unanswered():
                self._asked.discard(_topic(event.question))
                if self.standing is not Standing.REFUSED:  # then it was told a better reason
                    self.problem = f"the register does not answer: {event.why}"
                if self.standing is Standing.MEMBER and isinstance(event.question, words.Join):
                    self.standing = Standing.SILENT
                return []
        self._asked.discard(_topic(event.question))
        match event.question, event.answer:
            case words.Join(), words.Joined():
                return self._joined(event.answer, event.asked_s, now)
            case words.Join(), Refused():
                return self._refused(event.answer)
            case words.Acquire() as asked, words.Held() | Refused():
                self._leased(asked, event.answer, event.asked_s)
            case words.AskFloors(), words.ToldFloors():
                return self._told_floors(event.answer)
            case words.AskTenants(), words.ToldTenants(revision, str() as text):
                return self._told_tenants(revision, text)
            case words.PutTenants(text), words.Done(revision):
                self._edited = None if self._edited == text else self._edited
                return self._agreed(revision, text)
            case words.PutTenants(), Refused(No.STALE) if self._tenants is not None:
                return self._ask("tenants", words.AskTenants(self._tenants.revision))
            case words.Raise() as asked, words.Done():
                said = set(asked.floors)
                self._known["floors"] = -1  # to be seen there: a server that fails may lose them
                self._unsaid = [floor for floor in self._unsaid if floor not in said]
                return self._say()
            case _, Refused():
                self.problem = f"the register refuses: {event.answer.why} {event.answer.about}"
            case _:
                pass
        return []

    # -- what the register says -----------------------------------------------------------------

    def _joined(self, told: words.Joined, asked_s: float, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self.created and told.created != self.created:
            effects += self._begin_again(now)
        elif -math.inf < self.heard_s < now - self.params.ttl_s / 2:
            self._grace_s = now + self.params.ttl_s  # others could not be heard either
        self.created = told.created
        self.standing, self.problem = Standing.MEMBER, ""
        self.heard_s = max(self.heard_s, asked_s)
        self._known["members"] = told.members_rev
        if told.members is not None:
            effects += self._meet(told.members, now)
        for what, lease in self._leases.items():
            me = self.me
            ask = words.Acquire(what, me.name, me.life, self.params.ttl_ms, lease.highest)
            effects += self._ask(what, ask)
        if told.floors_rev != self._known["floors"]:
            effects += self._ask("floors", words.AskFloors(max(0, self._known["floors"])))
        return effects + self._agree(told.tenants_rev) + self._say()

    def _agree(self, revision: int) -> list[Effect]:
        """On who the tenants are: the newest counts, and the first where there was none."""
        mine = self._tenants
        if mine is None:
            return []
        put: words.PutTenants | None = None
        if self._edited is not None and revision >= mine.revision:
            put = words.PutTenants(self._edited, mine.revision)
        elif self._edited is not None:  # what was lost had another text by that revision
            put = words.PutTenants(self._edited, offered=mine.revision + 1)
        elif revision > mine.revision:
            return self._ask("tenants", words.AskTenants(mine.revision))
        elif revision < mine.revision and mine.text:
            put = words.PutTenants(mine.text, offered=mine.revision)
        return [] if put is None else self._ask("put tenants", put)

    def _begin_again(self, now: float) -> list[Effect]:
        """It is an empty one: what must not be lost is said again, and nobody is missed yet."""
        self.emptied += 1
        self._known = {"members": 0, "floors": 0}
        self._unsaid = list(self._floors.all())
        self._grace_s = now + self.params.ttl_s
        for lease in self._leases.values():
            lease.until_s = -math.inf
        return [Emptied()]

    def _meet(self, members: tuple[Member, ...], now: float) -> list[Effect]:
        others = {member.name: member for member in members if member.name != self.me.name}
        if now < self._grace_s:
            others = {member.name: member for member in self.others} | others
            self._known["members"] = 0  # ask for all again, until the time is over
        met = tuple(others[name] for name in sorted(others))
        if met == self.others:
            return []
        self.others = met
        return [Members(met)]

    def _refused(self, answer: Refused) -> list[Effect]:
        self.standing = Standing.REFUSED
        self.problem = reason(answer, self.me)
        for lease in self._leases.values():
            lease.until_s = -math.inf
        return []

    def _leased(self, asked: words.Acquire, answer: words.Held | Refused, asked_s: float) -> None:
        lease = self._leases[asked.what]
        if isinstance(answer, words.Held):
            lease.token = answer.token
            lease.highest = max(lease.highest, answer.token)
            lease.until_s = asked_s + self.params.ttl_s * BELIEVED
            lease.holder = ""
            return
        lease.until_s = -math.inf
        lease.holder = answer.about if answer.why is No.HELD else ""

    def _told_floors(self, told: words.ToldFloors) -> list[Effect]:
        self._known["floors"] = told.revision
        floors = told.floors if told.revision else ()
        if floors is None:
            return []
        there = Floors(floors)  # what it lacks was lost with a server that failed
        self._unsaid = [floor for floor in self._floors.all() if not there.has(floor)]
        new = tuple(floor for floor in floors if self._floors.put(floor))
        return ([Learnt(new)] if new else []) + self._say()

    def _told_tenants(self, revision: int, text: str) -> list[Effect]:
        """By somebody else, who was first: what was edited here does not follow on it."""
        agreed = self._agreed(revision, text)
        edited = self._edited
        if not agreed or edited is None:
            return agreed
        self._edited = None
        return agreed if edited == text else [Overruled(edited), *agreed]

    def _agreed(self, revision: int, text: str) -> list[Effect]:
        if self._tenants is None or revision <= self._tenants.revision:
            return []
        self._tenants = Tenants(revision, text)
        return [self._tenants]

    # -- what is asked --------------------------------------------------------------------------

    def _say(self) -> list[Effect]:
        if not self._unsaid:
            return []
        return self._ask("raise", words.Raise(tuple(self._unsaid[:RAISED_MAX])))

    def _ask(self, topic: str, question: Question) -> list[Effect]:
        """One of a kind at a time."""
        if topic in self._asked:
            return []
        self._asked.add(topic)
        return [Ask(question, self.params.deadline_s)]


_TOPICS: dict[type[object], str] = {
    words.Join: "join",
    words.Raise: "raise",
    words.AskFloors: "floors",
    words.AskTenants: "tenants",
    words.PutTenants: "put tenants",
}


def _topic(question: Question) -> str:
    return question.what if isinstance(question, words.Acquire) else _TOPICS[type(question)]


def reason(answer: Refused, me: Member) -> str:
    """Why a member is not taken, for people: whose fault it is, and what to do."""
    match answer.why:
        case No.CLUSTER:
            return (
                "another cluster, with another secret, has this name in the register: give this "
                "one a name of its own, or the same keys.secret_file"
            )
        case No.FORMAT:
            return (
                f"the register is kept in format {answer.about}, this is a kvatlas of format "
                f"{words.FORMAT}: run one version, or give the new one a name of its own"
            )
        case No.NAME:
            return (
                f"another process is {me.name!r} in this cluster, at {answer.about}: names must "
                "differ; of one that was killed the name is free after some seconds"
            )
        case No.CLOCK:
            apart_s = int(answer.about) / 1000
            ahead = "ahead of" if apart_s > 0 else "behind"
            return (
                f"the clock here is {abs(apart_s):.0f} s {ahead} that of the register; at most "
                f"{words.CLOCK_APART_MS / 1000:.0f} s are let pass: set the clocks"
            )
        case _:
            return f"the register refuses: {answer.why} {answer.about}".rstrip()
