"""Facts of stage D: a store that two nodes share, used, filled and broken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from kvatlas.errors import ConfigError
from kvatlas.report.latency import Report
from kvatlas.validate.stages.asking import load_of, sampled
from kvatlas.validate.stages.facts import (
    Baseline,
    Figures,
    Outage,
    Phase,
    StageD,
    StoreSample,
)
from kvatlas.validate.stages.gather import figures_of
from kvatlas.validate.stages.rules import external
from kvatlas.validate.stages.site import Site
from kvatlas.validate.stages.stagefile import Engine
from kvatlas.validate.stages.values import Missing

_TRIED = 4
_AFTER_TTL_S = 1.0
_AGAIN_S = 0.5


class Trials:
    """What is tried, one after the other: what destroys comes last."""

    def __init__(self, site: Site, writer: Engine, reader: Engine) -> None:
        self.site = site
        self.writer = writer
        self.reader = reader
        self.few = range(min(_TRIED, len(site.prompts)))
        self.others = range(len(self.few), min(2 * len(self.few), len(site.prompts)))
        self._attempt = 0

    async def written(self, indices: range, salt: str) -> Missing | None:
        """The writer computes them, and they are saved; why not, else None."""
        replies = await self.site.asker.ask(self.writer.url, indices, salt)
        bad = [r for r in replies if r.status != 200]
        if bad:
            return Missing(f"{self.writer.name} did not answer: {bad[0].error or bad[0].status}")
        return await self.site.settled()

    async def read(self, indices: range, salt: str, engine: Engine | None = None) -> Phase:
        """The reader is asked for them."""
        engine = engine or self.reader
        return await self.site.phase([engine], engine.url, indices, salt)

    async def pair(self, indices: range, salt: str) -> Phase | Missing:
        """Written by one, read by the other."""
        return await self.written(indices, salt) or await self.read(indices, salt)

    async def stranger(self) -> Phase | Missing:
        """An engine that computes differently asks for what is in the store."""
        found = self.site.file.engines("stranger")
        if not found:
            return Missing("no engine of another fingerprint is named (role = stranger)")
        return await self.read(self.few, "d", found[0])

    async def ttl_after(self, written_s: float) -> Phase | Missing:
        """Others of the same time, once that is over."""
        ttl_s = self.site.file.store.ttl_s
        if not ttl_s:
            return Missing("store.ttl_s is 0: no end of life is declared")
        if not self.others:
            return Missing(f"{len(self.few)} prompts are too few: the reader has seen them all")
        await asyncio.sleep(max(0.0, written_s + ttl_s + _AFTER_TTL_S - time.monotonic()))
        return await self.read(self.others, "ttl")

    async def index(self) -> Outage | Missing:
        """One gateway is away; the others serve, and it foresees hits again when it is back."""
        gateways = [gateway.url for gateway in self.site.file.gateway]
        if not gateways:
            return Missing("no [[gateway]] is named: nothing has a global index")

        async def back() -> tuple[Phase, int | Missing]:
            found = await self.site.phase([], gateways[0], self.few, "d")
            told = [r.expected_tokens for r in found.replies if r.expected_tokens is not None]
            if not told:
                return found, Missing("the gateway does not say what it foresees")
            return found, sum(told)

        return await self._away(
            "index_stop",
            "index_start",
            lambda: self.site.phase([], gateways[-1], self.few, "index"),
            back,
        )

    async def node(self) -> Outage | Missing:
        """The reader's agent is away."""
        return await self._away(
            "node_stop", "node_start", lambda: self.read(self.few, "node"), self._hits
        )

    async def store(self, away: str, back: str) -> Outage | Missing:
        """The store is away, while the reader asks for what only it has."""
        salt = f"only-{away}"
        why = await self.written(self.few, salt)
        return why or await self._away(away, back, lambda: self.read(self.few, salt), self._hits)

    async def _hits(self) -> tuple[Phase, int | Missing]:
        """Something new goes through the store."""
        self._attempt += 1
        found = await self.pair(self.few, f"again-{self._attempt}")
        if isinstance(found, Missing):
            return Phase(), found
        return found, external(found, self.reader.name)

    async def _away(
        self,
        away: str,
        back: str,
        during: Callable[[], Awaitable[Phase]],
        after: Callable[[], Awaitable[tuple[Phase, int | Missing]]],
    ) -> Outage | Missing:
        """Parts that are back need a moment: it is tried until there are hits, or settle_s."""
        hooks, settle_s = self.site.hooks, self.site.file.requests.settle_s
        if back not in hooks:
            return Missing(f"no hook {back} in the stage file")
        seen = await hooks.around(away, back, during)
        if isinstance(seen, Missing):
            return seen
        until = time.monotonic() + settle_s
        phase, hits = await after()
        while not (isinstance(hits, int) and hits) and time.monotonic() < until:
            await asyncio.sleep(_AGAIN_S)
            phase, hits = await after()
        return Outage(seen, phase, hits)

    async def dirty(self) -> Phase | Missing:
        """What is in the store is damaged before the reader asks for it."""
        why = await self.written(self.few, "dirty") or await self.site.hooks.run("store_damage")
        return why or await self.read(self.few, "dirty")

    async def filled(
        self,
    ) -> tuple[
        Report | Missing, tuple[StoreSample, ...] | Missing, tuple[StoreSample, ...] | Missing
    ]:
        """More prompts than the store and host memory hold; both are looked at meanwhile."""
        site, count = self.site, self.site.file.store.fill_prompts
        agent = site.agent_of(self.writer)
        why = Missing("store.fill_prompts is 0: it is not said how many prompts fill it")
        if not count:
            return why, why, why
        if agent is None:
            none = Missing(f"{self.writer.name} has no agent")
            return none, none, none
        async with (
            sampled(site.watcher.store) as store,
            sampled(lambda: site.watcher.dram(agent)) as dram,
        ):
            load = await load_of(
                site.prompts, self.writer.url, site.model, site.prompts.fresh(count)
            )
            await site.settled()
        return load, _samples(store), _samples(dram)

    async def full(self) -> Phase | Missing:
        """The store takes nothing more, and engines have something to save."""
        hooks = self.site.hooks
        if "store_empty" not in hooks:
            return Missing("no hook store_empty in the stage file")
        return await hooks.around(
            "store_full", "store_empty", lambda: self.read(self.few, "full", self.writer)
        )


