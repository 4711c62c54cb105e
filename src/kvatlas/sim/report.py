"""What a run amounted to: latencies as users felt them, tokens by where they came from, loads.

`Recorder` watches gateway and engines. It keeps one number per request and metric, and a histogram
of the single gaps between tokens, so that memory hardly follows the length of a trace.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from kvatlas.core.ahead_copies import Tally, Why
from kvatlas.core.events import Batch, BlockRemoved, BlockStored
from kvatlas.core.records import Tier
from kvatlas.core.router import Decision
from kvatlas.report.latency import Report, Slo, Summary, Timing, summarise
from kvatlas.sim.engines import SimEngine
from kvatlas.sim.flights import Inquiry, Outcome
from kvatlas.sim.pairs import PairCounts
from kvatlas.sim.tier_units import AgentUse
from kvatlas.workload.protocol import Admitted, Arrive
from kvatlas.workload.step_time import StepTime

_STEP = 1.005  # buckets of gaps are half a percent wide
_LOG_STEP = math.log(_STEP)


class Gaps:
    """A histogram of durations: percentiles to a quarter of a percent, in memory that is bounded
    by their range."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.count = 0
        self.total_s = 0.0
        self.max_s = 0.0

    def add(self, gap_s: float, count: int = 1) -> None:
        """``count`` equal gaps."""
        self._counts[round(math.log(gap_s) / _LOG_STEP) if gap_s > 1e-9 else -1 << 20] += count
        self.count += count
        self.total_s += gap_s * count
        self.max_s = max(self.max_s, gap_s)

    def add_run(self, gaps_s: Sequence[float], count: int) -> None:
        """``count`` times these gaps. Those that fall into one bucket anyway are put there at once:
        the steps of a leap differ by little."""
        if not gaps_s:
            return
        least, most = min(gaps_s), max(gaps_s)
        if most <= least * _STEP:
            mean_s = min(sum(gaps_s) / len(gaps_s), most)  # rounding: equal ones add up to more
            self.add(mean_s, len(gaps_s) * count)
            self.max_s = max(self.max_s, most)
            return
        for gap_s in gaps_s:
            self.add(gap_s, count)

    def percentile(self, percent: float) -> float:
        """The middle of the bucket in which that rank lies. Raises ValueError when empty."""
        if not self.count:
            raise ValueError("a percentile of nothing")
        rank = (self.count - 1) * percent / 100
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen > rank:
                return min(0.0 if bucket == -1 << 20 else _STEP**bucket, self.max_s)
        return self.max_s

    def summary(self) -> Summary:
        """As `report.latency.summarise`."""
        if not self.count:
            return Summary(0, None, None, None, None, None)
        p50, p95, p99 = (self.percentile(p) for p in (50, 95, 99))
        return Summary(self.count, self.total_s / self.count, p50, p95, p99, self.max_s)


class TokenUse(msgspec.Struct, frozen=True):
    """Where all prompt tokens of the run came from; the parts add up to ``prompt``.

    ``hits``: resumed, by the tier that held them; ``recomputed``: computed by the engine that
    answered; ``unserved``: of requests that failed before an engine said what it resumed.
    ``hit_requests`` resumed at all; ``good``: prompt and output tokens of requests that met the
    objectives.
    """

    prompt: int
    hits: dict[str, int]
    recomputed: int
    unserved: int
    output: int
    hit_requests: int
    good: int

    @property
    def hit_share(self) -> float:
        """Resumed tokens, of all tiers, per prompt token."""
        return sum(self.hits.values()) / self.prompt if self.prompt else 0.0


class SecondsUse(msgspec.Struct, frozen=True):
    """Engine seconds, summed over answered requests, each taken alone in a step of its own:
    ``reused`` were saved by resumed tokens, ``recomputed`` spent on the others. ``waited``: from
    arrival at the engine to admission."""

    reused_s: float
    recomputed_s: float
    waited_s: float


class EngineLoad(msgspec.Struct, frozen=True):
    """One engine over the run. ``busy`` is the share of the time with work in hand; stored and
    evicted blocks are those that it announced, groups counted apart."""

    name: str
    role: str
    requests: int
    prompt_tokens: int
    hit_tokens: int
    output_tokens: int
    preemptions: int
    stored_blocks: int
    evicted_blocks: int
    busy: float


