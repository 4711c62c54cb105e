"""How many seeds it takes until each planted bug is found, and by which check."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvatlas.sim.faults_cluster import scenario
from kvatlas.sim.faults_run import run_seed
from kvatlas.sim.planted import BELOW, BESIDE, BUGS


class Score(msgspec.Struct, frozen=True):
    """What became of one planted bug. ``seeds``: how many it took, the one that found it
    included; 0 where none of them did. ``classes``: what was violated there, and ``first``: what
    came first, in words."""

    name: str
    kind: str
    symbol: str
    what: str
    seeds: int
    classes: tuple[str, ...] = ()
    first: str = ""


def score(name: str, seeds: Sequence[int]) -> Score:
    """Play ``seeds`` with the bug ``name`` until one finds it; worlds that do not have what
    the bug is in are not played. Raises KeyError for no such bug."""
    bug = BUGS[name]
    for played, seed in enumerate(seeds, 1):
        if not _can_find(name, seed):
            continue
        result = run_seed(seed, canary=name)
        if result.found:
            first = result.violations[0]
            kinds = dict.fromkeys([first.kind, *sorted(result.found)])
            told = f"{first.kind}: {first.what}"
            return Score(name, bug.kind, bug.symbol, bug.what, played, tuple(kinds), told)
    return Score(name, bug.kind, bug.symbol, bug.what, 0)


def _can_find(name: str, seed: int) -> bool:
    """Does the world of this seed have what the bug is in?"""
    if name in BELOW:
        return scenario(seed).tiers is not None
    return name not in BESIDE or scenario(seed).replicas > 1


def scores(names: Iterable[str], seeds: Sequence[int], jobs: int = 1) -> Iterator[Score]:
    """All of ``names``, in their order, ``jobs`` at a time in processes of their own."""
    play = functools.partial(score, seeds=seeds)
    if jobs <= 1:
        yield from map(play, names)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(play, names)


def row(found: Score) -> tuple[str, ...]:
    """For a table: name, what is wrong, symbol, expected class, seeds, by which checks."""
    seeds = str(found.seeds) if found.seeds else "not found"
    return found.name, found.what, found.symbol, found.kind, seeds, ", ".join(found.classes)
