"""What a tenant can tell from latency: nothing of another's prompts, all of its own."""

from __future__ import annotations

from contextlib import ExitStack

import msgspec
import pytest

from kvatlas.validate.isolation import planted
from kvatlas.validate.isolation.timing import (
    AUC_MAX,
    BY_NAME,
    CASES,
    CONTROL_MIN,
    HOLDER,
    PROBER,
    Case,
    probe,
    story,
    tell,
)
from kvatlas.validate.isolation.timing_served import Probed

TRIALS = 12


@pytest.mark.parametrize("name", ["hbm", "dram", "pairs"])
def test_latency_tells_nothing_of_another_tenant(name: str) -> None:
    across = probe(BY_NAME[name], TRIALS)
    assert across.auc == 0.5, across
    assert across.equal == across.trials == TRIALS
    assert probe(BY_NAME[name], TRIALS, inside=True).auc >= CONTROL_MIN


@pytest.mark.parametrize(
    ("case", "leaks"),
    [
        ("hbm", ("engine-without-salt", "scope-left-out")),
        ("dram", ("scope-left-out",)),
        ("hbm", ("engine-without-salt",)),
    ],
)
def test_the_prober_sees_planted_leaks(case: str, leaks: tuple[str, ...]) -> None:
    with ExitStack() as stack:
        for name in leaks:
            stack.enter_context(planted.BY_NAME[name]())
        assert probe(BY_NAME[case], 2 * TRIALS).auc > AUC_MAX + 0.1


def test_the_gateway_tells_nothing_of_another_tenant() -> None:
    """Nor do headers, usage or text; and the prober sends the holder's name as its salt."""
    run = Probed()
    assert probe(BY_NAME["hbm"], TRIALS, run=run).equal == TRIALS
    _, probes = story(BY_NAME["hbm"], TRIALS, seed=0, twin=False)
    one, other = run.told
    assert all(one[each.index] == other[each.index] for each in probes)
    assert all(one[each.index].status == 200 for each in probes)
    control = Probed()
    assert probe(BY_NAME["hbm"], TRIALS, run=control, inside=True).auc >= CONTROL_MIN
    one, other = control.told
    assert any(one[each.index] != other[each.index] for each in probes)


def test_twins_differ_in_what_the_holder_has_alone() -> None:
    (one, probes), (other, _) = (story(BY_NAME["dram"], 20, seed=3, twin=t) for t in (False, True))
    changed = [a for a, b in zip(one, other, strict=True) if a != b]
    assert {a.scope for a in changed} == {HOLDER}
    assert len(changed) == 20 * (1 + BY_NAME["dram"].crowd)
    lengths = [[msgspec.structs.replace(r, hash_ids=()) for r in each] for each in (one, other)]
    assert lengths[0] == lengths[1]
    assert {one[each.index].scope for each in probes} == {PROBER}
    assert 0 < sum(each.held for each in probes) < 20


def test_auc_counts_pairs() -> None:
    assert tell([1.0, 2.0], [3.0, 4.0]).auc == 1.0
    assert tell([3.0, 4.0], [1.0, 2.0]).auc == 0.0
    assert tell([1.0, 1.0], [1.0, 1.0]).auc == 0.5
    assert tell([1.0, 3.0], [2.0, 2.0]).auc == 0.5
    many = tell([0.1 * i for i in range(50)], [0.1 * i + 1 for i in range(50)])
    assert many.low < many.auc < many.high
    assert many.equal == 0


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_many_trials(case: Case) -> None:
    across = probe(case, 300)
    assert across.high <= AUC_MAX, across
