"""The matrix: how the same devices are arranged × what they are asked, in virtual time.

All arrangements of a workload and a seed get the same requests at the same times, on the same
devices. A cell is one run of `world.simulate`, reduced to figures that can be summed up over seeds
(`matrix_table.py`). Where engines are split into halves of pairs, how many prefill is chosen by
runs of its own, on a seed that is not counted, unless it is given.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context, parent_process

import msgspec

from kvatlas.errors import ConfigError
from kvatlas.report.latency import Slo, Summary
from kvatlas.sim.arrangements import ARRANGEMENTS, Name, arranged
from kvatlas.sim.cluster import Cluster
from kvatlas.sim.matrix_money import Prices, dollars
from kvatlas.sim.report import EngineLoad, SimReport
from kvatlas.sim.tier_plots import moved
from kvatlas.sim.world import Play, no_collector, simulate
from kvatlas.workload.families import Family, generate
from kvatlas.workload.step_time import StepTime
from kvatlas.workload.trace import Trace

SEEDS_MAX = 100
PROCESSES_MAX = 64
SPLITS = (0.25, 0.5, 0.75)  # shares of engines that prefill, of which one is chosen
TUNING_SEED = 1_000_003
TUNING_SHARE = 0.25  # of a workload's requests, to choose by


class Setup(msgspec.Struct, frozen=True):
    """What all cells share. ``cluster``: combined engines, and below them dram and a store, of
    which an arrangement has what it says. ``prefill``: the first engines of so many are that half
    of the pairs, 0: how many is chosen."""

    cluster: Cluster
    slo: Slo
    prices: Prices
    prefill: int = 0

    def __post_init__(self) -> None:
        tiers = self.cluster.tiers
        if tiers is None or not tiers.dram_bytes or not tiers.object_bytes:
            raise ConfigError("the matrix compares dram and a store with nothing: give both sizes")
        if any(member.role != "combined" for member in self.cluster.members):
            raise ConfigError("the matrix splits the engines itself: see `arrangements.unpaired`")
        if self.prefill and not 0 < self.prefill < len(self.cluster.members):
            raise ConfigError(
                f"{self.prefill} prefill engines of {len(self.cluster.members)}: each half of a "
                "pair needs at least one"
            )


class Workload(msgspec.Struct, frozen=True):
    """What is asked. ``make(seed)`` gives the trace; ``seeds`` 0: it is what it is, and played
    once. ``load``: engine seconds asked for per second, had nothing been cached (None: unknown).
    """

    name: str
    make: Callable[[int], Trace]
    requests: int
    seeds: int
    load: float | None = None
    time_scale: float = 1.0


class PathUse(msgspec.Struct, frozen=True):
    """One kind of way over the run, all nodes together: how many there are, bytes moved, seconds
    in which something was on its way, and what all could move in a second."""

    links: int
    moved_bytes: float
    busy_s: float
    bytes_per_s: float


class Cell(msgspec.Struct, frozen=True):
    """One run. ``figures`` are seconds, shares or counts by name, None where nothing was measured;
    ``hit_tokens`` by tier, ``recomputed`` and ``unserved`` add up to ``prompt_tokens``.
    ``held_bytes`` in the end, by tier; of the store what was written to it. ``node_bytes``: of each
    node's tiers."""

    workload: str
    arrangement: Name
    seed: int
    prefill_engines: int
    figures: dict[str, float | None]
    hit_tokens: dict[str, int]
    recomputed: int
    unserved: int
    prompt_tokens: int
    output_tokens: int
    moved_bytes: dict[str, int]
    held_bytes: dict[str, int]
    counts: dict[str, int]
    paths: dict[str, PathUse]
    engines: tuple[EngineLoad, ...]
    node_bytes: dict[str, dict[str, int]]
    ttft_s: tuple[float, ...]


class Job(msgspec.Struct, frozen=True):
    """One cell to play: ``limit`` requests at most."""

    workload: Workload
    arrangement: Name
    seed: int
    prefill: int
    limit: int


def family(name: str, shape: Family, setup: Setup, load: float, seeds: int) -> Workload:
    """A generated workload whose sessions start fast enough to ask for ``load`` engine seconds per
    second and engine, had nothing been cached. Few long sessions ask for less: the answer's
    ``load`` is what one seed really asks for."""
    asked_s = _asked_s(setup, generate(shape, TUNING_SEED, name))
    duration_s = asked_s / (load * len(setup.cluster.members))
    make = _Generated(name, msgspec.structs.replace(shape, duration_s=duration_s))
    real = offered(setup, make(TUNING_SEED), None, 1.0)
    return Workload(name, make, shape.requests, seeds, real)


class _Generated(msgspec.Struct, frozen=True):
    """A family's traces by seed; can be sent to another process."""

    name: str
    shape: Family

    def __call__(self, seed: int) -> Trace:
        return generate(self.shape, seed, self.name)


