"""The committed report of the CPU cluster: whole, a chain, and free of any machine's paths."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from kvatlas.validate.stages import report
from kvatlas.validate.stages.cluster import _ended_whole
from kvatlas.validate.stages.points import RULES
from kvatlas.validate.stages.result import built_on, load_result, path_of
from kvatlas.validate.stages.values import Stage

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "validated" / "stages"
RUN: tuple[Stage, ...] = ("a", "b", "c", "d")
#: Declared: vLLM on a CPU has no HBM, no meter and no RDMA.
NOT_HERE = {"a": {"a.hbm", "a.power"}, "b": {"b.transport", "b.rdma_ports"}}
#: One Valkey server has no quotas, and nothing to rebalance.
NOT_SHOWN = {"d": {"d.quota", "d.rebalance"}}


@pytest.mark.parametrize("stage", RUN)
def test_each_stage_reached_a_verdict(stage: Stage) -> None:
    found = load_result(path_of(FOLDER, stage))
    assert [v.point for v in found.verdicts] == [rule.point.id for rule in RULES[stage]]
    told = {s: {v.point for v in found.verdicts if v.status == s} for s in found.counts()}
    assert told["fail"] == set()
    assert told["not applicable"] == NOT_HERE.get(stage, set())
    assert told["not shown"] == NOT_SHOWN.get(stage, set())
    path = path_of(FOLDER, stage)
    assert path.with_suffix(".md").read_text("utf-8") == report.markdown(found)
    for kind in (".json", ".md"):
        text = path.with_suffix(kind).read_text("utf-8")
        assert not re.search(r"/(tmp|home|root|work|var|usr)/", text)


def test_they_are_one_chain() -> None:
    last, baseline = built_on(FOLDER, "d")
    assert last.stage == "c"
    final = load_result(path_of(FOLDER, "d"))
    assert final.previous is not None
    assert final.previous.digest == last.digest
    assert len(set(baseline.answers)) > 1


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_closed_terminal_ends_the_cluster_unless_that_is_ignored(before: signal.Handlers) -> None:
    kept = signal.signal(signal.SIGHUP, before)
    try:
        if before is signal.SIG_IGN:
            with _ended_whole():
                signal.raise_signal(signal.SIGHUP)
        else:
            with pytest.raises(KeyboardInterrupt), _ended_whole():
                signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, kept)
