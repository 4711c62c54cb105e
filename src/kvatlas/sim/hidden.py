"""How well first tokens are foretold on engines whose speed nobody is told, and changes.

Each engine's pace is drawn by seed and name; in the middle of the run it is drawn anew. All that
the router has is one prior for all of them, which is wrong for each, and what it measures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from kvatlas.core.router import Decision
from kvatlas.sim.cluster import Cluster, default_cluster
from kvatlas.sim.flights import Inquiry, Outcome
from kvatlas.sim.world import World
from kvatlas.workload.families import generate
from kvatlas.workload.pace import Pace, drawn, paced
from kvatlas.workload.presets import FAMILIES

#: Requests a second that keep eight default engines busy.
RATES = {"random": 67.0, "shared-prompt": 83.0, "multi-turn": 33.0, "agent": 33.0}
WARM_UP = 20  # requests of each engine that do not count
#: Requests of an engine after its change, first to last, whose errors are told together.
WINDOWS = ((1, 2), (3, 5), (6, 9), (10, 15), (16, 25), (26, 40))
_AGAIN = 1.25  # times the error before the change: recovered
_RUN = 5  # requests whose median that is


class Told(msgspec.Struct, frozen=True):
    """One answered request: who answered, and when its first token was to come and came."""

    at: float
    engine: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """In shares of what was measured."""
        return abs(self.predicted_s - self.measured_s) / self.measured_s


class Foretold(msgspec.Struct, frozen=True):
    """Errors in shares of the measured time: median and 90th percentile after warm-up, before the
    change; medians by `WINDOWS` after it. ``recovered_after``: requests of an engine until the
    median of its next five is at most 1.25 times that before the change; -1: not within 40."""

    family: str
    seeds: int
    predictions: int
    error_p50: float
    error_p90: float
    after: tuple[float, ...]
    recovered_after: int


class _Watch:
    def __init__(self) -> None:
        self._decided: dict[str, Decision] = {}
        self.told: list[Told] = []

    def decided(self, inquiry: Inquiry, decision: Decision) -> None:
        self._decided[inquiry.id] = decision

    def waited(self, gaps_s: Sequence[float], count: int) -> None:
        pass

    def ended(self, outcome: Outcome) -> None:
        decision = self._decided.pop(outcome.id)
        if not outcome.fault and len(outcome.tried) == 1:
            plan = next(p for p in decision.plans if p.publisher.worker == outcome.tried[0])
            at, ttft_s = outcome.arrived_at, outcome.ttft_s
            self.told.append(Told(at, outcome.tried[0], plan.price.ttft_s, ttft_s))


def hidden(cluster: Cluster, seed: int, spread: float) -> Cluster:
    """The same, each engine at a pace of its own. Raises ConfigError for an impossible spread."""
    members = [
        msgspec.structs.replace(m, spec=paced(m.spec, drawn(seed, m.name, spread)))
        for m in cluster.members
    ]
    return msgspec.structs.replace(cluster, members=tuple(members))


def changed(seed: int, name: str, spread: float) -> Pace:
    """By how much an engine changes in mid-run."""
    return drawn(seed, f"{name} changed", spread)


def run(
    family: str, seed: int, *, engines: int = 8, requests: int = 1000, spread: float = 2.0
) -> tuple[list[Told], float]:
    """One run: all that was told, in order of arrival, and when the engines changed. Raises
    ConfigError for numbers that cannot be."""
    cluster = hidden(default_cluster(engines=engines), seed, spread)
    rate_per_s = RATES[family] * engines / 8
    shape = msgspec.structs.replace(
        FAMILIES[family], requests=requests, duration_s=requests / rate_per_s
    )
    trace = generate(shape, seed, family)
    arrivals = sorted(request.arrival_s for request in trace)
    change_s = arrivals[len(arrivals) // 2]
    watch = _Watch()
    world = World(cluster, seed=seed, gateway_watchers=[watch])

    def change() -> None:
        for engine in world.engines.values():
            engine.set_pace(changed(seed, engine.name, spread))

    world.timeline.at(change_s, change)
    world.play(trace)
    return sorted(watch.told, key=lambda told: told.at), change_s


def foretold(family: str, runs: Iterable[tuple[Sequence[Told], float]]) -> Foretold:
    """The errors of several runs, put together."""
    before: list[float] = []
    after: dict[int, list[float]] = {}
    count = 0
    for told, change_s in runs:
        count += 1
        seen, since = Counter[str](), Counter[str]()
        for each in told:
            seen[each.engine] += 1
            if each.at >= change_s:
                since[each.engine] += 1
                after.setdefault(since[each.engine], []).append(each.error)
            elif seen[each.engine] > WARM_UP:
                before.append(each.error)
    before.sort()
    usual = median(before) if before else 0.0

    def together(first: int, last: int) -> float:
        errors = [error for n in range(first, last + 1) for error in after.get(n, ())]
        return median(errors) if errors else 0.0

    last = WINDOWS[-1][1]
    recovered = [n for n in range(last) if together(n + 1, n + _RUN) <= _AGAIN * usual]
    return Foretold(
        family=family,
        seeds=count,
        predictions=len(before),
        error_p50=usual,
        error_p90=before[int(0.9 * len(before))] if before else 0.0,
        after=tuple(together(*window) for window in WINDOWS),
        recovered_after=recovered[0] if recovered and after else -1,
    )