def _samples(seen: list[StoreSample | Missing]) -> tuple[StoreSample, ...] | Missing:
    """All, with evictions counted from the first on; or why one is missing."""
    missing = [s for s in seen if isinstance(s, Missing)]
    found = [s for s in seen if isinstance(s, StoreSample)]
    if missing or not found:
        return missing[0] if missing else Missing("nobody looked")
    first = found[0].evicted
    return tuple(StoreSample(s.used_bytes, s.max_bytes, s.evicted - first) for s in found)


async def stage_d(site: Site, baseline: Baseline) -> tuple[StageD, Figures]:
    """Two combined engines on two nodes. Raises ConfigError where the file has no such."""
    file = site.file
    both = file.engines("combined")
    if len(both) < 2 or both[0].agent == both[1].agent:
        raise ConfigError(
            "stage d needs two [[engine]] with role combined on nodes of their own (agent = …)"
        )
    writer, reader = both[0], both[1]
    seen = [await site.look_at(engine) for engine in (writer, reader)]
    tries = Trials(site, writer, reader)
    for engine in both:
        await site.asker.ask(engine.url, [0], "warm")
    ttl_s = file.store.ttl_s
    why = await tries.written(range(2 * len(tries.few)), "ttl") if ttl_s else None
    written_s = time.monotonic()
    before = why or await tries.read(tries.few, "ttl") if ttl_s else Missing("store.ttl_s is 0")
    across = await tries.pair(range(len(site.prompts)), "d")
    stranger = await tries.stranger()
    why = await tries.written(tries.few, "tenant-1")
    other = why or await tries.read(tries.few, "tenant-2")
    same = why or await tries.read(tries.few, "tenant-1")
    index, node = await tries.index(), await tries.node()
    after = await tries.ttl_after(written_s)
    load = await load_of(
        site.prompts, reader.url, site.model, site.prompts.fresh(len(site.prompts))
    )
    partition = await tries.store("store_partition", "store_heal")
    dirty = await tries.dirty()
    filling, store, dram = await tries.filled()
    full = await tries.full()
    facts = StageD(
        writer=seen[0],
        reader=seen[1],
        baseline=baseline,
        across=across,
        same_tenant=same,
        other_tenant=other,
        stranger=stranger,
        ttl_before=before,
        ttl_after=after,
        eviction=store,
        filling=filling,
        full=full,
        dram=dram,
        index=index,
        node=node,
        outage=await tries.store("store_stop", "store_start"),
        partition=partition,
        dirty=dirty,
        declared=file.declared,
        samples_min=file.requests.samples_min,
        answer_max_s=file.limits.answer_s,
    )
    again = across.replies if isinstance(across, Phase) else ()
    return facts, figures_of(site, seen, load, again)
