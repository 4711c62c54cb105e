"""What is published of traces, and the same figures of any trace: to set one beside the other.

Sources: Qwen's production traces (to-C, API, coder), Wang et al., KVCache in the wild (USENIX ATC
2025); Mooncake (FAST 2025) and its open traces; DualPath (arXiv 2602.21548), table of its agent
workloads. Hit rates are by block; LRU capacities are shares of the distinct blocks.
"""

from __future__ import annotations

import msgspec

from kvatlas.workload.trace_stats import TraceStats


def _published(
    requests: int,
    prompt: tuple[float, float, float],
    ideal: float,
    lru: tuple[float, float, float, float, float],
    **more: float,
) -> dict[str, float]:
    figures = {"requests": float(requests)}
    figures.update(zip(("prompt_mean", "prompt_p50", "prompt_p99"), prompt, strict=True))
    figures["ideal_hit"] = ideal
    figures.update(zip(("lru_1", "lru_5", "lru_10", "lru_25", "lru_50"), lru, strict=True))
    return figures | more


PUBLISHED: dict[str, dict[str, float]] = {
    "qwen-to-c": _published(
        43_058,
        (2331, 1046, 14_359),
        0.579,
        (0.176, 0.410, 0.500, 0.562, 0.578),
        output_mean=430,
        output_p50=375,
        output_p99=1641,
        hits_in_session=0.71,
        turn_gap_p50=115,  # 111 to 118
    ),
    "qwen-api": _published(
        172_800, (915, 574, 6294), 0.542, (0.462, 0.516, 0.528, 0.537, 0.541), hits_in_session=0
    ),
    "qwen-coder": _published(
        43_011,
        (5748, 4540, 14_406),
        0.664,
        (0.404, 0.553, 0.604, 0.645, 0.660),
        turn_gap_p50=115,
    ),
    "mooncake-toolagent": _published(
        23_608,
        (8596, 6346, 61_525),
        0.553,
        (0.346, 0.449, 0.508, 0.551, 0.552),
        output_mean=182,
        output_p50=30,
    ),
    # Counted by us on the trace itself, which is public.
    "mooncake-conversation": _published(
        12_031,
        (12_035, 6909, 85_401),
        0.3664,
        (0.052, 0.195, 0.278, 0.353, 0.363),
        output_mean=343,
        output_p50=350,
        output_p99=1120,
    ),
}


class Compared(msgspec.Struct, frozen=True):
    """One figure: as published, and here (None: this trace cannot say)."""

    name: str
    published: float
    here: float | None


def compared(found: TraceStats, name: str) -> tuple[Compared, ...]:
    """The published figures of a trace beside those of another. Raises KeyError."""
    here = figures(found)
    return tuple(Compared(key, value, here[key]) for key, value in PUBLISHED[name].items())


def figures(found: TraceStats) -> dict[str, float | None]:
    """The figures of a trace by the names that `PUBLISHED` uses."""
    prompt, output = found.prompt_tokens, found.output_tokens
    return {
        "requests": found.requests,
        "prompt_mean": prompt.mean,
        "prompt_p50": prompt.p50,
        "prompt_p99": prompt.p99,
        "output_mean": output.mean,
        "output_p50": output.p50,
        "output_p99": output.p99,
        "ideal_hit": found.block_hit_rate,
        "hits_in_session": found.hits_in_session,
        "turn_gap_p50": found.turn_gap_s.p50 if found.turn_gap_s else None,
        **{f"lru_{round(p.share_of_unique * 100)}": p.block_hit_rate for p in found.lru},
    }
