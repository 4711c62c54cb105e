"""One member's side of the register: what it asks, what it takes for true, what it never does."""

from __future__ import annotations

import itertools

import pytest

from kvatlas.core import register_values as words
from kvatlas.core.forgetting import Floor
from kvatlas.core.membership import (
    BELIEVED,
    Answered,
    Ask,
    Changed,
    Edited,
    Effect,
    Emptied,
    Learnt,
    Members,
    Membership,
    Overruled,
    Params,
    Raised,
    Standing,
    Tenants,
    Unanswered,
    reason,
)
from kvatlas.core.register import Register
from kvatlas.core.register_values import Member, No, Refused

TTL_S = 10.0
CLOCK_MS = 1_000_000_000_000
OLD, NEW = Floor("a" * 24, 1), Floor("b" * 24, 2)
LEASE = "controller"


class Rig:
    """Members and one register. Each is asked in turn, unless ``silent``."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.register = Register("first")
        self.members: dict[str, Membership] = {}
        self.told: dict[str, list[Effect]] = {}
        self.silent = False
        self.apart_ms = 0

    def member(
        self,
        name: str,
        *,
        life: str = "1",
        identity: str = "secret",
        wants: tuple[str, ...] = (LEASE,),
        tenants: Tenants | None = None,
        floors: tuple[Floor, ...] = (),
        url: str = "",
    ) -> Membership:
        me = Member(name, "gateway", life, url or f"http://{name}", "1")
        made = Membership(
            me, identity, wants=wants, tenants=tenants, floors=floors, params=Params(ttl_s=TTL_S)
        )
        self.members[f"{name}/{life}"] = made
        self.told[f"{name}/{life}"] = []
        return made

    def perform(self, key: str, effects: list[Effect]) -> None:
        member = self.members[key]
        waiting = list(effects)
        while waiting:
            effect = waiting.pop(0)
            if not isinstance(effect, Ask):
                self.told[key].append(effect)
                continue
            if self.silent:
                waiting += member.handle(Unanswered(effect.question, "no answer"), self.now)
                continue
            answer = self.register.ask(effect.question, self.clock_ms)
            waiting += member.handle(Answered(effect.question, answer, self.now), self.now)

    @property
    def clock_ms(self) -> int:
        return CLOCK_MS + int(self.now * 1000)

    def beats(self, count: int = 1, among: tuple[str, ...] | None = None) -> None:
        for _ in range(count):
            self.now += 1.0
            for key in among if among is not None else tuple(self.members):
                member = self.members[key]
                clock_ms = self.clock_ms + self.apart_ms
                self.perform(key, member.tick(self.now, clock_ms))

    def of(self, key: str, kind: type[Effect]) -> list[Effect]:
        return [effect for effect in self.told[key] if isinstance(effect, kind)]


def names(member: Membership) -> list[str]:
    return [other.name for other in member.others]


def test_members_meet_and_one_of_them_leads() -> None:
    rig = Rig()
    a, b = rig.member("a"), rig.member("b")
    assert (a.standing, a.next_deadline()) == (Standing.ALONE, -float("inf"))
    rig.beats(int(TTL_S) + 3)
    assert a.standing is b.standing is Standing.MEMBER
    assert (names(a), names(b)) == (["b"], ["a"])
    leads = [member for member in (a, b) if member.leads(LEASE, rig.now)]
    assert len(leads) == 1
    follows = b if leads[0] is a else a
    assert follows.holder(LEASE) == leads[0].me.name
    assert leads[0].holder(LEASE) == ""
    assert (a.holder("nothing"), a.leads("nothing", rig.now), a.wants) == ("", 0, (LEASE,))


def test_between_beats_nothing_is_asked() -> None:
    rig = Rig()
    a = rig.member("a")
    rig.beats()
    assert a.tick(rig.now + 0.5, rig.clock_ms) == []
    assert a.next_deadline() == rig.now + 1.0


def test_a_lease_ends_by_the_clock_of_who_has_it_before_it_does_for_others() -> None:
    rig = Rig()
    a = rig.member("a")
    rig.beats(int(TTL_S) + 3)
    token = a.leads(LEASE, rig.now)
    assert token
    rig.silent = True
    rig.beats(3)
    assert a.standing is Standing.SILENT
    assert a.leads(LEASE, rig.now) == token
    until = rig.now - 3.0 + TTL_S * BELIEVED
    assert a.leads(LEASE, until - 0.01)
    assert not a.leads(LEASE, until)


def test_tokens_rise_over_an_empty_register_and_nobody_leads_too_early() -> None:
    rig = Rig()
    a = rig.member("a")
    rig.beats(int(TTL_S) + 3)
    token = a.leads(LEASE, rig.now)
    rig.register = Register("second")
    rig.beats()
    assert not a.leads(LEASE, rig.now)
    rig.beats(int(TTL_S) - 1)
    assert not a.leads(LEASE, rig.now)
    rig.beats(2)
    assert a.leads(LEASE, rig.now) > token


def test_an_empty_register_is_told_again_what_must_not_be_lost() -> None:
    rig = Rig()
    a, b = rig.member("a", floors=(OLD,)), rig.member("b")
    rig.beats(2)
    assert rig.of("b/1", Learnt) == [Learnt((OLD,))]
    rig.register = Register("second")
    rig.beats(1, among=("b/1",))
    assert (b.emptied, rig.of("b/1", Emptied)) == (1, [Emptied()])
    assert names(b) == ["a"], "nobody is missed yet"
    told = rig.register.ask(words.AskFloors(), rig.clock_ms)
    assert isinstance(told, words.ToldFloors)
    assert told.floors == (OLD,)
    rig.beats(int(TTL_S) + 2, among=("b/1",))
    assert names(b) == [], "it had time enough to come back"
    assert a.emptied == 0


def test_who_died_is_gone_when_its_time_is_over_and_not_before() -> None:
    rig = Rig()
    a, _ = rig.member("a"), rig.member("b")
    rig.beats(2)
    rig.beats(int(TTL_S) - 1, among=("a/1",))
    assert names(a) == ["b"]
    rig.beats(2, among=("a/1",))
    assert names(a) == []


def test_a_register_that_was_silent_for_all_takes_nobody_away() -> None:
    """Found by the fault simulation (seeds 60, 64, 99, 111): whoever was heard first, after a
    register had been away for longer than members are believed, was told that it is alone."""
    rig = Rig()
    a, b = rig.member("a"), rig.member("b")
    rig.beats(3)
    rig.silent = True
    rig.beats(int(2 * TTL_S))
    assert a.standing is b.standing is Standing.SILENT
    rig.silent = False
    rig.beats(1)
    assert (names(a), names(b)) == (["b"], ["a"])
    assert all(effect.members for effect in rig.of("a/1", Members) if isinstance(effect, Members))
    rig.beats(int(TTL_S) + 3, among=("a/1",))
    assert names(a) == [], "one that died meanwhile is gone in the end"


def test_floors_reach_everybody_and_are_told_once() -> None:
    rig = Rig()
    a, _ = rig.member("a"), rig.member("b")
    rig.beats(2)
    rig.perform("a/1", a.handle(Raised((OLD, NEW, OLD)), rig.now))
    rig.beats(3)
    assert rig.of("b/1", Learnt) == [Learnt((OLD, NEW))]
    assert rig.of("a/1", Learnt) == []
    assert a.handle(Raised((OLD,)), rig.now) == [], "as much is known"


def test_floors_that_were_raised_in_silence_are_said_later() -> None:
    rig = Rig()
    a, _ = rig.member("a"), rig.member("b")
    rig.beats(2)
    rig.silent = True
    rig.perform("a/1", a.handle(Raised((OLD,)), rig.now))
    rig.beats(2)
    assert a.handle(Raised((NEW,)), rig.now) == [], "not a member: there is nobody to tell"
    rig.silent = False
    rig.beats(3)
    assert rig.of("b/1", Learnt) == [Learnt((OLD, NEW))]


@pytest.mark.parametrize("before", [(), (NEW,)])
def test_floors_that_a_server_lost_with_its_last_writes_are_raised_again(
    before: tuple[Floor, ...],
) -> None:
    """Found by the fault simulation (seed 164): a server that failed before the next beat had
    the state that the member took for the present one."""
    rig = Rig()
    a = rig.member("a", floors=before)
    rig.beats(3)
    rig.perform("a/1", a.handle(Raised((OLD,)), rig.now))
    fallen = Register("first")
    rig.register, at = fallen, rig.now
    rig.now = 1000.0
    other = Rig()
    other.register = fallen
    other.member("a", floors=before)
    other.beats(3)
    rig.now = at
    rig.beats(3)
    told = rig.register.ask(words.AskFloors(), rig.clock_ms)
    assert isinstance(told, words.ToldFloors)
    assert told.floors == (OLD, *before)


def test_what_it_tells_of_itself_is_told_at_once() -> None:
    rig = Rig()
    a, b = rig.member("a"), rig.member("b")
    rig.beats(2)
    a.handle(Changed(Member("a", "gateway", "1", "http://a", "1", draining=True)), rig.now)
    assert a.next_deadline() == -float("inf")
    rig.beats(1)
    assert [other.draining for other in b.others] == [True]
    assert a.leave() == words.Leave("a", "1")


@pytest.mark.parametrize(
    ("why", "told"),
    [
        (No.CLUSTER, "another cluster, with another secret"),
        (No.FORMAT, "is kept in format 7"),
        (No.NAME, "another process is 'b' in this cluster, at 7"),
        (No.FULL, "the register refuses: full 7"),
    ],
)
def test_a_refusal_says_whose_fault_it_is(why: No, told: str) -> None:
    assert told in reason(Refused(why, "7"), Member("b", "gateway", "1", "http://b", "1"))


@pytest.mark.parametrize(("apart_ms", "told"), [(45_000, "45 s ahead of"), (-600_000, "600 s be")])
def test_a_clock_that_is_apart_is_refused_until_it_is_set(apart_ms: int, told: str) -> None:
    rig = Rig()
    a = rig.member("a")
    rig.beats(int(TTL_S) + 3)
    assert a.leads(LEASE, rig.now)
    rig.apart_ms = apart_ms
    rig.beats()
    assert (a.standing, a.leads(LEASE, rig.now)) == (Standing.REFUSED, 0)
    assert told in a.problem
    rig.silent = True
    rig.beats()
    assert told in a.problem, "silence is no better reason"
    rig.silent, rig.apart_ms = False, 0
    rig.beats()
    assert (a.standing.value, a.problem) == ("member", "")


def test_another_cluster_and_another_process_of_that_name_are_refused() -> None:
    rig = Rig()
    rig.member("a")
    rig.beats(2)
    stranger = rig.member("c", identity="other")
    namesake = rig.member("a", life="2", url="http://elsewhere")
    rig.beats()
    assert [m.standing.value for m in (stranger, namesake)] == ["refused", "refused"]
    assert "another cluster" in stranger.problem
    assert "http://a" in namesake.problem
    rig.beats(int(TTL_S) + 1, among=("a/2",))
    assert namesake.standing is Standing.MEMBER, "of one that was killed the name is free"


def test_a_question_that_is_refused_is_told_as_a_problem() -> None:
    rig = Rig()
    a = rig.member("a")
    rig.beats()
    raised = words.Raise((OLD,))
    assert a.handle(Answered(raised, Refused(No.FULL, "2 floors"), rig.now), rig.now) == []
    assert a.problem == "the register refuses: full 2 floors"
    assert a.handle(Answered(raised, words.Committed(1, ()), rig.now), rig.now) == []


def test_only_one_question_of_a_kind_is_under_way() -> None:
    member = Rig().member("a")
    asked = member.tick(1.0, 0)
    assert [type(effect) for effect in asked] == [Ask]
    assert member.tick(3.0, 0) == []
    assert isinstance(asked[0], Ask)
    member.handle(Unanswered(asked[0].question, "late"), 3.5)
    assert member.standing is Standing.ALONE
    assert "late" in member.problem
    assert len(member.tick(5.0, 0)) == 1


def test_who_hears_nothing_for_too_long_knows_it_before_it_asks() -> None:
    rig = Rig()
    a = rig.member("a")
    rig.beats()
    a.tick(rig.now + 2 * TTL_S, rig.clock_ms)
    assert a.standing is Standing.SILENT


def test_tenants_of_the_newest_revision_count_for_all() -> None:
    rig = Rig()
    a, b = (rig.member(name, tenants=Tenants(0, "")) for name in "ab")
    rig.beats(2)
    assert rig.of("a/1", Tenants) == []
    rig.perform("a/1", a.handle(Edited("red"), rig.now))
    rig.beats(3)
    last = [rig.of(key, Tenants)[-1] for key in ("a/1", "b/1")]
    assert [effect.text for effect in last if isinstance(effect, Tenants)] == ["red", "red"]
    rig.register = Register("second")
    rig.beats(3)
    c = rig.member("c", tenants=Tenants(0, ""))
    rig.beats(2)
    told = rig.of("c/1", Tenants)[-1]
    assert isinstance(told, Tenants)
    assert told.text == "red", "an empty register is told again who the tenants are"
    assert {m.standing for m in (a, b, c)} == {Standing.MEMBER}


def test_of_two_who_change_the_tenants_the_second_is_told() -> None:
    rig = Rig()
    a, b = (rig.member(name, tenants=Tenants(0, "")) for name in "ab")
    rig.beats(2)
    first, second = a.handle(Edited("red"), rig.now), b.handle(Edited("blue"), rig.now)
    for key, effects in (("a/1", first), ("b/1", second)):
        rig.perform(key, effects)
    rig.beats(4)
    overruled = list(itertools.chain(rig.of("a/1", Overruled), rig.of("b/1", Overruled)))
    assert overruled == [Overruled("blue")]
    assert [m for m in (a, b) if m.standing is not Standing.MEMBER] == []


@pytest.mark.parametrize("left", [0, 5])
def test_tenants_that_were_changed_while_the_register_lost_them_reach_all(left: int) -> None:
    rig = Rig()
    a = rig.member("a", tenants=Tenants(7, "red"))
    rig.member("b", tenants=Tenants(7, "red"))
    if left:  # what a server that failed had of them
        rig.register.ask(words.PutTenants("old", offered=left), rig.clock_ms)
    rig.perform("a/1", a.handle(Edited("blue"), rig.now))
    rig.beats(3)
    for key in ("a/1", "b/1"):
        told = rig.of(key, Tenants)[-1]
        assert isinstance(told, Tenants)
        assert told.text == "blue"
    assert not rig.of("a/1", Overruled)


def test_a_change_that_comes_while_another_is_asked_for_does_not_undo_it() -> None:
    rig = Rig()
    a = rig.member("a", tenants=Tenants(7, "red"))
    join = Answered(words.Join(a.me, "secret", 1, 1), words.Joined(1, "first", 1, 0, 9, ()), 0.0)
    (ask,) = [e for e in a.handle(join, rig.now) if isinstance(e, Ask) and _of_tenants(e)]
    a.handle(Edited("blue"), rig.now)
    told = words.ToldTenants(9, "green")
    effects = a.handle(Answered(ask.question, told, rig.now), rig.now)
    assert effects == [Overruled("blue"), Tenants(9, "green")]
    assert not [e for e in a.handle(join, rig.now) if isinstance(e, Ask) and _of_tenants(e)]


def _of_tenants(effect: Ask) -> bool:
    return isinstance(effect.question, words.AskTenants | words.PutTenants)


def test_what_was_written_before_a_store_lost_all_counts_in_no_register_to_come() -> None:
    """Generations of an empty register must not be those that old writers know."""
    record = words.Record(b"key", "owner", 1, b"data")
    first, second = Register("first"), Register("second")
    began = first.ask(words.AskUsage("store"), CLOCK_MS)
    assert isinstance(began, words.ToldUsage)
    first.ask(words.Expire("store", began.generation), CLOCK_MS + 1000)
    late = words.Commit("store", began.generation, (record,))
    told = second.ask(late, CLOCK_MS + 2000)
    assert isinstance(told, words.Committed)
    assert told.refused == (No.STALE,)
    assert told.generation > began.generation + 1