def offered(setup: Setup, trace: Trace, limit: int | None, time_scale: float) -> float | None:
    """The load of a trace as `Workload` counts it; None where its requests all come at once."""
    first, last = math.inf, 0.0
    for request in itertools.islice(trace, limit):
        first, last = min(first, request.arrival_s), max(last, request.arrival_s)
    span_s = (last - first) * time_scale
    if span_s <= 0:
        return None
    return _asked_s(setup, trace, limit) / (span_s * len(setup.cluster.members))


def _asked_s(setup: Setup, trace: Trace, limit: int | None = None) -> float:
    """Engine seconds of all prompts, each computed from its first token in steps of its own."""
    first = setup.cluster.members[0]
    time, step = StepTime(first.spec, first.layout), first.spec.step_tokens
    total_s = 0.0
    for request in itertools.islice(trace, limit):
        tokens = request.input_tokens
        for start in range(0, tokens, step):
            total_s += time.seconds([(start, min(tokens, start + step))])
    return total_s


def play(setup: Setup, job: Job) -> Cell:
    """One run. Raises ConfigError and TraceError as `simulate` does."""
    cluster = arranged(setup.cluster, job.arrangement, job.prefill)
    times: list[float] = []
    with no_collector():
        report = simulate(
            cluster,
            job.workload.make(job.seed),
            Play(limit=job.limit, time_scale=job.workload.time_scale),
            seed=job.seed,
            slo=setup.slo,
            export=lambda outcome: None if outcome.fault else times.append(outcome.ttft_s),
        )
    if not report.latency.requests:
        raise ConfigError(f"{job.workload.name}: no requests in it")
    held = _held(report)
    figures = _figures(report) | dollars(setup.prices, report, held)
    return Cell(
        workload=job.workload.name,
        arrangement=job.arrangement,
        seed=job.seed,
        prefill_engines=job.prefill if ARRANGEMENTS[job.arrangement].pairs else 0,
        figures=figures,
        hit_tokens=report.tokens.hits,
        recomputed=report.tokens.recomputed,
        unserved=report.tokens.unserved,
        prompt_tokens=report.tokens.prompt,
        output_tokens=report.tokens.output,
        moved_bytes=moved(report.agents.values(), report.pairs),
        held_bytes=held,
        counts=_counts(report),
        paths=_paths(cluster, report),
        engines=report.engines,
        node_bytes={node: use.held_bytes for node, use in report.agents.items()},
        ttft_s=_thinned(sorted(times)),
    )


def _held(report: SimReport) -> dict[str, int]:
    held: Counter[str] = Counter()
    for use in report.agents.values():
        held.update(use.held_bytes)
        held["object"] += use.moved_bytes.get("write object", 0)
    return {tier: size for tier, size in held.items() if size}


def _counts(report: SimReport) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for use in report.agents.values():
        counts.update(use.counts)
    counts["evicted blocks"] = report.evicted_blocks
    counts["preemptions"] = report.preemptions
    counts["hand-overs"] = report.pairs.transfers
    counts["hand-overs failed"] = report.pairs.failed
    counts["leases run out"] = report.pairs.expired
    counts["combined fallbacks"] = sum(report.fallbacks.values())
    counts["sent to another engine"] = report.retries
    return {name: count for name, count in counts.items() if count}


def _figures(report: SimReport) -> dict[str, float | None]:
    latency, tokens = report.latency, report.tokens
    figures: dict[str, float | None] = {}
    summaries: dict[str, Summary] = {
        "ttft": latency.ttft_s,
        "tpot": latency.tpot_s,
        "itl": latency.itl_s,
        "e2e": latency.e2e_s,
    }
    for name, of in summaries.items():
        figures |= {f"{name}_p50_s": of.p50, f"{name}_p95_s": of.p95, f"{name}_p99_s": of.p99}
    hits, per_engine = tokens.hit_requests, report.devices / len(report.engines)
    figures |= {
        "attained": latency.attained,
        "goodput_per_s": latency.goodput_per_s,
        "requests_per_s": latency.requests_per_s,
        "output_tokens_per_s": latency.output_tokens_per_s,
        "hit_share": tokens.hit_share,
        "failed": float(latency.failed),
        "duration_s": latency.duration_s,
        "gpu_s_saved_per_hit": report.seconds.reused_s * per_engine / hits if hits else None,
        "prefill_saved_s": report.seconds.reused_s,
        "prefill_spent_s": report.seconds.recomputed_s,
        "hand_over_s": report.pairs.transfer_s / report.pairs.transfers
        if report.pairs.transfers
        else None,
    }
    return figures


