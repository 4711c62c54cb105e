"""The matrix summed up: means over seeds with their intervals, differences, and the advice. Pure.

Arrangements of one workload are compared seed by seed: they got the same requests. A difference is
one only where its interval leaves zero out; a workload that was played once has no interval, and
nothing is called better there by less than `ONCE_SHARE`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from kvatlas.report.money import dollars_text
from kvatlas.report.statistics import Interval, interval
from kvatlas.report.table import seconds
from kvatlas.sim.arrangements import ARRANGEMENTS, Name
from kvatlas.sim.matrix import Cell, PathUse

#: Where there is one run of each, by so large a share must they differ to be called better.
ONCE_SHARE = 0.02

FIGURES: dict[str, str] = {
    "ttft_p50_s": "TTFT p50",
    "ttft_p95_s": "TTFT p95",
    "ttft_p99_s": "TTFT p99",
    "tpot_p50_s": "TPOT p50",
    "tpot_p95_s": "TPOT p95",
    "tpot_p99_s": "TPOT p99",
    "itl_p50_s": "ITL p50",
    "itl_p95_s": "ITL p95",
    "itl_p99_s": "ITL p99",
    "e2e_p50_s": "E2E p50",
    "e2e_p95_s": "E2E p95",
    "e2e_p99_s": "E2E p99",
    "goodput_per_s": "goodput",
    "attained": "objectives met",
    "hit_share": "hit tokens",
    "gpu_s_saved_per_hit": "GPU-seconds saved per hit",
    "dollars_per_million": "$ per million tokens",
    "busy_dollars_per_million": "the same, busy engines alone",
    "good_dollars_per_million": "the same, per token that met the objectives",
}


class Row(msgspec.Struct, frozen=True):
    """One arrangement under one workload, over its seeds. Sums are means per run."""

    workload: str
    arrangement: Name
    title: str
    runs: int
    prefill_engines: int
    figures: dict[str, Interval | None]
    token_share: dict[str, float]
    prompt_tokens: float
    moved_bytes: dict[str, float]
    held_bytes: dict[str, float]
    counts: dict[str, float]
    paths: dict[str, PathUse]


class Difference(msgspec.Struct, frozen=True):
    """``one`` against ``other`` in one figure, seed by seed: ``gain`` is one's value less the
    other's. ``better``: what may be said of it, None where nothing may."""

    workload: str
    one: Name
    other: Name
    figure: str
    gain: Interval
    better: bool | None


class Advice(msgspec.Struct, frozen=True):
    """For one workload: what to take, and the sentence that says so."""

    workload: str
    take: Name
    sentence: str


def rows(cells: Sequence[Cell]) -> list[Row]:
    """In the order of the cells."""
    groups: dict[tuple[str, Name], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.workload, cell.arrangement].append(cell)
    return [_row(name, arrangement, of) for (name, arrangement), of in groups.items()]


def _row(workload: str, arrangement: Name, of: Sequence[Cell]) -> Row:
    prompt = sum(cell.prompt_tokens for cell in of)
    shares = {
        "recomputed": sum(cell.recomputed for cell in of),
        "unserved": sum(cell.unserved for cell in of),
    }
    shares = _sums([cell.hit_tokens for cell in of]) | shares
    return Row(
        workload=workload,
        arrangement=arrangement,
        title=ARRANGEMENTS[arrangement].title,
        runs=len(of),
        prefill_engines=of[0].prefill_engines,
        figures={name: _interval([cell.figures[name] for cell in of]) for name in of[0].figures},
        token_share={name: count / prompt for name, count in shares.items()} if prompt else {},
        prompt_tokens=prompt / len(of),
        moved_bytes=_means([cell.moved_bytes for cell in of]),
        held_bytes=_means([cell.held_bytes for cell in of]),
        counts=_means([cell.counts for cell in of]),
        paths=_paths([cell.paths for cell in of]),
    )


def _interval(values: Sequence[float | None]) -> Interval | None:
    """None where a run had nothing to measure."""
    known = [value for value in values if value is not None]
    return interval(known) if known and len(known) == len(values) else None


