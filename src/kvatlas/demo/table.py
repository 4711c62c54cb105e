"""What a run came to, and two runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.table import Table

from kvatlas.demo.play import Answer
from kvatlas.report.latency import percentile
from kvatlas.report.table import seconds


class Run(msgspec.Struct, frozen=True):
    """Totals of one policy over one set of chats. Seconds are as the engines' users felt them."""

    policy: str
    requests: int
    prompt_tokens: int
    hit_tokens: int
    recomputed_tokens: int
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_sum_s: float
    wall_s: float


def summarize(policy: str, answers: Sequence[Answer], wall_s: float) -> Run:
    """``answers`` must not be empty."""
    prompt_tokens = sum(a.prompt_tokens for a in answers)
    hit_tokens = sum(a.cached_tokens for a in answers)
    ttfts_s = sorted(a.ttft_s for a in answers)
    return Run(
        policy=policy,
        requests=len(answers),
        prompt_tokens=prompt_tokens,
        hit_tokens=hit_tokens,
        recomputed_tokens=prompt_tokens - hit_tokens,
        ttft_p50_s=percentile(ttfts_s, 50),
        ttft_p95_s=percentile(ttfts_s, 95),
        ttft_sum_s=sum(ttfts_s),
        wall_s=wall_s,
    )


def side_by_side(title: str, before: Run, after: Run) -> Table:
    """``before`` is the baseline, ``after`` is kvatlas."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column(before.policy.replace("_", " "), justify="right")
    table.add_column("kvatlas", justify="right", style="bold")
    table.add_column("", justify="right")
    rows = (
        ("requests", f"{before.requests}", f"{after.requests}", ""),
        ("prompt tokens", f"{before.prompt_tokens:,}", f"{after.prompt_tokens:,}", ""),
        ("hit tokens", _share(before), _share(after), ""),
        (
            "tokens recomputed",
            f"{before.recomputed_tokens:,}",
            f"{after.recomputed_tokens:,}",
            _ratio(before.recomputed_tokens, after.recomputed_tokens),
        ),
        ("TTFT p50", *_times(before.ttft_p50_s, after.ttft_p50_s)),
        ("TTFT p95", *_times(before.ttft_p95_s, after.ttft_p95_s)),
        ("waited for first tokens", *_times(before.ttft_sum_s, after.ttft_sum_s)),
        ("whole run", *_times(before.wall_s, after.wall_s)),
    )
    for row in rows:
        table.add_row(*row)
    return table


def saving(before: Run, after: Run) -> str:
    """One sentence: the seconds saved, or lost."""
    saved_s = before.ttft_sum_s - after.ttft_sum_s
    tokens = before.recomputed_tokens - after.recomputed_tokens
    waiting = f"{abs(saved_s):.1f} seconds of waiting {'saved' if saved_s >= 0 else 'lost'}"
    computed = "not computed again" if tokens >= 0 else "more were computed"
    return f"{waiting} over {after.requests} requests; {abs(tokens):,} prompt tokens {computed}."


def _share(run: Run) -> str:
    return f"{run.hit_tokens:,} ({run.hit_tokens / max(1, run.prompt_tokens):.0%})"


def _times(before_s: float, after_s: float) -> tuple[str, str, str]:
    return seconds(before_s), seconds(after_s), _ratio(before_s, after_s)


def _ratio(before: float, after: float) -> str:
    return f"{before / after:.1f}× less" if 0 < after < before else ""
