"""Rounds of all arms in turn, then the knees: a bench from its first question to its last answer.

ABAB: each round plays every arm once with the same requests, and begins with another arm than the
round before; so what changes slowly on the machines falls on all of them. Before a play: the arm's
command, a few requests that warm up, then empty caches, and that is looked at.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

import msgspec

from kvatlas import __version__
from kvatlas.errors import ConfigError, EngineError
from kvatlas.report.statistics import share_interval
from kvatlas.service import load
from kvatlas.service.http import Headers
from kvatlas.service.http_client import HttpClient, origin_of
from kvatlas.service.load import LoadPlan, LoadResult, run_load
from kvatlas.validate.bench.knee import RATE_MAX, RATE_MIN, STEPS_MAX, Knee, Search, Step
from kvatlas.validate.bench.side import Side, hits_between
from kvatlas.validate.bench.texts import TOKENS_PER_WORD, Prompts
from kvatlas.validate.bench.values import (
    ARMS_MAX,
    REQUESTS_MAX,
    ROUNDS_MAX,
    Arm,
    BenchPlan,
    Clean,
    Endpoint,
    EngineHits,
    KneePlan,
    Outcome,
    Round,
    Row,
)
from kvatlas.validate.bench.workload import Workload, own_rate, time_scale
from kvatlas.validate.counters import Counters
from kvatlas.workload.trace import TraceRequest

STEP_REQUESTS_MIN = 20  # of one rate: a share of fewer says nothing
_LAG_S = 0.05  # a client that is later than this, and than a tenth of the TTFT wanted, is late
_SETTLE_TRIES, _SETTLE_S = 10, 0.2  # counters come a moment after the last answer


class Bench:
    """Whatever happens to `run`, `outcome` and ``rows`` have what was measured until then.

    ``nonce`` makes texts that no run before has sent; ``told`` gets a line per play, ``on_done`` a
    call per request of a round.
    """

    def __init__(
        self,
        plan: BenchPlan,
        arms: Sequence[Arm],
        workload: Workload,
        *,
        headers: Headers | None = None,
        nonce: str,
        told: Callable[[str], None] = lambda text: None,
        on_done: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.rows: list[Row] = []
        self._plan = plan
        self._arms = tuple(arms)
        self._workload = workload
        self._headers = headers or []
        self._nonce = nonce
        self._told = told
        self._on_done = on_done
        self._clock = clock
        self._started = clock()
        self._endpoints: dict[str, Endpoint] = {}
        self._rounds: list[Round] = []
        self._knees: dict[str, Knee] = {}
        self._left: dict[str, str] = {}
        self._tokens_per_word: float | None = None
        self._interrupted = False

    @property
    def outcome(self) -> Outcome:
        """What was found so far."""
        return Outcome(
            workload=self._workload.name,
            plan=self._plan,
            arms=self._arms,
            endpoints=dict(self._endpoints),
            rounds=tuple(self._rounds),
            knees=tuple(self._knees.values()),
            left=dict(self._left),
            notes=tuple(self._notes()),
            interrupted=self._interrupted,
            kvatlas=__version__,
            started_unix_s=self._started,
        )

    async def run(self) -> None:
        """Play it all. Raises EngineError where an arm cannot be played at all, ConfigError where
        the requests cannot be; what goes wrong later is in the outcome."""
        client = HttpClient()
        sides = [
            Side(arm, self._plan, client, headers=self._headers, nonce=self._nonce)
            for arm in self._arms
        ]
        try:
            await self._meet(sides)
            for number in range(self._plan.rounds):
                for position, side in enumerate(_order(sides, number, self._plan.seed)):
                    if side.arm.name not in self._left:
                        await self._round(side, number, position)
            for side in sides:
                if self._plan.knee is not None and side.arm.name not in self._left:
                    await self._search(side, self._plan.knee)
        except asyncio.CancelledError:
            self._interrupted = True
            raise
        finally:
            await client.close()

    async def _meet(self, sides: Sequence[Side]) -> None:
        """Every arm answers once before anything is measured."""
        for side in sides:
            self._told(f"{side.arm.name}: asking {side.arm.target}")
            await side.there("start")
            self._endpoints[side.arm.name] = await side.endpoint()
        known = [e.context_tokens for e in self._endpoints.values() if e.context_tokens]
        if known:
            self._workload.fit(min(known))
        rates = [e.tokens_per_word for e in self._endpoints.values() if e.tokens_per_word]
        self._tokens_per_word = rates[0] if rates else None
        first = self._workload.requests(0, self._plan.requests)
        if self._plan.rate is not None or self._plan.knee is not None:
            time_scale(first, 1.0)  # raises where there is no rate

    # -- rounds -----------------------------------------------------------------------------------

    async def _round(self, side: Side, number: int, position: int) -> None:
        name = side.arm.name
        self._told(f"round {number + 1} of {self._plan.rounds}: {name}")
        requests = self._workload.requests(number, self._plan.requests)
        scale = self._plan.load.time_scale
        if self._plan.rate is not None:
            scale = time_scale(requests, self._plan.rate)
        try:
            await side.there(str(number + 1))
            await self._warm_up(side, number)
            clean = await side.clean()
        except EngineError as error:
            self._left[name] = f"before round {number + 1}: {error}"
            return
        before = await side.counts()
        round = Round(
            arm=name,
            number=number,
            position=position,
            seed=self._workload.seed_of(number),
            started_unix_s=self._clock(),
            clean=clean,
            load=None,
            hits=EngineHits(),
            whole=False,
        )
        self._rounds.append(round)
        play = f"round {number + 1}"
        result = await self._play(side, requests, side.load(time_scale=scale), play, clean)
        hits = await self._hits(side, before, result)
        self._rounds[-1] = msgspec.structs.replace(round, load=result, hits=hits, whole=True)
        if not result.latency.requests - result.latency.failed:
            kind, text = next(iter(result.error_examples.items()))
            self._left[name] = f"in round {number + 1}: no request was answered: {kind}: {text}"

    async def _warm_up(self, side: Side, number: int) -> None:
        if not self._plan.warm_up:
            return
        requests = self._workload.warm_up(self._plan.warm_up)
        prompts = self._prompts(requests, f"{self._nonce}-warm-{number}")
        plan = side.load(time_scale=0.0, closed_loop=False)
        result = await run_load(plan, requests, prompt_of=prompts, headers=self._headers)
        if len(requests) == result.latency.failed:
            kind, text = next(iter(result.error_examples.items()))
            raise EngineError(f"no request of the warm-up was answered: {kind}: {text}")

    async def _play(
        self,
        side: Side,
        requests: Sequence[TraceRequest],
        plan: LoadPlan,
        play: str,
        clean: Clean,
    ) -> LoadResult:
        name = side.arm.name
        tag = "" if clean.how == "reset" else f"{self._nonce}-{play}-{name}"
        return await run_load(
            plan,
            requests,
            prompt_of=self._prompts(requests, tag),
            headers=self._headers,
            on_done=self._on_done,
            on_record=lambda record: self.rows.append(Row(name, play, record)),
        )

    def _prompts(self, requests: Sequence[TraceRequest], tag: str) -> Prompts:
        return Prompts(
            requests,
            form=self._plan.form,
            block_tokens=self._workload.block_tokens,
            tokens_per_word=self._tokens_per_word or TOKENS_PER_WORD,
            vocab_size=self._plan.load.vocab_size,
            tag=tag,
        )

    async def _hits(
        self, side: Side, before: dict[str, Counters | str], result: LoadResult
    ) -> EngineHits:
        told = result.hits.prompt_tokens or None
        whole = not result.latency.failed
        for left in reversed(range(_SETTLE_TRIES)):
            found = hits_between(before, await side.counts(), told=told, whole=whole)
            counted = found.prompt_tokens
            if counted is None or told is None or counted >= told or not left:
                return found
            await asyncio.sleep(_SETTLE_S)
        raise AssertionError

    # -- knees ------------------------------------------------------------------------------------

    async def _search(self, side: Side, knee: KneePlan) -> None:
        name = side.arm.name
        first = self._plan.rate or own_rate(self._workload.requests(0, self._plan.requests))
        assert first is not None
        search = Search(first, tolerance=knee.tolerance, steps_max=knee.steps_max)
        steps: list[Step] = []
        self._knees[name] = Knee(name, "stopped", None, None, (), "interrupted")
        reason = ""
        try:
            await side.there("knee")
            while (rate := search.next_rate()) is not None:
                step, reason = await self._step(side, knee, rate)
                steps.append(step)
                search.told(rate, step.held)
                if reason:
                    search.stop()
                # Whatever ends the run now, these steps are kept.
                partial = (search.holds, search.misses, tuple(steps))
                self._knees[name] = Knee(name, "stopped", *partial, "interrupted")
        except EngineError as error:
            search.stop()
            reason = str(error)
            self._left[name] = f"while its knee was searched: {error}"
        self._knees[name] = Knee(
            name, search.ending, search.holds, search.misses, tuple(steps), reason
        )

    async def _step(self, side: Side, knee: KneePlan, rate: float) -> tuple[Step, str]:
        """One play at ``rate``, and why the search cannot go on from it ("" where it can)."""
        count = max(STEP_REQUESTS_MIN, math.ceil(rate * knee.step_s))
        self._told(f"knee of {side.arm.name}: {count} requests at {rate:.3g} per second")
        requests = self._workload.requests(0, count)
        clean = await side.clean()
        plan = side.load(time_scale=time_scale(requests, rate))
        result = await self._play(side, requests, plan, f"rate {rate:.4g}", clean)
        latency = result.latency
        good = round(latency.attained * latency.requests)
        low, high = share_interval(good, latency.requests)
        held = latency.attained >= knee.share
        step = Step(
            rate,
            latency.requests,
            latency.failed,
            latency.duration_s,
            latency.attained,
            low,
            high,
            held,
            latency.goodput_per_s,
            latency.ttft_s.p95,
            latency.tpot_s.p95,
        )
        lag_s, limit_s = result.start_lag_s.p99 or 0.0, plan.slo.ttft_s or 0.0
        if not held and lag_s > max(_LAG_S, limit_s / 10):
            return step, (
                f"at {rate:.3g} requests per second this client itself was {lag_s:.3f} s late "
                "(p99): what it measured there is not the endpoint's"
            )
        return step, ""

    # -- what a reader must know ------------------------------------------------------------------

    def _notes(self) -> list[str]:
        notes = []
        if self._endpoints and self._tokens_per_word is None and self._plan.form != "ids":
            notes.append(
                "No endpoint tells how many tokens a prompt has: lengths assume "
                f"{TOKENS_PER_WORD} tokens a word."
            )
        for name, end in self._endpoints.items():
            if not end.ignore_eos:
                notes.append(f"{name}: refuses ignore_eos, so answers end where the model ends.")
        models = {end.model for end in self._endpoints.values()}
        if len(models) > 1:
            notes.append(f"The arms serve models of different names: {', '.join(sorted(models))}.")
        left_out = sum(self._workload.left_out.values())
        if left_out:
            notes.append(f"{left_out} requests exceed the context and were left out.")
        if self._workload.repeated:
            notes.append("The trace has fewer requests than all rounds: its windows repeat.")
        if any(r.hits.hit_tokens is None and r.hits.local_tokens for r in self._rounds):
            notes.append(
                "Hit tokens are those on the engines' devices: they do not tell of any others."
            )
        new = sorted({r.arm for r in self._rounds if r.clean.how == "new text"})
        if new:
            notes.append(
                f"{', '.join(new)}: caches could not be emptied between plays, so each play had "
                "text of its own. Arms then do not get the same words."
            )
        return notes


def _order(sides: Sequence[Side], number: int, seed: int) -> list[Side]:
    """Round by round another arm begins."""
    start = (number + seed) % len(sides)
    return [*sides[start:], *sides[:start]]


def check(plan: BenchPlan, arms: Sequence[Arm]) -> None:
    """Raises ConfigError for a bench that cannot be, before anything is sent."""
    slo, knee = plan.load.slo, plan.knee or KneePlan()
    for option, value, low, high in (
        ("--rounds", plan.rounds, 1, ROUNDS_MAX),
        ("--requests", plan.requests, 1, REQUESTS_MAX),
        ("--warm-up", plan.warm_up, 0, REQUESTS_MAX),
        ("--rate", plan.rate or RATE_MIN, RATE_MIN, RATE_MAX),
        ("--ready-s", plan.ready_s, 0, 86_400),
        ("--knee-share", knee.share, 0.01, 1),
        ("--knee-tolerance", knee.tolerance, 0.001, 1),
        ("--knee-steps", knee.steps_max, 1, STEPS_MAX),
        ("--knee-step-s", knee.step_s, 0.1, 3600),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{option} {value:g}: {low:g} to {high:g} is possible")
    if plan.rate is not None and not plan.rate > 0:
        raise ConfigError(f"--rate {plan.rate:g}: more than 0 is needed")
    if plan.knee is not None and slo.ttft_s is None and slo.tpot_s is None:
        raise ConfigError("--knee needs --slo-ttft-s or --slo-tpot-s: what shall hold?")
    if not 1 <= len(arms) <= ARMS_MAX:
        raise ConfigError(f"{len(arms)} arms: 1 to {ARMS_MAX} are possible")
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise ConfigError(f"two arms of one name: {', '.join(names)}")
    targets = [arm.target for arm in arms]
    for arm in arms:
        load.check(msgspec.structs.replace(plan.load, target=arm.target))
        for url in (arm.target, *arm.engines):
            try:
                origin_of(url)
            except ValueError as error:
                raise ConfigError(f"arm {arm.name}: {error}") from error
        if targets.count(arm.target) > 1 and not arm.before:
            raise ConfigError(
                f"arm {arm.name}: {arm.target} is the target of another arm too: a command "
                f"(--before {arm.name}=COMMAND) must make the difference"
            )
