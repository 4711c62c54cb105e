"""The register of a scenario, its members, and what goes wrong between them.

The register is `core.register` as a value; each member runs `core.membership`, and asks over a path
on which questions and answers may be late, or lost. Clocks: the register has its own, each member
a wall clock that may be apart and a steady clock that runs a little fast or slow.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from kvatlas.core import membership
from kvatlas.core import register_values as words
from kvatlas.core.forgetting import Floors
from kvatlas.core.membership import Answered, Ask, Membership, Params, Unanswered
from kvatlas.core.register import Register
from kvatlas.core.register_values import Answer, Member, Question
from kvatlas.sim.faults_loop import Loop
from kvatlas.sim.timeline import Timeline

EPOCH_MS = 1_800_000_000_000
LATENCY_S = 0.0005
CONTROLLER = "controller"  # the lease of who orders copies ahead of need

Reply = Callable[[Answer], None]


class SimRegister:
    """One register and the ways to it. ``asked``: told each question with its answer, and by
    whom."""

    def __init__(self, timeline: Timeline, seed: int) -> None:
        self.core = Register("register 1")
        self.asked: Callable[[str, Question, Answer], None] = lambda host, question, answer: None
        self.lost_at = -1.0  # when it last came back with less than it had
        self.fell_back = False  # and whether that was some of it
        self._lives = 1
        self._timeline = timeline
        self._draw = random.Random(f"kvatlas.register/{seed}")
        self._journal: list[tuple[Question, int]] = []  # since it was empty
        self._away: dict[str, float] = {}  # host, "" for all → until when nothing passes
        self._late: tuple[float, float] = 0.0, 0.0  # until when, and by how much at most
        self._last: dict[str, float] = {}  # of one connection: what was sent first comes first
        self.trouble: dict[str, float] = {}  # host, "" for all → end of what was wrong last

    @property
    def now_s(self) -> float:
        """The world's time."""
        return self._timeline.now

    @property
    def now_ms(self) -> int:
        """Its clock."""
        return EPOCH_MS + int(self._timeline.now * 1000)

    def quiet_since(self, host: str) -> float:
        """Since when this host is answered in time."""
        return max(self.trouble.get("", 0.0), self.trouble.get(host, 0.0))

    def floors(self) -> Floors:
        """What it would tell (read-outs)."""
        told = self.core.ask(words.AskFloors(), self.now_ms)
        assert isinstance(told, words.ToldFloors)
        return Floors(told.floors or ())

    def generation(self, store: str) -> int:
        """Of a store's content (read-outs)."""
        told = self.core.ask(words.AskUsage(store), self.now_ms)
        assert isinstance(told, words.ToldUsage)
        return told.generation

    def ask(self, host: str, question: Question, reply: Reply) -> None:
        """A question from a host. There may be no answer, or a late one."""
        arrival = max(self._timeline.now + self._delay_s(), self._last.get(host, 0.0))
        self._last[host] = arrival
        if self._passes(host):
            self._timeline.at(arrival, self._take, host, question, reply)

    def _take(self, host: str, question: Question, reply: Reply) -> None:
        if not self._passes(host):
            return
        now_ms = self.now_ms
        answer = self.core.ask(question, now_ms)
        self._journal.append((question, now_ms))
        self.asked(host, question, answer)
        self._timeline.after(self._delay_s(), self._give, host, answer, reply)

    def _give(self, host: str, answer: Answer, reply: Reply) -> None:
        if self._passes(host):
            reply(answer)

    def _passes(self, host: str) -> bool:
        until = max(self._away.get("", 0.0), self._away.get(host, 0.0))
        return self._timeline.now >= until

    def _delay_s(self) -> float:
        until, most_s = self._late
        late = self._timeline.now < until
        return LATENCY_S + (self._draw.uniform(0.0, most_s) if late else 0.0)

    # -- faults ---------------------------------------------------------------------------------

    def away(self, seconds: float, host: str = "") -> None:
        """Nothing passes between it and a host, or anybody."""
        until = self._timeline.now + seconds
        self._away[host] = max(until, self._away.get(host, 0.0))
        self._in_trouble(host, until)

    def late(self, seconds: float, most_s: float) -> None:
        """Questions and answers each take up to that much longer."""
        until = self._timeline.now + seconds
        self._late = until, most_s
        self._in_trouble("", until + 2 * most_s)

    def empty(self, seconds: float) -> None:
        """It is lost, and another one comes, with nothing."""
        self.away(seconds)
        self._lives += 1
        self.core = Register(f"register {self._lives}")
        self._journal.clear()
        self.lost_at, self.fell_back = self._timeline.now + seconds, False

    def fall_back(self, seconds: float, lost_s: float) -> None:
        """Another one comes, which never heard of what was written last."""
        self.away(seconds)
        kept_ms = self.now_ms - int(lost_s * 1000)
        self._journal = [entry for entry in self._journal if entry[1] <= kept_ms]
        self.core = Register(self.core.created)
        for question, at_ms in self._journal:
            self.core.ask(question, at_ms)
        self.lost_at, self.fell_back = self._timeline.now + seconds, True

    def _in_trouble(self, host: str, until: float) -> None:
        self.trouble[host] = max(until, self.trouble.get(host, 0.0))


