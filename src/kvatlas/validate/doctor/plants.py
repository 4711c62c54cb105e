"""Misconfigurations by name, and the check that must name each of them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvatlas.connectors.stub_cluster import StubOptions
from kvatlas.core.findings import Status
from kvatlas.core.layout import plain
from kvatlas.validate.doctor import planting
from kvatlas.validate.doctor.stage import BLOCK, MODEL, OTHER_SECRET, SPEC, Plan


class Plant(msgspec.Struct, frozen=True):
    """``check`` must say ``status``. ``also``: other checks that are wrong in consequence, and say
    so rightly."""

    name: str
    what: str
    check: str
    plan: Callable[[], Plan]
    also: tuple[str, ...] = ()
    status: Status = "wrong"


_BLIND = ("keys", "routed-hit", "alarms")

#: Nothing is wrong with these, and all of it can be seen.
SOUND: dict[str, Callable[[], Plan]] = {
    "two engines": Plan,
    "a pair": lambda: Plan(workers={0: {"role": "prefill"}, 1: {"role": "decode"}}),
}

PLANTS = (
    Plant(
        "hash-seed",
        "one engine hashes under another PYTHONHASHSEED",
        "hash-seed",
        lambda: Plan(disturb=planting.hashes_otherwise),
    ),
    Plant(
        "hash-algorithm",
        "one engine hashes by another algorithm",
        "hash-algorithm",
        lambda: planting.told("prefix_caching_hash_algo", "sha256", "xxhash"),
    ),
    Plant(
        "block-size",
        "the gateway counts one engine in blocks of twice its size",
        "block-size",
        lambda: Plan(workers={1: {"layout": str(2 * BLOCK)}}),
        (*_BLIND, "layout"),
    ),
    Plant(
        "block-size-skew",
        "one engine runs with blocks of twice the size",
        "block-size-skew",
        lambda: planting.two(StubOptions(plain(2 * BLOCK), SPEC, model_name=MODEL)),
        ("weights",),  # a stub's answers depend on its blocks
    ),
    Plant(
        "dtype",
        "the configuration says fp8, the engines keep bfloat16",
        "dtype",
        planting.configured_dtype,
    ),
    Plant(
        "dtype-skew",
        "one engine keeps its KV as fp8",
        "dtype-skew",
        lambda: planting.two(planting.other_dtype()),
    ),
    Plant(
        "chat-template",
        "one engine has another chat template",
        "chat-template",
        lambda: planting.two(tokenizer=planting.OtherTemplate),
    ),
    Plant(
        "tokenizer",
        "one engine has another tokenizer",
        "tokenizer",
        lambda: planting.two(tokenizer=planting.OtherTokens),
        ("chat-template", *_BLIND),
    ),
    Plant("salt-ignored", "one engine never sees cache_salt", "salt", planting.ignores_salt),
    Plant(
        "salt-changed",
        "what lies before one engine changes cache_salt",
        "salt",
        planting.salts_anew,
    ),
    Plant(
        "caching-off",
        "no engine caches prefixes",
        "prefix-cache",
        planting.caches_nothing,
        (*_BLIND, "events"),
    ),
    Plant(
        "usage-silent",
        "answers do not tell cached tokens",
        "hits-told",
        planting.silent_usage,
        status="not shown",
    ),
    Plant(
        "metrics-gone",
        "one engine has no metrics page",
        "metrics",
        planting.metrics_gone,
        status="not shown",
    ),
    Plant(
        "damaged-cache",
        "one engine resumes from damaged state",
        "right-answer",
        planting.damaged,
    ),
    Plant(
        "feed-silent",
        "one engine's event publisher says nothing",
        "events",
        lambda: Plan(disturb=planting.says_nothing),
        _BLIND,
    ),
    Plant(
        "feed-gaps",
        "batches of one engine's events are lost",
        "event-sequence",
        lambda: Plan(disturb=planting.loses_batches),
        _BLIND,
    ),
    Plant(
        "replay-dead",
        "one engine's replay socket answers nothing",
        "replay",
        lambda: Plan(disturb=planting.replays_nothing),
        _BLIND,
    ),
    Plant(
        "replay-missing",
        "one engine offers no replay",
        "replay",
        planting.no_replay,
        status="not shown",
    ),
    Plant(
        "feeds-crossed",
        "one engine tells another one's events for its own",
        "event-source",
        planting.crossed_feeds,
        (*_BLIND, "events"),
    ),
    Plant(
        "version-skew",
        "one engine is a version older",
        "version-skew",
        lambda: planting.version("0.32.0", "0.31.1"),
        ("version",),
    ),
    Plant(
        "version-untested",
        "all engines are of a version that was never tested",
        "version",
        lambda: planting.version("0.9.2", "0.9.2"),
    ),
    Plant(
        "two-weights",
        "one name stands for two sets of weights",
        "weights",
        lambda: planting.two(tokenizer=planting.OtherWeights),
    ),
    Plant("clock", "one host's clock is five minutes ahead", "clock", planting.clock),
    Plant(
        "context",
        "one engine takes shorter prompts than the other",
        "context",
        lambda: planting.two(planting.other_spec(context_tokens=4096)),
    ),
    Plant(
        "draft",
        "one engine runs with a draft model",
        "draft",
        lambda: Plan(workers={1: {"draft": True}}),
        ("layout",),
    ),
    Plant(
        "tensor-parallel",
        "one engine splits its state over two ranks",
        "tensor-parallel",
        planting.ranks,
    ),
    Plant(
        "promise-broken",
        "routed for a prefix, and the engine reports none",
        "routed-hit",
        planting.breaks_promises,
        ("alarms",),
    ),
    Plant(
        "blind-router",
        "the router does not go by the cache",
        "routed-hit",
        lambda: Plan(policy="round_robin"),
        ("keys",),
    ),
    Plant(
        "stale-gateway",
        "the running gateway has another engine than the file",
        "workers",
        lambda: Plan(file={1: {"name": "w9"}}),
        ("alarms", "store-keys"),
    ),
    Plant(
        "secret",
        "the file names another secret than the gateway runs with",
        "keys",
        lambda: Plan(secret=OTHER_SECRET),
        ("store-keys",),
    ),
    Plant(
        "agent-secret",
        "the agent stores under another secret",
        "store-keys",
        lambda: Plan(agent_secret=OTHER_SECRET),
        ("alarms",),
    ),
    Plant(
        "disk",
        "a disk has places that cannot be read",
        "disk",
        lambda: Plan(quarantined_bytes=4096, agent_flags={"quarantined": "4096 bytes"}),
        ("agent",),
    ),
    Plant(
        "weights-digest",
        "two engines of one name have other digests of their weights",
        "weights-digest",
        lambda: Plan(workers={0: {"weights_digest": "1"}, 1: {"weights_digest": "2"}}),
    ),
    Plant(
        "layout",
        "one engine keeps the state of another model",
        "layout",
        lambda: Plan(workers={0: {"layout": "llama-3.1-8b"}, 1: {"layout": "qwen3-32b"}}),
    ),
    Plant(
        "layout-unknown",
        "nobody knows what one engine's state consists of",
        "alarms",
        lambda: Plan(workers={0: {"layout": "auto"}}),
        _BLIND,
    ),
    Plant(
        "fingerprint",
        "the file has another digest of the weights than the gateway runs with",
        "fingerprint",
        lambda: Plan(file={1: {"weights_digest": "2"}}),
        ("keys", "store-keys"),
    ),
    Plant(
        "agent-down",
        "one agent does not answer",
        "agent",
        lambda: Plan(disturb=planting.agent_dies),
        ("alarms",),
        "not shown",
    ),
    Plant(
        "gateway-down",
        "the gateway does not answer",
        "gateway",
        lambda: Plan(disturb=planting.gateway_dies),
        (),
        "not shown",
    ),
    Plant(
        "engine-down",
        "one engine does not answer",
        "reach",
        lambda: Plan(disturb=planting.engine_dies),
        ("alarms",),
        "not shown",
    ),
    Plant(
        "tcp-for-rdma",
        "a pair hands over by TCP instead of RDMA",
        "transport",
        planting.pair_over_tcp,
        ("alarms",),
    ),
)
