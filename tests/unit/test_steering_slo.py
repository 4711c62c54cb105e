"""Objectives through steering: pairs at the price of pairs, refusals that leave nothing behind."""

from __future__ import annotations

import math

import msgspec
import pytest
from test_steering import BLOCK, FP, IDS, PATH, Bench

from kvatlas.config import Role
from kvatlas.core.compat import Member
from kvatlas.core.keys import Fingerprint
from kvatlas.core.layout import plain
from kvatlas.core.records import Publisher
from kvatlas.errors import RequestError
from kvatlas.service.steer import Inbound, Outcome, Route
from kvatlas.service.steering import Rank
from kvatlas.service.tokens import Prompt

P, D, C = (Publisher(name) for name in "pdc")


async def ask(bench: Bench, id: str, slo_s: float = math.inf) -> Route:
    return await bench.steering.choose(Inbound(id, PATH, {"model": "m"}, {}, ttft_slo_s=slo_s))


async def test_a_pair_whose_hand_off_makes_it_late_stands_behind_one_engine() -> None:
    """It holds the prompt, so it is cheaper; without an objective it is first."""
    bench = Bench()
    roles: dict[Publisher, Role] = {P: "prefill", D: "decode", C: "combined"}
    member = Member(("m",), Fingerprint("m"), plain(BLOCK))
    for publisher, role in roles.items():
        rank = Rank(publisher, f"http://{publisher}", {"m": ""}, plain(BLOCK), FP)
        bench.steering.add(msgspec.structs.replace(rank, member=member, role=role))
    bench.store(P, 6)
    transports = bench.steering.transports
    for _ in range(60):
        transports.sent(P, D, 0, bench.now)
        transports.arrived(P, D, 0, 0.12, bench.now)
    first = {slo_s: (await ask(bench, f"{slo_s}", slo_s)).targets[0].worker for slo_s in SLOS}
    # The last one nobody makes.
    assert first == {math.inf: "p", 1.0: "p", 0.115: "c", 0.001: "p"}


SLOS = (math.inf, 1.0, 0.115, 0.001)


@pytest.mark.parametrize("keyed", [True, False])
async def test_a_refusal_leaves_nothing_behind(keyed: bool) -> None:
    bench = Bench(None if keyed else Prompt(reason="multimodal"))
    bench.add("a")
    for number in range(30):
        route = await ask(bench, f"warm{number}")
        bench.steering.sent(route, route.targets[0])
        bench.now += 0.2
        bench.steering.first_token(route, 0.2)
        bench.steering.finished(route, Outcome(route.targets[0], 200, 100, 0, 5, 0.2, 0.2))
    held = [await ask(bench, f"held{number}") for number in range(5)]
    for route in held:
        bench.steering.sent(route, route.targets[0])
    if not keyed:  # nothing was foreseen of them, so nothing is known: it is taken
        assert (await ask(bench, "late", 0.01)).targets
        return
    with pytest.raises(
        RequestError, match="no engine is predicted to give the first token"
    ) as late:
        await ask(bench, "late", 0.01)
    assert (late.value.status, late.value.code) == (429, "slo_unreachable")
    assert late.value.retry_after_s >= 1
    assert bench.steering.in_flight() == {Publisher("a"): 5}
    kept = bench.log.get("late")
    assert kept is not None
    assert kept.decision.refusal is not None
    assert bench.steering.decisions == 36
    # Its id is free again, and the same request passes once the queue is gone.
    for route in held:
        bench.steering.finished(route, Outcome(route.targets[0], 499))
    assert (await ask(bench, "late", 0.5)).id == "late"


async def test_a_batch_and_an_empty_prompt_state_objectives_too() -> None:
    bench = Bench(Prompt(tokens=IDS, others=(IDS * 2,)))
    bench.add("a")
    assert (await ask(bench, "batch", 0.001)).prompt_tokens == 200
    empty = Bench(Prompt(tokens=b""))
    empty.add("a")
    assert (await ask(empty, "empty", 0.001)).unkeyed == "empty_prompt"