class LinkUse(msgspec.Struct, frozen=True):
    """One link over the run: bytes moved, seconds in which something was on its way, and what it
    carries in a second."""

    moved_bytes: float
    busy_s: float
    bytes_per_s: float


class SimReport(msgspec.Struct, frozen=True):
    """The whole result; equal runs give equal reports, byte by byte."""

    trace: str
    seed: int
    policy: str
    devices: int
    latency: Report
    tokens: TokenUse
    seconds: SecondsUse
    preemptions: int
    evicted_blocks: int
    engines: tuple[EngineLoad, ...]
    links: dict[str, LinkUse]
    pairs: PairCounts
    agents: dict[str, AgentUse]
    fallbacks: dict[str, int]
    faults: dict[str, int]
    retries: int
    ahead: dict[Why, Tally] = {}


class _Resumed(msgspec.Struct, frozen=True):
    """Tokens that one engine did not compute; how many of them came by a load, and, where that
    was from tiers, from which."""

    cached: int
    loaded: int
    below: dict[Tier, int]


class _EngineCounts:
    def __init__(self) -> None:
        self.requests = self.prompt = self.hits = self.output = self.stored = self.evicted = 0


class Recorder:
    """Implements `GatewayWatcher` and `EngineWatcher`. ``export`` gets each `Outcome`."""

    def __init__(
        self,
        *,
        slo: Slo | None = None,
        export: Callable[[Outcome], None] | None = None,
    ) -> None:
        self._slo = slo or Slo()
        self._export = export
        self._ttft_s, self._tpot_s, self._e2e_s = array("d"), array("d"), array("d")
        self._gaps = Gaps()
        self._good = self._failed = self._retries = self._resumed = 0
        self._prompt = self._recomputed = self._unserved = self._output = self._good_tokens = 0
        self._hits = [0] * len(Tier)
        self._reused_s = self._recomputed_s = self._waited_s = 0.0
        self._faults: Counter[str] = Counter()
        self._first_at = math.inf
        self._last_at = 0.0
        # request → engine → what it resumed there, until the request ended
        self._admitted: dict[str, dict[str, _Resumed]] = {}
        self._engines: dict[str, _EngineCounts] = {}
        self._fallbacks: Counter[str] = Counter()
        self._times: dict[str, StepTime] = {}

    # -- watching -------------------------------------------------------------------------------

    def decided(self, inquiry: Inquiry, decision: Decision) -> None:
        """Nothing to note."""

    def waited(self, gaps_s: Sequence[float], count: int) -> None:
        self._gaps.add_run(gaps_s, count)

    def admitted(
        self, engine: SimEngine, arrive: Arrive, admitted: Admitted, waited_s: float
    ) -> None:
        known = self._admitted.setdefault(arrive.id, {})
        if engine.name not in known:  # else again, after a preemption
            side, below = engine.outside, dict[Tier, int]()
            if admitted.loaded_tokens and side is not None:
                below = side.loaded_from(arrive.id)
            known[engine.name] = _Resumed(admitted.cached_tokens, admitted.loaded_tokens, below)
            if engine.name not in self._times:
                self._times[engine.name] = StepTime(engine.spec, engine.layout)
            self._waited_s += waited_s

    def published(self, engine: SimEngine, batch: Batch) -> None:
        counts, events = self._of(engine.name), batch.events
        counts.evicted += sum([len(e.hashes) for e in events if isinstance(e, BlockRemoved)])
        counts.stored += sum([len(e.hashes) for e in events if isinstance(e, BlockStored)])

    def ended(self, outcome: Outcome) -> None:
        self._first_at = min(self._first_at, outcome.arrived_at)
        self._last_at = max(self._last_at, outcome.ended_at)
        self._prompt += outcome.prompt_tokens
        self._output += outcome.output_tokens
        wanted = 2 if outcome.prefilled_by else 1  # the halves of a pair are no retry
        self._retries += max(0, len(outcome.tried) - wanted)
        admitted = self._admitted.pop(outcome.id, {})
        if outcome.fallback:
            self._fallbacks[outcome.fallback] += 1
        if outcome.fault:
            self._failed += 1
            self._faults[outcome.fault] += 1
            self._unserved += outcome.prompt_tokens
        else:
            self._served(outcome, admitted)
        if self._export is not None:
            self._export(outcome)

    def _served(self, outcome: Outcome, admitted: dict[str, _Resumed]) -> None:
        e2e_s = outcome.ended_at - outcome.arrived_at
        timing = Timing(outcome.ttft_s, e2e_s, outcome.output_tokens)
        self._ttft_s.append(outcome.ttft_s)
        self._e2e_s.append(e2e_s)
        if (tpot_s := timing.tpot_s) is not None:
            self._tpot_s.append(tpot_s)
        if self._slo.met(timing):
            self._good += 1
            self._good_tokens += outcome.prompt_tokens + outcome.output_tokens
        prompt, last = outcome.prompt_tokens, outcome.tried[-1]
        resumed = admitted[last]
        counts = self._of(last)
        counts.output += outcome.output_tokens
        # Where a pair shared the work, the prefill half decides what was reused.
        handed_over = resumed.loaded and not resumed.below
        name = (outcome.prefilled_by if handed_over else "") or last
        if name != last:
            resumed = admitted[name]
            self._of(name).requests += 1
        cached, below = resumed.cached, resumed.below
        counts.requests += 1
        counts = self._of(name)
        counts.prompt += prompt
        counts.hits += cached
        for tier, tokens in below.items():
            self._hits[tier] += tokens
        self._hits[Tier.HBM] += cached - sum(below.values())
        self._resumed += cached > 0
        self._recomputed += prompt - cached
        time = self._times[name]
        rest_s = time.seconds([(cached, prompt)])
        self._recomputed_s += rest_s
        self._reused_s += time.seconds([(0, prompt)]) - rest_s if cached else 0.0

    def _of(self, name: str) -> _EngineCounts:
        found = self._engines.get(name)
        if found is None:
            found = self._engines[name] = _EngineCounts()
        return found

    # -- the result -----------------------------------------------------------------------------

    def latency(self) -> Report:
        """As users felt it."""
        answered = len(self._e2e_s)
        requests = answered + self._failed
        duration_s = self._last_at - self._first_at if requests else 0.0
        per_s = 1 / duration_s if duration_s > 0 else 0.0
        return Report(
            requests=requests,
            failed=self._failed,
            duration_s=duration_s,
            ttft_s=summarise(self._ttft_s),
            tpot_s=summarise(self._tpot_s),
            itl_s=self._gaps.summary(),
            e2e_s=summarise(self._e2e_s),
            slo=self._slo,
            attained=self._good / requests if requests else 0.0,
            goodput_per_s=self._good * per_s,
            requests_per_s=answered * per_s,
            output_tokens_per_s=self._output * per_s,
        )

    def token_use(self) -> TokenUse:
        """Where the prompt tokens came from."""
        hits = {tier.name.lower(): self._hits[tier] for tier in Tier}
        return TokenUse(
            self._prompt,
            hits,
            self._recomputed,
            self._unserved,
            self._output,
            self._resumed,
            self._good_tokens,
        )

    def seconds_use(self) -> SecondsUse:
        """What they cost or saved."""
        return SecondsUse(self._reused_s, self._recomputed_s, self._waited_s)

    def engine_loads(self, engines: Sequence[SimEngine], duration_s: float) -> list[EngineLoad]:
        """One record per engine, in the given order."""
        loads = []
        for engine in engines:
            counts = self._of(engine.name)
            loads.append(
                EngineLoad(
                    name=engine.name,
                    role=engine.role,
                    requests=counts.requests,
                    prompt_tokens=counts.prompt,
                    hit_tokens=counts.hits,
                    output_tokens=counts.output,
                    preemptions=engine.preemptions,
                    stored_blocks=counts.stored,
                    evicted_blocks=counts.evicted,
                    busy=engine.busy_s / duration_s if duration_s > 0 else 0.0,
                )
            )
        return loads

    @property
    def fallbacks(self) -> dict[str, int]:
        """Pairs that were given up for one engine, by reason."""
        return dict(self._fallbacks.most_common())

    @property
    def faults(self) -> dict[str, int]:
        """Failed requests by reason, the most frequent first."""
        return dict(self._faults.most_common())

    @property
    def retries(self) -> int:
        """How often a request was sent to another engine."""
        return self._retries
