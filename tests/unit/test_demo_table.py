"""The demo's arithmetic: totals of a run, and what two runs differ by."""

from __future__ import annotations

from rich.console import Console

from kvatlas.demo.play import Answer
from kvatlas.demo.table import saving, side_by_side, summarize


def answer(prompt: int, cached: int, ttft_s: float) -> Answer:
    return Answer(
        text="x",
        prompt_tokens=prompt,
        cached_tokens=cached,
        ttft_s=ttft_s,
        e2e_s=ttft_s + 1,
        headers={},
    )


BEFORE = summarize("round_robin", [answer(100, 0, 2.0), answer(200, 50, 4.0)], 10.0)
AFTER = summarize("price", [answer(100, 0, 2.0), answer(200, 150, 1.0)], 5.0)


def test_hit_and_recomputed_tokens_sum_to_all():
    assert (BEFORE.prompt_tokens, BEFORE.hit_tokens, BEFORE.recomputed_tokens) == (300, 50, 250)
    assert BEFORE.requests == 2
    assert BEFORE.ttft_sum_s == 6.0
    assert BEFORE.ttft_p50_s == 3.0


def test_the_saving_is_waiting_and_tokens():
    assert saving(BEFORE, AFTER) == (
        "3.0 seconds of waiting saved over 2 requests; 100 prompt tokens not computed again."
    )


def test_a_loss_is_called_one():
    text = saving(AFTER, BEFORE)
    assert "3.0 seconds of waiting lost" in text
    assert "100 prompt tokens more were computed" in text


def test_the_table_shows_both_and_by_how_much():
    console = Console(width=100)
    with console.capture() as captured:
        console.print(side_by_side("", BEFORE, AFTER))
    text = captured.get()
    assert "round robin" in text
    assert "50 (17%)" in text
    assert "150 (50%)" in text
    assert "1.7× less" in text  # 250 against 150 recomputed
