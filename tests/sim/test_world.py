"""Whole runs: nothing is lost, nothing is counted twice, and the same run comes out again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from sim_kit import Log, chats, cluster_of, ids

from kvatlas.core.router import Policy
from kvatlas.sim.gateway import Outcome
from kvatlas.sim.world import Play, World, simulate


@pytest.mark.parametrize("policy", get_args(Policy))
def test_every_request_ends_once_and_every_token_is_accounted_for(policy: str) -> None:
    outcomes: list[Outcome] = []
    report = simulate(cluster_of(policy), chats(200), export=outcomes.append)
    assert ids(outcomes) == list(range(200))
    assert report.latency.requests == 200
    assert not report.latency.failed
    tokens = report.tokens
    assert tokens.prompt == sum(r.input_tokens for r in chats(200))
    assert sum(tokens.hits.values()) + tokens.recomputed + tokens.unserved == tokens.prompt
    assert tokens.output == sum(r.output_tokens for r in chats(200))
    assert sum(load.requests for load in report.engines) == 200
    assert sum(load.prompt_tokens for load in report.engines) == tokens.prompt
    assert sum(load.hit_tokens for load in report.engines) == sum(tokens.hits.values())


def test_nothing_is_left_over() -> None:
    log = Log()
    world = World(cluster_of(), engine_watchers=[log], gateway_watchers=[log])
    world.play(chats(120))
    assert world.gateway.in_flight == 0
    assert not any(world.dispatcher.router.in_flight().values())
    assert all(e.model.running == e.model.waiting == 0 for e in world.engines.values())
    assert all(world.gateway.feed(name).idle for name in world.engines)
    assert world.timeline.next_at() is None
    for name in world.engines:
        numbers = [batch.seq for sender, batch in log.batches if sender == name]
        assert numbers == list(range(len(numbers)))


def test_what_is_promised_is_reused_where_nothing_overlaps() -> None:
    outcomes: list[Outcome] = []
    simulate(cluster_of(), chats(150, rate_per_s=0.2), export=outcomes.append)
    assert [o.expected_tokens for o in outcomes] == [o.cached_tokens for o in outcomes]
    assert sum(o.cached_tokens for o in outcomes) > 100_000


def _digest(hash_seed: str) -> str:
    script = (
        "import msgspec, hashlib; from sim_kit import chats, cluster_of; "
        "from kvatlas.sim.world import simulate; "
        "r = simulate(cluster_of(), chats(80), seed=7); "
        "print(hashlib.sha256(msgspec.json.encode(r)).hexdigest())"
    )
    env = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, check=True)
    return done.stdout.decode().strip()


def test_the_same_run_comes_out_again_in_other_processes() -> None:
    assert _digest("0") == _digest("4242")


def test_another_seed_changes_the_secret_and_not_the_decisions() -> None:
    one, other = (simulate(cluster_of(), chats(80), seed=seed) for seed in (1, 2))
    assert msgspec.structs.replace(one, seed=2) == other


def test_only_the_first_requests_and_shorter_answers() -> None:
    report = simulate(cluster_of(), chats(100), Play(limit=30, max_output_tokens=3))
    assert report.latency.requests == 30
    assert report.tokens.output <= 90