def _sums(tables: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = defaultdict(int)
    for table in tables:
        for name, value in table.items():
            total[name] += value
    return dict(total)


def _means(tables: Sequence[dict[str, int]]) -> dict[str, float]:
    return {name: value / len(tables) for name, value in sorted(_sums(tables).items())}


def _paths(tables: Sequence[dict[str, PathUse]]) -> dict[str, PathUse]:
    names = sorted({name for table in tables for name in table})
    found = {}
    for name in names:
        uses = [table[name] for table in tables if name in table]
        found[name] = PathUse(
            uses[0].links,
            fmean([use.moved_bytes for use in uses]),
            fmean([use.busy_s for use in uses]),
            uses[0].bytes_per_s,
        )
    return found


def difference(
    cells: Sequence[Cell], workload: str, one: Name, other: Name, figure: str, *, more: bool
) -> Difference | None:
    """None where a run of either lacks the figure. ``more``: more of it is better."""
    values: dict[Name, dict[int, float]] = {one: {}, other: {}}
    for cell in cells:
        value = cell.figures[figure]
        if cell.workload == workload and cell.arrangement in values:
            if value is None:
                return None
            values[cell.arrangement][cell.seed] = value
    seeds = sorted(values[one].keys() & values[other].keys())
    if not seeds:
        return None
    gain = interval([values[one][seed] - values[other][seed] for seed in seeds])
    better: bool | None = None
    largest = max(abs(v) for of in values.values() for v in of.values())
    if gain.excludes_zero or (len(seeds) == 1 and abs(gain.mean) >= ONCE_SHARE * largest > 0):
        better = (gain.mean > 0) == more
    return Difference(workload, one, other, figure, gain, better)


def advise(cells: Sequence[Cell], workload: str, names: Sequence[Name]) -> Advice:
    """The arrangement that meets the objectives most often; of those that cannot be told from it,
    the one that needs the least: ``names`` go from little to much."""
    of = [cell for cell in cells if cell.workload == workload]
    shares = _by_name(of, names, "attained")
    slow_s = _by_name(of, names, "ttft_p95_s")
    best = min(names, key=lambda name: (-shares[name], slow_s[name]))
    take = next(name for name in names if not _worse(of, workload, name, best))
    runs = len({cell.seed for cell in of})
    said = _sentence(workload, (take, best), shares, slow_s)
    if cost := _by_name(of, [take], "dollars_per_million")[take]:
        said += f"; {dollars_text(cost)} per million tokens"
    said += f" ({runs} seeds)." if runs > 1 else " (one run: no interval)."
    return Advice(workload, take, said)


def _by_name(cells: Sequence[Cell], names: Sequence[Name], figure: str) -> dict[Name, float]:
    return {
        name: _mean([cell.figures[figure] for cell in cells if cell.arrangement == name])
        for name in names
    }


def _mean(values: Sequence[float | None]) -> float:
    return fmean([value or 0.0 for value in values]) if values else 0.0


def _worse(cells: Sequence[Cell], workload: str, name: Name, best: Name) -> bool:
    """Whether it surely meets the objectives less often than the best, or is surely slower to the
    first token where both meet them equally often."""
    if name == best:
        return False
    met = difference(cells, workload, name, best, "attained", more=True)
    if met is not None and met.better is not None:
        return not met.better
    quick = difference(cells, workload, name, best, "ttft_p95_s", more=False)
    return quick is not None and quick.better is False


def _sentence(
    workload: str,
    chosen: tuple[Name, Name],
    shares: dict[Name, float],
    slow_s: dict[Name, float],
) -> str:
    """``chosen``: what to take, and the best."""
    names, (take, best) = list(shares), chosen
    base = names[0]
    said = f"{workload}: take {ARRANGEMENTS[take].title}: {shares[take]:.1%} of requests meet the "
    said += f"objectives, TTFT p95 {seconds(slow_s[take])}"
    if take != base:
        title = ARRANGEMENTS[base].title
        said += f" ({shares[base]:.1%} and {seconds(slow_s[base])} with {title})"
    if further := names[names.index(take) + 1 :]:
        titles = ", ".join(f"{ARRANGEMENTS[name].title} {shares[name]:.1%}" for name in further)
        said += f"; what needs more shows no sure gain here: {titles}"
    elif take != best:
        said += f"; {ARRANGEMENTS[best].title} had {shares[best]:.1%}, which is no sure difference"
    return said
