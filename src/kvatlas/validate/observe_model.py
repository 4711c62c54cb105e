"""Observed traffic among modelled engines: as it really was routed, and as kvatlas would have.

Both runs are the simulator's, with the same engines, arrivals and prompts; only the choice of the
engine differs. The engines' pace is fitted to measured times of the first part of the recording.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import msgspec

from kvatlas.core.dispatch import Again, Dispatcher, Input, Question
from kvatlas.core.router import Decision, Policy
from kvatlas.errors import ConfigError
from kvatlas.report.latency import percentile
from kvatlas.service.observe_record import Row
from kvatlas.sim.cluster import Cluster
from kvatlas.sim.flights import Inquiry, Outcome
from kvatlas.sim.world import Play, World
from kvatlas.validate.fit import Parameters, Prior, fit
from kvatlas.workload.pace import Pace, paced
from kvatlas.workload.trace import Trace, TraceRequest

FIT_MAX = 500  # requests
_FIT_ROUNDS = 4

#: Factors on the engines' times (`workload.pace`), and what lies outside of the engines: network,
#: HTTP, tokens.
PRIORS = {
    "compute": Prior(1.0, 0.7, 0.02, 50.0),
    "memory": Prior(1.0, 0.7, 0.02, 50.0),
    "step": Prior(1.0, 0.7, 0.02, 50.0),
    "outside_s": Prior(0.005, 1.5, 1e-5, 1.0),
}


class AsItWas(Dispatcher):
    """Another dispatcher, all its books included, that asks first whoever served it in reality.

    ``engines``: request → engine; requests that are not in it go where the policy says.
    """

    def __init__(self, of: Dispatcher, engines: Mapping[str, str]) -> None:
        self.__dict__ = of.__dict__
        self.engines = engines

    def handle(self, event: Input, now: float) -> Decision | None:
        """As the other, with the plans of a question in that order."""
        answer = super().handle(event, now)
        if not isinstance(event, Question) or answer is None:
            return answer
        wanted = self.engines.get(event.id)
        plans = list(answer.plans)
        while wanted is not None and all(p.publisher.worker != wanted for p in plans):
            more = super().handle(Again(event.id), now) if self.left(event.id) else None
            if more is None or not more.plans:
                return answer
            plans += more.plans
        plans.sort(key=lambda plan: plan.publisher.worker != wanted)
        return msgspec.structs.replace(answer, plans=tuple(plans))


class _Watch:
    def __init__(self) -> None:
        self.outcomes: dict[int, Outcome] = {}

    def decided(self, inquiry: Inquiry, decision: Decision) -> None:
        """Nothing to note."""

    def waited(self, gaps_s: Sequence[float], count: int) -> None:
        """Nothing to note."""

    def ended(self, outcome: Outcome) -> None:
        self.outcomes[int(outcome.id)] = outcome


def trace_of(name: str, rows: Sequence[Row], block_tokens: int) -> Trace:
    """The requests of a recording, the first at 0 s."""
    start = rows[0].timestamp if rows else 0.0
    requests = [
        TraceRequest(
            index,
            (row.timestamp - start) / 1000,
            row.input_length,
            row.output_length,
            row.hash_ids,
            scope=row.scope,
        )
        for index, row in enumerate(rows)
    ]
    return Trace(name, "observed", block_tokens, lambda: iter(requests))


def play(
    cluster: Cluster,
    trace: Trace,
    *,
    policy: Policy,
    engines: Mapping[str, str] | None = None,
    limit: int | None = None,
    seed: int = 0,
    on_end: Callable[[], None] = lambda: None,
) -> dict[int, Outcome]:
    """How each request went, by its index; ``engines`` as `AsItWas`. Raises ConfigError for an
    engine that cannot work."""
    watch = _Watch()
    router = msgspec.structs.replace(cluster.router, policy=policy)
    world = World(
        msgspec.structs.replace(cluster, router=router), seed=seed, gateway_watchers=[watch]
    )
    if engines is not None:
        world.gateway.dispatcher = AsItWas(world.dispatcher, engines)
    world.play(trace, Play(limit=limit), on_end=on_end)
    return watch.outcomes


def at_pace(cluster: Cluster, parameters: Parameters) -> Cluster:
    """The same with engines whose steps take that much longer."""
    compute = parameters["compute"]
    pace = Pace(compute, compute, parameters["memory"], parameters["step"])
    members = tuple(
        msgspec.structs.replace(member, spec=paced(member.spec, pace)) for member in cluster.members
    )
    return msgspec.structs.replace(cluster, members=members)


def calibrated(
    cluster: Cluster,
    trace: Trace,
    rows: Sequence[Row],
    first: int,
    run: Callable[[Cluster, int], dict[int, Outcome]],
) -> dict[str, float]:
    """`PRIORS`, moved to where the model's times are closest to the measured ones of ``rows`` from
    ``first`` on, which are the trace's first. ``run(cluster, limit)`` models what was real."""
    watched = [i for i in range(first, len(rows)) if measured(rows[i])]
    groups = _groups(rows, watched)
    real = [_shape([rows[i].observed.ttft_s for i in group]) for group in groups]
    slow = [i for i in watched if tpot_s(rows[i]) is not None]
    real_tpot = [_mean([tpot_s(rows[i]) or 0.0 for i in slow])]

    def residuals(parameters: Parameters) -> list[float]:
        found = run(at_pace(cluster, parameters), len(rows))
        outside_s = parameters["outside_s"]
        modelled = [_shape([found[i].ttft_s + outside_s for i in group]) for group in groups]
        out = [
            math.log(max(a, 1e-9) / max(b, 1e-9)) / 0.05
            for one, other in zip(modelled, real, strict=True)
            for a, b in zip(one, other, strict=True)
        ]
        tpots = [t for i in slow if (t := _modelled_tpot_s(found[i])) is not None]
        if tpots and real_tpot[0] > 0:
            out.append(math.log(max(_mean(tpots), 1e-9) / real_tpot[0]) / 0.05)
        else:
            out.append(0.0)
        return out

    return fit(residuals, PRIORS, rounds=_FIT_ROUNDS, step=0.08).parameters


