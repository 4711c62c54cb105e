"""How far a prompt is held, and by whom: publishers as bits, gathered by block count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

Steps = dict[int, int]  # block count → the publishers (bits) that get exactly so far
T = TypeVar("T")


def stairs(near: Steps, deepest: Steps, without: int) -> list[tuple[int, int, int]]:
    """(blocks that can be resumed, blocks of chain, publishers), the deepest first."""
    result: list[tuple[int, int, int]] = []
    for blocks, mask in near.items():
        holders = mask & ~without if blocks else 0
        if deepest is near:
            result.append((blocks, blocks, holders))
            continue
        for end, having in deepest.items():
            both = holders & having
            if both:
                result.append((end, blocks, both))
                holders ^= both
        result.append((0, blocks, holders))
    result.sort(key=lambda stair: stair[:2], reverse=True)
    return result


def shorter(steps: Steps, blocks: int) -> Steps:
    """Everybody's count less ``blocks``, never below none."""
    result: Steps = {}
    for count, mask in steps.items():
        rest = max(count - blocks, 0)
        result[rest] = result.get(rest, 0) | mask
    return result


def union(steps: Steps) -> int:
    """Everybody in ``steps``."""
    result = 0
    for mask in steps.values():
        result |= mask
    return result


def by_publisher(steps: Steps) -> dict[int, int]:
    """Publisher bit → block count."""
    return {bit: blocks for blocks, mask in steps.items() for bit in bits(mask)}


def bits(mask: int) -> Iterator[int]:
    """The set bits of ``mask``, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def members(mask: int, of: Sequence[T]) -> list[T]:
    """What stands in ``of`` at the set bits of ``mask``."""
    if mask.bit_count() * 8 < mask.bit_length():
        return [of[bit.bit_length() - 1] for bit in bits(mask)]
    digits = bin(mask)[:1:-1]  # for many of few this is three times as fast as bit by bit
    return [item for item, digit in zip(of, digits, strict=False) if digit == "1"]
