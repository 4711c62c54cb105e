"""When a copy is ordered, what it may take, how it ends, and what it is said to have brought."""

from __future__ import annotations

import pytest
from ahead_kit import AGENTS, BLOCKS, ENGINES, GRID, LAYOUT, Stand, crowded, tokens

from kvatlas.core.ahead_books import ENDS_MAX, PREFIXES_MAX, Heats, Turns
from kvatlas.core.ahead_copies import Copied, Copies, Params, Recall, Why
from kvatlas.core.ahead_moves import LOOK_MAX
from kvatlas.core.dispatch import Finished, Input, Question, Reset, Sent, Unsettle
from kvatlas.core.events import BlockStored, UnitsHeld
from kvatlas.core.keys import PUBLIC, salt_scope
from kvatlas.core.records import Tier


def test_a_prefix_that_many_wait_for_is_copied_to_an_idle_node() -> None:
    stand = crowded()
    (order,) = stand.orders
    assert (order.source, order.agent, order.engine) == (AGENTS[0], AGENTS[1], ENGINES[1])
    assert list(order.keys) == stand.keys(tokens((1, BLOCKS)))
    assert order.tokens == BLOCKS * GRID
    assert order.size_bytes == LAYOUT.load_bytes(order.tokens)
    assert order.expected_s > order.size_bytes / 50e9  # it pays
    tally = stand.core.tallies[Why.REPLICATE]
    assert (tally.ordered, tally.expected_s) == (1, order.expected_s)


def test_one_request_alone_is_no_reason() -> None:
    stand = Stand()
    stand.hold(AGENTS[0], stand.keys(tokens((1, BLOCKS))))
    stand.ask("busy", tokens((9, 400)))  # it makes the holder wait
    stand.ask("one", tokens((1, BLOCKS), (100, 50)))
    assert not stand.orders


def test_where_the_holder_is_idle_nothing_is_copied() -> None:
    stand = Stand()
    stand.hold(AGENTS[0], stand.keys(tokens((1, BLOCKS))))
    for i in range(20):
        id = f"r{i}"
        chosen = stand.ask(id, tokens((1, BLOCKS), (100 + i, 5)))
        stand.tell(Finished(id, chosen, True, BLOCKS * GRID, 0.1))
        stand.now += 5.0
    assert not stand.orders


@pytest.mark.parametrize("switch", ["replicate", "push"])
def test_each_kind_has_its_switch(switch: str) -> None:
    stand = crowded(**{"replicate": switch == "replicate", "push": switch == "push"})
    assert bool(stand.orders) == (switch == "replicate")


def test_a_copy_is_of_one_scope_and_says_whose() -> None:
    stand = Stand()
    tenant = salt_scope("t")
    stand.hold(AGENTS[0], stand.keys(tokens((1, BLOCKS)), tenant))
    stand.crowd(6)  # the same tokens, of everybody: nobody holds them
    assert not stand.orders
    stand.crowd(6, scope=tenant, at=10)
    (order,) = stand.orders
    assert order.scope == tenant
    assert list(order.keys) == stand.keys(tokens((1, BLOCKS)), tenant)


def test_without_a_source_in_memory_none_is_ordered() -> None:
    stand = Stand()
    keys = stand.keys(tokens((1, BLOCKS)))
    stand.dispatcher.apply(AGENTS[0], [UnitsHeld(Tier.DISK, tuple(keys), ())])
    stand.crowd(6)
    assert not stand.orders
    assert stand.core.tallies[Why.REPLICATE].denied["no_source"]


def test_no_more_are_under_way_than_may_be() -> None:
    stand = Stand(copies_max=1, bandwidth_share=1.0)
    for prefix, agent in ((1, AGENTS[0]), (2, AGENTS[0])):
        stand.hold(agent, stand.keys(tokens((prefix, BLOCKS))))
    stand.crowd(6)
    stand.now += 20.0
    stand.crowd(6, prefix=2, at=10)
    assert len(stand.orders) == 1
    assert stand.core.tallies[Why.REPLICATE].denied["busy"]


