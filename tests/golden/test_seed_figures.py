"""Seed document 003's figures on V4's KV cache, and how far each is from the computed one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvatlas.workload import seed_003
from kvatlas.workload.seed_003 import Row, rows, shown

SEED = Path(__file__).resolve().parents[2].parent / "shared" / "seeds"
ROWS = {(row.where, row.what): row for row in rows()}


def row(where: str, what: str) -> Row:
    return ROWS[where, what]


@pytest.mark.parametrize(
    ("where", "what", "seed", "computed"),
    [
        ("1", "one token, Flash", 6.3, 3850.25),
        ("1", "4K tokens, Flash", 25e3, 15_770_624),
        ("intro", "100 requests × 3,200 tokens, Flash", 2e6, 1_232_080_000),
        ("6", "one token, plain heads", 320e3, 3_145_728),
        ("6", "4K tokens, V3", 121e6, 143_917_056),
        ("6", "block of 256, Flash", 1.6e3, 985_664),
        ("7", "3,200 tokens to decode, Flash", 20.2e3, 12_320_800),
        ("7", "the same with its resume point", 20.2e3, 12_528_000 + 15_467_904),
        ("7", "100 requests in each of 8 GPUs", 0.25e6, 1_232_080_000),
        ("8.4", "KV of all shared prefixes", 25.3e3, 15_401_000),
        ("10", "1M tokens, Flash", 6.3e6, 3_850_250_000),
    ],
)
def test_bytes(where: str, what: str, seed: float, computed: float) -> None:
    found = row(where, what)
    assert (found.seed, found.unit) == (seed, "B")
    assert found.computed == pytest.approx(computed, rel=1e-12)


@pytest.mark.parametrize(
    ("where", "what", "computed"),
    [
        ("intro", "Flash of V3.2, fp4 indexer", 7.311),
        ("intro", "Flash of V3.2, fp8 indexer", 8.010),
        ("intro", "Pro of V3.2, fp4 indexer", 10.467),
        ("intro", "Pro of V3.2, fp8 indexer", 11.466),
        ("6", "V3 to V3.2", 0.73097),
        ("6", "V3.2 to Flash", 12.4844),
        ("6", "plain heads to Flash", 817.02),
        ("7", "100 of them over PCIe", 0.0192513),
        ("7", "100 of them over 10 GB/s", 0.123208),
        ("7", "Flash before V3", 9.1256),
        ("8.3", "100 requests in their HBM", 0.34609),
    ],
)
def test_ratios_and_times(where: str, what: str, computed: float) -> None:
    assert row(where, what).computed == pytest.approx(computed, rel=1e-3)


def test_where_the_seed_reckons_with_parameters_it_is_right() -> None:
    """Operations per token were never touched by the slip in the unit; attention comes on top."""
    short = [r for r in rows() if r.unit == "FLOP" and r.what != "prefill of the millionth token"]
    assert len(short) == 4
    assert all(1 <= r.ratio() < 1.1 for r in short)
    assert row("10", "prefill of the millionth token").ratio() == pytest.approx(5.16, rel=0.01)


def test_every_size_of_v4_is_wrong_by_the_same_slip() -> None:
    flash = [r for r in rows() if r.unit == "B" and "Flash" in r.what and "resume" not in r.what]
    assert len(flash) >= 6
    assert all(600 < r.ratio() < 640 for r in flash)


def test_rebuilt_rows_are_marked_and_only_those_of_the_lost_table() -> None:
    marked = [r for r in rows() if r.rebuilt]
    assert {r.where for r in marked} == {"6"}
    assert len(marked) == 12
    assert "lost" in seed_003.NOTES


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (6.3, "B", "6.3 B"),
        (3850.25, "B", "3.85 KB"),
        (1.2e9, "B", "1.2 GB"),
        (26e9, "FLOP", "26 GFLOP"),
        (0.00003, "s", "0.03 ms"),
        (0.0006, "%", "0.0006 %"),
        (7, "%", "7.0 %"),
        (50_000, "×", "50,000×"),
    ],
)
def test_units(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text


def test_the_figures_stand_in_the_document() -> None:
    if not SEED.is_dir():
        pytest.skip("the seed documents are not beside this checkout")
    (file,) = SEED.glob("003*.txt")
    text = re.sub(r"\s+", " ", file.read_text("utf-8"))
    for figure in ("6.3 bytes", "25 KB", "仅 2 MB", "121 MB", "350 KB", "36 KB", "5.1 KB", "496 b"):
        assert figure in text, figure
    for figure in ("~320 KB", "20.2 KB", "0.03ms", "0.2ms", "9.9 GB", "0.25 MB", "3.86 PFLOP"):
        assert figure in text, figure
    for figure in ("8.32 PFLOP", "3.22 PFLOP", "25.3 KB", "15.8 KB", "9.5 KB", "630 MB", "0.0006%"):
        assert figure in text, figure
