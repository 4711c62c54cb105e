"""Seeds, one after another or over several processes: play, heal, judge."""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from kvatlas.sim import planted
from kvatlas.sim.checkers import CLASSES, Violation
from kvatlas.sim.checkers_agents import AgentWatch
from kvatlas.sim.checkers_end import (
    check_alike,
    check_convergence,
    check_endings,
    check_memory,
    check_promises,
    check_rest,
    new_core,
)
from kvatlas.sim.checkers_kept import (
    check_counts,
    check_kept,
)
from kvatlas.sim.checkers_register import RegisterWatch
from kvatlas.sim.checkers_tiers import (
    TierWatch,
    check_books,
    check_damage,
    check_empty,
    check_reach,
    check_shelves,
)
from kvatlas.sim.checkers_view import Judge
from kvatlas.sim.engines import SimEngine
from kvatlas.sim.faults import KINDS, Ask, Scenario
from kvatlas.sim.faults_cluster import scenario
from kvatlas.sim.faults_world import FaultWorld

#: After healing every engine says something; so long after that all must be right again.
SETTLE_S = 75.0
EMPTY_S = 20.0  # after a restart of all engines, until that is known and swept up
FAILING_MAX = 20  # seeds that a report tells of


class SeedResult(msgspec.Struct, frozen=True):
    """What came out of one seed."""

    seed: int
    violations: tuple[Violation, ...]
    found: dict[str, int]  # class → how often
    trace: tuple[str, ...]  # the end of it, where something was found
    faults: dict[str, int]  # kind → how many took effect
    requests: int
    answered: int
    promises: int
    tokens: int
    copies: int  # ordered ahead of need
    virtual_s: float


def run_seed(
    seed: int, *, canary: str = "", say: Callable[[str], None] | None = None
) -> SeedResult:
    """Play one seed. ``canary`` plants a bug, by name; ``say`` gets the whole trace."""
    plan = scenario(seed)
    with planted.planted(canary):
        return _Run(plan, say).play()


class Report(msgspec.Struct, frozen=True):
    """What came out of many. ``violations`` counts all of them, ``failing`` tells of a few."""

    seeds: int
    first_seed: int
    canary: str
    violations: int
    classes: dict[str, int]  # of `checkers.CLASSES` → violations
    faults: dict[str, int]  # of `faults.KINDS` → how many took effect
    requests: int
    answered: int
    promises: int
    tokens: int
    copies: int  # ordered ahead of need
    virtual_s: float
    failing_seeds: int
    failing: tuple[SeedResult, ...]

    @classmethod
    def of(cls, results: Iterable[SeedResult], canary: str = "") -> Report:
        """Sum them up, in the order of their seeds."""
        found, faults, sums = Counter[str](), Counter[str](), Counter[str]()
        failing: list[SeedResult] = []
        seeds, first, virtual_s = 0, -1, 0.0
        for result in results:
            first = result.seed if first < 0 else first
            seeds += 1
            virtual_s += result.virtual_s
            found.update(result.found)
            faults.update(result.faults)
            for name in ("requests", "answered", "promises", "tokens", "copies"):
                sums[name] += getattr(result, name)
            if result.found:
                sums["failing"] += 1
                if len(failing) < FAILING_MAX:
                    failing.append(result)
        return cls(
            seeds=seeds,
            first_seed=first,
            canary=canary,
            violations=found.total(),
            classes={kind: found[kind] for kind in CLASSES},
            faults={kind: faults[kind] for kind in KINDS},
            requests=sums["requests"],
            answered=sums["answered"],
            promises=sums["promises"],
            tokens=sums["tokens"],
            copies=sums["copies"],
            virtual_s=virtual_s,
            failing_seeds=sums["failing"],
            failing=tuple(failing),
        )