def test_copies_take_their_share_of_a_node_and_no_more() -> None:
    copies = Copies(Params(copies_max=256, bandwidth_share=0.1))
    one, other = AGENTS[:2]
    now = spent_s = 0.0
    for i in range(2000):
        if not copies.room((one, other), now):
            spent_s += copies.cost_s(10**9)
            copies.order(
                Why.PUSH,
                (one, other, ENGINES[0]),
                (i.to_bytes(16, "little"),),
                tokens=GRID,
                size_bytes=10**9,
                expected_s=9.0,
                fades_at=1e9,
                scope=PUBLIC,
                now=now,
            )
            copies.ended(Copied(f"push-{len(copies.out)}"), now)
        now += 0.01
    assert 0.8 * 0.1 * now < spent_s <= 0.1 * now + copies.cost_s(10**9)
    assert copies.room((one,), now) in ("", "bandwidth")


def test_a_copy_that_no_longer_pays_is_called_off() -> None:
    stand = crowded(horizon_s=1.0)
    (order,) = stand.orders
    stand.later(order.until)
    assert stand.recalls == ["cooled"]
    assert stand.core.tallies[Why.REPLICATE].ended == {"recalled": 1}
    assert not stand.core.under_way


def test_a_copy_that_is_not_answered_is_late() -> None:
    stand = crowded(horizon_s=86_400.0)
    (order,) = stand.orders
    stand.later(order.until)
    assert stand.recalls == ["late"]
    assert stand.core.tallies[Why.REPLICATE].ended == {"late": 1}
    stand.core.handle(Copied(order.id, 7), stand.now)
    tally = stand.core.tallies[Why.REPLICATE]
    assert (tally.ended, tally.moved_bytes) == ({"late": 1}, 7)  # what moved, moved


def test_where_the_node_computed_it_itself_the_copy_is_called_off() -> None:
    stand = crowded()
    (order,) = stand.orders
    stand.hold(order.agent, order.keys)  # as the copy itself says before its end
    stand.crowd(1, at=50)
    assert not stand.recalls
    prompt = tokens((1, BLOCKS))[:-4]
    stored = BlockStored(tuple(range(BLOCKS)), None, prompt, GRID)
    stand.dispatcher.apply(order.engine, [stored])
    stand.crowd(1, at=51)
    assert stand.recalls == ["held_meanwhile"]


@pytest.mark.parametrize("event", [Unsettle(AGENTS[1]), Reset(AGENTS[1])])
def test_with_its_agent_a_copy_is_over(event: Input) -> None:
    stand = crowded()
    stand.tell(event)
    assert stand.recalls == ["agent_gone"]
    assert not stand.core.under_way


def test_what_goes_by_a_copy_is_counted_with_what_it_saved() -> None:
    stand = crowded()
    order = stand.copied()
    assert stand.core.watched == 1
    chosen = stand.ask("next", tokens((1, BLOCKS), (77, 5)), send=False)
    assert chosen == order.engine
    stand.tell(Sent("next", chosen))
    plan = stand.dispatcher.plan("next", chosen)
    assert plan is not None
    stand.tell(Finished("next", chosen, True, order.tokens, 0.5))
    tally = stand.core.tallies[Why.REPLICATE]
    assert tally.served == 1
    assert tally.predicted_s > 0
    assert tally.measured_s == pytest.approx(tally.predicted_s + plan.price.ttft_s - 0.5)
    stand.later(10_000.0)
    assert (tally.used, tally.unused, stand.core.watched) == (1, 0, 0)


def test_a_copy_that_nobody_used_is_counted_so() -> None:
    stand = crowded()
    stand.copied()
    stand.later(10_000.0)
    tally = stand.core.tallies[Why.REPLICATE]
    assert (tally.ended, tally.used, tally.unused) == ({"arrived": 1}, 0, 1)
    assert (tally.served, tally.measured_s) == (0, 0.0)


def test_a_copy_that_failed_is_counted_and_may_be_ordered_again() -> None:
    stand = crowded(bandwidth_share=1.0)
    stand.copied("it is down")
    tally = stand.core.tallies[Why.REPLICATE]
    assert (tally.ended, stand.core.watched) == ({"failed": 1}, 0)
    stand.now += 10.0
    stand.crowd(6, at=20)
    assert len(stand.orders) == 2


