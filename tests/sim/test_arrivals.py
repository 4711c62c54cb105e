"""When requests arrive: the trace's own times, or after the answer before."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from kvatlas.sim import arrivals
from kvatlas.sim.arrivals import Arrivals
from kvatlas.sim.timeline import Timeline
from kvatlas.workload.trace import TraceRequest


def turn(index: int, at: float, session: str = "", think_s: float | None = None) -> TraceRequest:
    return TraceRequest(index, at, 100, 10, (0,), session, think_s)


def play(
    requests: list[TraceRequest], answer_s: float = 2.0, **options: object
) -> dict[int, float]:
    """When each arrived, if every answer takes ``answer_s``."""
    timeline = Timeline()
    came: dict[int, float] = {}

    def ask(request: TraceRequest, told: Callable[[], None]) -> None:
        assert request.index not in came
        came[request.index] = timeline.now
        timeline.after(answer_s, told)

    source = Arrivals(timeline, iter(requests), ask, **options)  # type: ignore[arg-type]
    source.start()
    while timeline.step():
        pass
    assert source.done
    return came


TURNS = [
    turn(0, 0.0, "a"),
    turn(1, 0.5, "b"),
    turn(2, 1.0, "a", 3.0),
    turn(3, 1.5, "a", 0.0),
    turn(4, 9.0, "b", 0.5),
    turn(5, 9.0),
]


def test_open_loop_keeps_the_times_whatever_the_answers_do() -> None:
    assert play(TURNS) == {r.index: r.arrival_s for r in TURNS}
    assert play(TURNS, time_scale=0.5) == {r.index: r.arrival_s / 2 for r in TURNS}


def test_closed_loop_waits_for_the_answer_and_the_think_time() -> None:
    # a: 0, answered at 2, +3 → 5, answered at 7, +0 → 7. b: 0.5, answered at 2.5, +0.5 → 3.
    assert play(TURNS, closed_loop=True) == {0: 0.0, 1: 0.5, 2: 5.0, 3: 7.0, 4: 3.0, 5: 9.0}


def test_a_turn_whose_session_was_cut_off_comes_at_its_own_time() -> None:
    assert play(TURNS[2:], closed_loop=True)[2] == 1.0


def test_all_at_once() -> None:
    assert set(play(TURNS, time_scale=0.0).values()) == {0.0}


def test_it_reads_no_further_ahead_than_it_may() -> None:
    read = 0

    def requests() -> itertools.chain[TraceRequest]:
        def one(index: int) -> TraceRequest:
            nonlocal read
            read += 1
            return turn(index, float(index), "s", 1.0 if index else None)

        return itertools.chain(map(one, range(3 * arrivals.READ_AHEAD_MAX)))

    timeline = Timeline()
    most = 0

    def ask(request: TraceRequest, told: Callable[[], None]) -> None:
        nonlocal most
        most = max(most, read - request.index)
        timeline.after(0.001, told)

    source = Arrivals(timeline, requests(), ask, closed_loop=True)
    source.start()
    while timeline.step():
        pass
    assert source.done
    assert most <= arrivals.READ_AHEAD_MAX + 1