def run_seeds(seeds: Sequence[int], canary: str = "", jobs: int = 1) -> Iterator[SeedResult]:
    """Play them all, ``jobs`` at a time in processes of their own; results in order of seeds."""
    jobs = 1 if canary else min(jobs, len(seeds))  # the registry of this process counts
    play = functools.partial(run_seed, canary=canary)
    if jobs <= 1:
        yield from map(play, seeds)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs) as pool:
        yield from pool.imap(play, seeds, chunksize=max(1, min(16, len(seeds) // (4 * jobs))))


class _Run:
    def __init__(self, plan: Scenario, say: Callable[[str], None] | None) -> None:
        self.plan = plan
        self.checkers = Judge(lambda: self.world.timeline.now)
        self.checkers.say = say
        self.asks = list(plan.asks)
        self.world = FaultWorld(plan, self.checkers)
        TierWatch(self.checkers, self.world)
        AgentWatch(self.checkers, self.world)
        if self.world.members is not None:
            RegisterWatch(self.checkers, self.world, self.world.members)

    def play(self) -> SeedResult:
        checkers, world = self.checkers, self.world
        for ask in self.asks:
            checkers.will_ask(ask)
        try:
            self._play()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            checkers.note(traceback.format_exc())
            checkers.report(
                "crash", f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
            )
        outcomes = checkers.outcomes.values()
        return SeedResult(
            seed=self.plan.seed,
            violations=tuple(checkers.violations),
            found=dict(checkers.found),
            trace=checkers.shown,
            faults=dict(world.injected),
            requests=len(checkers.outcomes),
            answered=sum(not outcome.fault for outcome in outcomes),
            promises=checkers.promises,
            tokens=checkers.tokens,
            copies=sum(r.ahead.core.ordered for r in world.replicas if r.ahead is not None),
            virtual_s=world.timeline.now,
        )

    def _play(self) -> None:
        checkers, world, plan = self.checkers, self.world, self.plan
        world.begin()
        world.run(plan.heal_at)
        self._rest()
        checkers.note("healed, and everything is over")
        world.probe(_fresh)
        world.run(world.timeline.now + SETTLE_S)
        self._last()
        self.asks += world.clients.again
        check_endings(checkers, world, self.asks)
        check_rest(checkers, world, self.asks)
        check_books(checkers, world)
        check_damage(checkers, world)
        heard = new_core(world, told=True)
        for replica in world.replicas:
            check_promises(checkers, world, replica, self.asks)
            check_convergence(checkers, world, replica, heard)
            check_shelves(checkers, world, replica)
            check_reach(checkers, world, replica, self.asks)
            check_counts(checkers, world, replica)
            check_kept(checkers, world, replica, heard)
        if len(world.replicas) > 1:
            check_alike(checkers, world, heard, self.asks)
        world.restart_all()
        world.run(world.timeline.now + EMPTY_S)
        for replica in world.replicas:
            check_memory(checkers, world, replica)
            check_empty(checkers, world, replica)

    def _rest(self) -> None:
        """Wait until no request is under way: a silent engine is given up in the end."""
        world = self.world
        limit = world.timeline.now + self.plan.silence_s + 120.0
        while world.in_flight and world.timeline.now < limit:
            world.run(world.timeline.now + 1.0)

    def _last(self) -> None:
        """One more request, too short for any block: what fades with time does so now."""
        world = self.world
        for replica in world.replicas:
            id = "last" if len(world.replicas) == 1 else f"last {replica.name}"
            ask = Ask(id, world.timeline.now, b"\1\0\0\0" * 3, 1, "", "")
            self.asks.append(ask)
            self.checkers.will_ask(ask)
            world.clients.ask(ask, replica)
        world.run(world.timeline.now + 5.0)


def _fresh(engine: SimEngine) -> bytes:
    """Tokens that nobody else has, two blocks of them."""
    size = 4 * (2 * engine.layout.grid_tokens + 1)
    return hashlib.shake_128(engine.name.encode()).digest(size)
