"""What latency tells: can a tenant learn from it whether another one holds a prefix?

A prober asks for prompts that another tenant, the *holder*, has asked for, or has not: then that
one has asked for something else, as long and at the same time. Each trial is played in two *twins*
of one world, in which the same prompt is held in the one and is not in the other; so a difference
between their latencies comes from nothing else. Figures are the area under the curve (AUC) of a
guess by the latency alone: 0.5 tells nothing, 1 tells all. The same prober inside of the holder's
own tenant is the control: it must see.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import msgspec

from kvatlas.core.ahead_copies import Params as AheadParams
from kvatlas.report.statistics import interval
from kvatlas.sim.cluster import ClusterFile, EngineTable, TiersTable, build
from kvatlas.sim.flights import Outcome
from kvatlas.sim.world import simulate
from kvatlas.workload.trace import Trace, TraceRequest

AUC_MAX = 0.52
CONTROL_MIN = 0.95
BLOCK_TOKENS = 16
_PREFIX_BLOCKS = 64  # of what is guessed
_TAIL_BLOCKS = 2  # of a prompt that nobody else has
_OUTPUT_TOKENS = 4
_OTHERS = 6  # further tenants
HOLDER, PROBER = "holder", "prober"


class Case(msgspec.Struct, frozen=True):
    """Where what is guessed lies when it is asked for. ``others``: requests of further tenants
    between holder and prober, which push it down; ``crowd``: how often the holder asks again at
    once, which makes copies ahead worth it; ``trial_s``: from one trial to the next."""

    name: str
    cluster: ClusterFile
    others: int
    crowd: int = 0
    trial_s: float = 4.0


class Trial(msgspec.Struct, frozen=True):
    """``index`` of the prober's request; ``held``: whether the holder has that prompt."""

    index: int
    held: bool


class Auc(msgspec.Struct, frozen=True):
    """Of a guess by latency alone. ``low``…``high``: 95 % by resampling trials. ``equal``: trials
    of which both twins have the same latency, to the last digit."""

    auc: float
    low: float
    high: float
    trials: int
    equal: int


def _engines(blocks: int, count: int = 4) -> tuple[EngineTable, ...]:
    return (
        EngineTable(
            name="e",
            count=count,
            model="llama-3.1-8b",
            blocks=blocks,
            prefill_tokens_per_s=8000.0,
            decode_step_s=0.01,
        ),
    )


_SMALL = _engines(150, 2)  # room for two prompts each
_HALVES = tuple(
    msgspec.structs.replace(_engines(2000, 1)[0], name=role, role=role)
    for role in ("prefill", "decode")
)
CASES = (
    Case("hbm", ClusterFile(engine=_engines(4000)), others=3),
    Case(
        "dram",
        ClusterFile(
            engine=_SMALL,
            tiers=TiersTable(dram="4GB", peers=True),
            ahead=AheadParams(replicate=True, push=True),
        ),
        others=9,
        crowd=6,
    ),
    Case("disk", ClusterFile(engine=_SMALL, tiers=TiersTable(dram="300MB", disk="20GB")), others=9),
    Case("pairs", ClusterFile(engine=_HALVES), others=3),
)
BY_NAME = {case.name: case for case in CASES}


def story(
    case: Case, trials: int, *, seed: int, twin: bool, inside: bool = False
) -> tuple[list[TraceRequest], list[Trial]]:
    """All requests of one twin, by time, and which of them probe. ``inside``: the prober is of the
    holder's own tenant. Twins differ in nothing but what the holder has asked for."""
    draw = random.Random(f"kvatlas.timing.1/{seed}/{case.name}")
    asked: list[tuple[float, str, tuple[int, ...], bool | None]] = []
    fresh = 1 << 40
    for number in range(trials):
        start = (number + 1) * case.trial_s
        held = (draw.random() < 0.5) is not twin
        first = (2 * number + 1) * 1000
        guessed = tuple(range(first, first + _PREFIX_BLOCKS))
        other = tuple(range(first + 1000, first + 1000 + _PREFIX_BLOCKS))

        def tail() -> tuple[int, ...]:
            nonlocal fresh
            fresh += _TAIL_BLOCKS
            return tuple(range(fresh - _TAIL_BLOCKS, fresh))

        at = start + draw.uniform(0.0, 0.1)
        has = guessed if held else other
        asked.append((at, HOLDER, has + tail(), None))
        asked += [(at + 0.25 + 0.001 * i, HOLDER, has + tail(), None) for i in range(case.crowd)]
        for _ in range(case.others):
            at = start + draw.uniform(0.4, 0.8 * case.trial_s)
            beside = (draw.randrange(1 << 50, 1 << 51),) * draw.randint(8, _PREFIX_BLOCKS)
            asked.append((at, f"other {draw.randrange(_OTHERS)}", beside + tail(), None))
        at = start + draw.uniform(0.82, 0.9) * case.trial_s
        asked.append((at, HOLDER if inside else PROBER, guessed + tail(), held))
    asked.sort(key=lambda each: each[0])
    requests, probes = [], []
    for index, (at, scope, ids, held_) in enumerate(asked):
        size = len(ids) * BLOCK_TOKENS
        made = TraceRequest(index, at, size, _OUTPUT_TOKENS, ids, scope=scope)
        requests.append(made)
        if held_ is not None:
            probes.append(Trial(index, held_))
    return requests, probes


def simulated(case: Case, requests: Sequence[TraceRequest]) -> Mapping[int, float]:
    """Seconds to the first token in the simulator, by index."""
    ttft_s: dict[int, float] = {}

    def ended(outcome: Outcome) -> None:
        ttft_s[int(outcome.id)] = outcome.ttft_s

    trace = Trace(case.name, "made", BLOCK_TOKENS, lambda: iter(requests))
    simulate(build(case.cluster, lambda place: place), trace, export=ended)
    return ttft_s


Run = Callable[[Case, Sequence[TraceRequest]], Mapping[int, float]]


def probe(
    case: Case, trials: int, *, seed: int = 0, inside: bool = False, run: Run = simulated
) -> Auc:
    """Both twins, and what the prober can tell."""
    held: list[float] = []
    other: list[float] = []
    twins = [story(case, trials, seed=seed, twin=t, inside=inside) for t in (False, True)]
    times = [run(case, requests) for requests, _ in twins]
    for pair in zip(*(probes for _, probes in twins), strict=True):
        for each, measured in zip(pair, times, strict=True):
            (held if each.held else other).append(measured[each.index])
    return tell(held, other)


def tell(held: Sequence[float], other: Sequence[float]) -> Auc:
    """How often a guess is right that takes the sooner of two answers for the held one. Equal
    places of the two are twins. Raises ValueError without any."""
    ranked = sorted(held), sorted(other)
    ours = [1 - _share_before(ranked[1], value) for value in held]
    theirs = [_share_before(ranked[0], value) for value in other]
    auc = fmean(ours)
    spread = interval([one + two - auc for one, two in zip(ours, theirs, strict=True)])
    low, high = (auc if end is None else end for end in (spread.low, spread.high))
    equal = sum(one == two for one, two in zip(held, other, strict=True))
    return Auc(auc, low, high, len(held), equal)


def _share_before(ranked: Sequence[float], value: float) -> float:
    """The share of ``ranked`` below ``value``, equal ones counted half."""
    return (bisect_left(ranked, value) + bisect_right(ranked, value)) / (2 * len(ranked))
