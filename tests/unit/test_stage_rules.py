"""Every acceptance point of every stage: sound facts pass, one planted failure turns it red, and
what could not be seen is not shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from stage_worlds import (
    COUNT,
    DECLARED,
    PROMPT,
    SOUND,
    agent,
    counted,
    engine,
    load,
    phase,
    replies,
)

from kvatlas.core.transports import Moved
from kvatlas.validate.counters import Counters
from kvatlas.validate.stages.facts import AgentSeen, Counted, Outage, Phase, StoreSample
from kvatlas.validate.stages.points import RULES
from kvatlas.validate.stages.rules import chance
from kvatlas.validate.stages.values import Missing, Trial, Verdict, judged

GONE = Missing("it does not answer")
#: No facts can fail these: only the operator's own trial shows them.
BY_TRIAL = {"d.quota", "d.rebalance"}


def verdicts(facts: Any, stage: str, **more: Any) -> dict[str, Verdict]:
    return {v.point: v for v in judged(RULES[stage], facts, **more)}  # type: ignore[index]


def change(facts: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(facts, **fields)


def failing(count: int = COUNT, **more: Any) -> tuple[Any, ...]:
    """One of the requests gets no answer."""
    first, *others = replies(count, **more)
    return (change(first, status=503, words="", error="no"), *others)


def wrong(count: int = COUNT, **more: Any) -> tuple[Any, ...]:
    """One of the answers is another one."""
    first, *others = replies(count, **more)
    return (change(first, words="something else"), *others)


def pair(facts: Any, moved: Any = None, counters: Any = None, **more: Any) -> Any:
    """Stage B with other counts at the decode half."""
    first, second = facts.phase.engines
    second = Counted("d", counters or second.counters, moved or second.moved)
    return change(facts, phase=change(facts.phase, engines=(first, second), **more))


def ports(size: int | None) -> tuple[AgentSeen, ...]:
    return (agent("node-d", rdma_bytes=size),)


LOST = {f"r-{i}": "…" for i in range(1, COUNT)}
WARM = COUNT * (PROMPT - 32)
SLOW = Outage(phase(4, engine="r", replies=replies(4, seconds=99.0)), phase(4), 4)
NEVER = Outage(phase(4, engine="r"), phase(4), 0)
NODE = agent(loaded_tokens={"dram": WARM}, moved_bytes={"load dram": 10**9})


def setting(name: str, other: str) -> Callable[[Any], Any]:
    """What the operator declares is not what the engine has."""
    return lambda f: change(f, declared=DECLARED | {name: other})


PLANTED: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("a.model", "another digest", setting("model_digest", "sha256:9")),
    ("a.runtime", "another version", setting("runtime", "vllm 0.31.0")),
    ("a.tensor_parallel", "another TP", setting("tensor_parallel", "4")),
    ("a.context", "another context", setting("context_tokens", "131072")),
    ("a.dtypes", "another KV dtype", setting("kv_dtype", "fp8")),
    ("a.graphs", "graphs off", setting("graphs", "off")),
    (
        "a.speculation",
        "speculation",
        lambda f: change(
            f, engine=engine(speculation="eagle"), declared=DECLARED | {"speculation": "off"}
        ),
    ),
    ("a.requests", "none", lambda f: change(f, requests=change(f.requests, digest=""))),
    ("a.correct", "not answered", lambda f: change(f, rounds=(replies(), failing()))),
    ("a.correct", "not the same twice", lambda f: change(f, rounds=(replies(), wrong()))),
    ("a.ttft", "failures", lambda f: change(f, load=load(failed=1))),
    ("a.ttft", "objective", lambda f: change(f, slo={"ttft_p95_s": 0.1})),
    ("a.tpot", "objective", lambda f: change(f, slo={"tpot_p95_s": 0.001})),
    ("a.throughput", "failures", lambda f: change(f, load=load(failed=2))),
    ("a.hbm", "pool full", lambda f: change(f, hbm={"kv_usage_peak": 1.0})),
    ("a.power", "dead meter", lambda f: change(f, power_w=0.0)),
    (
        "b.frozen",
        "another dtype",
        lambda f: change(f, decode=engine("d", "decode", kv_dtype="fp8")),
    ),
    ("b.hisparse_off", "on", lambda f: change(f, decode=engine("d", "decode", hisparse="on"))),
    ("b.speculation_off", "on", lambda f: change(f, prefill=engine("p", speculation="eagle"))),
    ("b.shared_off", "connector", lambda f: change(f, decode=engine("d", shared_store="LMCache"))),
    ("b.shared_off", "agent", lambda f: change(f, shared={"node-d": "object"})),
    ("b.same", "layout", lambda f: change(f, decode=engine("d", layout="bb"))),
    ("b.same", "tokenizer", lambda f: change(f, decode=engine("d", tokenizer="ids 2"))),
    ("b.backend", "none", lambda f: change(f, decode=engine("d", connector="none"))),
    ("b.backend", "idle", lambda f: pair(f, Moved())),
    ("b.transport", "TCP", lambda f: change(f, transport_seen="not rdma")),
    ("b.request_ids", "not in one log", lambda f: change(f, logs=f.logs | {"d": LOST})),
    ("b.transfers", "fewer", lambda f: pair(f, Moved(1e6, 1.0, 3, 0))),
    ("b.transfers", "failed", lambda f: pair(f, Moved(1e6, 1.0, COUNT, 1))),
    ("b.rdma_ports", "still", lambda f: change(f, phase=change(f.phase, agents=ports(100)))),
    (
        "b.no_reprefill",
        "computed",
        lambda f: pair(f, counters=counted("d", 0, computed_tokens=COUNT * PROMPT).counters),
    ),
    (
        "b.answers",
        "wrong",
        lambda f: change(f, phase=change(f.phase, replies=wrong(prefilled_by="p"))),
    ),
    (
        "b.answers",
        "not split",
        lambda f: change(
            f,
            phase=change(
                f.phase,
                replies=(*replies(prefilled_by="p")[1:], *replies(1, fallback="prefill: short")),
            ),
        ),
    ),
    (
        "b.fallback",
        "partial state",
        lambda f: change(f, trial=Phase(wrong(4, fallback="decode: failed"))),
    ),
    ("b.fallback", "errors", lambda f: change(f, trial=Phase(failing(4)))),
    ("c.frozen", "another TP", lambda f: change(f, engine=engine(tensor_parallel="4"))),
    ("c.speculation_off", "on", lambda f: change(f, engine=engine(speculation="mtp"))),
    ("c.shared_off", "peers", lambda f: change(f, shared={"node": "peer"})),
    ("c.hits", "none", lambda f: change(f, warm=phase(external=0))),
    (
        "c.hits",
        "two truths",
        lambda f: change(f, warm=change(f.warm, agents=(change(NODE, loaded_tokens={"dram": 1}),))),
    ),
    ("c.answers", "wrong", lambda f: change(f, warm=change(f.warm, replies=wrong()))),
    (
        "c.hbm_released",
        "still held",
        lambda f: change(
            f, warm=change(f.warm, engines=(counted(external=WARM, local_hit_tokens=512),))
        ),
    ),
    (
        "c.host_memory",
        "over",
        lambda f: change(
            f,
            warm=change(
                f.warm,
                agents=(change(NODE, tiers={"dram": {"held_bytes": 101, "capacity_bytes": 100}}),),
            ),
        ),
    ),
    ("c.bandwidth", "slow", lambda f: change(f, bandwidth_min=1e12)),
    (
        "c.pays",
        "slower than computing",
        lambda f: change(f, warm=change(f.warm, replies=replies(ttft_s=0.4))),
    ),
    ("c.tpot", "loads slow others down", lambda f: change(f, load=load(tpot_s=0.05))),
    ("d.frozen", "another runtime", lambda f: change(f, reader=engine("r", runtime="vllm 1"))),
    ("d.across", "no hits", lambda f: change(f, across=phase(engine="r", external=0))),
    ("d.across", "wrong answers", lambda f: change(f, across=change(f.across, replies=wrong()))),
    (
        "d.index",
        "no answers",
        lambda f: change(f, index=Outage(phase(4, replies=failing(4)), phase(4), 9)),
    ),
    ("d.index", "forgets for good", lambda f: change(f, index=NEVER)),
    (
        "d.node",
        "no answers",
        lambda f: change(f, node=Outage(phase(4, replies=failing(4)), phase(4), 9)),
    ),
    ("d.tenant", "crossed", lambda f: change(f, other_tenant=phase(4, engine="r", external=32))),
    ("d.fingerprint", "crossed", lambda f: change(f, stranger=phase(4, engine="s", external=32))),
    ("d.ttl", "outlived", lambda f: change(f, ttl_after=phase(4, engine="r", external=32))),
    ("d.eviction", "requests fail", lambda f: change(f, filling=load(failed=1))),
    (
        "d.eviction",
        "over its limit",
        lambda f: change(f, eviction=(StoreSample(50, 100), StoreSample(120, 100))),
    ),
    (
        "d.backpressure",
        "requests fail",
        lambda f: change(
            f, full=phase(4, replies=failing(4), agents=(agent(counts={"write_rests": 3}),))
        ),
    ),
    ("d.watermarks", "over", lambda f: change(f, dram=(StoreSample(101, 100, 5),))),
    (
        "d.outage",
        "wrong answers",
        lambda f: change(f, outage=Outage(phase(4, replies=wrong(4)), phase(4), 9)),
    ),
    ("d.outage", "late", lambda f: change(f, outage=SLOW)),
    ("d.partition", "late", lambda f: change(f, partition=SLOW)),
    ("d.partition", "does not heal", lambda f: change(f, partition=NEVER)),
    (
        "d.dirty",
        "used",
        lambda f: change(
            f, dirty=phase(4, engine="r", external=32, agents=(agent(counts={"damaged": 1}),))
        ),
    ),
    ("d.dirty", "wrong answers", lambda f: change(f, dirty=phase(4, replies=wrong(4)))),
    ("e.on", "not on", lambda f: change(f, engines=(engine("d", "decode"),))),
    (
        "e.on",
        "something else",
        lambda f: change(f, engines=(engine("d", "decode", kv_dtype="float32"),)),
    ),
    (
        "e.one",
        "two variables",
        lambda f: change(f, engines=(engine("d", "decode", kv_dtype="fp8", graphs="off"),)),
    ),
    ("e.answers", "wrong", lambda f: change(f, again=wrong())),
    ("e.hits", "fewer", lambda f: change(f, again=replies(cached_tokens=32))),
    ("e.transfers", "failed", lambda f: change(f, moved=Moved(1e6, 1.0, COUNT, 2))),
    ("e.transfers", "none", lambda f: change(f, moved=Moved())),
    ("e.ttft", "worse", lambda f: change(f, load=load(ttft_s=0.4))),
    ("e.tpot", "worse", lambda f: change(f, load=load(tpot_s=0.05))),
    ("e.throughput", "worse", lambda f: change(f, load=load(ttft_s=0.9))),
]


@pytest.mark.parametrize("stage", SOUND)
def test_sound_facts_pass_at_every_point(stage: str) -> None:
    found = verdicts(SOUND[stage](), stage)
    other = {name: (v.status, v.reason) for name, v in found.items() if v.status != "pass"}
    assert set(other) == (BY_TRIAL if stage == "d" else set()), other
    assert all(v.evidence for v in found.values() if v.status == "pass")


@pytest.mark.parametrize(
    ("point", "plant"), [pytest.param(p, f, id=f"{p}: {name}") for p, name, f in PLANTED]
)
def test_a_planted_failure_turns_its_point_red(point: str, plant: Callable[[Any], Any]) -> None:
    stage = point[0]
    found = verdicts(plant(SOUND[stage]()), stage)
    assert found[point].status == "fail", (found[point].status, found[point].reason)
    assert found[point].reason


def test_every_point_has_a_planted_failure() -> None:
    points = {rule.point.id for rules in RULES.values() for rule in rules}
    assert {point for point, _, _ in PLANTED} == points - BY_TRIAL
    for point in BY_TRIAL:
        trial = {point: Trial("check", 1, "the tenant holds more than it may")}
        assert verdicts(SOUND["d"](), "d", trials=trial)[point].status == "fail"


HIDDEN: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("a.model", "no digest", lambda f: change(f, engine=engine(model_digest=""))),
    ("a.runtime", "no image", lambda f: change(f, declared={})),
    (
        "a.tensor_parallel",
        "declared only",
        lambda f: change(
            f, engine=engine(tensor_parallel=""), declared=DECLARED | {"tensor_parallel": "8"}
        ),
    ),
    ("a.graphs", "untold", lambda f: change(f, engine=engine(graphs=""))),
    ("a.requests", "tiny", lambda f: change(f, requests=change(f.requests, count=3))),
    ("a.correct", "tiny", lambda f: change(f, rounds=(replies(3), replies(3)))),
    ("a.correct", "once", lambda f: change(f, rounds=(replies(),))),
    (
        "a.correct",
        "one answer to all",
        lambda f: change(f, rounds=(tuple(change(r, words="x") for r in replies()),) * 2),
    ),
    ("a.ttft", "tiny", lambda f: change(f, load=load(count=5))),
    ("a.ttft", "no load", lambda f: change(f, load=GONE)),
    ("a.throughput", "tiny", lambda f: change(f, load=load(count=5))),
    ("a.hbm", "no metrics", lambda f: change(f, hbm=GONE)),
    ("a.hbm", "never in use", lambda f: change(f, hbm={"kv_usage_peak": 0.0})),
    ("a.power", "no meter", lambda f: change(f, power_w=GONE)),
    ("b.frozen", "untold", lambda f: change(f, decode=engine("d", kv_dtype=""))),
    (
        "b.frozen",
        "tiny",
        lambda f: change(f, phase=change(f.phase, replies=replies(3, prefilled_by="p"))),
    ),
    ("b.hisparse_off", "untold", lambda f: change(f, decode=engine("d", hisparse=""))),
    ("b.shared_off", "agent gone", lambda f: change(f, shared={"node-d": GONE})),
    ("b.same", "untold", lambda f: change(f, decode=engine("d", tokenizer=""))),
    (
        "b.backend",
        "no counters",
        lambda f: change(f, phase=change(f.phase, engines=(Counted("d", GONE, GONE),))),
    ),
    ("b.transport", "unknown", lambda f: change(f, transport_seen="unknown")),
    ("b.transport", "no gateway", lambda f: change(f, transport_seen=GONE)),
    ("b.request_ids", "no log", lambda f: change(f, logs={})),
    ("b.transfers", "no counters", lambda f: pair(f, moved=GONE)),
    ("b.rdma_ports", "no ports", lambda f: change(f, phase=change(f.phase, agents=ports(None)))),
    ("b.rdma_ports", "no agent", lambda f: change(f, phase=change(f.phase, agents=()))),
    ("b.no_reprefill", "no counters", lambda f: pair(f, counters=GONE)),
    ("b.no_reprefill", "half counters", lambda f: pair(f, counters=Counters(engine="vllm"))),
    (
        "b.answers",
        "tiny",
        lambda f: change(f, phase=change(f.phase, replies=replies(3, prefilled_by="p"))),
    ),
    (
        "b.answers",
        "empty words",
        lambda f: change(
            f,
            baseline=change(f.baseline, answers=("",) * COUNT),
            phase=change(
                f.phase, replies=tuple(change(r, words="") for r in replies(prefilled_by="p"))
            ),
        ),
    ),
    ("b.fallback", "no hook", lambda f: change(f, trial=GONE)),
    (
        "b.fallback",
        "nothing failed",
        lambda f: change(f, trial=Phase(replies(4, prefilled_by="p"))),
    ),
    ("b.fallback", "no word of it", lambda f: change(f, trial=Phase(replies(4)))),
    ("c.hits", "no counters", lambda f: change(f, warm=phase(external=None))),
    ("c.hits", "cannot forget", lambda f: change(f, warm=GONE)),
    ("c.answers", "tiny", lambda f: change(f, warm=phase(3))),
    ("c.hbm_released", "no counters", lambda f: change(f, warm=phase(external=None))),
    ("c.host_memory", "no agent", lambda f: change(f, warm=change(f.warm, agents=()))),
    ("c.host_memory", "agent gone", lambda f: change(f, warm=change(f.warm, agents=(GONE,)))),
    (
        "c.bandwidth",
        "not streamed",
        lambda f: change(f, warm=change(f.warm, replies=replies(ttft_s=None))),
    ),
    ("c.pays", "tiny", lambda f: change(f, warm=phase(3))),
    (
        "c.pays",
        "by chance",
        lambda f: change(
            f, warm=change(f.warm, replies=(*replies(15, ttft_s=0.1), *replies(ttft_s=0.3)[15:]))
        ),
    ),
    ("c.tpot", "tiny", lambda f: change(f, load=load(count=5))),
    ("d.across", "no counters", lambda f: change(f, across=phase(engine="r", external=None))),
    (
        "d.across",
        "tiny",
        lambda f: change(f, across=phase(3, engine="r", external=3 * (PROMPT - 32))),
    ),
    ("d.index", "no hook", lambda f: change(f, index=GONE)),
    ("d.index", "nobody foresees", lambda f: change(f, index=Outage(phase(4), phase(4), GONE))),
    ("d.tenant", "no control", lambda f: change(f, same_tenant=phase(4, engine="r"))),
    ("d.fingerprint", "no stranger", lambda f: change(f, stranger=GONE)),
    ("d.ttl", "no TTL", lambda f: change(f, ttl_before=GONE)),
    ("d.ttl", "no control", lambda f: change(f, ttl_before=phase(4, engine="r"))),
    (
        "d.eviction",
        "not full",
        lambda f: change(f, eviction=(StoreSample(5, 100), StoreSample(9, 100))),
    ),
    ("d.eviction", "another store", lambda f: change(f, eviction=GONE)),
    ("d.backpressure", "silent", lambda f: change(f, full=phase(4, agents=(agent(),)))),
    ("d.watermarks", "never reached", lambda f: change(f, dram=(StoreSample(5, 100),))),
    ("d.watermarks", "no limit", lambda f: change(f, dram=(StoreSample(5, 0),))),
    ("d.outage", "no hook", lambda f: change(f, outage=GONE)),
    (
        "d.dirty",
        "no damage noticed",
        lambda f: change(f, dirty=phase(4, engine="r", agents=(agent(),))),
    ),
    ("d.quota", "nothing drives it", lambda f: f),
    ("d.rebalance", "nothing drives it", lambda f: f),
    ("e.on", "untold", lambda f: change(f, engines=(engine("d", "decode", kv_dtype=""),))),
    ("e.one", "no such half before", lambda f: change(f, before={"combined": {}})),
    ("e.answers", "tiny", lambda f: change(f, first=replies(3))),
    ("e.hits", "untold", lambda f: change(f, again=replies(cached_tokens=None))),
    ("e.transfers", "nothing is handed over", lambda f: change(f, moves=False)),
    ("e.transfers", "no counters", lambda f: change(f, moved=GONE)),
    ("e.ttft", "nothing before", lambda f: change(f, load_before=GONE)),
    ("e.tpot", "tiny", lambda f: change(f, load=load(count=5))),
    ("e.throughput", "tiny", lambda f: change(f, load=load(count=5))),
]


@pytest.mark.parametrize(
    ("point", "hide"), [pytest.param(p, f, id=f"{p}: {name}") for p, name, f in HIDDEN]
)
def test_what_could_not_be_seen_is_not_shown(point: str, hide: Callable[[Any], Any]) -> None:
    found = verdicts(hide(SOUND[point[0]]()), point[0])[point]
    assert found.status == "not shown", (found.status, found.reason)
    assert found.reason


def test_only_what_the_operator_declares_is_not_applicable() -> None:
    tcp = verdicts(change(SOUND["b"](), transport="tcp", transport_seen=GONE), "b")
    apart = {name for name, v in tcp.items() if v.status == "not applicable"}
    assert apart == {"b.transport", "b.rdma_ports"}
    assert all("declared" in tcp[name].reason for name in apart)
    said = {"a.power": "no meter", "a.correct": "we trust it"}
    found = verdicts(change(SOUND["a"](), power_w=GONE, rounds=()), "a", not_applicable=said)
    assert (found["a.power"].status, found["a.power"].reason) == (
        "not applicable",
        "declared: no meter",
    )
    assert found["a.correct"].status == "not shown"  # nobody may wave that away


@pytest.mark.parametrize(("status", "verdict"), [(0, "pass"), (1, "fail"), (7, "not shown")])
def test_a_trial_of_the_operators_shows_a_point(status: int, verdict: str) -> None:
    trial = {"d.quota": Trial("check-quota", status, "12 of 10 GB"), "d.tenant": Trial("x", 0, "")}
    facts = change(SOUND["d"](), other_tenant=phase(4, engine="r", external=32))
    found = verdicts(facts, "d", trials=trial)
    assert found["d.quota"].status == verdict
    assert found["d.tenant"].status == "fail"  # isolation is not shown by a word


def test_the_sign_test() -> None:
    assert chance(0, 0) == 1.0
    assert chance(5, 0) == 1 / 32
    assert chance(4, 4) > 0.5
    assert chance(22, 8) < 0.05 < chance(19, 11)


def test_a_foreign_gateways_fallback_is_seen_in_the_counters() -> None:
    """It says nothing of steps; but the half that is left has computed the prompts."""
    facts = SOUND["b"]()
    for computed, verdict in ((4 * PROMPT, "pass"), (4 * 32, "not shown")):
        left = counted("d", 0, computed_tokens=computed)
        trial = Phase(replies(4), (left,))
        assert verdicts(change(facts, trial=trial), "b")["b.fallback"].status == verdict


def test_a_longer_context_answers_what_did_not_fit() -> None:
    longer = {"context_tokens": "131072"}
    engines = (engine("d", "decode", **longer), engine("p", "prefill", **longer))
    (answered,) = replies(1)
    for long, verdict in (
        (answered, "pass"),
        (change(answered, status=400), "fail"),
        (GONE, "not shown"),
    ):
        facts = change(SOUND["e"](), change="context", engines=engines, long=long)
        found = verdicts(facts, "e")
        assert (found["e.on"].status, found["e.one"].status) == (verdict, "pass")
    shorter = (engine("d", "decode", context_tokens="4096"),)
    facts = change(SOUND["e"](), change="context", engines=shorter, long=answered)
    assert verdicts(facts, "e")["e.on"].status == "fail"
