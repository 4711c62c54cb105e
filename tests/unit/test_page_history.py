"""What the page keeps of requests while somebody looks: sums that are right, and books that end."""

from __future__ import annotations

import pytest

from kvatlas.core.cost import Price
from kvatlas.core.records import Publisher
from kvatlas.core.router import Decision, Plan
from kvatlas.service.decision_log import DecisionLog, Entry
from kvatlas.service.metrics import SOURCES
from kvatlas.service.page_history import (
    BUCKET_S,
    BUCKETS,
    PREFIXES_MAX,
    PREFIXES_SHOWN,
    TENANTS_MAX,
    History,
    sources,
)
from kvatlas.service.page_state import explained, recent
from kvatlas.service.steer import Outcome, Target


def plan(worker: str, total_s: float = 0.2, tiers: tuple[int, ...] = (64, 32)) -> Plan:
    price = Price(0.01, 0.02, total_s - 0.05, 0.01, 0.01)
    held = sum(tiers)
    return Plan(Publisher(worker), held, held, held, tiers, 1, False, price)


def entry(
    at: float = 100.0, *, cached: int = 80, ttft_s: float = 0.1, status: int = 200, owner: str = ""
) -> Entry:
    """One that went to ``a``, while ``b`` was the other."""
    log = DecisionLog(10)
    decision = Decision("r", at, 128, "price", "", (plan("a"), plan("b", 0.11)), 2)
    made = log.decided(decision, owner=owner)
    made.tried.append("a")
    log.ended(made, Outcome(Target("a", ""), status, 128, cached, 8, ttft_s, 1.0))
    return made


def by_name(counts: list[int]) -> dict[str, int]:
    return {name: n for name, n in zip(SOURCES, counts, strict=True) if n}


@pytest.mark.parametrize(
    ("cached", "expected"),
    [
        (80, {"hbm": 64, "dram": 16, "computed": 48}),
        (0, {"computed": 128}),
        (120, {"hbm": 88, "dram": 32, "computed": 8}),
        (-1, {"unreported": 128}),
    ],
)
def test_tokens_by_source_are_the_prompt(cached: int, expected: dict[str, int]) -> None:
    assert by_name(sources(entry(cached=cached))) == expected


def test_a_bucket_adds_up_what_ended_in_it() -> None:
    history = History()
    for number in range(3):
        history.ended(entry(100.0 + number))
    history.ended(entry(100.0, status=502, ttft_s=-1.0))
    history.refused(101.0)
    (bucket,) = history.buckets()
    assert bucket.index == int(101.0 // BUCKET_S)
    assert (bucket.ended, bucket.failed, bucket.refused, bucket.judged) == (4, 1, 1, 3)
    assert sum(bucket.tokens) == 4 * 128
    assert bucket.measured_s == pytest.approx(0.3)
    assert bucket.predicted_s == pytest.approx(3 * 0.18)
    assert bucket.regret_s == pytest.approx(3 * (0.1 - 0.09))
    assert sum(bucket.price_s) == pytest.approx(4 * 0.2)


def test_old_buckets_go_and_come_not_back() -> None:
    history = History()
    for number in range(3 * BUCKETS):
        history.ended(entry(BUCKET_S * number))
    kept = [bucket.index for bucket in history.buckets()]
    assert len(kept) == BUCKETS
    assert kept[-1] - kept[0] == BUCKETS - 1
    history.ended(entry(0.0))
    assert [bucket.index for bucket in history.buckets()] == kept


def test_tenants_are_told_apart_by_tag_up_to_a_limit() -> None:
    history = History()
    history.ended(entry(owner="tag.0"))
    history.ended(entry(owner="tag.1.session"))
    history.ended(entry())
    assert (history.tenants["tag"].requests, history.tenants["tag"].hit_tokens) == (2, 160)
    assert history.tenants[""].prompt_tokens == 128
    for number in range(2 * TENANTS_MAX):
        history.ended(entry(owner=f"t{number}.0"))
    assert len(history.tenants) <= TENANTS_MAX + 1
    assert history.tenants["others"].requests > 0


def test_a_prefix_is_hot_where_requests_resume_at_it_or_pass_it() -> None:
    history = History()
    chain = [bytes([n]) * 16 for n in range(8)]
    history.resumes("a", 64, chain[:4])
    assert history.prefixes() == []  # one alone is not hot
    history.resumes("b", 128, chain)
    history.resumes("b", 64, chain[:4])
    history.resumes("c", 0, [])
    (hot,) = history.prefixes()
    assert (hot.key, hot.tokens, hot.requests) == (chain[3].hex()[:12], 64, 3)
    assert hot.engines == ("b", "a")
    history.forget()
    assert history.prefixes() == []
    assert not history.tenants


def test_prefixes_have_a_limit_and_the_least_asked_for_goes() -> None:
    history = History()
    hot = b"h" * 16
    for _ in range(3):
        history.resumes("a", 16, [hot])
    for number in range(3 * PREFIXES_MAX):
        history.resumes("a", 32, [number.to_bytes(16, "big")])
    assert len(history._prefixes) == PREFIXES_MAX
    assert [prefix.key for prefix in history.prefixes()] == [hot.hex()[:12]]
    for number in range(3 * PREFIXES_SHOWN):
        for _ in range(5):
            history.resumes("a", 32, [number.to_bytes(16, "big") + b"x"])
    assert len(history.prefixes()) == PREFIXES_SHOWN


def test_what_is_told_of_a_request() -> None:
    made = entry()
    line = recent(made, 1000.0)
    assert (line.worker, line.status, line.hit_tokens) == ("a", 200, 80)
    assert line.at == 1100.0
    told = explained(made, 1000.0)
    first, other = told.candidates
    assert (first.worker, first.taken, first.why) == ("a", True, "")
    assert (other.worker, other.taken, other.why) == ("b", False, "-0.090 s")
    assert sum(first.price_s) == pytest.approx(first.total_s)
    assert by_name(told.came_from) == {"hbm": 64, "dram": 16, "computed": 48}
    assert told.text.startswith("request r: 128 prompt tokens")


def test_what_was_not_seen_is_told_as_such() -> None:
    made = Entry(Decision("r", 1.0, -1, "price", "no_tokenizer", (), 0))
    told = explained(made, 0.0)
    assert told.running
    assert (told.ttft_s, told.cached_tokens, told.candidates) == (None, None, [])
    assert recent(made, 0.0).hit_tokens is None
