"""The simulated gateway among engines that die, restart, fall silent and come back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from sim_kit import Log, chats, cluster_of, ids

from kvatlas.sim.engines import GATEWAY
from kvatlas.sim.gateway import Inquiry
from kvatlas.sim.network import Envelope
from kvatlas.sim.world import World

TOKENS = bytes(range(256)) * 4 * 20  # 5,120 token ids


class Scene:
    """Engines, and requests that are asked one by one."""

    def __init__(self, count: int = 2) -> None:
        self.log = Log()
        self.world = World(
            cluster_of(count=count), engine_watchers=[self.log], gateway_watchers=[self.log]
        )
        self.timeline = self.world.timeline
        for engine in self.world.engines.values():
            engine.start()
        self.world.gateway.start()

    def ask(self, id: str, tokens: bytes = TOKENS, output: int = 30) -> None:
        self.world.gateway.ask(Inquiry(id, tokens, output), lambda outcome: None)

    def wait(self, seconds: float) -> None:
        until = self.timeline.now + seconds
        self.timeline.at(until, lambda: None)
        while self.timeline.now < until:
            assert self.timeline.step()

    def tried(self) -> list[tuple[str, ...]]:
        return [outcome.tried for outcome in self.log.outcomes]


def test_a_dead_engine_is_passed_over_and_then_left_out() -> None:
    scene = Scene()
    scene.world.engines["e-0"].stop()
    scene.ask("first")
    scene.wait(1.0)
    assert scene.tried() == [("e-0", "e-1")]
    scene.wait(10.0)  # looks fail: it is down
    scene.ask("second", TOKENS[::-1])
    scene.wait(1.0)
    assert scene.tried()[1] == ("e-1",)
    assert not any(outcome.fault for outcome in scene.log.outcomes)
    scene.world.engines["e-0"].start()
    scene.wait(10.0)
    for number in range(4):
        scene.ask(str(number), bytes([number]) * 40_000)
    scene.wait(5.0)
    assert {tried[-1] for tried in scene.tried()[2:]} == {"e-0", "e-1"}


def test_a_request_fails_only_when_nobody_is_left() -> None:
    """Twelve engines at most get a plan; here thirty serve the model, and one is alive."""
    scene = Scene(count=30)
    for name, engine in scene.world.engines.items():
        if name != "e-17":
            engine.stop(silent=True)
    scene.ask("first")
    scene.wait(2.0)
    (tried,) = scene.tried()
    assert (tried[-1], len(set(tried))) == ("e-17", len(tried))
    assert not scene.log.outcomes[0].fault
    scene.world.engines["e-17"].stop(silent=True)
    scene.ask("second", TOKENS[::-1])
    scene.wait(2.0)
    assert len(scene.tried()[1]) == 30
    assert scene.log.outcomes[1].fault == "no connection"


def test_the_first_refused_connection_is_enough_until_the_next_good_look() -> None:
    scene = Scene()
    scene.world.engines["e-0"].stop()
    scene.ask("first")
    scene.wait(0.3)
    for number in range(4):  # polls have noticed nothing yet
        scene.ask(str(number), bytes([number]) * 40_000)
    scene.wait(0.2)
    assert [len(decision.plans) for decision in scene.log.decisions] == [2, 1, 1, 1, 1]
    scene.world.engines["e-0"].start()
    scene.wait(2.5)  # it was never down: one good look is enough
    scene.ask("again")
    assert len(scene.log.decisions[-1].plans) == 2


def test_claims_of_a_life_that_ended_are_given_up() -> None:
    scene = Scene(count=1)
    scene.ask("first")
    scene.wait(3.0)
    directory = scene.world.dispatcher.directory
    engine = scene.world.engines["e-0"]
    assert directory.holders_of(engine.publisher)
    engine.stop()
    engine.start()
    scene.wait(5.0)
    assert not directory.holders_of(engine.publisher)
    scene.ask("second")
    scene.wait(3.0)
    assert [(o.expected_tokens, o.cached_tokens) for o in scene.log.outcomes] == [(0, 0), (0, 0)]


def test_a_request_that_was_under_way_fails_and_is_not_tried_again() -> None:
    scene = Scene()
    scene.ask("x", output=500)
    scene.wait(0.5)
    name = next(n for n, e in scene.world.engines.items() if e.model.running)
    scene.world.engines[name].stop()
    scene.wait(1.0)
    (outcome,) = scene.log.outcomes
    assert (outcome.fault, outcome.tried) == ("the engine broke off", (name,))
    assert 0 < outcome.output_tokens < 500


def test_an_engine_that_never_answers_costs_the_connect_timeout() -> None:
    scene = Scene()

    def cut(envelope: Envelope) -> Sequence[Envelope]:
        return () if "e-0" in (envelope.source, envelope.destination) else (envelope,)

    scene.world.network.interpose(cut)
    scene.ask("x")
    scene.wait(5.0)
    (outcome,) = scene.log.outcomes
    assert outcome.tried == ("e-0", "e-1")
    assert outcome.fault == ""
    assert outcome.ttft_s > scene.world.gateway.spec.connect_timeout_s


def test_silence_ends_a_request_in_the_end() -> None:
    scene = Scene(count=1)
    scene.ask("x", output=5000)
    scene.wait(1.0)
    scene.world.engines["e-0"].pause()
    scene.wait(1000.0)
    (outcome,) = scene.log.outcomes
    assert outcome.fault == "the engine fell silent"
    scene.world.engines["e-0"].resume()
    scene.wait(1.0)
    assert not scene.world.engines["e-0"].model.running  # the cancelled one is freed


def test_a_pause_takes_as_long_as_it_lasts_and_nothing_else() -> None:
    calm, paused = Scene(count=1), Scene(count=1)
    for scene in (calm, paused):
        scene.ask("x", output=300)
        scene.wait(0.5)
    paused.world.engines["e-0"].pause()
    paused.wait(40.0)
    paused.world.engines["e-0"].resume()
    for scene in (calm, paused):
        scene.wait(20.0)
    (one,), (other,) = calm.log.outcomes, paused.log.outcomes
    assert other.ended_at - one.ended_at == pytest.approx(40.0, abs=1e-6)
    assert one.output_tokens == other.output_tokens == 300


def test_a_lost_batch_is_asked_for_again() -> None:
    scene = Scene(count=1)
    dropped: list[Envelope] = []

    def lose(envelope: Envelope) -> Sequence[Envelope]:
        told = type(envelope.message).__name__ == "Events"
        if told and envelope.destination == GATEWAY and len(dropped) < 2:
            dropped.append(envelope)
            return ()
        return (envelope,)

    scene.world.network.interpose(lose)
    for number in range(4):
        scene.ask(str(number), bytes([number]) * 40_000)
        scene.wait(5.0)
    assert len(dropped) == 2
    scene.ask("again", bytes([0]) * 40_000)
    scene.wait(5.0)
    last = scene.log.outcomes[-1]
    assert last.expected_tokens == last.cached_tokens > 0
    assert scene.world.gateway.feed("e-0").sequencer.counters.replays > 0


def test_equal_ids_are_refused_and_a_client_may_leave_twice() -> None:
    scene = Scene()
    scene.ask("x")
    with pytest.raises(ValueError, match="in use"):
        scene.ask("x")
    scene.world.gateway.leave("x")
    scene.world.gateway.leave("x")
    scene.wait(2.0)
    assert [outcome.fault for outcome in scene.log.outcomes] == ["the client left"]
    assert all(e.model.free_share == 1.0 for e in scene.world.engines.values())


def test_engines_that_come_and_go_lose_no_request_out_of_the_books() -> None:
    log = Log()
    world = World(cluster_of(), engine_watchers=[log], gateway_watchers=[log])
    for number, name in enumerate(world.engines):
        engine = world.engines[name]
        world.timeline.at(4.0 + 3 * number, engine.stop)
        world.timeline.at(9.0 + 3 * number, engine.start)
    world.play(chats(400, rate_per_s=15.0, output=400))
    assert ids(log.outcomes) == list(range(400))
    assert any(outcome.fault for outcome in log.outcomes)
    assert sum(1 for outcome in log.outcomes if not outcome.fault) > 250
    assert not any(world.dispatcher.router.in_flight().values())
