"""Delta coding of rows of floats: bit-exact whatever the bits, small where the signal is smooth."""

from __future__ import annotations

import itertools
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.dataplane.codec import Codec, encode
from kvatlas.errors import ConfigError
from kvatlas.validate.delta_code import Delta, Difference, Predictor, coded, decoded

WAYS = [
    Delta(predictor, difference, distance)
    for predictor, difference, distance in itertools.product(Predictor, Difference, (1, 2, 4, 16))
]


def bf16(*values: float) -> bytes:
    return b"".join(struct.pack("<f", value)[2:] for value in values)


@given(
    st.sampled_from(WAYS),
    st.sampled_from([1, 2]),
    st.integers(1, 5),
    st.integers(1, 40),
    st.randoms(use_true_random=False),
)
def test_every_unit_comes_back_bit_by_bit(
    how: Delta, width: int, floats: int, rows: int, chance: random.Random
) -> None:
    """Any bytes, so NaN, infinities and both zeros too; any number of rows behind an I row."""
    unit = chance.randbytes(width * floats * rows)
    made = coded(unit, width, width * floats, how)
    assert len(made) == len(unit)
    assert decoded(made, width, width * floats, how) == unit


def test_p_rows_hold_the_step_from_the_row_before() -> None:
    unit = bf16(1.0, 1.0078125, 1.0, 1.0, 2.0)  # the next bf16 after 1 is 1 + 2**-7
    made = coded(unit, 2, 2, Delta(Predictor.PREVIOUS, Difference.ARITHMETIC, 4))
    assert made[:2] == bf16(1.0), "an I row is kept"
    assert [int.from_bytes(made[i : i + 2], "little") for i in (2, 4, 6)] == [2, 1, 0], "+1, -1, 0"
    assert made[8:] == bf16(2.0), "and so is the next"
    other = coded(unit, 2, 2, Delta(Predictor.PREVIOUS, Difference.XOR, 4))
    assert [int.from_bytes(other[i : i + 2], "little") for i in (2, 4, 6)] == [1, 1, 0]


def test_ranks_go_on_through_zero() -> None:
    """XOR sees the sign change as a jump; as a difference of ranks it is one step."""
    unit = b"\x00\x80" + b"\x00\x00"  # -0.0 and 0.0
    how = Delta(Predictor.PREVIOUS, Difference.ARITHMETIC, 2)
    assert coded(unit, 2, 2, how) == b"\x00\x80" + b"\x02\x00"


def test_key_rows_hold_the_distance_from_the_i_row() -> None:
    unit = bytes([10, 11, 12, 13, 50, 51])
    made = coded(unit, 1, 1, Delta(Predictor.KEY, Difference.ARITHMETIC, 4))
    assert list(made) == [10, 2, 4, 6, 50, 2]


def test_b_rows_hold_what_the_mean_of_both_sides_misses() -> None:
    unit = bytes([10, 13, 14, 16, 18, 21, 25])  # the line 10, 12, 14 … but for a few
    made = coded(unit, 1, 1, Delta(Predictor.BOTH, Difference.ARITHMETIC, 4))
    # I: 10, 18. Half way: 14 against 14; 25, behind which the unit ends, against 18.
    # Between: 13 against 12, 16 against 16, 21 against (18 + 25) // 2.
    assert list(made) == [10, 2, 0, 0, 18, 0, 14]


def small(unit: bytes, row_bytes: int, how: Delta | None = None) -> float:
    made = unit if how is None else coded(unit, 2, row_bytes, how)
    return len(encode(Codec.PLANES, memoryview(made))[1]) / len(unit)


def test_a_smooth_signal_shrinks_and_noise_does_not() -> None:
    """256 tokens of 64 floats: random walks in small steps, and independent values."""
    chance = random.Random(7)
    now = [chance.uniform(1, 2) for _ in range(64)]
    smooth, noise = [], []
    for _ in range(256):
        now = [x + chance.choice((-1, 0, 1)) / 128 for x in now]
        smooth.append(bf16(*now))
        noise.append(bf16(*(chance.gauss(0, 1) for _ in now)))
    walk, alone = b"".join(smooth), b"".join(noise)
    for predictor in (Predictor.PREVIOUS, Predictor.BOTH):
        how = Delta(predictor, Difference.ARITHMETIC, 16)
        assert small(walk, 128, how) < 0.5 * small(walk, 128)
        assert small(alone, 128, how) > small(alone, 128)
    xor = Delta(Predictor.PREVIOUS, Difference.XOR, 16)
    assert small(walk, 128, xor) < small(walk, 128)
    assert small(alone, 128, xor) > small(alone, 128)


@pytest.mark.parametrize(
    ("unit", "width", "row_bytes", "says"),
    [
        (b"", 2, 2, "whole rows"),
        (b"abc", 2, 2, "whole rows"),
        (b"abcd", 4, 4, "1 or 2 bytes"),
        (b"abcd", 2, 3, "1 or 2 bytes"),
        (b"abcd", 1, 0, "1 or 2 bytes"),
    ],
)
def test_what_is_no_unit_is_refused(unit: bytes, width: int, row_bytes: int, says: str) -> None:
    how = Delta(Predictor.PREVIOUS, Difference.XOR, 4)
    for go in (coded, decoded):
        with pytest.raises(ConfigError, match=says):
            go(unit, width, row_bytes, how)


@pytest.mark.parametrize("distance", [0, 3, -4, 2048])
def test_a_distance_is_a_power_of_two(distance: int) -> None:
    with pytest.raises(ConfigError, match="a power of two"):
        Delta(Predictor.KEY, Difference.XOR, distance)
