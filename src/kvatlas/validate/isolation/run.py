"""Worlds, one after another or over several processes, and what came of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import msgspec

from kvatlas.validate.isolation.marks import CLASSES, Violation
from kvatlas.validate.isolation.planted import BY_NAME
from kvatlas.validate.isolation.world import World

OPERATIONS = 4000  # of one world
_FAILING_MAX = 10


class Played(msgspec.Struct, frozen=True):
    """One world."""

    seed: int
    operations: int
    inputs: int
    kinds: dict[str, int]
    hits: dict[str, int]
    late: int
    found: dict[str, int]
    violations: tuple[Violation, ...]


class Report(msgspec.Struct, frozen=True):
    """All of them. ``inputs``: what dispatchers and agents were told for it. ``hits``: blocks that
    were used or promised, by where they lay and whose they were to whoever asked; ``violations``
    by class, of which ``first`` tells a few. ``late``: promises of what a store had let go."""

    operations: int
    inputs: int
    worlds: int
    leak: str
    kinds: dict[str, int]
    hits: dict[str, int]
    late: int
    violations: dict[str, int]
    first: tuple[Violation, ...]

    @property
    def clean(self) -> bool:
        """Nothing was violated."""
        return not any(self.violations.values())


def play(seed: int, operations: int = OPERATIONS, *, leak: str = "", stop: bool = False) -> Played:
    """One world. ``leak``: a planted one; ``stop``: at the first violation."""
    with BY_NAME[leak]() if leak else contextlib.nullcontext():
        world = World(seed)
        judge = world.judge
        try:
            while world.operations < operations and not (stop and judge.found):
                world.step()
            if not (stop and judge.found):
                world.finish()
        except Exception:  # production code raised: found as such, with all that it said
            judge.report("crash", traceback.format_exc(limit=-4))
    kinds, hits = dict(sorted(world.counts.items())), dict(sorted(judge.hits.items()))
    return Played(
        seed,
        world.operations,
        world.inputs,
        kinds,
        hits,
        judge.late,
        dict(judge.found),
        tuple(judge.violations),
    )


def run(operations: int, *, first_seed: int = 0, jobs: int = 1) -> Iterator[Played]:
    """Worlds of `OPERATIONS` each, or a few more, until there are so many."""
    seeds = range(first_seed, first_seed + -(-operations // OPERATIONS))
    one = partial(play, operations=min(OPERATIONS, operations))
    if jobs <= 1 or len(seeds) < 2:
        yield from map(one, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(seeds))) as pool:
        yield from pool.imap(one, seeds)


def report(played: Iterable[Played], leak: str = "") -> Report:
    """Sums over them."""
    kinds, hits, found = Counter[str](), Counter[str](), Counter[str]()
    operations = inputs = worlds = late = 0
    first: list[Violation] = []
    for each in played:
        worlds += 1
        operations += each.operations
        inputs += each.inputs
        late += each.late
        kinds.update(each.kinds)
        hits.update(each.hits)
        found.update(each.found)
        first += each.violations[: _FAILING_MAX - len(first)]
    violations = {kind: found[kind] for kind in CLASSES}
    return Report(
        operations,
        inputs,
        worlds,
        leak,
        dict(sorted(kinds.items())),
        dict(sorted(hits.items())),
        late,
        violations,
        tuple(first),
    )


class Caught(msgspec.Struct, frozen=True):
    """What became of one planted leak. ``operations``: until it was seen, over all worlds that were
    played; 0: it was not. ``by``: the class of the first violation."""

    name: str
    kind: str
    symbol: str
    what: str
    operations: int
    by: str = ""


def catch(name: str, seeds: Sequence[int] = range(8), operations: int = OPERATIONS) -> Caught:
    """Play worlds with a leak until it is seen. Raises KeyError for no such leak."""
    leak, before = BY_NAME[name], 0
    for seed in seeds:
        played = play(seed, operations, leak=name, stop=True)
        before += played.operations
        if played.violations:
            by = played.violations[0].kind
            return Caught(name, leak.kind, leak.symbol, leak.what, before, by)
    return Caught(name, leak.kind, leak.symbol, leak.what, 0)
