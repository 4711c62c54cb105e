"""Prefill and decode apart: what changes hands, what it takes, and the death of either half."""

from __future__ import annotations

import pytest
from sim_kit import Log, chats, ids, pairs_of

from kvatlas.sim.gateway import Inquiry, Outcome
from kvatlas.sim.world import World, simulate
from kvatlas.workload.models import load_layout

TOKENS = bytes(range(256)) * 4 * 40  # 10,240 token ids


class Stage:
    """One request on a cluster of pairs, and something that happens meanwhile."""

    def __init__(self, **fields: object) -> None:
        self.log = Log()
        self.world = World(
            pairs_of(**fields), engine_watchers=[self.log], gateway_watchers=[self.log]
        )
        for engine in self.world.engines.values():
            engine.start()

    def ask(self, id: str = "x", output: int = 20) -> None:
        self.world.gateway.ask(Inquiry(id, TOKENS, output), lambda outcome: None)

    def until(self, condition: object) -> None:
        assert callable(condition)
        while not condition():
            assert self.world.timeline.step(), "it never came to that"

    def finish(self) -> Outcome:
        while self.world.gateway.in_flight:
            assert self.world.timeline.step(), "a request hangs"
        self.until(lambda: not any(e.model.running for e in self.world.engines.values()))
        (outcome,) = self.log.outcomes
        return outcome

    def free(self) -> bool:
        """Every block of every engine that lives can be taken again."""
        while self.world.timeline.step():
            pass
        return all(e.model.free_share == 1.0 for e in self.world.engines.values())


def test_a_pair_shares_the_work_and_the_bytes_are_the_layouts() -> None:
    stage = Stage()
    stage.ask()
    outcome = stage.finish()
    assert (outcome.fault, outcome.fallback, outcome.output_tokens) == ("", "", 20)
    assert outcome.tried[0].startswith("prefill")
    assert outcome.tried[1].startswith("decode")
    assert outcome.prefilled_by == outcome.tried[0]
    counts = stage.world.pairs.counts
    layout = load_layout("deepseek-v4-flash", engine="vllm")
    assert counts.transferred_bytes == layout.resume_bytes(len(TOKENS) // 4)
    # Alone on two 45 GB/s links: size over bandwidth and two latencies.
    assert counts.transfer_s == pytest.approx(counts.transferred_bytes / 45e9 + 20e-6, rel=1e-3)
    moved = {name: link.bytes_moved for name, link in stage.world.fabric.links.items()}
    assert sum(moved.values()) == pytest.approx(2 * counts.transferred_bytes)
    assert stage.free()
    assert not counts.expired


def test_what_the_decode_side_holds_is_not_moved_again() -> None:
    """A model without windows: of V4 the decode side holds no position but the last."""
    stage = Stage(decode=1, model="llama-3.1-70b", devices=4)
    stage.ask("first")
    stage.until(lambda: not stage.world.gateway.in_flight)
    before = stage.world.pairs.counts.transferred_bytes
    stage.ask("second")
    stage.until(lambda: not stage.world.gateway.in_flight)
    again = stage.world.pairs.counts.transferred_bytes - before
    assert 0 <= again < before / 2
    assert not any(o.fault or o.fallback for o in stage.log.outcomes)


def test_whole_runs_account_for_every_token_once() -> None:
    outcomes: list[Outcome] = []
    report = simulate(pairs_of(), chats(150), export=outcomes.append)
    assert report.retries == 0, "the decode half is no second try"
    assert ids(outcomes) == list(range(150))
    tokens = report.tokens
    assert tokens.prompt == sum(r.input_tokens for r in chats(150))
    assert sum(tokens.hits.values()) + tokens.recomputed == tokens.prompt
    assert tokens.output == sum(r.output_tokens for r in chats(150))
    assert report.pairs.transfers > 100
    assert not report.fallbacks
    prefill = [load for load in report.engines if load.role == "prefill"]
    assert sum(load.prompt_tokens for load in prefill) == tokens.prompt


def test_the_prefill_half_dies_before_it_is_done() -> None:
    stage = Stage(prefill=1)
    stage.ask()
    stage.until(lambda: stage.world.engines["prefill-0"].model.running)
    stage.world.engines["prefill-0"].stop()
    outcome = stage.finish()
    assert outcome.fallback == "prefill: the engine broke off"
    assert (outcome.fault, outcome.output_tokens, outcome.cached_tokens) == ("", 20, 0)
    assert stage.free()


def test_the_prefill_half_dies_while_it_is_read() -> None:
    stage = Stage(decode=1)
    stage.ask()
    stage.until(lambda: stage.world.fabric.flows)
    prefill = next(e for e in stage.world.engines.values() if e.role == "prefill" and e.requests)
    prefill.stop(silent=True)
    outcome = stage.finish()
    assert (outcome.fault, outcome.fallback, outcome.cached_tokens) == ("", "", 0)
    assert stage.world.pairs.counts.failed == 1
    assert stage.free()


def test_the_decode_half_dies_before_a_token_was_seen() -> None:
    stage = Stage(decode=1)
    stage.ask()
    stage.until(lambda: stage.world.fabric.flows)
    stage.world.engines["decode-0"].stop()
    outcome = stage.finish()
    assert outcome.fallback == "decode: the engine broke off"
    assert outcome.fault == ""
    assert outcome.tried[-1].startswith("prefill")
    assert stage.free()


def test_the_decode_half_dies_after_tokens_were_seen() -> None:
    stage = Stage(decode=1)
    stage.ask(output=400)
    stage.until(lambda: stage.world.engines["decode-0"].output_tokens)
    stage.world.engines["decode-0"].stop()
    outcome = stage.finish()
    assert outcome.fault == "the engine broke off"
    assert 0 < outcome.output_tokens < 400
    assert stage.free()


def test_a_link_that_stands_still_ends_as_a_recompute() -> None:
    stage = Stage(decode=1)
    for name in stage.world.fabric.links:
        stage.world.fabric.set_speed(name, 0.0)
    stage.ask()
    outcome = stage.finish()
    assert (outcome.fault, outcome.cached_tokens) == ("", 0)
    assert outcome.ttft_s > stage.world.pairs.spec.transfer_timeout_s
    assert stage.free()


def test_a_client_that_leaves_frees_both_sides() -> None:
    stage = Stage()
    stage.ask()
    stage.until(lambda: stage.world.fabric.flows)
    stage.world.gateway.leave("x")
    assert stage.finish().fault == "the client left"
    assert stage.free()
    assert not stage.world.pairs.counts.expired


def test_no_decode_engine_at_all() -> None:
    stage = Stage(prefill=1, decode=1)
    stage.world.engines["decode-0"].stop()
    stage.ask()
    outcome = stage.finish()
    assert outcome.fault == ""
    assert outcome.fallback == "decode: no connection"
    assert stage.free()
