"""What each check says of facts: right, wrong with both values, or not shown with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.core.check_facts import (
    AgentFacts,
    Asked,
    EngineFacts,
    Facts,
    GatewayFacts,
    KeyFacts,
    PairRow,
    StreamFacts,
    WorkerRow,
)
from kvatlas.core.checks import CHECKS, ENGINE_CHECK_NAMES, check
from kvatlas.core.checks_engine import SUPPORTED, differing, untested
from kvatlas.core.findings import Finding, worst
from kvatlas.core.keys import Fingerprint
from kvatlas.core.layout import plain

DOCS = Path(__file__).resolve().parents[2] / "docs"
IDS = tuple(range(100, 166))
CACHED = Asked(prompt_tokens=66, cached_tokens=64, text="a b")
NONE = Asked(prompt_tokens=66, cached_tokens=0, text="a b")
CANARIES = {
    "own": NONE,
    "fresh": NONE,
    "again": CACHED,
    "salted": NONE,
    "salted again": CACHED,
    "text": CACHED,
    "chat": NONE,
    "chat ids": CACHED,
}
STREAM = StreamFacts(
    told=True, heard=True, blocks=(16,), hashes={"group 0": 7}, batches=5, replay=""
)
W0 = EngineFacts(
    name="w0",
    url="http://w0",
    kind="vllm",
    version="0.32.0",
    models=("m",),
    context_tokens=4096,
    told_block_tokens=16,
    kv_dtype="auto",
    fingerprint=Fingerprint(model="m", engine="vllm", hash_algorithm="sha256"),
    layout=plain(16),
    clock_ahead_s=0.3,
    counted_tokens=500,
    counted_hits=300,
    canary_tokens=500,
    canaries=CANARIES,
    text_ids=IDS,
    chat_ids=IDS,
    stream=STREAM,
)
PRINT = W0.fingerprint.digest().hex()[:16] if W0.fingerprint else ""
KEYS = KeyFacts(prompt_tokens=66, keys={"w0": ("aa", "bb")}, resume_tokens={"w0": 64})
GATEWAY = GatewayFacts(
    url="http://g",
    ours=True,
    version="1",
    own_version="1",
    workers={"w0": WorkerRow("http://w0", up=True, fingerprint=PRINT, feed="")},
    configured={"w0": "http://w0"},
    canaries={
        "fresh": Asked(prompt_tokens=66, cached_tokens=0, expected_tokens=0, worker="w0"),
        "again": Asked(prompt_tokens=66, cached_tokens=64, expected_tokens=64, worker="w0"),
    },
    ids=KEYS,
    text=KEYS,
    own_keys={"w0": ("aa", "bb")},
)
PAIR = PairRow("p", "d", "ok", "rdma", "rdma", "", 2e9, "engine", 5)
AGENT = AgentFacts(
    "node",
    "http://a",
    roots={"m": "f00d"},
    own_roots={"w0": "f00d"},
    tiers={"disk": {"capacity_bytes": 1e12, "held_bytes": 1e9, "quarantined_bytes": 0.0}},
)


def engine(base: EngineFacts = W0, **changes: Any) -> EngineFacts:
    return msgspec.structs.replace(base, **changes)


def canaries(**changes: Asked) -> EngineFacts:
    named = {name.replace("_", " "): asked for name, asked in changes.items()}
    return engine(canaries=CANARIES | named)


def stream(**changes: Any) -> EngineFacts:
    return engine(stream=msgspec.structs.replace(STREAM, **changes))


def gateway(**changes: Any) -> Facts:
    return Facts((W0,), msgspec.structs.replace(GATEWAY, **changes))


def routed(**changes: Any) -> Facts:
    again = msgspec.structs.replace(GATEWAY.canaries["again"], **changes)
    return gateway(canaries=GATEWAY.canaries | {"again": again})


def agent(**changes: Any) -> Facts:
    return Facts(agents=(msgspec.structs.replace(AGENT, **changes),))


def of(facts: Facts | EngineFacts, name: str) -> list[Finding]:
    facts = Facts((facts,)) if isinstance(facts, EngineFacts) else facts
    return [finding for finding in check(facts) if finding.check == name]


def test_a_sound_cluster_is_sound() -> None:
    pairs = msgspec.structs.replace(GATEWAY, pairs=(PAIR,))
    facts = Facts((W0, engine(name="w1", url="http://w1")), pairs, (AGENT,))
    one = msgspec.structs.replace(facts, engines=(W0,))
    assert {f.status for f in check(one)} == {"ok", "not applicable"}
    seen = {f.check for f in check(one)}
    assert seen == set(CHECKS)
    assert worst(f for f in check(facts) if f.check == "hash-seed") == "ok"


@pytest.mark.parametrize(
    ("facts", "name", "told"),
    [
        (engine(version="0.9.2"), "version", "vllm 0.9.2 is not in the support matrix"),
        (engine(clock_ahead_s=-30.0), "clock", "-30 s from ours"),
        (engine(counted_tokens=499), "metrics", "counted less than it was asked"),
        (engine(caching="False"), "prefix-cache", "its prefix caching is off"),
        (canaries(again=NONE), "prefix-cache", "nothing was resumed"),
        (
            canaries(again=Asked(prompt_tokens=66, cached_tokens=16, text="a b")),
            "prefix-cache",
            "less than half",
        ),
        (canaries(salted=CACHED), "salt", "tenants are not apart"),
        (canaries(salted_again=NONE), "salt", "never resumed"),
        (
            canaries(again=Asked(prompt_tokens=66, cached_tokens=64, text="a c")),
            "right-answer",
            "another greedy answer",
        ),
        (canaries(text=NONE), "tokenizer", "did not resume what was cached"),
        (
            canaries(text=Asked(prompt_tokens=67, cached_tokens=64)),
            "tokenizer",
            "counts other tokens",
        ),
        (canaries(chat_ids=NONE), "chat-template", "did not resume"),
        (
            canaries(chat=Asked(prompt_tokens=70, cached_tokens=0)),
            "chat-template",
            "renders a chat otherwise",
        ),
        (stream(blocks=(32,)), "block-size", "other blocks than expected"),
        (engine(layout=plain(32)), "block-size", "counts in other blocks"),
        (engine(kv_dtype="bfloat16", configured_kv_dtype="fp8"), "dtype", "not the engine's"),
        (stream(heard=False), "events", "its events never told of"),
        (stream(heard=False, on="w1"), "event-source", "stream of w1"),
        (stream(gap="batch 3 was expected, 5 came"), "event-sequence", "5 came"),
        (stream(malformed=2), "event-sequence", "2 of its events cannot be read"),
        (stream(replay="no answer within 5 s"), "replay", "no answer"),
        (gateway(ready=False), "gateway", "not ready"),
        (gateway(version="2"), "gateway", "another version"),
        (gateway(alarms={"hit_gap": {"w0": "only 3 %"}}), "alarms", "hit_gap: only 3 %"),
        (gateway(configured={"w0": "http://other"}), "workers", "other engines than the file"),
        (gateway(ids=KeyFacts(keys={"w0": ("cc",)})), "keys", "other keys than its configuration"),
        (gateway(text=KeyFacts(keys={"w0": ("aa", "cc")})), "keys", "from block 1 on"),
        (gateway(text=KeyFacts(unkeyed="no_tokenizer")), "keys", "cannot key text"),
        (gateway(ids=KeyFacts(keys=KEYS.keys)), "keys", "does not know a prefix"),
        (
            routed(cached_tokens=0),
            "routed-hit",
            "routed for a prefix, and the engine reported none",
        ),
        (routed(cached_tokens=0, expected_tokens=0), "routed-hit", "twice through it"),
        (routed(expected_tokens=0), "routed-hit", "did not foresee"),
        (routed(expected_tokens=16), "routed-hit", "far apart"),
        (agent(alarms={"quarantined": "x"}), "agent", "quarantined: x"),
        (agent(own_roots={"w0": "beef"}), "store-keys", "under other keys"),
        (agent(tiers={"disk": {"quarantined_bytes": 4096.0}}), "disk", "4096 bytes"),
        (agent(faults={"hanging": 2}), "disk", "hanging, 2 times"),
    ],
)
def test_what_is_wrong_is_named(facts: Facts | EngineFacts, name: str, told: str) -> None:
    found = [finding for finding in of(facts, name) if finding.status == "wrong"]
    assert len(found) == 1
    assert told in found[0].why
    assert found[0].change
    assert found[0].compared or name in ("gateway", "store-keys")


FAILED = Asked(error="status 503")
UNTOLD = Asked(prompt_tokens=66, text="a b")
ALL_UNTOLD = engine(canaries=dict.fromkeys(CANARIES, UNTOLD))


@pytest.mark.parametrize(
    ("facts", "name", "reason"),
    [
        (engine(version=""), "version", "does not tell"),
        (engine(kind="other"), "version", "does not tell"),
        (engine(clock_ahead_s=None), "clock", "no date"),
        (engine(metrics_error="status 404"), "metrics", "status 404"),
        (engine(counted_tokens=None), "metrics", "does not count"),
        (engine(canary_tokens=0, counted_tokens=0), "metrics", "no canary was answered"),
        (ALL_UNTOLD, "hits-told", "do not tell cached tokens"),
        (ALL_UNTOLD, "prefix-cache", "do not tell cached tokens"),
        (ALL_UNTOLD, "right-answer", "do not tell cached tokens"),
        (ALL_UNTOLD, "salt", "do not tell cached tokens"),
        (ALL_UNTOLD, "tokenizer", "do not tell cached tokens"),
        (canaries(again=FAILED), "prefix-cache", "status 503"),
        (canaries(again=FAILED), "hits-told", "status 503"),
        (canaries(fresh=FAILED), "right-answer", "status 503"),
        (canaries(again=NONE), "right-answer", "nothing was resumed"),
        (canaries(fresh=msgspec.structs.replace(NONE, text="")), "right-answer", "is empty"),
        (canaries(salted=FAILED), "salt", "status 503"),
        (canaries(again=NONE), "salt", "without a salt either"),
        (canaries(again=NONE), "tokenizer", "see prefix-cache"),
        (canaries(text=FAILED), "tokenizer", "status 503"),
        (canaries(chat=FAILED), "chat-template", "status 503"),
        (engine(tokenize_error="status 404"), "tokenizer", "status 404"),
        (engine(chat_error="status 404"), "chat-template", "status 404"),
        (stream(blocks=(), heard=False), "block-size", "no event of a canary"),
        (engine(kv_dtype=""), "dtype", "does not tell"),
        (engine(layout=None, layout_error="no config.json"), "layout", "no config.json"),
        (engine(stream=StreamFacts()), "events", "does not say"),
        (stream(error="nobody there"), "events", "nobody there"),
        (stream(replay=None), "replay", "no replay"),
        (gateway(error="refused"), "gateway", "refused"),
        (gateway(error="refused"), "alarms", "refused"),
        (gateway(error="refused"), "routed-hit", "refused"),
        (gateway(error="refused"), "keys", "refused"),
        (gateway(error="refused"), "workers", "refused"),
        (gateway(error="refused"), "fingerprint", "refused"),
        (gateway(error="refused"), "disk", "whether there are any"),
        (gateway(error="refused"), "transport", "refused"),
        (gateway(workers={}, configured={}), "fingerprint", "not known"),
        (gateway(ids=KeyFacts(error="status 500")), "keys", "status 500"),
        (gateway(ids=KeyFacts(unkeyed="no_tokenizer")), "keys", "no_tokenizer"),
        (gateway(ids=KeyFacts()), "keys", "has no keys for it"),
        (gateway(canaries={}), "routed-hit", "not asked"),
        (routed(cached_tokens=-1), "routed-hit", "do not tell"),
        (agent(error="refused"), "agent", "refused"),
        (agent(error="refused"), "store-keys", "refused"),
        (agent(error="refused"), "disk", "refused"),
        (agent(no_own_roots="no secret"), "store-keys", "no secret"),
        (agent(roots={}), "store-keys", "no engine is attached"),
        (agent(metrics_error="status 500"), "disk", "status 500"),
        (agent(tiers={"disk": {}}), "disk", "capacity"),
    ],
)
def test_what_nobody_could_see_is_no_pass(
    facts: Facts | EngineFacts, name: str, reason: str
) -> None:
    found = of(facts, name)
    assert [finding.status for finding in found] == ["not shown"]
    assert reason in found[0].why


def test_of_an_engine_that_does_not_answer_nothing_is_shown() -> None:
    found = check(Facts((EngineFacts("w0", "http://w0", error="refused"),)))
    by_check = {f.check: f.status for f in found if f.who == "w0"}
    assert by_check == dict.fromkeys(("reach", *ENGINE_CHECK_NAMES), "not shown")
    assert all("refused" in f.why for f in found if f.who == "w0")


def test_counters_that_show_no_hit_at_all_are_enough_to_call_it_wrong() -> None:
    silent = engine(canaries=dict.fromkeys(CANARIES, UNTOLD), counted_hits=0)
    assert [f.status for f in of(silent, "prefix-cache")] == ["wrong"]


OTHER = Fingerprint(model="m", engine="vllm", hash_algorithm="xxhash", weights_digest="2")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("version-skew", {"version": "0.31.0"}),
        ("context", {"context_tokens": 2048}),
        ("dtype-skew", {"kv_dtype": "fp8"}),
        ("block-size-skew", {"told_block_tokens": 32}),
        ("draft", {"draft": True}),
        ("hash-algorithm", {"fingerprint": OTHER}),
        ("weights", {"canaries": CANARIES | {"fresh": Asked(prompt_tokens=66, text="z")}}),
        ("tokenizer", {"text_ids": (1, *IDS[1:])}),
        ("chat-template", {"chat_ids": (1, *IDS[1:])}),
        ("hash-seed", {"stream": msgspec.structs.replace(STREAM, hashes={"group 0": 8})}),
        ("layout", {"layout": msgspec.structs.replace(plain(16), tensor_parallel="by_head")}),
    ],
)
def test_engines_of_one_model_that_differ(name: str, changes: dict[str, Any]) -> None:
    w1 = engine(name="w1", url="http://w1", **changes)
    found = [f for f in of(Facts((W0, w1)), name) if f.status == "wrong"]
    assert len(found) == 1
    assert found[0].who == "w1, w0"
    assert len(found[0].compared) >= 1
    elsewhere = msgspec.structs.replace(w1, models=("another",))
    assert not [f for f in of(Facts((W0, elsewhere)), name) if f.status == "wrong"]


def test_ranks_count_where_they_split_the_state() -> None:
    split = msgspec.structs.replace(plain(16), tensor_parallel="by_head")
    w0, w1 = (engine(name=f"w{i}", layout=split, tensor_ranks=1 + i) for i in (0, 1))
    assert [f.status for f in of(Facts((w0, w1)), "tensor-parallel")] == ["wrong"]
    unknown = engine(w1, tensor_ranks=0)
    assert [f.status for f in of(Facts((w0, unknown)), "tensor-parallel")] == ["not shown"]
    whole = engine(w1, layout=plain(16), tensor_ranks=2), engine(w0, layout=plain(16))
    assert [f.status for f in of(Facts(whole), "tensor-parallel")] == ["ok"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("version-skew", {"version": ""}),
        ("context", {"context_tokens": 0}),
        ("dtype-skew", {"kv_dtype": ""}),
        ("block-size-skew", {"told_block_tokens": 0}),
        ("draft", {"metrics_error": "status 404"}),
        ("weights", {"canaries": CANARIES | {"fresh": Asked(prompt_tokens=66)}}),
        ("weights", {"canaries": CANARIES | {"fresh": Asked(error="status 503")}}),
        ("hash-seed", {"stream": StreamFacts(error="nobody there")}),
    ],
)
def test_what_one_of_them_does_not_tell_is_no_pass(name: str, changes: dict[str, Any]) -> None:
    w1 = engine(name="w1", **changes)
    assert [(f.who, f.status) for f in of(Facts((W0, w1)), name)] == [("w1", "not shown")]


def test_hashes_of_other_blocks_are_not_compared_and_no_pass() -> None:
    w1 = engine(name="w1", stream=msgspec.structs.replace(STREAM, hashes={"group 1": 8}))
    assert [f.status for f in of(Facts((W0, w1)), "hash-seed")] == ["not shown"]


@pytest.mark.parametrize(
    ("changes", "status", "told"),
    [
        ({}, "ok", ""),
        ({"seen": "not rdma"}, "wrong", "does not go over RDMA"),
        ({"state": "degraded", "why": "slower"}, "wrong", "slower"),
        ({"seen": ""}, "not shown", "too little"),
        ({"expected": "any", "seen": ""}, "ok", ""),
        ({"expected": "any", "seen": "", "hand_offs": 0}, "not shown", "nothing over yet"),
    ],
)
def test_pairs(changes: dict[str, Any], status: str, told: str) -> None:
    found = of(gateway(pairs=(msgspec.structs.replace(PAIR, **changes),)), "transport")
    assert [(f.who, f.status) for f in found] == [("p → d", status)]
    assert told in found[0].why
    assert "GB/s" in found[0].compared


def test_a_router_of_somebody_else_is_only_asked() -> None:
    facts = gateway(ours=False, canaries={"fresh": NONE, "again": CACHED})
    assert [f.status for f in of(facts, "routed-hit")] == ["ok"]
    assert [f.status for f in of(facts, "keys")] == ["not applicable"]
    blind = gateway(ours=False, canaries={"fresh": NONE, "again": NONE})
    assert [f.status for f in of(blind, "routed-hit")] == ["wrong"]


def test_a_gateway_that_knows_another_fingerprint() -> None:
    row = WorkerRow("http://w0", up=True, fingerprint="0" * 16, feed="")
    assert [f.status for f in of(gateway(workers={"w0": row}), "fingerprint")] == ["wrong"]
    unknown = gateway(workers={"w0": row}, configured=None)
    assert [f.status for f in of(unknown, "fingerprint")] == ["not shown"]
    deaf = WorkerRow("http://w0", up=True, fingerprint=PRINT, feed="it is not connected")
    found = of(gateway(workers={"w0": deaf}), "events")
    assert [f.status for f in found] == ["ok", "wrong"]


def test_the_gateway_compares_stores_keys_where_its_secret_is_not_known() -> None:
    told = agent(no_own_roots="no secret").agents
    assert [f.status for f in of(Facts((W0,), GATEWAY, told), "store-keys")] == ["not shown"]
    watching = msgspec.structs.replace(GATEWAY, agents=("node",))
    assert [f.status for f in of(Facts((W0,), watching, told), "store-keys")] == ["ok"]
    apart = msgspec.structs.replace(
        watching, alarms={"agent_apart": {"w0": "node: another secret"}}
    )
    assert [f.status for f in of(Facts((W0,), apart, told), "store-keys")] == ["wrong"]


def test_answers_apart_beyond_rounding() -> None:
    one = Asked(text="a b", tokens=("a", "b"), logprobs=(-0.1, -1.0))
    tie = Asked(text="a c", tokens=("a", "c"), logprobs=(-0.1, -1.01))
    tuned = Asked(text="a b", tokens=("a", "b"), logprobs=(-0.9, -1.0))
    assert differing(one, one) == {}
    assert differing(one, tie) == {}
    assert differing(one, tuned)["logprobs"] == "-0.100, -0.900 at token 0"
    assert differing(Asked(text="a"), Asked(text="b")) == {"answer": "'a'", "other answer": "'b'"}


def test_versions_are_those_of_the_support_matrix() -> None:
    matrix = (DOCS / "support-matrix.md").read_text()
    names = {"vllm": "vLLM", "sglang": "SGLang"}
    for kind, versions in SUPPORTED.items():
        for version in versions:
            assert f"{names[kind]} {version}" in matrix
            assert not untested(kind, version)
            assert not untested(kind, f"{version}.1")
    assert untested("vllm", "0.320.1")


def test_the_guide_has_every_check() -> None:
    guide = (DOCS / "guides" / "doctor.md").read_text()
    assert not [name for name in CHECKS if f"| `{name}` |" not in guide]