def test_engines_without_agents_or_sizes_are_left_alone() -> None:
    stand = Stand()
    stand.hold(AGENTS[0], stand.keys(tokens((1, BLOCKS))))
    for agent in AGENTS:
        stand.tell(Unsettle(agent))
    stand.crowd(6)
    assert not stand.orders


# -- the next turn ---------------------------------------------------------------------------------


def session(stand: Stand, name: int, turn: int, *, busy: bool) -> None:
    """One turn of a chat whose home is busy when it comes back, or is not."""
    blocks = 600 + 10 * turn
    prompt, id = tokens((name, blocks)), f"s{name}-{turn}"
    home = ENGINES[0]
    decision = stand.tell(Question(id, tuple((e, "") for e in ENGINES), prompt))
    assert decision is not None
    stand.tell(Sent(id, home))
    stand.hold(AGENTS[0], stand.keys(prompt))
    stand.now += 0.1
    stand.tell(Finished(id, home, True, -1, 0.1))
    stand.now += 4.0
    if busy:
        other = f"b{name}-{turn}"
        stand.tell(Question(other, ((home, ""),), tokens((1000 + 100 * name + turn, 250))))
        stand.tell(Sent(other, home))


def test_a_prompt_is_pushed_once_that_would_have_paid() -> None:
    stand = Stand(replicate=False, push=True)
    for turn in range(8):
        session(stand, 1, turn, busy=True)
        stand.now += 0.5
    assert stand.orders
    order = stand.orders[0]
    assert (order.why, order.source) == (Why.PUSH, AGENTS[0])
    assert order.agent != AGENTS[0]


def test_where_the_home_is_idle_when_they_come_back_nothing_is_pushed() -> None:
    stand = Stand(replicate=False, push=True)
    for turn in range(8):
        session(stand, 1, turn, busy=False)
    assert not stand.orders


def test_a_next_turn_that_goes_elsewhere_calls_the_push_off() -> None:
    stand = Stand(replicate=False, push=True, bandwidth_share=1.0)
    for turn in range(8):
        session(stand, 1, turn, busy=True)
        if stand.orders:
            break
    order = stand.orders[0]
    id, prompt = "again", tokens((1, 600 + 10 * (turn + 1)))
    stand.tell(Question(id, tuple((e, "") for e in ENGINES), prompt))
    stand.tell(Sent(id, ENGINES[0]))
    assert "next_turn_elsewhere" in stand.recalls
    assert order.id in [e.id for e in stand.effects if isinstance(e, Recall)]


# -- books -----------------------------------------------------------------------------------------


def test_what_was_saved_lately_is_expected_and_fades() -> None:
    heats = Heats(10.0)
    assert heats.add(b"k", 4.0, 0.0) == 0.0  # of one alone nothing follows
    assert heats.add(b"k", 4.0, 0.0) == 4.0
    assert heats.add(b"k", 0.0, 1000.0) == pytest.approx(0.0, abs=1e-9)
    heats.drop(b"k")
    assert not len(heats)


def test_books_are_bounded() -> None:
    heats, turns = Heats(10.0), Turns(10.0)
    for i in range(max(PREFIXES_MAX, ENDS_MAX) + 10):
        key = i.to_bytes(16, "little")
        heats.add(key, 1.0, 0.0)
        turns.ended(key, AGENTS[1], 0.0, 0.0, again=False)
    assert (len(heats), len(turns)) == (PREFIXES_MAX, ENDS_MAX)


def test_what_a_push_is_worth_is_learnt_by_what_it_looked_to_be_worth_and_of_whom() -> None:
    turns = Turns(1e9)

    def ended(key: bytes, looks_s: float, again: bool) -> float:
        return turns.ended(key, AGENTS[1], looks_s, 0.0, again=again)

    seen = ((2.0, True, 1.5), (2.0, False, 0.3), (0.0, True, 0.1))
    for i in range(10):
        for looks_s, again, gain_s in seen:
            key = f"{i} {looks_s} {again}".encode()
            ended(key, looks_s, again)
            found = turns.back([b"before", key, b"after"])
            assert found is not None
            assert found[0] == key
            turns.saved(found[1], gain_s, 0.0)
    assert ended(b"x", 1.9, True) == pytest.approx(1.5)
    assert ended(b"y", 1.9, False) == pytest.approx(0.3)
    assert ended(b"z", -3.0, True) == pytest.approx(0.1)
    assert ended(b"w", -3.0, False) == 0.0  # nothing is known of such
    assert turns.back([b"v"]) is None


