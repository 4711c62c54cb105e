"""What a prediction is worth where the answer is known, and what rounding residuals loses."""

from __future__ import annotations

import math
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.validate.delta_code import Delta, Difference, Predictor
from kvatlas.validate.delta_loss import (
    bits_per_value,
    channels,
    errors,
    kinship,
    restored,
    steps,
)


def way(predictor: Predictor, distance: int = 16) -> Delta:
    return Delta(predictor, Difference.ARITHMETIC, distance)


def noise(seed: int, count: int = 4096) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(0, 1) for _ in range(count)]


@given(st.sampled_from(Predictor), st.sampled_from([1, 2, 4, 16]), st.integers(1, 70))
def test_every_row_but_i_rows_is_predicted_once_from_known_ones(
    predictor: Predictor, distance: int, rows: int
) -> None:
    known = set(range(0, rows, distance))
    for row, before, behind in steps(predictor, distance, rows):
        assert row not in known
        assert {before, behind} <= known
        known.add(row)
    assert known == set(range(rows))


def test_independent_values_cost_half_a_bit_more_as_residuals() -> None:
    """Var(x - y) is twice Var(x); of x less the mean of two it is one and a half."""
    every = [noise(seed) for seed in range(4)]
    for predictor, ratio in (
        (Predictor.PREVIOUS, 2.0),
        (Predictor.KEY, 2.0),
        (Predictor.BOTH, 1.5),
    ):
        found = kinship(every, way(predictor))
        assert found.variance_ratio == pytest.approx(ratio, rel=0.05)
        assert found.bits_saved == pytest.approx(-0.5 * math.log2(ratio), abs=0.04)
        assert found.helped == 0


def test_a_signal_that_changes_slowly_saves_bits() -> None:
    """x' = 0.99 x + noise: Var(x' - x) is 0.02 of Var(x), which is 2.8 bits."""
    value, values = 0.0, []
    for each in noise(5, 60_000):
        value = 0.99 * value + math.sqrt(1 - 0.99**2) * each
        values.append(value)
    found = kinship([values], way(Predictor.PREVIOUS))
    assert found.variance_ratio == pytest.approx(0.02, rel=0.1)
    assert found.bits_saved == pytest.approx(2.82, abs=0.1)
    assert found.helped == 1
    assert kinship([values], way(Predictor.BOTH, 2)).variance_ratio < found.variance_ratio


def test_constant_channels_and_i_rows_alone_say_nothing() -> None:
    assert kinship([[3.0] * 8], way(Predictor.PREVIOUS)).bits_saved == 0
    assert kinship([noise(1, 8)], way(Predictor.PREVIOUS, 1)).variance_ratio == 1


def relative(values: list[float], predictor: Predictor | None, bits: int) -> float:
    how = None if predictor is None else way(predictor)
    wrong, own = errors(values, restored(values, how, 16, bits))
    return math.sqrt(wrong / own)


def test_residuals_of_a_walk_round_better_than_its_values_and_those_of_noise_worse() -> None:
    walk = [0.0]
    for each in noise(3, 4095):
        walk.append(walk[-1] + each)
    alone = noise(4)
    for predictor in (Predictor.PREVIOUS, Predictor.BOTH):
        assert relative(alone, predictor, 4) > relative(alone, None, 4)
    assert relative(walk, Predictor.PREVIOUS, 4) < relative(walk, None, 4)


def test_less_the_i_row_a_group_has_the_same_range_so_nothing_is_gained() -> None:
    """But for the I rows themselves, which are exact: one row of 16 without error."""
    alone = noise(6)
    ratio = relative(alone, Predictor.KEY, 4) / relative(alone, None, 4)
    assert ratio == pytest.approx(math.sqrt(15 / 16), rel=0.05)


def test_errors_do_not_add_up_and_i_rows_are_kept() -> None:
    """In a closed loop the last row of a group is no worse than the first: within one step."""
    values = [math.sin(t / 9) * 3 for t in range(64)]
    found = restored(values, way(Predictor.PREVIOUS), 16, 6)
    wrong = [abs(x - y) for x, y in zip(values, found, strict=True)]
    assert wrong[::16] == [0, 0, 0, 0]
    assert max(wrong) < 0.02  # residuals span up to 0.4 in a group, 63 steps


def test_plain_rounding_hits_what_lies_on_its_steps() -> None:
    values = [float(t % 4) for t in range(32)]
    assert restored(values, None, 16, 2) == values
    assert restored([7.0] * 5, None, 4, 2) == [7.0] * 5


def test_all_that_is_stored_is_counted() -> None:
    assert bits_per_value(None, 16, 4) == 4 + 2
    assert bits_per_value(Predictor.PREVIOUS, 16, 4) == (3 * 16 + 15 * 4) / 16


def test_channels_of_bf16_rows() -> None:
    unit = b"".join(struct.pack("<f", x)[2:] for x in (1.0, -2.0, 3.0, 0.5))
    assert channels(unit, 4) == [[1.0, 3.0], [-2.0, 0.5]]
