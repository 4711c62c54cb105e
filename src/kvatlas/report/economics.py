"""What GPU time, loads and storage come to, and from where one pays for the other. Pure arithmetic.

Seconds, bytes and dollars in, the same out; who computes, loads and stores is the caller's. A hit
saves GPU time now and costs room until then: it pays where the first is worth more. None stands
for "never".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

#: Memory of the directory per holder of a block that one holds: docs/benchmarks.md, "Directory".
HOLDER_BYTES = 65
#: Blocks that are under way at a time between tiers: docs/benchmarks.md, "Stores" reads so many.
IN_FLIGHT = 32
METADATA_SHARE_MAX = 0.01  # of a block's bytes: beyond it a block is called too small


def per_million(dollars: float, tokens: float) -> float:
    """Dollars per million tokens."""
    return dollars / tokens * 1e6


def blended(prompt: float, output: float, prompt_tokens: int, output_tokens: int) -> float:
    """Dollars per million tokens of both kinds, from those of each kind and how many there are."""
    return (prompt * prompt_tokens + output * output_tokens) / (prompt_tokens + output_tokens)


def load_s(size_bytes: float, bytes_per_s: float, latency_s: float) -> float:
    """Seconds until so many bytes have come; no bytes take none."""
    return latency_s + size_bytes / bytes_per_s if size_bytes else 0.0


def slowest_bytes_per_s(size_bytes: float, saved_s: float, latency_s: float) -> float | None:
    """The break-even bandwidth: over a slower way a load takes longer than what it saves. None:
    over any way."""
    left_s = saved_s - latency_s
    return size_bytes / left_s if left_s > 0 else None


def pays_from(gains: Iterable[tuple[int, float]]) -> int | None:
    """The first of (tokens, seconds won) from which on every one wins; None where the last loses.

    Ascending in tokens.
    """
    first: int | None = None
    for tokens, won_s in gains:
        if won_s <= 0:
            first = None
        elif first is None:
            first = tokens
    return first


def reuses_to_pay(held_dollars: float, hit_dollars: float) -> int | None:
    """Hits within its life that pay for holding a prefix; at least one. None: they never do."""
    if hit_dollars <= 0:
        return None
    return max(1, math.ceil(held_dollars / hit_dollars - 1e-9))


def longest_s(hit_dollars: float, dollars_per_s: float) -> float | None:
    """The break-even TTL: how long one hit may be waited for. None: never worth it; where holding
    costs nothing, forever (infinity)."""
    if hit_dollars <= 0:
        return None
    return hit_dollars / dollars_per_s if dollars_per_s > 0 else math.inf


class BlockSize(msgspec.Struct, frozen=True):
    """What one size of blocks comes to for a prompt of a certain length.

    ``block_bytes`` of its chain parts, ``metadata_share`` the directory's bytes over these.
    ``lost_tokens``: of a match, on average, what stands behind the last position at which it can
    be resumed; ``lost_s`` seconds to compute them anew. ``efficiency``: the share of the link's
    bandwidth that is reached where blocks come one at a time; ``waits_s`` what the latencies of
    all blocks come to, `IN_FLIGHT` at a time. ``overhead_s`` is both seconds together.
    """

    block_tokens: int
    block_bytes: float
    metadata_share: float
    lost_tokens: float
    lost_s: float
    efficiency: float
    waits_s: float
    overhead_s: float


def block_size(
    block_tokens: int,
    *,
    grid_tokens: int,
    prompt_tokens: int,
    bytes_per_token: float,
    token_s: float,
    bytes_per_s: float,
    latency_s: float,
) -> BlockSize:
    """One row. ``grid_tokens``: where the engine can resume at all, whatever the blocks;
    ``token_s`` what a token costs to compute; the link is the slowest that is in use."""
    size_bytes = block_tokens * bytes_per_token
    step = math.lcm(block_tokens, grid_tokens)
    lost_tokens = min(step, prompt_tokens) / 2
    waits_s = math.ceil(prompt_tokens / block_tokens / IN_FLIGHT) * latency_s
    lost_s = lost_tokens * token_s
    return BlockSize(
        block_tokens,
        size_bytes,
        HOLDER_BYTES / size_bytes,
        lost_tokens,
        lost_s,
        size_bytes / (size_bytes + latency_s * bytes_per_s),
        waits_s,
        lost_s + waits_s,
    )


def best_block(rows: Sequence[BlockSize]) -> BlockSize:
    """The one that costs the least time among those whose metadata is small beside them; of equals
    the largest. Where all are too small, the largest."""
    fit = [row for row in rows if row.metadata_share <= METADATA_SHARE_MAX]
    if not fit:
        return max(rows, key=lambda row: row.block_tokens)
    return min(fit, key=lambda row: (row.overhead_s, -row.block_tokens))
