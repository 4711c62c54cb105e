"""What rules of several stages share: answers, samples and runs compared. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvatlas.report.latency import Report, Summary
from kvatlas.validate.stages.facts import AgentSeen, Baseline, EngineSeen, Phase, Reply
from kvatlas.validate.stages.values import (
    Finding,
    Missing,
    excerpt,
    failed,
    hidden,
    passed,
)

#: What later stages must leave as stage A found it.
FROZEN = (
    "model_digest",
    "runtime",
    "image",
    "tensor_parallel",
    "context_tokens",
    "weights_dtype",
    "kv_dtype",
    "graphs",
    "speculation",
)
#: How unlikely an order of two figures must be by chance alone.
CHANCE_MAX = 0.05


def right(replies: Sequence[Reply], answers: Sequence[str], *, samples_min: int) -> Finding:
    """Whether each reply says what the baseline's answer to that prompt says."""
    if not replies:
        return hidden("no request was sent")
    bad = [r for r in replies if r.status != 200]
    if bad:
        first = bad[0]
        return failed(
            f"{len(bad)} of {len(replies)} requests got no answer",
            request=first.request_id,
            status=first.status,
            error=excerpt(first.error),
        )
    wrong = [r for r in replies if r.words != answers[r.prompt]]
    if wrong:
        first = wrong[0]
        return failed(
            f"{len(wrong)} of {len(replies)} answers differ from the baseline's",
            request=first.request_id,
            prompt=first.prompt,
            expected=excerpt(answers[first.prompt]),
            answered=excerpt(first.words),
        )
    if not any(r.words for r in replies):
        return hidden("all answers are empty: nothing can differ")
    if len(replies) < samples_min:
        return too_few(len(replies), samples_min)
    return passed(answers=len(replies), different=0)


def too_few(found: int, samples_min: int) -> Finding:
    """A tiny sample shows nothing."""
    return hidden(
        f"{found} samples, {samples_min} are needed (requests.samples_min)", samples=found
    )


def off(engines: Sequence[EngineSeen], setting: str) -> Finding:
    """Whether a setting is seen to be off at every engine."""
    told = {engine.name: engine.setting(setting) for engine in engines}
    on = {name: v for name, v in told.items() if isinstance(v, str) and v not in ("off", "none")}
    if on:
        return failed(f"{setting} is on at {', '.join(on)}", **on)
    unknown = [v.reason for v in told.values() if isinstance(v, Missing)]
    if unknown or not told:
        return hidden("; ".join(unknown) or "no engine was asked")
    return passed(**{name: str(v) for name, v in told.items()})


def unshared(shared: Mapping[str, str | Missing], engines: Sequence[EngineSeen]) -> Finding:
    """That no store beyond the nodes is in use: ``shared`` has each agent's, "" for none."""
    found = off(engines, "shared_store")
    used = {name: v for name, v in shared.items() if isinstance(v, str) and v}
    if used:
        return failed(f"a shared store is in use at {', '.join(used)}", **used)
    unknown = [v.reason for v in shared.values() if isinstance(v, Missing)]
    if unknown and found.status == "pass":
        return hidden("; ".join(unknown))
    return found


def frozen(
    engines: Sequence[EngineSeen],
    baseline: Baseline,
    declared: Mapping[str, str],
    settings: Sequence[str] = FROZEN,
) -> Finding:
    """Whether the engines are what stage A froze. What the baseline does not know is not asked; an
    image, which no engine tells, is taken from the operator's word, as there."""
    other: dict[str, Any] = {}
    unknown: list[str] = []
    for engine in engines:
        for name in settings:
            was = baseline.settings.get(name, "")
            now = engine.seen.get(name, "") or declared.get(name, "")
            if was and not now:
                unknown.append(f"{name} of {engine.name}")
            elif was and now != was:
                other[f"{engine.name}.{name}"] = {"baseline": was, "now": now}
    if other:
        return failed(f"not as in the baseline: {', '.join(other)}", **other)
    if unknown:
        return hidden(f"not told: {', '.join(unknown)}: {engines[0].why}")
    return passed(settings={k: v for k, v in baseline.settings.items() if k in settings})


def measured(
    load: Report | Missing, field: str, *, samples_min: int, slo_s: float | None = None
) -> Finding:
    """A latency of a load: without failures, out of enough samples, within the objective."""
    if isinstance(load, Missing):
        return hidden(load.reason)
    summary: Summary = getattr(load, field)
    told = {f"{name}_s": getattr(summary, name) for name in ("p50", "p95", "p99")}
    figures = {"samples": summary.count} | {k: v for k, v in told.items() if v is not None}
    if load.failed:
        return failed(f"{load.failed} of {load.requests} requests failed", **figures)
    if summary.p95 is None:
        return hidden(f"nobody saw {field}: answers must be streamed and longer than a token")
    if summary.count < samples_min:
        return too_few(summary.count, samples_min)
    if slo_s is not None and summary.p95 > slo_s:
        return failed(f"p95 is {summary.p95:.4g} s, the objective {slo_s:g} s", **figures)
    return passed(**figures)


def chance(wins: int, losses: int) -> float:
    """The sign test: how likely at least so many of all pairs would favour one side by chance."""
    total = wins + losses
    return sum(math.comb(total, k) for k in range(wins, total + 1)) / 2**total if total else 1.0


def median(values: Sequence[float]) -> float:
    """Raises ValueError for nothing."""
    if not values:
        raise ValueError("a median of nothing")
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2


def external(phase: Phase | Missing, engine: str) -> int | Missing:
    """Prompt tokens that an engine resumed from outside its own memory, as it counts itself."""
    if isinstance(phase, Missing):
        return phase
    counters = phase.counted(engine)
    if isinstance(counters, Missing):
        return counters
    if counters.external_hit_tokens is None:
        return Missing(f"{engine} does not count tokens from outside")
    return counters.external_hit_tokens


def prompt_tokens(replies: Sequence[Reply]) -> int:
    """Of all that were answered."""
    return sum(reply.prompt_tokens for reply in replies)


def known(agents: Sequence[AgentSeen | Missing]) -> list[AgentSeen]:
    """Those that answered."""
    return [agent for agent in agents if isinstance(agent, AgentSeen)]


def summed(agents: Sequence[AgentSeen], *names: str) -> dict[str, int]:
    """What agents counted under any of these names, or names that end with them; without zeros."""
    found: dict[str, int] = {}
    for agent in agents:
        for name, count in agent.counts.items():
            if count > 0 and name.endswith(names):
                found[name] = found.get(name, 0) + count
    return found


def not_worse(
    before: Report | Missing, after: Report | Missing, field: str, worse_max: float, samples: int
) -> Finding:
    """An A/B of the same load: whether the median stayed within ``worse_max`` times what it was."""
    for load in (before, after):
        if isinstance(load, Missing):
            return hidden(load.reason)
        found = measured(load, field, samples_min=samples)
        if found.status != "pass":
            return found
    assert isinstance(before, Report)
    assert isinstance(after, Report)
    was, now = getattr(before, field).p50, getattr(after, field).p50
    figures = {
        "p50_before_s": was,
        "p50_after_s": now,
        "p95_before_s": getattr(before, field).p95,
        "p95_after_s": getattr(after, field).p95,
        "ratio": now / was if was else None,
        "ratio_max": worse_max,
        "samples": getattr(after, field).count,
    }
    if was and now > worse_max * was:
        return failed(f"the median is {now / was:.2f} times what it was", **figures)
    return passed(**figures)
