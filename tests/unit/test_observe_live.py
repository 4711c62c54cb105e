"""The core in shadow: it learns from what was, when it was, and late decisions do not count."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from kvatlas.config import Config, TokenizerConfig, WorkerConfig
from kvatlas.core.dispatch import Apply
from kvatlas.core.events import BlockStored
from kvatlas.core.records import Publisher
from kvatlas.service.body import Usage
from kvatlas.service.observe_live import Live, decided
from kvatlas.service.observe_record import About, Observed, Recording, read
from kvatlas.service.observe_shadow import Ended, Seen, Shadow
from kvatlas.service.steer import Inbound
from kvatlas.service.steering import Rank
from kvatlas.service.tokens import Tokenizer
from kvatlas.workload.models import load_layout
from kvatlas.workload.trace_tokens import Hashed

LAYOUT = load_layout("16", engine="vllm")
PROMPT = list(range(500, 600))
TOKENS = array("I", PROMPT).tobytes()
NAMES = ("a", "b")


class Kit:
    """Two engines that were told of, none of them real."""

    def __init__(self) -> None:
        self.now_s = 0.0
        workers = tuple(
            WorkerConfig(name=name, url=f"http://10.0.0.{at}:80{at}", layout="16")
            for at, name in enumerate(NAMES, 1)
        )
        self.live = Live(Config(worker=workers), clock=lambda: self.now_s)
        self.ranks = [
            Rank(Publisher(name), f"http://{name}", {"m": ""}, LAYOUT, b"same") for name in NAMES
        ]
        for rank in self.ranks:
            self.live.assembly.steering.add(rank)
            self.live.assembly.steering.set_up(rank.publisher, True)

    def decide(self, id: str) -> Any:
        inbound = Inbound(id, "/v1/completions", {"model": "m"}, {})
        return self.live.decide(inbound, TOKENS, self.ranks)

    def stored(self, name: str, *, blocks: int = 6) -> None:
        event = BlockStored(
            hashes=tuple(range(blocks)),
            parent=None,
            tokens=TOKENS[: blocks * 64],
            block_tokens=16,
        )
        self.live.assembly.dispatcher.handle(Apply(Publisher(name), (event,)), self.now_s)


def test_it_learns_from_where_and_when_it_really_was() -> None:
    kit = Kit()
    for turn in range(30):
        kit.now_s = float(turn)
        decision = kit.decide(str(turn))
        kit.now_s += 0.5  # the first token, on b whatever was decided
        at = kit.live.began(decision, "b", 0.5)
        assert at == Publisher("b")
        kit.now_s += 0.1
        kit.live.over(decision, at, 0, 0.5)
    kit.now_s = 100.0
    last = kit.decide("last")
    there = decided(last, "b")
    assert there.there_ttft_s == pytest.approx(0.5, rel=0.1)
    assert not any(kit.live.assembly.steering.in_flight().values())


def test_who_is_not_known_teaches_nothing_and_leaves_nothing() -> None:
    kit = Kit()
    for turn in range(5):
        kit.now_s = float(turn)
        decision = kit.decide(str(turn))
        assert kit.live.began(decision, "elsewhere", 0.5) is None
        kit.live.over(decision, None, 0, 0.5)
    assert kit.live.assembly.dispatcher.asked("4") is None
    assert not any(kit.live.assembly.steering.in_flight().values())


def test_the_one_that_announces_the_prompt_is_who_served_it() -> None:
    kit = Kit()
    decision = kit.decide("1")
    assert kit.live.served_by(decision) == ""
    kit.stored("b", blocks=3)
    assert kit.live.served_by(decision) == ""  # not all of it
    kit.stored("b")
    assert kit.live.served_by(decision) == "b"
    kit.stored("a")
    assert kit.live.served_by(decision) == ""  # one of two
    kit.live.over(decision, None, -1, -1.0)
    again = kit.decide("2")
    assert kit.live.served_by(again) == ""  # nothing new
    told = decided(again, "a")
    assert (told.elsewhere_tokens, told.there_resume_tokens) == (96, 96)
    assert decided(again, "").elsewhere_tokens == -1


def test_engines_are_known_by_name_address_and_host() -> None:
    live = Kit().live
    for told in ("a", "10.0.0.1:801", "http://10.0.0.1:801", "10.0.0.1"):
        assert live.named(told) == "a"
    assert live.named("10.0.0.9:1") == "10.0.0.9:1"


def test_nothing_of_it_writes_copies_or_asks_for_tokens(tmp_path: Path) -> None:
    base = Config(worker=(WorkerConfig(name="a", url="http://h:1", layout="16"),))
    paths = {"recording": str(tmp_path / "r"), "decision_log": str(tmp_path / "d")}
    router = type(base.router)(policy="round_robin", **paths)
    live = Live(Config(worker=base.worker, router=router))
    assert live.assembly.config.router.policy == "price"
    assert not live.assembly.config.ahead.on
    assert not list(tmp_path.iterdir())
    tokenizer = live.assembly.tokenizer
    assert tokenizer is not None
    assert tokenizer.state().chat == "none"  # and not "endpoint"


@pytest.mark.parametrize(("late_s", "counts"), [(0.0, True), (0.3, False)])
async def test_a_decision_behind_the_first_token_does_not_count(
    tmp_path: Path, late_s: float, counts: bool
) -> None:
    kit = Kit()
    recording = Recording(tmp_path / "seen", About(1, "0", "front", "", 16))
    tokenizer = Tokenizer.load(TokenizerConfig())
    shadow = Shadow(recording, tokenizer, Hashed(16, b"0123456789abcdef"), 16, live=kit.live)
    body = json.dumps({"model": "m", "prompt": PROMPT}).encode()
    case = shadow.begin(Seen("POST", "/v1/completions", {}, body, 0.0, late_s=late_s))
    assert case is not None
    ended = Ended(200, ttft_s=0.25, e2e_s=1.0, usage=Usage(100, 1, 0), engine="a", told="answer")
    shadow.end(case, ended)
    await shadow.settle()
    recording.close()
    await tokenizer.close()
    (row,) = read(tmp_path / "seen").rows
    assert (row.observed.decided is not None) == counts
    assert row.observed.engine == "a"
    assert isinstance(row.observed, Observed)
    assert not any(kit.live.assembly.steering.in_flight().values())
