"""Bulk bytes: fair shares, background traffic, breaking off. By hand, and against a fluid model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.sim.links import PROFILES, Fabric, LinkSpec
from kvatlas.sim.timeline import Timeline


class Bench:
    """A fabric that notes when flows end."""

    def __init__(self, **links: LinkSpec) -> None:
        self.timeline = Timeline()
        self.fabric = Fabric(self.timeline)
        for name, spec in links.items():
            self.fabric.add(name, spec)
        self.ended: dict[str, tuple[float, bool]] = {}

    def flow(self, name: str, size_bytes: float, *path: str, at: float = 0.0) -> None:
        def start() -> None:
            self.fabric.start(path, size_bytes, lambda ok: self.end(name, ok))

        self.timeline.at(at, start)

    def end(self, name: str, arrived: bool) -> None:
        assert name not in self.ended
        self.ended[name] = (self.timeline.now, arrived)

    def run(self) -> dict[str, float]:
        steps = 0
        while self.timeline.step():
            steps += 1
            assert steps < 100_000
        assert not self.fabric.flows
        return {name: at for name, (at, _) in self.ended.items()}


def test_alone_it_takes_size_over_bandwidth_and_the_latency() -> None:
    bench = Bench(a=LinkSpec(100.0, 0.5))
    bench.flow("x", 1000.0, "a")
    assert bench.run()["x"] == pytest.approx(10.5)
    assert bench.fabric.links["a"].bytes_moved == pytest.approx(1000.0)
    assert bench.fabric.links["a"].busy_s == pytest.approx(10.0)


def test_two_share_and_the_longer_speeds_up_when_the_shorter_is_done() -> None:
    bench = Bench(a=LinkSpec(100.0))
    bench.flow("short", 500.0, "a")
    bench.flow("long", 1000.0, "a")
    ends = bench.run()
    assert ends["short"] == pytest.approx(10.0)
    assert ends["long"] == pytest.approx(15.0)


def test_a_late_one_slows_the_first_from_then_on() -> None:
    bench = Bench(a=LinkSpec(100.0))
    bench.flow("first", 1000.0, "a")
    bench.flow("late", 250.0, "a", at=5.0)
    ends = bench.run()
    assert ends["late"] == pytest.approx(10.0)
    assert ends["first"] == pytest.approx(12.5)


def test_what_a_narrow_link_leaves_goes_to_others() -> None:
    """Max-min: x is held to 10 by "narrow", so y gets 90 of "wide" and not 50."""
    bench = Bench(wide=LinkSpec(100.0), narrow=LinkSpec(10.0))
    bench.flow("x", 100.0, "wide", "narrow")
    bench.flow("y", 900.0, "wide")
    ends = bench.run()
    assert ends["x"] == pytest.approx(10.0)
    assert ends["y"] == pytest.approx(10.0)


def test_background_takes_its_share_steadily_or_in_bursts() -> None:
    steady = Bench(a=LinkSpec(100.0, background_share=0.4))
    steady.flow("x", 600.0, "a")
    assert steady.run()["x"] == pytest.approx(10.0)
    bursts = Bench(
        a=LinkSpec(100.0, background_share=0.4, background_period_s=1.0, background_burst_share=0.8)
    )
    bursts.flow("x", 600.0, "a")
    # Half of each second at 20, half at 100: ten seconds.
    assert bursts.run()["x"] == pytest.approx(10.0)
    bursts.flow("y", 10.0, "a", at=20.0)  # begins in a burst
    assert bursts.run()["y"] == pytest.approx(20.5, abs=0.01)


def test_broken_off_and_stopped() -> None:
    bench = Bench(a=LinkSpec(100.0))
    flow = bench.fabric.start(["a"], 1000.0, lambda ok: bench.end("x", ok))
    bench.timeline.at(3.0, flow.break_off)
    bench.flow("y", 100.0, "a", at=2.0)
    bench.run()
    assert bench.ended["x"] == (3.0, False)
    assert bench.ended["y"][0] == pytest.approx(3.5)
    flow.break_off()
    bench.timeline.at(10.0, bench.fabric.set_speed, "a", 0.0)
    bench.timeline.at(12.0, bench.fabric.set_speed, "a", 0.5)
    bench.flow("z", 100.0, "a", at=10.5)
    assert bench.run()["z"] == pytest.approx(14.0)


def test_nothing_and_nowhere_take_no_time() -> None:
    bench = Bench(a=LinkSpec(100.0))
    bench.flow("empty", 0.0, "a")
    bench.flow("inside", 1e12)
    assert set(bench.run().values()) == {0.0}
    with pytest.raises(KeyError):
        bench.fabric.start(["b"], 1.0, lambda ok: None)


def test_the_narrowest_link_and_the_latency_of_all_decide() -> None:
    bench = Bench(a=LinkSpec(100.0, 0.5, background_share=0.5), b=LinkSpec(200.0))
    bench.flow("x", 100.0, "a", "b")
    assert bench.run()["x"] == pytest.approx(2.5)


def test_every_profile_has_a_positive_rate() -> None:
    assert all(spec.rate(0.0)[0] > 0 for spec in PROFILES.values())


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.integers(1, 5000), st.sampled_from(["a", "b", "ab", "ba"])),
        min_size=1,
        max_size=12,
    )
)
def test_bytes_are_kept_and_no_link_is_overrun(flows: list[tuple[float, int, str]]) -> None:
    bench = Bench(a=LinkSpec(100.0), b=LinkSpec(37.0))
    for number, (at, size, path) in enumerate(flows):
        bench.flow(str(number), float(size), *path, at=at)
    ends = bench.run()
    assert len(ends) == len(flows)
    for name, limit in (("a", 100.0), ("b", 37.0)):
        link = bench.fabric.links[name]
        assert link.bytes_moved == pytest.approx(
            sum(size for _, size, path in flows if name in path), abs=len(flows)
        )
        assert link.bytes_moved <= link.busy_s * limit * (1 + 1e-6) + len(flows)
    for number, (at, size, path) in enumerate(flows):
        least = min({"a": 100.0, "b": 37.0}[name] for name in path)
        assert ends[str(number)] >= at + (size - 1) / least - 1e-3  # it knows half bytes
