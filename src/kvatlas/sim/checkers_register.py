"""What must hold of the register and its members, judged from outside both.

`RegisterWatch` sees what is asked and answered, and what each member takes for true; it knows who
lives, whose clock is apart, and since when the register answers whom.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvatlas.core import membership
from kvatlas.core import register_values as words
from kvatlas.core.ahead_copies import Why
from kvatlas.core.forgetting import Floor, Floors
from kvatlas.core.membership import Learnt, Standing
from kvatlas.core.register_values import FORMAT, Answer, No, Question
from kvatlas.sim.checkers import Checkers
from kvatlas.sim.faults_members import IDENTITY, Members
from kvatlas.sim.faults_register import CONTROLLER, SimMember
from kvatlas.sim.faults_scribes import STORE
from kvatlas.sim.faults_wire import host_of
from kvatlas.sim.faults_world import FaultWorld
from kvatlas.sim.messages import Pull
from kvatlas.sim.network import Envelope

LOOK_S = 1.0
#: After so long with a register that answers in time a member is one, and knows all floors.
BACK_S = 6.0
#: Beyond a member's ttl: who died is gone, who came last is known to all.
LATE_S = 6.0
_REASONS = {
    No.CLUSTER: "another cluster",
    No.FORMAT: "is kept in format",
    No.NAME: "another process is",
    No.CLOCK: "the clock here is",
}


class RegisterWatch:
    """Of one world. Implements `faults_members.MembersWatch`."""

    def __init__(self, checkers: Checkers, world: FaultWorld, members: Members) -> None:
        self._checkers = checkers
        self._world = world
        self._members = members
        self._ttl_s = members.params.ttl_s
        self._tokens: dict[str, tuple[int, str]] = {}  # lease → highest token, and who has it
        self._knows: dict[str, Floors] = {}  # by life
        self._kept: dict[Floor, float] = {}  # said when, and known to somebody since
        self._there: dict[Floor, float] = {}  # of them: since when the register has it
        self._others: dict[str, tuple[str, ...]] = {}  # by life: who it took for there
        self._joined: dict[str, float] = {}  # name → when the register last took it
        self._contents = [0]  # the present content of the store; several where one cannot know
        self._turns: list[tuple[float, int]] = [(0.0, 0)]  # when which content began
        self._generation = members.register.generation(STORE)
        members.watch = self
        members.register.asked = self.asked
        world.network.interpose(self._passes)
        world.timeline.after(LOOK_S, self._look)

    def content(self) -> int:
        """Which content the store has."""
        return self._contents[-1]

    # -- while it goes on -----------------------------------------------------------------------

    def raised(self, member: SimMember, floor: Floor) -> None:
        """See `MembersWatch`."""
        self._floors_of(member).put(floor)
        self._kept.setdefault(floor, self._checkers.clock())

    def replaced(self, lost_s: float) -> None:
        """See `MembersWatch`. That a store has lost all may be among what nobody knows any more."""
        self._generation = self._members.register.generation(STORE)
        then = self._checkers.clock() - lost_s
        if lost_s:
            old = [number for at, number in self._turns if at < then][-1]
            self._contents = list(range(min(old, self._contents[0]), self._turns[-1][1] + 1))

    def acted(self, member: SimMember, effects: Sequence[membership.Effect]) -> None:
        """See `MembersWatch`."""
        for effect in effects:
            if isinstance(effect, Learnt):
                for floor in effect.floors:
                    self._floors_of(member).put(floor)
            elif isinstance(effect, membership.Members):
                self._met(member, tuple(other.name for other in effect.members))
        self._leaders()
        self._standing(member)

    def _floors_of(self, member: SimMember) -> Floors:
        return self._knows.setdefault(member.core.me.life, Floors())

    def _met(self, member: SimMember, others: tuple[str, ...]) -> None:
        """Nobody is missed who is there, and could say so."""
        now = self._checkers.clock()
        had = self._others.get(member.core.me.life, ())
        self._others[member.core.me.life] = others
        for name in set(had) - set(others):
            if name not in self._members.living or self._is_disturbed(name):
                continue
            if now - self._quiet_since(name) < self._ttl_s + LATE_S and not self._all_away(name):
                continue
            self._report("membership", f"{member.host} misses {name}, which is there")

    def _all_away(self, name: str) -> bool:
        """Was it only the register that was in trouble, and with everybody alike?"""
        trouble = self._members.register.trouble
        own = max(trouble.get(name, 0.0), self._members.living[name].began_at)
        return self._checkers.clock() - own > self._ttl_s + LATE_S

    def _quiet_since(self, name: str) -> float:
        """Since when nothing keeps a member from being heard."""
        members = self._members
        member = members.living[name]
        return max(
            members.register.quiet_since(name),
            members.register.lost_at,
            member.began_at,
            members.disturbed.get(name, 0.0),
        )

    def _heard_again(self, name: str) -> bool:
        """Has nothing kept it, for long enough, from hearing that it is a member?"""
        return self._checkers.clock() - self._quiet_since(name) >= self._ttl_s + LATE_S

    def _is_disturbed(self, name: str) -> bool:
        return (
            self._checkers.clock() < self._members.disturbed.get(name, 0.0) + self._ttl_s + LATE_S
        )

    def _leaders(self) -> None:
        members, now = self._members, self._checkers.clock()
        lost_at = members.register.lost_at
        if members.register.fell_back and now < lost_at + 2 * members.params.beat_s + 2.0:
            return  # a lease may have been among what it lost; its token tells them apart
        leaders = [m.host for m in (*members.living.values(), *members.rogues) if m.leads()]
        if len(leaders) > 1:
            self._report("two-leaders", f"{' and '.join(leaders)} lead at one time")

    def _passes(self, envelope: Envelope) -> Sequence[Envelope]:
        """Copies of hot prefixes are ordered by who leads alone: others do not know of them."""
        message = envelope.message
        if isinstance(message, Pull) and message.id.startswith(Why.REPLICATE):
            member = self._members.living[host_of(envelope.source)]
            if not member.leads():
                self._report("two-leaders", f"{member.host} orders a copy and does not lead")
        return (envelope,)

    def _standing(self, member: SimMember) -> None:
        """Who is refused is told why, and has deserved it."""
        core, members = member.core, self._members
        known = members.living.get(core.me.name)
        stranger = member.identity != IDENTITY or member.format != FORMAT
        if core.standing is Standing.MEMBER:
            twice = known is not None and known is not member and known.loop.moves
            if stranger:
                self._report("membership", f"{member.host} is taken for a member")
            elif twice and known is not None and known.core.standing is Standing.MEMBER:
                self._report("membership", f"two processes are {core.me.name}")
        elif core.standing is Standing.REFUSED:
            if known is member and self._heard_again(core.me.name):
                self._report("membership", f"{member.host} is refused: {core.problem}")
            if not any(reason in core.problem for reason in _REASONS.values()):
                self._report("membership", f"{member.host} is refused without a reason")

    def asked(self, host: str, question: Question, answer: Answer) -> None:
        """See `MembersWatch`."""
        match question, answer:
            case words.Join(member), words.Joined():
                self._joined[member.name] = self._checkers.clock()
            case words.Acquire(what, name, life), words.Held(_, token):
                self._granted(what, f"{name}, {life}", token)
            case words.Raise(floors), words.Done():
                for floor in floors:
                    self._there.setdefault(floor, self._checkers.clock())
            case words.Expire(), words.Done(generation):
                if generation != self._generation:
                    self._generation = generation
                    self._contents = [self._turns[-1][1] + 1]
                    self._turns.append((self._checkers.clock(), self._contents[0]))
            case words.AskRecords(_, keys), words.ToldRecords():
                self._records(host, keys, answer)

    def _granted(self, what: str, holder: str, token: int) -> None:
        highest, had = self._tokens.get(what, (0, ""))
        if token < highest or (token == highest and holder != had):
            self._report("two-leaders", f"{holder} gets token {token} of {what}, {had} {highest}")
        self._tokens[what] = max((highest, had), (token, holder))

    def _records(self, host: str, keys: tuple[bytes, ...], told: words.ToldRecords) -> None:
        floors = Floors(self._there)
        uncertain = self._checkers.clock() < self._members.register.lost_at + BACK_S
        for key, data in zip(keys, told.data, strict=True):
            if data is None:
                continue
            content, owner = data.decode().split(" ", 1)
            if int(content) not in self._contents:
                self._report(
                    "stale-record",
                    f"{host} is told {key!r} of content {content}, it is {self._contents} now",
                )
            if floors.forgotten(owner) and not uncertain:
                self._report("stale-record", f"{host} is told {key!r} of {owner}, forgotten")

    # -- every second ---------------------------------------------------------------------------

    def _look(self) -> None:
        self._world.timeline.after(LOOK_S, self._look)
        register = self._members.register
        there = register.floors()
        living = [self._floors_of(member) for member in self._members.living.values()]
        self._kept = {
            floor: at
            for floor, at in self._kept.items()
            if there.has(floor) or any(known.has(floor) for known in living)
        }
        now = self._checkers.clock()
        self._there = {f: self._there.get(f, now) for f in self._kept if there.has(f)}
        for name, member in self._members.living.items():
            quiet_s = self._checkers.clock() - self._quiet_since(name)
            if member.loop.moves and quiet_s > BACK_S:
                self._check_member(member, quiet_s)
        self._leaders()
        self._check_led()

    def _check_member(self, member: SimMember, quiet_s: float) -> None:
        core, now, ttl_s = member.core, self._checkers.clock(), self._ttl_s
        if core.standing is not Standing.MEMBER:
            self._report("membership", f"{member.host} is {core.standing}: {core.problem}")
            return
        due = [floor for floor, at in self._kept.items() if self._due(floor, at)]
        if lost := [floor for floor in due if not self._floors_of(member).has(floor)]:
            self._report("lost-floor", f"{member.host} does not know {lost[0]}")
        others = {other.name: other.life for other in core.others}
        for name, other in self._members.living.items():
            long = now - self._quiet_since(name) > BACK_S
            if name != core.me.name and long and others.get(name) != other.core.me.life:
                self._report("membership", f"{member.host} does not know {name}")
        rogues = {rogue.core.me.name for rogue in self._members.rogues}
        dead = others.keys() - self._members.living.keys() - rogues
        for name in sorted(dead) if quiet_s > ttl_s + LATE_S else ():
            if now - (died := self._members.died[name]) > ttl_s + LATE_S:
                self._report("membership", f"{member.host} knows {name}, dead since {died:.1f} s")

    def _due(self, floor: Floor, said_at: float) -> bool:
        """Has everybody had the time to learn it, from the register, or who tells that?"""
        now = self._checkers.clock()
        if floor in self._there:
            return now - max(said_at, self._there[floor]) > BACK_S
        knowers = [
            self._quiet_since(name)
            for name, member in self._members.living.items()
            if self._floors_of(member).has(floor)
        ]
        return now - max(said_at, min(knowers, default=now)) > BACK_S

    def _check_led(self) -> None:
        """Somebody leads again, in the end."""
        now, members = self._checkers.clock(), self._members
        gateways = [name for name, m in members.living.items() if m.core.wants]
        quiet_s = now - max([self._quiet_since(name) for name in gateways], default=now)
        died = [at for name, at in members.died.items() if name.startswith("gateway")]
        quiet_s = min(quiet_s, now - max(died, default=0.0))
        led = any(members.living[name].leads(CONTROLLER) for name in gateways)
        if gateways and not led and quiet_s > 2 * self._ttl_s + LATE_S:
            self._report("membership", "nobody leads")

    def _report(self, kind: str, what: str) -> None:
        self._checkers.report(kind, what)
