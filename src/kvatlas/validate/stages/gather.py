"""Facts of the stages A, B, C and E, gathered from a running cluster."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from pathlib import Path

from kvatlas.core.transports import Moved
from kvatlas.errors import ConfigError
from kvatlas.report.latency import Report
from kvatlas.validate.stages.asking import load_of, sampled
from kvatlas.validate.stages.facts import (
    Baseline,
    EngineSeen,
    Figures,
    Phase,
    Reply,
    StageA,
    StageB,
    StageC,
    StageE,
)
from kvatlas.validate.stages.rules import median, prompt_tokens
from kvatlas.validate.stages.site import Site
from kvatlas.validate.stages.stagefile import Engine
from kvatlas.validate.stages.values import Missing, excerpt

_LOG_BYTES_MAX = 64 << 20
_TRIED = 4  # prompts that are asked where one would do


async def stage_a(site: Site) -> tuple[StageA, Figures]:
    """One Combined engine, alone. Raises ConfigError where the file has none."""
    file = site.file
    engine = site.one("a", "combined")
    seen = await site.look_at(engine)
    everything = range(len(site.prompts))
    await site.asker.ask(engine.url, [0], "warm")
    first = await site.asker.ask(engine.url, everything, "a")
    again = await site.asker.ask(engine.url, everything, "a")
    usage: list[float | Missing]
    power: list[float | Missing]
    async with (
        sampled(lambda: site.watcher.kv_usage(engine)) as usage,
        sampled(lambda: site.hooks.number("power_w")) as power,
    ):
        load = await load_of(site.prompts, engine.url, site.model, site.prompts.fresh(len(first)))
    facts = StageA(
        engine=seen,
        requests=site.prompts.described(),
        rounds=(first, again),
        load=load,
        declared=file.declared,
        hbm=await _hbm(site, seen.seen.get("pool_tokens", ""), usage),
        power_w=_middle(power),
        samples_min=file.requests.samples_min,
        slo={
            name: value
            for name in ("ttft_p95_s", "tpot_p95_s")
            if (value := getattr(file.limits, name))
        },
    )
    figures = figures_of(site, [seen], load, again)
    return facts, figures


async def _hbm(
    site: Site, pool_tokens: str, usage: Sequence[float | Missing]
) -> dict[str, float] | Missing:
    found: dict[str, float] = {}
    told = [u for u in usage if isinstance(u, float)]
    size = await site.hooks.number("hbm_bytes")
    if isinstance(size, float):
        found["hbm_bytes"] = size
    if told and pool_tokens:
        found |= {"kv_pool_tokens": float(pool_tokens), "kv_usage_peak": max(told)}
    if found:
        return found
    reasons = [u.reason for u in usage if isinstance(u, Missing)]
    pool = "the engine does not tell the size of its KV pool"
    assert isinstance(size, Missing)
    return Missing(f"{reasons[0] if reasons else pool}; {size.reason}")


def _middle(samples: Sequence[float | Missing]) -> float | Missing:
    found = [s for s in samples if isinstance(s, float)]
    missing = [s for s in samples if isinstance(s, Missing)]
    if found and not missing:
        return median(found)
    return missing[0] if missing else Missing("nothing was read")


def figures_of(
    site: Site, engines: Sequence[EngineSeen], load: Report | Missing, again: Sequence[Reply]
) -> Figures:
    """For the stage after. ``again``: answers to prompts that had been asked before."""
    told = [r.cached_tokens for r in again if r.cached_tokens is not None]
    tokens = prompt_tokens(again)
    share = sum(told) / tokens if tokens and len(told) == len(again) else None
    image = {"image": site.file.declared["image"]} if "image" in site.file.declared else {}
    return Figures(
        {engine.role: image | engine.seen for engine in engines},
        load if isinstance(load, Report) else None,
        share,
    )


async def stage_b(site: Site, baseline: Baseline) -> tuple[StageB, Figures]:
    """A pair behind a gateway. Raises ConfigError where the file has no such."""
    file = site.file
    prefill, decode = site.one("b", "prefill"), site.one("b", "decode")
    if len(file.engines("prefill", "decode")) > 2:
        raise ConfigError("stage b looks at one pair: name one prefill and one decode half")
    if not file.gateway:
        raise ConfigError("stage b needs a [[gateway]]: what joins the halves of a pair")
    url, halves = file.gateway[0].url, [prefill, decode]
    seen = [await site.look_at(half) for half in halves]
    await site.asker.ask(url, [0], "warm")
    phase = await site.phase(halves, url, range(len(site.prompts)), "b")
    ids = [reply.request_id for reply in phase.replies]
    logs = {half.name: await _log(half, ids, file.requests.settle_s) for half in halves}
    transport = await site.watcher.transport_seen(prefill.name, decode.name)
    again = await site.asker.ask(url, range(len(site.prompts)), "b")
    load = await load_of(site.prompts, url, site.model, site.prompts.fresh(len(ids)))
    block = seen[1].seen.get("block_tokens", "")
    facts = StageB(
        prefill=seen[0],
        decode=seen[1],
        baseline=baseline,
        phase=phase,
        declared=file.declared,
        transport=file.transport,
        transport_seen=transport,
        logs=logs,
        shared=await site.watcher.shared_tiers(),
        block_tokens=int(block) if block.isdecimal() else 0,
        trial=await _backend_trial(site, url),
        samples_min=file.requests.samples_min,
    )
    return facts, figures_of(site, seen, load, again)


async def _log(engine: Engine, ids: Sequence[str], wait_s: float) -> dict[str, str] | Missing:
    """The line of each request id; logs are written a moment late."""
    if not engine.log:
        return Missing(f"{engine.name}: the stage file names no log of it")
    path, until = Path(engine.log), time.monotonic() + wait_s
    while True:
        found = await asyncio.to_thread(_lines_of, path, ids)
        if isinstance(found, Missing) or len(found) == len(ids) or time.monotonic() > until:
            break
        await asyncio.sleep(0.2)
    if isinstance(found, dict) and not found:
        return Missing(
            f"{engine.name}: its log names none of these requests: start vLLM with"
            " --enable-log-requests, SGLang with --log-requests"
        )
    return found


def _lines_of(path: Path, ids: Sequence[str]) -> dict[str, str] | Missing:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES_MAX))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError as error:
        return Missing(f"{path.name}: cannot be read: {error.strerror}")
    found: dict[str, str] = {}
    for wanted in ids:
        whole = re.compile(rf"{re.escape(wanted)}(?!\d)")  # the first is not the tenth
        line = next((x for x in lines if whole.search(x)), "")
        if line:
            found[wanted] = excerpt(line.strip())
    return found


async def _backend_trial(site: Site, url: str) -> Phase | Missing:
    """Requests while the backend fails, and what engines other than prefill halves computed."""
    left = site.file.engines("decode", "combined")
    few = range(min(_TRIED, len(site.prompts)))
    return await site.hooks.around(
        "backend_fail", "backend_heal", lambda: site.phase(left, url, few, "trial")
    )


async def stage_c(site: Site, baseline: Baseline) -> tuple[StageC, Figures]:
    """One engine with host memory below it. Raises ConfigError where the file has none."""
    file = site.file
    engine = site.one("c", "combined")
    seen = await site.look_at(engine)
    await site.asker.ask(engine.url, [0], "warm")
    cold = await site.phase([engine], engine.url, range(len(site.prompts)), "c")
    warm = await _warm(site, engine)
    prompts = site.prompts.fresh(len(site.prompts))
    fresh = await load_of(site.prompts, engine.url, site.model, prompts)
    why = await site.settled() or await site.let_go(engine)
    repeated: Report | Missing
    repeated = why or await load_of(site.prompts, engine.url, site.model, prompts)
    facts = StageC(
        engine=seen,
        baseline=baseline,
        cold=cold,
        warm=warm,
        load=repeated,
        shared=await site.watcher.shared_tiers(),
        declared=file.declared,
        samples_min=file.requests.samples_min,
        tpot_worse_max=file.limits.tpot_worse_max,
        bandwidth_min=file.limits.host_bytes_per_s,
    )
    again = warm.replies if isinstance(warm, Phase) else ()
    return facts, figures_of(site, [seen], fresh, again)


async def _warm(site: Site, engine: Engine) -> Phase | Missing:
    why = await site.settled() or await site.let_go(engine)
    return why or await site.phase([engine], engine.url, range(len(site.prompts)), "c")


async def stage_e(
    site: Site, baseline: Baseline, before: Figures, change: str
) -> tuple[StageE, Figures]:
    """The cluster of the stage before with one optimisation more."""
    file = site.file
    halves = file.engines("prefill", "decode")
    engines = halves or [site.one("e", "combined")]
    url = file.gateway[0].url if file.gateway else engines[0].url
    seen = [await site.look_at(engine) for engine in engines]
    await site.asker.ask(url, [0], "warm")
    everything = range(len(site.prompts))
    phase = await site.phase(engines, url, everything, "e")
    again = await site.asker.ask(url, everything, "e")
    load = await load_of(site.prompts, url, site.model, site.prompts.fresh(len(site.prompts)))
    contexts = [s.get("context_tokens", "") for s in before.settings.values()]
    lengths = [int(text) for text in contexts if text.isdecimal()]
    moved = [c.moved for c in phase.engines if isinstance(c.moved, Moved)]
    untold = Missing("the stage before did not measure it")
    facts = StageE(
        change=change,
        engines=tuple(seen),
        before=before.settings,
        baseline=baseline,
        load_before=before.load or untold,
        load=load,
        first=phase.replies,
        again=again,
        hits_before=untold if before.hit_share is None else before.hit_share,
        moved=Moved(
            transfers=sum(m.transfers for m in moved), failures=sum(m.failures for m in moved)
        )
        if moved
        else Missing("no half counts transfers"),
        moves=bool(halves),
        long=await site.asker.ask_long(url, max(lengths))
        if lengths and change == "context"
        else untold,
        declared=file.declared,
        samples_min=file.requests.samples_min,
        worse_max=file.limits.worse_max,
        same_min=file.limits.same_min,
    )
    return facts, figures_of(site, seen, load, again)
