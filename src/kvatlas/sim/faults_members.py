"""Who is a member of a scenario's cluster: its gateways and agents; and who should not be one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvatlas.core import membership
from kvatlas.core.forgetting import TAG_CHARS, Floor
from kvatlas.core.membership import Params
from kvatlas.core.register_values import FORMAT, Kind, Member
from kvatlas.sim.faults import Fault
from kvatlas.sim.faults_loop import Loop
from kvatlas.sim.faults_register import CONTROLLER, Clocks, SimMember, SimRegister
from kvatlas.sim.faults_scribes import Scribe
from kvatlas.sim.tier_node import SimNode

if TYPE_CHECKING:
    from kvatlas.sim.faults_world import FaultWorld

IDENTITY = "a secret"
_OTHERS = ("identity", "format")


class MembersWatch(Protocol):
    """Whoever wants to know what members do."""

    def acted(self, member: SimMember, effects: Sequence[membership.Effect]) -> None:
        """A member, or a process that should be none, did something."""

    def raised(self, member: SimMember, floor: Floor) -> None:
        """A member is told that this is to be forgotten."""

    def replaced(self, lost_s: float) -> None:
        """Another register is there now, which lacks what was written in the last ``lost_s``."""

    def content(self) -> int:
        """Which content the store of the scribes has."""
        ...


class Members:
    """All of them, by name. ``disturbed``: until when one cannot be expected to be a member."""

    watch: MembersWatch

    def __init__(self, world: FaultWorld, params: Params) -> None:
        self.params = params
        self.register = SimRegister(world.timeline, world.scenario.seed)
        self.living: dict[str, SimMember] = {}
        self.died: dict[str, float] = {}
        self.rogues: list[SimMember] = []
        self.disturbed: dict[str, float] = {}
        self.scribes: dict[str, Scribe] = {}
        self._world = world
        self._clocks: dict[str, Clocks] = {}
        self._lives = 0
        self._draw = random.Random(f"kvatlas.members/{world.scenario.seed}")

    def begin(self) -> None:
        """All that are up join."""
        for replica in self._world.replicas:
            replica.join(self)
        for node in self._world.nodes or ():
            self.turned(node)
        if self._world.nodes is not None:
            self._world.nodes.tiers.turned = self.turned

    def join(self, name: str, kind: Kind, loop: Loop) -> SimMember:
        """A new process."""
        self._lives += 1
        if name not in self._clocks:
            self._clocks[name] = Clocks(rate=self._draw.uniform(0.88, 1.12))
        self.died.pop(name, None)
        self.living[name] = member = self._member(
            Member(name, kind, f"life {self._lives}", f"http://{name}:8000", "1"),
            loop,
            wants=(CONTROLLER,) if kind == "gateway" else (),
            clocks=self._clocks[name],
        )
        seed = f"kvatlas.scribe/{self._world.scenario.seed}/{name}"
        self.scribes[name] = Scribe(member, seed, self.watch.content)
        return member

    def _member(
        self,
        me: Member,
        loop: Loop,
        *,
        clocks: Clocks,
        wants: Sequence[str] = (),
        identity: str = IDENTITY,
        format: int = FORMAT,
        host: str = "",
    ) -> SimMember:
        return SimMember(
            self.register,
            loop,
            me,
            identity,
            clocks=clocks,
            params=self.params,
            acted=self._acted,
            wants=wants,
            format=format,
            host=host,
        )

    def _acted(self, member: SimMember, effects: Sequence[membership.Effect]) -> None:
        scribe = self.scribes.get(member.host)
        if scribe is not None and scribe.member is member:
            scribe.heard(effects)
        self.watch.acted(member, effects)

    def gone(self, name: str) -> None:
        """Its process was killed."""
        self.living.pop(name).loop.end()
        self.scribes.pop(name)
        self.died[name] = self._world.timeline.now

    def turned(self, node: SimNode) -> None:
        """An agent began or ended."""
        name = node.publisher.worker
        if node.up and name not in self.living:
            self.join(name, "agent", Loop(self._world.timeline))
        elif not node.up and name in self.living:
            self.gone(name)

    def disturb(self, name: str, seconds: float) -> None:
        """It is not itself for so long."""
        until = self._world.timeline.now + seconds
        self.disturbed[name] = max(until, self.disturbed.get(name, 0.0))

    # -- faults ---------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> bool:
        """Let it happen, where it can."""
        register, seconds = self.register, fault.duration_s
        match fault.kind:
            case "register_late":
                register.late(seconds, fault.amount)
            case "register_silent":
                register.away(seconds)
            case "register_cut":
                register.away(seconds, fault.target)
            case "register_empty":
                self._end_rogues()
                register.empty(seconds)
                self.watch.replaced(0.0)
            case "register_behind":
                register.fall_back(seconds, fault.amount)
                self.watch.replaced(fault.amount)
            case "member_clock":
                return self._set_clock(fault)
            case "namesake" | "stranger":
                return self._intrude(fault)
            case "purge":
                return self._purge(fault)
        return True

    def _set_clock(self, fault: Fault) -> bool:
        clocks = self._clocks.get(fault.target)
        if clocks is None or clocks.apart_s:
            return False
        clocks.apart_s = fault.amount
        self.disturb(fault.target, fault.duration_s)
        self._world.timeline.after(fault.duration_s, setattr, clocks, "apart_s", 0.0)
        return True

    def _intrude(self, fault: Fault) -> bool:
        """A process under the name of a member, of another cluster, or of another format."""
        known = self.living.get(fault.target)
        if known is None or not self.register.core.created or not self._settled(known):
            return False
        self._lives += 1
        life, namesake = f"life {self._lives}", fault.kind == "namesake"
        name = fault.target if namesake else f"stranger-{self._lives}"
        me = Member(name, "agent", life, f"http://other-{self._lives}:8000", "1")
        other = "" if namesake else _OTHERS[fault.amount < 0.5]
        rogue = self._member(
            me,
            Loop(self._world.timeline),
            clocks=Clocks(),
            identity="another secret" if other == "identity" else IDENTITY,
            format=FORMAT + 1 if other == "format" else FORMAT,
            host=f"rogue {self._lives} {other or 'namesake'}",
        )
        self.rogues.append(rogue)
        if namesake:
            self.disturb(name, fault.duration_s + self.params.ttl_s)
        self._world.timeline.after(fault.duration_s, self._end_rogue, rogue)
        return True

    def _settled(self, member: SimMember) -> bool:
        """Is the register one of this cluster, which has members?"""
        now, core = self._world.timeline.now, member.core
        quiet = now - self.register.quiet_since("") > 2 * self.params.beat_s
        return quiet and core.standing is membership.Standing.MEMBER

    def _end_rogue(self, rogue: SimMember) -> None:
        if rogue in self.rogues:
            self.rogues.remove(rogue)
            rogue.loop.end()
            self.died[rogue.core.me.name] = self._world.timeline.now

    def _end_rogues(self) -> None:
        for rogue in list(self.rogues):
            self._end_rogue(rogue)

    def _purge(self, fault: Fault) -> bool:
        member = self.living.get(fault.target)
        if member is None:
            return False
        tag = "0123456789abcdef"[int(fault.amount * 4)] * TAG_CHARS
        floor = Floor(tag, self._draw.randint(1, 5), self._draw.choice(("", "", "a session")))
        self.watch.raised(member, floor)
        member.learn(membership.Raised((floor,)))
        return True

    def heal(self) -> None:
        """Nobody is there who should not."""
        self._end_rogues()
        for clocks in self._clocks.values():
            clocks.apart_s = 0.0