def _paths(cluster: Cluster, report: SimReport) -> dict[str, PathUse]:
    """Ways of one kind together: "host", "disk read", "out" of every node, and so on."""
    nodes = sorted({member.node for member in cluster.members}, key=len, reverse=True)
    paths: dict[str, PathUse] = {}
    for name, use in report.links.items():
        kind = next((name[len(n) + 1 :] for n in nodes if name.startswith(f"{n} ")), name)
        old = paths.get(kind, PathUse(0, 0.0, 0.0, 0.0))
        paths[kind] = PathUse(
            old.links + 1,
            old.moved_bytes + use.moved_bytes,
            old.busy_s + use.busy_s,
            old.bytes_per_s + use.bytes_per_s,
        )
    return paths


_TIMES_MAX = 400


def _thinned(ordered: Sequence[float]) -> tuple[float, ...]:
    """Quantiles in even steps: enough to draw a distribution."""
    count = len(ordered)
    if count <= _TIMES_MAX:
        return tuple(ordered)
    return tuple(ordered[(count - 1) * i // (_TIMES_MAX - 1)] for i in range(_TIMES_MAX))


def run(
    setup: Setup,
    workloads: Sequence[Workload],
    arrangements: Sequence[Name],
    *,
    processes: int = 2,
    on_cell: Callable[[], None] = lambda: None,
) -> list[Cell]:
    """All cells, in the order of workloads, arrangements and seeds; with one process in this one.
    Raises ConfigError and TraceError."""
    if not 1 <= processes <= PROCESSES_MAX:
        raise ConfigError(f"{processes} processes: 1 to {PROCESSES_MAX} are possible")
    spawn = get_context("spawn")
    many = processes > 1
    with ProcessPoolExecutor(processes, spawn, _end_with_parent) if many else nullcontext() as pool:
        try:
            splits = _splits(pool, setup, workloads, arrangements, on_cell)
            jobs = [
                Job(workload, name, seed, splits.get((workload.name, name), 0), workload.requests)
                for workload in workloads
                for name in arrangements
                for seed in range(max(1, workload.seeds))
            ]
            return list(_played(pool, setup, jobs, on_cell))
        except BaseException:
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
            raise


def _end_with_parent() -> None:
    """In a worker: it ends when whoever started it was killed. It would wait for work for ever."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def cells(setup: Setup, workloads: Sequence[Workload], arrangements: Sequence[Name]) -> int:
    """How many runs that takes, those that choose a split included."""
    pairs = sum(ARRANGEMENTS[name].pairs for name in arrangements)
    tries = 0 if setup.prefill else pairs * len(_candidates(len(setup.cluster.members)))
    return sum(tries + len(arrangements) * max(1, w.seeds) for w in workloads)


def _candidates(engines: int) -> list[int]:
    return sorted({min(max(1, round(engines * share)), engines - 1) for share in SPLITS})


def _splits(
    pool: ProcessPoolExecutor | None,
    setup: Setup,
    workloads: Sequence[Workload],
    arrangements: Sequence[Name],
    on_cell: Callable[[], None],
) -> dict[tuple[str, Name], int]:
    """How many engines prefill: what most requests meet the objectives with, and of equals what
    has the least product of TTFT and E2E at p95."""
    engines = len(setup.cluster.members)
    paired = [name for name in arrangements if ARRANGEMENTS[name].pairs]
    if paired and engines < 2:
        raise ConfigError("a pair needs two engines at least: give more, or leave P/D out")
    if setup.prefill:
        return {(w.name, name): setup.prefill for w in workloads for name in paired}
    jobs = [
        Job(
            workload,
            name,
            TUNING_SEED if workload.seeds else 0,
            prefill,
            max(100, round(workload.requests * TUNING_SHARE)),
        )
        for workload in workloads
        for name in paired
        for prefill in _candidates(engines)
    ]
    best: dict[tuple[str, Name], tuple[tuple[float, float], int]] = {}
    for cell in _played(pool, setup, jobs, on_cell):
        place, figures = (cell.workload, cell.arrangement), cell.figures
        slow = (figures["ttft_p95_s"] or math.inf) * (figures["e2e_p95_s"] or math.inf)
        rank = (-(figures["attained"] or 0.0), slow)
        if place not in best or rank < best[place][0]:
            best[place] = (rank, cell.prefill_engines)
    return {place: prefill for place, (_, prefill) in best.items()}


def _played(
    pool: ProcessPoolExecutor | None,
    setup: Setup,
    jobs: Sequence[Job],
    on_cell: Callable[[], None],
) -> Iterator[Cell]:
    """In order; without a pool one after the other, here. The progress is told as cells are done,
    whatever their order."""
    if pool is None:
        for job in jobs:
            yield play(setup, job)
            on_cell()
        return

    def done(future: Future[Cell]) -> None:
        if not future.cancelled() and future.exception() is None:
            on_cell()

    # The last arrangements have most to do: begun last, one process would work alone in the end.
    futures = [pool.submit(play, setup, job) for job in reversed(jobs)][::-1]
    for future in futures:
        future.add_done_callback(done)
    for future in futures:
        yield future.result()