def measured(row: Row) -> bool:
    """Whether its time to first token was seen, and its answer to its end."""
    return row.observed.ttft_s > 0 and row.observed.whole


def tpot_s(row: Row) -> float | None:
    """Measured seconds per output token after the first."""
    seen = row.observed
    if row.output_length < 2 or seen.ttft_s < 0 or seen.e2e_s <= seen.ttft_s:
        return None
    return (seen.e2e_s - seen.ttft_s) / (row.output_length - 1)


def placed(rows: Sequence[Row], cluster: Cluster) -> tuple[dict[str, str], float]:
    """Request → engine of the cluster, as far as the recording tells, and of which share of whole
    answers it does.

    Engines have the recording's names, or are taken in the order of their names; where there is
    one, nothing needs to tell. Raises ConfigError where their numbers do not fit.
    """
    names = sorted({row.observed.engine for row in rows if row.observed.engine})
    members = [member.name for member in cluster.members]
    if len(members) == 1 and len(names) <= 1:
        return {str(index): members[0] for index in range(len(rows))}, 1.0
    if set(names) <= set(members):
        known = {name: name for name in names}
    elif len(names) == len(members):
        known = dict(zip(names, members, strict=True))
    else:
        raise ConfigError(
            f"the recording tells of {len(names)} engines ({', '.join(names[:8])}), the cluster "
            f"has {len(members)}: describe as many in it"
        )
    found = {
        str(index): known[row.observed.engine]
        for index, row in enumerate(rows)
        if row.observed.engine
    }
    whole = [row for row in rows if row.observed.whole]
    return found, sum(1 for row in whole if row.observed.engine) / max(1, len(whole))


def _groups(rows: Sequence[Row], watched: Sequence[int]) -> list[list[int]]:
    """All of them, and thirds by the tokens to be computed: what a constant adds and what each
    token costs are told apart by those."""
    ordered = sorted(
        watched, key=lambda i: rows[i].input_length - max(0, rows[i].observed.cached_tokens)
    )
    third = -(-len(ordered) // 3) or 1
    thirds = [ordered[i : i + third] for i in range(0, len(ordered), third)]
    return [list(watched), *[group for group in thirds if group]]


def _shape(values: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    return _mean(ordered), percentile(ordered, 50), percentile(ordered, 90)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _modelled_tpot_s(outcome: Outcome) -> float | None:
    if outcome.output_tokens < 2 or outcome.fault:
        return None
    e2e_s = outcome.ended_at - outcome.arrived_at
    return (e2e_s - outcome.ttft_s) / (outcome.output_tokens - 1)
