"""Misconfigurations by name, and the check that must name each of them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvatlas.connectors.stub_cluster import StubOptions
from kvatlas.connectors.stub_text import WordTokenizer
from kvatlas.core.events import BlockRemoved, BlockStored, Event
from kvatlas.core.findings import Status
from kvatlas.core.layout import plain
from kvatlas.validate.doctor.stage import (
    BLOCK,
    MODEL,
    OTHER_SECRET,
    SPEC,
    Lies,
    Plan,
    Stage,
)
from kvatlas.workload.models import load_layout


class Plant(msgspec.Struct, frozen=True):
    """``check`` must say ``status``. ``also``: other checks that are wrong in consequence, and say
    so rightly."""

    name: str
    what: str
    check: str
    plan: Callable[[], Plan]
    also: tuple[str, ...] = ()
    status: Status = "wrong"


# -- what engines tell ----------------------------------------------------------------------------


def _page(path: str, pattern: str, text: str) -> Lies:
    """Another text on one of its pages."""

    def tell(asked: str, body: bytes) -> bytes:
        return re.sub(pattern.encode(), text.encode(), body) if asked == path else body

    return Lies(tell=tell)


def _told(label: str, *values: str) -> Plan:
    """Engines that tell this of their cache's configuration, each its own."""
    lies = {
        index: _page("/metrics", r"cache_config_info\{", f'cache_config_info{{{label}="{value}",')
        for index, value in enumerate(values)
    }
    return Plan(lies=lies)


def _configured_dtype() -> Plan:
    lie = _page("/metrics", 'cache_dtype="auto"', 'cache_dtype="bfloat16"')
    fp8 = {"kv_dtype": "fp8"}
    return Plan(lies={0: lie, 1: lie}, workers={0: fp8, 1: fp8})


def _version(*versions: str) -> Plan:
    return Plan(lies={i: _page("/version", r"0\.32\.0", v) for i, v in enumerate(versions)})


def _metrics_gone() -> Plan:
    return Plan(lies={1: Lies(tell=lambda path, body: None if path == "/metrics" else body)})


def _silent_usage() -> Plan:
    silent = Lies(tell=lambda path, body: re.sub(rb',"prompt_tokens_details":\{[^}]*\}', b"", body))
    return Plan(lies={0: silent, 1: silent})


def _clock() -> Plan:
    return Plan(lies={1: Lies(date_ahead_s=300.0)})


# -- what engines do with requests ----------------------------------------------------------------


def _asked(change: Callable[[dict[str, Any], bool], None], *engines: int) -> Plan:
    def ask(path: str, body: dict[str, Any], routed: bool) -> None:
        if path.startswith("/v1/"):
            change(body, routed)

    return Plan(lies={index: Lies(ask=ask) for index in engines or (0,)})


def _ignores_salt() -> Plan:
    return _asked(lambda body, _: body.pop("cache_salt", None) and None)


def _salts_anew() -> Plan:
    def change(body: dict[str, Any], _: bool) -> None:
        if "cache_salt" in body:
            body["cache_salt"] += secrets.token_hex(4)

    return _asked(change)


def _caches_nothing() -> Plan:
    return _asked(lambda body, _: body.update(cache_salt=secrets.token_hex(8)), 0, 1)


def _breaks_promises() -> Plan:
    """What a gateway routes there is under another salt than the gateway thinks, each time."""

    def change(body: dict[str, Any], routed: bool) -> None:
        if routed:
            body["cache_salt"] = secrets.token_hex(8)

    plan = _asked(change, 0, 1)
    plan.disturb = _announces_without_salt
    return plan


async def _announces_without_salt(stage: Stage) -> None:
    def unsalted(event: Event) -> Event:
        if isinstance(event, BlockStored):
            return msgspec.structs.replace(event, salt="")
        return event

    for index in (0, 1):
        _change_events(stage, index, lambda events: [unsalted(event) for event in events])


async def _damages(stage: Stage) -> None:
    """After each answer, so that the next resume reads other bytes than were written."""
    engine = stage.engine(0)

    def tell(path: str, body: bytes) -> bytes:
        if path == "/v1/completions":
            engine.damage(0)
        return body

    stage.plan.lies[0].tell = tell


def _damaged() -> Plan:
    return Plan(lies={0: Lies()}, disturb=_damages)


class _OtherTemplate(WordTokenizer):
    def encode_chat(self, body: Mapping[str, object]) -> bytes:
        return self.encode("<|system|>\nBe brief.<|end|>\n", special=False) + super().encode_chat(
            body
        )