# -- nodes that drain -----------------------------------------------------------------------------


def drained(count: int = 3, **params: object) -> Stand:
    """The first node served some prompts, which lie in its dram, and drains."""
    stand = Stand(**({"replicate": False, "move": True} | params))
    for i in range(count):
        prompt = tokens((i + 1, BLOCKS))
        stand.hold(AGENTS[0], stand.keys(prompt))
        chosen = stand.ask(f"r{i}", prompt)
        assert chosen == ENGINES[0]
        stand.tell(Finished(f"r{i}", chosen, True, BLOCKS * GRID, 0.1))
        stand.now += 100.0
    stand.effects += stand.core.drain([AGENTS[0]], stand.now)
    return stand


def test_what_a_node_that_drains_has_is_handed_on_the_last_first() -> None:
    stand = drained(copies_max=1, bandwidth_share=1.0)
    for number in (3, 2, 1):
        order = stand.copied()
        assert (order.why, order.source) == (Why.MOVE, AGENTS[0])
        assert order.agent in AGENTS[1:]
        assert list(order.keys) == stand.keys(tokens((number, BLOCKS)))
        stand.later(1.0)
    assert len(stand.orders) == 3
    assert stand.core.tallies[Why.MOVE].ended == {"arrived": 3}
    assert stand.core.next_deadline() is None or not stand.core.under_way


def test_moves_keep_to_their_share_of_a_node() -> None:
    stand = drained(copies_max=8, bandwidth_share=0.01)
    assert len(stand.orders) == 1
    stand.later(0.5)
    assert len(stand.orders) == 1
    stand.later(600.0)
    assert len(stand.orders) == 3


def test_what_others_have_too_is_not_moved_and_nothing_goes_where_they_drain() -> None:
    stand = drained(0)
    prompt = tokens((1, BLOCKS))
    for agent in AGENTS[:2]:
        stand.hold(agent, stand.keys(prompt))
    chosen = stand.ask("r", prompt)
    stand.tell(Finished("r", chosen, True, BLOCKS * GRID, 0.1))
    stand.effects += stand.core.drain(AGENTS[:1], stand.now)
    assert not stand.orders
    stand.effects += stand.core.drain(AGENTS[:2], stand.now)
    (order,) = stand.orders
    assert order.agent == AGENTS[2]
    stand.effects += stand.core.drain([], stand.now)
    assert stand.core.next_deadline() is not None  # the copy that is under way


def test_who_does_not_lead_moves_nothing() -> None:
    stand = Stand(replicate=False, move=True)
    stand.core.leads = False
    prompt = tokens((1, BLOCKS))
    stand.hold(AGENTS[0], stand.keys(prompt))
    chosen = stand.ask("r", prompt)
    stand.tell(Finished("r", chosen, True, BLOCKS * GRID, 0.1))
    stand.effects += stand.core.drain([AGENTS[0]], stand.now)
    assert not stand.orders
    assert stand.core.next_deadline() is None  # else it would look again without end
    stand.core.leads = True
    assert stand.core.next_deadline() == stand.now
    stand.effects += stand.core.tick(stand.now)
    assert len(stand.orders) == 1


def test_what_is_too_much_for_one_look_is_looked_at_later() -> None:
    stand = Stand(replicate=False, move=True)
    for i in range(LOOK_MAX + 1):  # but for the first, others have them too
        prompt = tokens((i + 1, 1 if i else BLOCKS))
        for agent in AGENTS[: 2 if i else 1]:
            stand.hold(agent, stand.keys(prompt))
        stand.ask(f"r{i}", prompt, send=False)
        stand.tell(Sent(f"r{i}", ENGINES[0]))
        stand.tell(Finished(f"r{i}", ENGINES[0], True, GRID, 0.1))
        stand.now += 100.0
    stand.effects += stand.core.drain([AGENTS[0]], stand.now)
    assert not stand.orders
    stand.later(1.0)
    assert len(stand.orders) == 1
