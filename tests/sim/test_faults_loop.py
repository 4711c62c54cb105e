"""The loop whose clock jumps."""

from __future__ import annotations

from kvatlas.sim.faults_loop import Loop
from kvatlas.sim.timeline import Timeline, Timer


def test_a_timer_is_not_called_before_its_time_whatever_the_clock_was_set_by() -> None:
    """Who is called too early by a rounding asks again for the same time, for ever."""
    early = 0
    for number in range(1000):
        world = Timeline()
        loop = Loop(world)
        loop.jump(number * 0.1 + 1 / 3)
        due = loop.now + number / 7 + 0.01
        called: list[float] = []

        def note(loop: Loop = loop, called: list[float] = called) -> None:
            called.append(loop.now)

        timer: Timer = loop.at(due, note)
        assert timer.at == due
        while world.step():
            pass
        early += called[0] < due
        assert called[0] - due < 1e-9
    assert early == 0