class _OtherTokens(WordTokenizer):
    def encode(self, text: str, *, special: bool) -> bytes:
        return super().encode(text.replace("e", "é"), special=special)


class _OtherWeights(WordTokenizer):
    def pick(self, number: int, *, first: bool) -> int:
        return (number + 1) % self.voices


def _two(second: StubOptions | None = None, tokenizer: Any = WordTokenizer) -> Plan:
    """Two engines that share nothing but the model's name."""
    one = StubOptions(plain(BLOCK), SPEC, model_name=MODEL)
    return Plan(engines=[one, second or one], tokenizers=(WordTokenizer, tokenizer))


def _other_spec(**changes: Any) -> StubOptions:
    spec = msgspec.structs.replace(SPEC, **changes)
    return StubOptions(plain(BLOCK), spec, model_name=MODEL)


def _other_dtype() -> StubOptions:
    layout = msgspec.structs.replace(plain(BLOCK), kv_dtype="fp8")
    return StubOptions(layout, SPEC, model_name=MODEL)


# -- events ---------------------------------------------------------------------------------------


def _change_events(
    stage: Stage, index: int, change: Callable[[Sequence[Event]], Sequence[Event]]
) -> None:
    publisher = stage.engine(index).publisher
    assert publisher is not None
    publish = publisher.publish

    def changed(events: Sequence[Event], ts: float) -> None:
        kept = change(events)
        if kept:
            publish(kept, ts)

    publisher.publish = changed  # type: ignore[method-assign]


async def _hashes_otherwise(stage: Stage) -> None:
    seed = 0x5EED_5EED_5EED_5EED

    def seeded(event: Event) -> Event:
        if isinstance(event, BlockStored):
            parent = None if event.parent is None else event.parent ^ seed
            hashes = tuple(h ^ seed for h in event.hashes)
            return msgspec.structs.replace(event, hashes=hashes, parent=parent)
        if isinstance(event, BlockRemoved):
            return msgspec.structs.replace(event, hashes=tuple(h ^ seed for h in event.hashes))
        return event

    _change_events(stage, 1, lambda events: [seeded(event) for event in events])


async def _says_nothing(stage: Stage) -> None:
    _change_events(stage, 0, lambda events: ())


async def _loses_batches(stage: Stage) -> None:
    publisher = stage.engine(0).publisher
    assert publisher is not None

    def skipping(events: Sequence[Event]) -> Sequence[Event]:
        publisher.skip(1)
        return events

    _change_events(stage, 0, skipping)


async def _replays_nothing(stage: Stage) -> None:
    publisher = stage.engine(0).publisher
    assert publisher is not None
    assert publisher._task is not None
    publisher._task.cancel()


def _no_replay() -> Plan:
    pattern = r'"replay_endpoint":"[^"]*"'
    lie = _page("/kv_event_sources", pattern, '"replay_endpoint":""')
    return Plan(lies={0: lie})


def _crossed_feeds() -> Plan:
    """The first engine tells the second one's events for its own."""
    other: list[bytes] = []

    def tell(path: str, body: bytes) -> bytes:
        return other[0] if path == "/kv_event_sources" and other else body

    async def cross(stage: Stage) -> None:
        publisher = stage.engine(1).publisher
        assert publisher is not None
        other.append(msgspec.json.encode({"0": publisher.source()}))

    return Plan(lies={0: Lies(tell=tell)}, disturb=cross)


# -- the rest of the cluster ----------------------------------------------------------------------


async def _engine_dies(stage: Stage) -> None:
    await stage.stubs[0].stop(1)


def _ranks() -> Plan:
    """Of a model whose state ranks split among them."""
    name = "llama-3.1-8b"
    layout = {"layout": name, "tensor_parallel": 1}
    options = StubOptions(load_layout(name, engine="vllm"), SPEC, model_name=MODEL, count=2)
    return Plan(engines=[options], workers={0: layout, 1: layout | {"tensor_parallel": 2}})