class Clocks(msgspec.Struct):
    """Of one host: its wall clock is ``apart_s`` from the register's, its steady one runs at
    ``rate``."""

    rate: float = 1.0
    apart_s: float = 0.0


class SimMember:
    """One process and its part in the register. ``acted``: told what it did, each time."""

    def __init__(
        self,
        register: SimRegister,
        loop: Loop,
        me: Member,
        identity: str,
        *,
        clocks: Clocks,
        params: Params,
        acted: Callable[[SimMember, Sequence[membership.Effect]], None],
        wants: Sequence[str] = (),
        format: int = words.FORMAT,
        host: str = "",
    ) -> None:
        self.core = Membership(me, identity, wants=wants, params=params)
        self.host = host or me.name
        self.clocks = clocks
        self.loop = loop
        self.identity = identity
        self.format = format
        self.began_at = register.now_s
        self._register = register
        self._acted = acted
        self._number = 0
        self._open: set[int] = set()
        self.loop.call(self._tick)

    @property
    def clock(self) -> float:
        """Its steady clock."""
        return self.loop.now * self.clocks.rate

    def leads(self, what: str = CONTROLLER) -> int:
        """The token of a lease that it takes for its own now; 0: it does not."""
        return self.core.leads(what, self.clock) if self.loop.moves else 0

    def learn(self, event: membership.Raised) -> None:
        """It is told of floors by others than the register."""
        self.loop.call(self._handle, event)

    def ask(self, question: Question, reply: Reply) -> None:
        """A question of its own, beside those of its membership."""
        self._register.ask(self.host, question, lambda answer: self.loop.call(reply, answer))

    def _tick(self) -> None:
        clock_ms = self._register.now_ms + round(self.clocks.apart_s * 1000)
        self._perform(self.core.tick(self.clock, clock_ms))
        due = self.core.next_deadline()
        assert due is not None
        self.loop.at(due / self.clocks.rate + 1e-6, self._tick)

    def _handle(self, event: membership.Input) -> None:
        self._perform(self.core.handle(event, self.clock))

    def _perform(self, effects: Sequence[membership.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Ask):
                self._ask(effect)
        self._acted(self, effects)

    def _ask(self, effect: Ask) -> None:
        question, asked_s = effect.question, self.clock
        if isinstance(question, words.Join) and self.format != question.format:
            question = msgspec.structs.replace(question, format=self.format)
        self._number += 1
        number = self._number
        self._open.add(number)

        def reply(answer: Answer) -> None:
            if number in self._open:
                self._open.discard(number)
                self._handle(Answered(question, answer, asked_s))

        def over() -> None:
            if number in self._open:
                self._open.discard(number)
                self._handle(Unanswered(question, "no answer in time"))

        self.loop.at(self.loop.now + effect.deadline_s / self.clocks.rate, over)
        self.ask(question, reply)
