"""What a cluster's tokens cost, what a hit saves, and from where on a tier pays for itself.

Arithmetic over the time model, the layout and prices; nothing is played. Seconds to compute are a
prompt's own steps (what a user waits for), GPU time is that of full steps (what is paid for). A hit
from a lower tier is counted as if the engine's devices waited for the load: the least it saves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvatlas.core.records import Tier
from kvatlas.errors import ConfigError
from kvatlas.report import economics
from kvatlas.report.economics import BlockSize
from kvatlas.report.money import MONTH_S, StoragePrice, dollars_text
from kvatlas.sim.cluster import Cluster
from kvatlas.sim.links import LinkSpec
from kvatlas.sim.plan_engines import Engine
from kvatlas.sim.tier_spec import TierSpec

HIT_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)
BLOCKS = (16, 64, 128, 256, 512, 1024, 2048)  # tokens
HAND_OFF = "hand-off"  # the way from the prefill to the decode half


class Terms(msgspec.Struct, frozen=True):
    """What is asked. ``prompt_tokens`` and ``output_tokens`` are the mix, ``tpot_s`` the longest
    step that it may have (None: any), ``ttl_s`` how long a prefix is held. ``storage``: by
    "dram", "disk" and "object"."""

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    tpot_s: float | None
    ttl_s: float
    storage: dict[str, StoragePrice]


class Prefill(msgspec.Struct, frozen=True):
    """A prompt of ``context`` tokens: engine seconds in full steps, and what they come to."""

    engine: str
    context: int
    engine_s: float
    tokens_per_s: float
    dollars_per_million: float


class Decode(msgspec.Struct, frozen=True):
    """``batch`` requests behind ``context`` tokens each; ``batch_max`` fit."""

    engine: str
    context: int
    batch: int
    batch_max: int
    step_s: float
    dollars_per_million: float


class Mix(msgspec.Struct, frozen=True):
    """The mix, with ``hit_share`` of the prompt found in HBM. Dollars per million prompt, output,
    and all tokens where every engine is busy; ``cluster_dollars`` per million of all with what
    stands idle beside the engines of kind ``bound``, which set the pace. ``balanced``: of engines
    that are split in halves, the share that would have to prefill (None: they are not)."""

    hit_share: float
    batch: int
    step_s: float
    prompt_dollars: float
    output_dollars: float
    blended_dollars: float
    requests_per_s: float
    bound: str
    cluster_dollars: float
    balanced: float | None


class Hit(msgspec.Struct, frozen=True):
    """A prefix of ``context`` tokens that need not be computed, resumed at ``position``."""

    context: int
    position: int
    load_bytes: int
    sooner_s: float
    gpu_s: float
    dollars: float


class Way(msgspec.Struct, frozen=True):
    """A way on which state comes: what it reaches, and from which position on a load is quicker
    than computing, at every longer one too (None: not even at the longest that was tried)."""

    name: str
    bytes_per_s: float
    latency_s: float
    pays_from_tokens: int | None


class Load(msgspec.Struct, frozen=True):
    """A load beside computing the same. ``slowest_bytes_per_s``: the break-even bandwidth (None:
    no way would do)."""

    way: str
    position: int
    size_bytes: int
    load_s: float
    computed_s: float
    slowest_bytes_per_s: float | None


class Held(msgspec.Struct, frozen=True):
    """Holding bytes in a tier. ``position`` 0 is one block. ``reuses``: hits within the TTL that
    pay for it (None: no number does; of a block: not counted). ``longest_s``: for how long one hit
    may be waited for (None: never, or forever where ``dollars_per_hour`` is 0)."""

    tier: str
    position: int
    size_bytes: int
    dollars_per_hour: float
    ttl_dollars: float
    hit_dollars: float
    reuses: int | None
    longest_s: float | None


class Plan(msgspec.Struct, frozen=True):
    """All of it, the advice first."""

    advice: str
    devices: int
    dollars_per_hour: float
    prefill: list[Prefill]
    decode: list[Decode]
    mix: list[Mix]
    hits: list[Hit]
    ways: list[Way]
    loads: list[Load]
    held: list[Held]
    blocks: list[BlockSize]
    block: BlockSize


class _Path(NamedTuple):
    name: str
    bytes_per_s: float
    latency_s: float


def plan(cluster: Cluster, engines: Sequence[Engine], terms: Terms) -> Plan:
    """Everything for one cluster. Raises ConfigError where a request of the mix cannot be served.

    ``engines``: its kinds with their prices, as `plan_engines.kinds` gives them.
    """
    first = [e for e in engines if e.kind.role != "decode"]
    second = [e for e in engines if e.kind.role != "prefill"]
    lead = first[0]  # hits, loads and tiers are told for the engines that prefill
    paths = _paths(cluster, lead, second[0])
    positions = [_position(lead, context) for context in terms.contexts]
    hits = [
        _hit(lead, context, position)
        for context, position in zip(terms.contexts, positions, strict=True)
    ]
    hour = sum(e.price.dollars_per_gpu_hour * e.kind.devices() for e in engines)
    mix = [_mix(first, second, terms, share, hour) for share in HIT_SHARES]
    ways = [_way(lead, path, max(terms.contexts)) for path in paths]
    held = [*_held(lead, None, hits, terms)]
    for path in paths:
        if path.name != HAND_OFF:
            held += _held(lead, path, hits, terms)
    blocks = _blocks(lead, paths, terms)
    block = economics.best_block(blocks)
    found = Plan(
        advice="",
        devices=cluster.devices(),
        dollars_per_hour=hour,
        prefill=[_prefill(e, context) for e in first for context in terms.contexts],
        decode=[row for e in second for row in _decode(e, terms)],
        mix=mix,
        hits=hits,
        ways=ways,
        loads=[_load(lead, path, position) for path in paths for position in positions],
        held=held,
        blocks=blocks,
        block=block,
    )
    return msgspec.structs.replace(found, advice=advise(found, terms))


def _position(engine: Engine, context: int) -> int:
    """Where a match of so many tokens can be resumed."""
    grid = engine.kind.layout.grid_tokens
    return context // grid * grid


def _prefill(engine: Engine, context: int) -> Prefill:
    seconds = engine.busy_s(context)
    dollars = economics.per_million(engine.dollars(seconds), context)
    return Prefill(engine.kind.name, context, seconds, context / seconds, dollars)


def _decode(engine: Engine, terms: Terms) -> Iterator[Decode]:
    for context in terms.contexts:
        most = engine.batch_max(context + 1)
        for batch in sorted({*terms.batches, most}):
            if 0 < batch <= most:
                step_s = engine.step_s(context, batch)
                dollars = economics.per_million(engine.dollars(step_s), batch)
                yield Decode(engine.kind.name, context, batch, most, step_s, dollars)


def _mix(
    first: Sequence[Engine],
    second: Sequence[Engine],
    terms: Terms,
    hit_share: float,
    hour_dollars: float,
) -> Mix:
    prompt, output = terms.prompt_tokens, terms.output_tokens
    lead, last = first[0], second[0]
    batch = last.batch(prompt + output // 2, prompt + output, terms.tpot_s)
    if not batch:
        raise ConfigError(
            f"engine {last.kind.name!r}: a request of {prompt:,} prompt and {output:,} output "
            "tokens does not fit, or no step is quick enough: more devices, a shorter --mix or a "
            "longer --tpot-s"
        )
    step_s = last.step_s(prompt + output // 2, batch)
    prefill_s = max(
        0.0, lead.busy_s(prompt) - lead.busy_s(_position(lead, int(prompt * hit_share)))
    )
    decode_s = output * step_s / batch
    per_prompt = economics.per_million(lead.dollars(prefill_s), prompt)
    per_output = economics.per_million(last.dollars(decode_s), output)
    bound, rate = _pace(first, second, prefill_s, decode_s)
    return Mix(
        hit_share,
        batch,
        step_s,
        per_prompt,
        per_output,
        economics.blended(per_prompt, per_output, prompt, output),
        rate,
        bound,
        economics.per_million(hour_dollars / 3600, rate * (prompt + output)),
        None if bound == "combined" else prefill_s / (prefill_s + decode_s),
    )


def _pace(
    first: Sequence[Engine], second: Sequence[Engine], prefill_s: float, decode_s: float
) -> tuple[str, float]:
    """Which engines set the pace, and requests per second of the whole cluster: of those that do
    all of a request, and of pairs. Engines of one role are taken for as fast as its first kind."""
    both = sum(e.kind.count for e in first if e in second)
    halves = {
        "prefill": (sum(e.kind.count for e in first) - both, prefill_s),
        "decode": (sum(e.kind.count for e in second) - both, decode_s),
    }
    rate = both / (prefill_s + decode_s)
    if not halves["prefill"][0]:
        return "combined", rate
    rates = {name: count / s if s else math.inf for name, (count, s) in halves.items()}
    bound = min(rates, key=lambda name: rates[name])
    return bound, rate + rates[bound]


def _hit(engine: Engine, context: int, position: int) -> Hit:
    busy_s = engine.busy_s(position)
    return Hit(
        context,
        position,
        engine.kind.layout.load_bytes(position),
        engine.saved_s(position) if position else 0.0,
        busy_s * engine.kind.spec.devices,
        engine.dollars(busy_s),
    )


def all_tiers() -> TierSpec:
    """Every tier there is, at the rates that stand where nobody gives any."""
    return TierSpec(dram_bytes=1 << 40, disk_bytes=1 << 43, object_bytes=1 << 47, peers=True)


def _paths(cluster: Cluster, lead: Engine, last: Engine) -> list[_Path]:
    spec = cluster.tiers or all_tiers()
    link, host = lead.kind.link, spec.host_link
    reads = spec.calibrated(link).reads
    card = spec.storage_link or link
    agent_s = spec.message_s + spec.record_s
    ways = {
        Tier.DRAM: (spec.dram_bytes, host.latency_s),
        Tier.DISK: (spec.disk_bytes, spec.disk_read_link.latency_s + host.latency_s),
        Tier.OBJECT: (
            spec.object_bytes,
            spec.store_link.latency_s + card.latency_s + host.latency_s,
        ),
        Tier.PEER: (spec.peers, link.latency_s + host.latency_s),
    }
    paths = [
        _Path(tier.name.lower(), reads[tier], latency_s + agent_s)
        for tier, (there, latency_s) in ways.items()
        if there
    ]
    if last is not lead:
        slower = min((link, last.kind.link), key=_share)
        paths.append(_Path(HAND_OFF, _share(slower), slower.latency_s))
    return paths


def _share(link: LinkSpec) -> float:
    """Bytes per second that others leave of a link."""
    return link.bytes_per_s * (1 - link.background_share)


def _way(engine: Engine, path: _Path, longest: int) -> Way:
    """Every position on the grid is tried, up to the longest context that is asked for and a step
    beyond: where a prompt begins to need one step more, a hit saves all of it."""
    grid, layout, spec = engine.kind.layout.grid_tokens, engine.kind.layout, engine.kind.spec
    last = min(longest + spec.step_tokens, spec.context_tokens)
    gains = (
        (
            position,
            engine.saved_s(position)
            - economics.load_s(layout.load_bytes(position), path.bytes_per_s, path.latency_s),
        )
        for position in range(grid, max(last, grid) + 1, grid)
    )
    return Way(path.name, path.bytes_per_s, path.latency_s, economics.pays_from(gains))


def _load(engine: Engine, path: _Path, position: int) -> Load:
    size_bytes = engine.kind.layout.load_bytes(position)
    saved_s = engine.saved_s(position) if position else 0.0
    return Load(
        path.name,
        position,
        size_bytes,
        economics.load_s(size_bytes, path.bytes_per_s, path.latency_s),
        saved_s,
        economics.slowest_bytes_per_s(size_bytes, saved_s, path.latency_s) if position else None,
    )


def _held(engine: Engine, path: _Path | None, hits: Sequence[Hit], terms: Terms) -> Iterator[Held]:
    """One block, and the prefix of each context. None: in the engine's own memory."""
    layout = engine.kind.layout
    block = round(layout.page_bytes_per_token() * layout.grid_tokens)
    tier = "hbm" if path is None else path.name
    copies = engine.copies() if path is None else 1
    price = _room_price(engine, path, terms)
    for hit in (None, *hits):
        size_bytes = (block if hit is None else hit.load_bytes) * copies
        hour, ttl = price.dollars(size_bytes, 3600), price.dollars(size_bytes, terms.ttl_s)
        if hit is None:
            yield Held(tier, 0, size_bytes, hour, ttl, 0.0, None, None)
            continue
        waits_s = 0.0
        if path is not None:
            waits_s = economics.load_s(hit.load_bytes, path.bytes_per_s, path.latency_s)
        won = hit.dollars - engine.dollars(waits_s)
        longest_s = economics.longest_s(won, hour / 3600)
        reuses = economics.reuses_to_pay(ttl, won)
        yield Held(tier, hit.position, size_bytes, hour, ttl, won, reuses, longest_s)


