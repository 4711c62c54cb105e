"""Where one thing pays for another: break-evens by hand."""

from __future__ import annotations

import math

import pytest

from kvatlas.errors import ConfigError
from kvatlas.report import economics, money
from kvatlas.report.economics import BlockSize


def test_dollars_per_million_tokens() -> None:
    assert economics.per_million(0.002, 1000) == pytest.approx(2.0)
    # 3 of 4 tokens are of the prompt
    assert economics.blended(1.0, 5.0, 3000, 1000) == pytest.approx(2.0)


def test_a_load_takes_its_latency_and_its_bytes() -> None:
    assert economics.load_s(10e9, 5e9, 0.5) == pytest.approx(2.5)
    assert economics.load_s(0, 5e9, 0.5) == 0.0


def test_the_break_even_bandwidth_is_where_loading_takes_as_long_as_computing() -> None:
    slowest = economics.slowest_bytes_per_s(10e9, 2.5, 0.5)
    assert slowest == pytest.approx(5e9)
    assert slowest is not None
    assert economics.load_s(10e9, slowest, 0.5) == pytest.approx(2.5)
    assert economics.slowest_bytes_per_s(10e9, 0.5, 0.5) is None


@pytest.mark.parametrize(
    ("gains", "first"),
    [
        ([(256, -1.0), (512, 1.0), (768, 2.0)], 512),
        ([(256, 1.0), (512, -1.0), (768, 2.0)], 768),  # a dip: what comes before it does not count
        ([(256, 1.0), (512, -1.0)], None),
        ([(256, 0.0)], None),
        ([(256, 1.0)], 256),
        ([], None),
    ],
)
def test_it_pays_from_where_every_longer_one_wins(
    gains: list[tuple[int, float]], first: int | None
) -> None:
    assert economics.pays_from(gains) == first


@pytest.mark.parametrize(
    ("held", "hit", "reuses"),
    [(1.0, 0.3, 4), (0.9, 0.3, 3), (0.0, 0.3, 1), (1.0, 0.0, None), (1.0, -1.0, None)],
)
def test_reuses_that_pay_for_holding(held: float, hit: float, reuses: int | None) -> None:
    assert economics.reuses_to_pay(held, hit) == reuses


def test_how_long_one_hit_may_be_waited_for() -> None:
    assert economics.longest_s(6.0, 2.0) == 3.0
    assert economics.longest_s(6.0, 0.0) == math.inf
    assert economics.longest_s(-1.0, 2.0) is None


def row(block_tokens: int, *, latency_s: float = 0.001) -> BlockSize:
    return economics.block_size(
        block_tokens,
        grid_tokens=256,
        prompt_tokens=8192,
        bytes_per_token=100.0,
        token_s=1e-5,
        bytes_per_s=1e9,
        latency_s=latency_s,
    )


def test_one_block_size_by_hand() -> None:
    found = row(64)
    assert found.block_bytes == 6400
    assert found.metadata_share == pytest.approx(65 / 6400)
    assert found.lost_tokens == 128  # half of the grid: a smaller block finds nothing more
    assert found.lost_s == pytest.approx(128e-5)
    assert found.waits_s == pytest.approx(0.004)  # 128 blocks, 32 at a time
    assert found.efficiency == pytest.approx(6400 / (6400 + 1e6))
    assert found.overhead_s == pytest.approx(0.00528)


def test_a_block_larger_than_the_grid_loses_more_of_a_match() -> None:
    assert [row(size).lost_tokens for size in (16, 256, 512, 1 << 20)] == [128, 128, 256, 4096]


def test_the_best_block_weighs_what_is_lost_against_what_is_waited_for() -> None:
    sizes = (64, 256, 512, 2048)
    assert economics.best_block([row(size) for size in sizes]).block_tokens == 256
    slow = [row(size, latency_s=0.1) for size in sizes]
    assert economics.best_block(slow).block_tokens == 256  # one wait suffices
    free = [row(size, latency_s=0.0) for size in sizes]
    assert economics.best_block(free).block_tokens == 256  # of equals the largest
    tiny = [row(size) for size in (16, 32)]  # 65 bytes are more than a hundredth of each
    assert economics.best_block(tiny).block_tokens == 32


def test_a_month_of_a_gigabyte() -> None:
    price = money.storage_price("disk", None)
    assert price == money.STORAGE["disk"]
    assert price.source.startswith("default")
    assert price.dollars(1e9, money.MONTH_S) == pytest.approx(0.080 * 1e9 / 2**30, rel=1e-3)
    own = money.storage_price("dram", 0)
    assert own.dollars(1e12, 1e6) == 0.0
    assert own.source == "as the operator says"


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf, 1e4])
def test_a_storage_price_that_cannot_be(wrong: float) -> None:
    with pytest.raises(ConfigError, match="dollars per GB and month of object"):
        money.storage_price("object", wrong)


def test_the_default_price_may_be_a_devices_own() -> None:
    listed = money.Price(4.75, "list")
    assert money.price(None, listed) is listed
    assert money.price(3.0, listed).dollars_per_gpu_hour == 3.0


@pytest.mark.parametrize(
    ("dollars", "text"),
    [(0.0, "$0.0000"), (12.3, "$12.30"), (0.5, "$0.5000"), (0.0000629, "$0.0000629"),
     (-0.002, "$-0.00200")],
)  # fmt: skip
def test_small_amounts_keep_three_digits(dollars: float, text: str) -> None:
    assert money.dollars_text(dollars) == text