def _pair_over_tcp() -> Plan:
    """A decode half whose transfers pass no RDMA port; it counts a million times what it moves."""

    def tell(path: str, body: bytes) -> bytes:
        if path != "/metrics":
            return body

        def more(found: re.Match[bytes]) -> bytes:
            return found[1] + str(float(found[2]) * 1e6).encode()

        return re.sub(rb"(vllm:nixl_bytes_transferred_sum\{[^}]*\} )(\S+)", more, body)

    halves = {
        0: {"role": "prefill", "transport": "rdma"},
        1: {"role": "decode", "transport": "rdma"},
    }
    return Plan(lies={1: Lies(tell=tell)}, workers=halves)


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
        lambda: Plan(disturb=_hashes_otherwise),
    ),
    Plant(
        "hash-algorithm",
        "one engine hashes by another algorithm",
        "hash-algorithm",
        lambda: _told("prefix_caching_hash_algo", "sha256", "xxhash"),
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
        lambda: _two(StubOptions(plain(2 * BLOCK), SPEC, model_name=MODEL)),
        ("weights",),  # a stub's answers depend on its blocks
    ),
    Plant(
        "dtype",
        "the configuration says fp8, the engines keep bfloat16",
        "dtype",
        _configured_dtype,
    ),
    Plant(
        "dtype-skew", "one engine keeps its KV as fp8", "dtype-skew", lambda: _two(_other_dtype())
    ),
    Plant(
        "chat-template",
        "one engine has another chat template",
        "chat-template",
        lambda: _two(tokenizer=_OtherTemplate),
    ),
    Plant(
        "tokenizer",
        "one engine has another tokenizer",
        "tokenizer",
        lambda: _two(tokenizer=_OtherTokens),
        ("chat-template", *_BLIND),
    ),
    Plant("salt-ignored", "one engine never sees cache_salt", "salt", _ignores_salt),
    Plant("salt-changed", "what lies before one engine changes cache_salt", "salt", _salts_anew),
    Plant(
        "caching-off",
        "no engine caches prefixes",
        "prefix-cache",
        _caches_nothing,
        (*_BLIND, "events"),
    ),
    Plant(
        "usage-silent",
        "answers do not tell cached tokens",
        "hits-told",
        _silent_usage,
        status="not shown",
    ),
    Plant(
        "metrics-gone",
        "one engine has no metrics page",
        "metrics",
        _metrics_gone,
        status="not shown",
    ),
    Plant("damaged-cache", "one engine resumes from damaged state", "right-answer", _damaged),
    Plant(
        "feed-silent",
        "one engine's event publisher says nothing",
        "events",
        lambda: Plan(disturb=_says_nothing),
        _BLIND,
    ),
    Plant(
        "feed-gaps",
        "batches of one engine's events are lost",
        "event-sequence",
        lambda: Plan(disturb=_loses_batches),
        _BLIND,
    ),
    Plant(
        "replay-dead",
        "one engine's replay socket answers nothing",
        "replay",
        lambda: Plan(disturb=_replays_nothing),
        _BLIND,
    ),
    Plant(
        "replay-missing", "one engine offers no replay", "replay", _no_replay, status="not shown"
    ),
    Plant(
        "feeds-crossed",
        "one engine tells another one's events for its own",
        "event-source",
        _crossed_feeds,
        (*_BLIND, "events"),
    ),
    Plant(
        "version-skew",
        "one engine is a version older",
        "version-skew",
        lambda: _version("0.32.0", "0.31.1"),
        ("version",),
    ),
    Plant(
        "version-untested",
        "all engines are of a version that was never tested",
        "version",
        lambda: _version("0.9.2", "0.9.2"),
    ),
    Plant(
        "two-weights",
        "one name stands for two sets of weights",
        "weights",
        lambda: _two(tokenizer=_OtherWeights),
    ),
    Plant("clock", "one host's clock is five minutes ahead", "clock", _clock),
    Plant(
        "context",
        "one engine takes shorter prompts than the other",
        "context",
        lambda: _two(_other_spec(context_tokens=4096)),
    ),
    Plant(
        "draft",
        "one engine runs with a draft model",
        "draft",
        lambda: Plan(workers={1: {"draft": True}}),
        ("layout",),
    ),
    Plant(
        "tensor-parallel", "one engine splits its state over two ranks", "tensor-parallel", _ranks
    ),
    Plant(
        "promise-broken",
        "routed for a prefix, and the engine reports none",
        "routed-hit",
        _breaks_promises,
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
        "engine-down",
        "one engine does not answer",
        "reach",
        lambda: Plan(disturb=_engine_dies),
        ("alarms",),
        "not shown",
    ),
    Plant(
        "tcp-for-rdma",
        "a pair hands over by TCP instead of RDMA",
        "transport",
        _pair_over_tcp,
        ("alarms",),
    ),
)