def _room_price(engine: Engine, path: _Path | None, terms: Terms) -> StoragePrice:
    if path is not None:
        return terms.storage["dram" if path.name == "peer" else path.name]
    device = engine.kind.spec.device
    assert device is not None
    per_gb = engine.price.dollars_per_gpu_hour / (device.memory_bytes / 1e9)
    return StoragePrice(per_gb * MONTH_S / 3600, "its share of the device's memory and price")


def _blocks(engine: Engine, paths: Sequence[_Path], terms: Terms) -> list[BlockSize]:
    layout = engine.kind.layout
    slowest = min(paths, key=lambda path: path.bytes_per_s)
    prompt = terms.prompt_tokens
    token_s = engine.alone_s(0, prompt) / prompt
    return [
        economics.block_size(
            tokens,
            grid_tokens=layout.grid_tokens,
            prompt_tokens=prompt,
            bytes_per_token=layout.page_bytes_per_token(),
            token_s=token_s,
            bytes_per_s=slowest.bytes_per_s,
            latency_s=slowest.latency_s,
        )
        for tokens in sorted({*BLOCKS, layout.grid_tokens})
    ]


def advise(found: Plan, terms: Terms) -> str:
    """The whole in one sentence."""
    mix, most, hit = found.mix[0], found.mix[-1], found.hits[-1]
    said = (
        f"{terms.prompt_tokens:,} prompt and {terms.output_tokens:,} output tokens cost "
        f"{dollars_text(mix.cluster_dollars)} per million ({mix.bound} engines set the pace), "
        f"{dollars_text(most.cluster_dollars)} at {most.hit_share:.0%} hits; a hit of "
        f"{hit.position:,} tokens saves {hit.gpu_s:.3g} GPU-seconds ({dollars_text(hit.dollars)}): "
    )
    pays = {way.name: way.pays_from_tokens for way in found.ways}
    kept = [
        held
        for held in found.held
        if held.position == hit.position
        and held.reuses
        and 0 < (pays.get(held.tier) or 0) <= hit.position
    ]
    if kept:
        best = min(kept, key=lambda h: (h.reuses or 0, h.ttl_dollars - h.hit_dollars))
        reuses = "one reuse pays" if best.reuses == 1 else f"{best.reuses} reuses pay"
        said += f"keep prefixes from {pays[best.tier]:,} tokens on in {best.tier}, for which "
        said += f"{reuses} within {hours(terms.ttl_s)}"
    else:
        said += "no tier below the engines pays for itself"
    slow = [name for name, tokens in pays.items() if tokens is None]
    if slow:
        said += f"; do not load over {', '.join(slow)}: computing is quicker"
    return f"{said}; blocks of {found.block.block_tokens} tokens."


def hours(seconds: float) -> str:
    """A span of time in the unit that reads best."""
    for unit_s, unit in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:,.3g} {unit}"
    return f"{seconds:.3g} s"
