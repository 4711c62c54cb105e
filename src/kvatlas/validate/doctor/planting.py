"""How misconfigurations are planted on a stage: what engines tell, do and announce otherwise."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvatlas.connectors.stub_cluster import StubOptions
from kvatlas.connectors.stub_text import WordTokenizer
from kvatlas.core.events import BlockRemoved, BlockStored, Event
from kvatlas.core.layout import plain
from kvatlas.validate.doctor.stage import BLOCK, MODEL, SPEC, Lies, Plan, Stage
from kvatlas.workload.models import load_layout

# -- what engines tell ----------------------------------------------------------------------------


def _page(path: str, pattern: str, text: str) -> Lies:
    """Another text on one of its pages."""

    def tell(asked: str, body: bytes) -> bytes:
        return re.sub(pattern.encode(), text.encode(), body) if asked == path else body

    return Lies(tell=tell)


def told(label: str, *values: str) -> Plan:
    """Engines that tell this of their cache's configuration, each its own."""
    lies = {
        index: _page("/metrics", r"cache_config_info\{", f'cache_config_info{{{label}="{value}",')
        for index, value in enumerate(values)
    }
    return Plan(lies=lies)


def configured_dtype() -> Plan:
    """Engines that keep bfloat16 where the file says fp8."""
    lie = _page("/metrics", 'cache_dtype="auto"', 'cache_dtype="bfloat16"')
    fp8 = {"kv_dtype": "fp8"}
    return Plan(lies={0: lie, 1: lie}, workers={0: fp8, 1: fp8})


def version(*versions: str) -> Plan:
    """Engines of these versions."""
    return Plan(lies={i: _page("/version", r"0\.32\.0", v) for i, v in enumerate(versions)})


def metrics_gone() -> Plan:
    """The second engine has no metrics page."""
    return Plan(lies={1: Lies(tell=lambda path, body: None if path == "/metrics" else body)})


def silent_usage() -> Plan:
    """Answers without the details of their usage."""
    silent = Lies(tell=lambda path, body: re.sub(rb',"prompt_tokens_details":\{[^}]*\}', b"", body))
    return Plan(lies={0: silent, 1: silent})


def clock() -> Plan:
    """The second engine's answers are dated five minutes ahead."""
    return Plan(lies={1: Lies(date_ahead_s=300.0)})


# -- what engines do with requests ----------------------------------------------------------------


def _asked(change: Callable[[dict[str, Any], bool], None], *engines: int) -> Plan:
    def ask(path: str, body: dict[str, Any], routed: bool) -> None:
        if path.startswith("/v1/"):
            change(body, routed)

    return Plan(lies={index: Lies(ask=ask) for index in engines or (0,)})


def ignores_salt() -> Plan:
    """The first engine never sees a salt."""
    return _asked(lambda body, _: body.pop("cache_salt", None) and None)


def salts_anew() -> Plan:
    """The first engine sees another salt than was sent, each time."""

    def change(body: dict[str, Any], _: bool) -> None:
        if "cache_salt" in body:
            body["cache_salt"] += secrets.token_hex(4)

    return _asked(change)


def caches_nothing() -> Plan:
    """Each request is under a salt of its own."""
    return _asked(lambda body, _: body.update(cache_salt=secrets.token_hex(8)), 0, 1)


def breaks_promises() -> Plan:
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


def damaged() -> Plan:
    """The first engine resumes from other bytes than were written."""
    return Plan(lies={0: Lies()}, disturb=_damages)


class OtherTemplate(WordTokenizer):
    """Puts a system message before every chat."""

    def encode_chat(self, body: Mapping[str, object]) -> bytes:
        return self.encode("<|system|>\nBe brief.<|end|>\n", special=False) + super().encode_chat(
            body
        )


class OtherTokens(WordTokenizer):
    """Splits the same text otherwise."""

    def encode(self, text: str, *, special: bool) -> bytes:
        return super().encode(text.replace("e", "é"), special=special)


class OtherWeights(WordTokenizer):
    """Says another word for each id: as other weights would."""

    def pick(self, number: int, *, first: bool) -> int:
        return (number + 1) % self.voices


def two(second: StubOptions | None = None, tokenizer: Any = WordTokenizer) -> Plan:
    """Two engines that share nothing but the model's name."""
    one = StubOptions(plain(BLOCK), SPEC, model_name=MODEL)
    return Plan(engines=[one, second or one], tokenizers=(WordTokenizer, tokenizer))


def other_spec(**changes: Any) -> StubOptions:
    """An engine with other parameters."""
    spec = msgspec.structs.replace(SPEC, **changes)
    return StubOptions(plain(BLOCK), spec, model_name=MODEL)


def other_dtype() -> StubOptions:
    """An engine that keeps fp8."""
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


async def hashes_otherwise(stage: Stage) -> None:
    """The second engine's events have other hashes, well chained."""
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


async def says_nothing(stage: Stage) -> None:
    """The first engine's events never leave it."""
    _change_events(stage, 0, lambda events: ())


async def loses_batches(stage: Stage) -> None:
    """Each second batch of the first engine's events is lost."""
    publisher = stage.engine(0).publisher
    assert publisher is not None

    def skipping(events: Sequence[Event]) -> Sequence[Event]:
        publisher.skip(1)
        return events

    _change_events(stage, 0, skipping)


async def replays_nothing(stage: Stage) -> None:
    """Nobody answers at the first engine's replay socket."""
    publisher = stage.engine(0).publisher
    assert publisher is not None
    assert publisher._task is not None
    publisher._task.cancel()


def no_replay() -> Plan:
    """The first engine tells of no replay socket."""
    pattern = r'"replay_endpoint":"[^"]*"'
    lie = _page("/kv_event_sources", pattern, '"replay_endpoint":""')
    return Plan(lies={0: lie})


def crossed_feeds() -> Plan:
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


async def engine_dies(stage: Stage) -> None:
    """The second engine is gone."""
    await stage.stubs[0].stop(1)


async def agent_dies(stage: Stage) -> None:
    """The agent of the first engine's node is gone."""
    await stage.agents[0].close()


async def gateway_dies(stage: Stage) -> None:
    """Nobody is in front any more."""
    await stage.gateway.close()


def ranks() -> Plan:
    """Of a model whose state ranks split among them."""
    name = "llama-3.1-8b"
    layout = {"layout": name, "tensor_parallel": 1}
    options = StubOptions(load_layout(name, engine="vllm"), SPEC, model_name=MODEL, count=2)
    return Plan(engines=[options], workers={0: layout, 1: layout | {"tensor_parallel": 2}})


def pair_over_tcp() -> Plan:
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
