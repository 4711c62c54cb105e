"""Kept results of ``kvatlas validate exactness --tiers`` on real engines: all as expected."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvatlas.validate.exactness_tiers import TierReport

RESULTS = sorted((Path(__file__).parents[1] / "fixtures" / "validated").glob("tiers-*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_case_came_from_its_tier_and_was_the_same(path: Path) -> None:
    report = msgspec.json.decode(path.read_bytes(), type=TierReport)
    assert report.ok()
    assert report.damaged
    for case in report.cases:
        assert case.ok
        assert case.difference is None
        assert case.cached_tokens == ({case.tier: case.resumed} if case.tier else {})
    assert {case.tier for case in report.cases} >= {"", "dram", "disk"}
    tokens = sum(case.resumed for case in report.cases)
    assert sum(report.cached_tokens_by_tier.values()) == tokens


def test_there_are_some() -> None:
    assert RESULTS
