"""Stage E: one optimisation on top, each beside the stage before. Pure."""

from __future__ import annotations

from collections.abc import Callable

from kvatlas.report.latency import Report
from kvatlas.validate.stages.facts import EngineSeen, StageE
from kvatlas.validate.stages.rules import FROZEN, not_worse, prompt_tokens, too_few
from kvatlas.validate.stages.values import (
    Finding,
    Missing,
    Point,
    Rule,
    excerpt,
    failed,
    hidden,
    passed,
)

#: An optimisation, and the setting that it changes.
CHANGES = {
    "hisparse": "hisparse",
    "draft": "speculation",
    "fp8-kv": "kv_dtype",
    "context": "context_tokens",
}
_FP8 = "fp8"


def _on(facts: StageE) -> Finding:
    name = CHANGES[facts.change]
    evidence: dict[str, dict[str, str]] = {}
    for engine in facts.engines:
        was, now = _before(facts, engine).get(name, ""), engine.setting(name)
        if isinstance(now, Missing):
            return hidden(now.reason)
        if not was:
            return hidden(f"the stage before does not know {name} of its {engine.role} engine")
        evidence[engine.name] = {"before": was, "now": now}
        if was == now:
            return failed(f"{name} did not change at {engine.name}", **evidence)
        if not _meant(facts.change, was, now):
            return failed(f"{name} changed, but not to what {facts.change} means", **evidence)
    if facts.change == "context":
        if isinstance(facts.long, Missing):
            return hidden(facts.long.reason, **evidence)
        if facts.long.status != 200:
            return failed("a prompt that did not fit before got no answer", **evidence)
        evidence["long"] = {"prompt_tokens": str(facts.long.prompt_tokens)}
    return passed(**evidence) if evidence else hidden("no engine was asked")


def _before(facts: StageE, engine: EngineSeen) -> dict[str, str]:
    """Of the engine that had this one's role in the stage before."""
    return facts.before.get(engine.role, {})


def _meant(change: str, was: str, now: str) -> bool:
    if change == "fp8-kv":
        return _FP8 in now.lower()
    if change == "context":
        return now.isdecimal() and was.isdecimal() and int(now) > int(was)
    return now not in ("off", "none")


def _one(facts: StageE) -> Finding:
    """Nothing else may have moved: what was frozen, and how state is kept and handed over."""
    names = (*FROZEN, "hisparse", "connector", "shared_store")
    others = [n for n in names if n != CHANGES[facts.change]]
    unknown: list[str] = []
    changed: dict[str, dict[str, str]] = {}
    for engine in facts.engines:
        before = _before(facts, engine)
        if not before:
            return hidden(f"the stage before had no {engine.role} engine")
        for name in others:
            was = before.get(name, "")
            now = engine.seen.get(name, "") or facts.declared.get(name, "")
            if was and not now:
                unknown.append(f"{name} of {engine.name}")
            elif was and was != now:
                changed[f"{engine.name}.{name}"] = {"before": was, "now": now}
    if changed:
        return failed(f"more than one variable changed: {', '.join(changed)}", **changed)
    if unknown or not facts.engines:
        return hidden(f"not told: {', '.join(unknown) or 'anything'}")
    return passed(same=others)


def _answers(facts: StageE) -> Finding:
    """``same_min``: the share of answers that must be the baseline's; below 1 only where the
    operator says that the optimisation is lossy."""
    replies = (*facts.first, *facts.again)
    if not replies:
        return hidden("no request was sent")
    bad = [r for r in replies if r.status != 200]
    if bad:
        return failed(f"{len(bad)} requests got no answer", error=excerpt(bad[0].error))
    same = sum(r.words == facts.baseline.answers[r.prompt] for r in replies)
    evidence = {"answers": len(replies), "same": same, "same_min": facts.same_min}
    if len(facts.first) < facts.samples_min:
        return too_few(len(facts.first), facts.samples_min)
    if same < facts.same_min * len(replies):
        return failed(f"{len(replies) - same} answers differ from the baseline's", **evidence)
    return passed(**evidence)


def _hits(facts: StageE) -> Finding:
    told = [r for r in facts.again if r.cached_tokens is not None]
    if not told or len(told) < len(facts.again):
        return hidden("the answers do not tell cached tokens")
    if isinstance(facts.hits_before, Missing):
        return hidden(facts.hits_before.reason)
    asked = prompt_tokens(told)
    share = sum(r.cached_tokens or 0 for r in told) / asked if asked else 0.0
    evidence = {"before": facts.hits_before, "now": share, "requests": len(told)}
    if share < facts.hits_before / facts.worse_max:
        return failed("prefixes are found less than before", **evidence)
    return passed(**evidence)


def _transfers(facts: StageE) -> Finding:
    if not facts.moves:
        return hidden("no half of a pair is named: nothing is handed over; declare so")
    if isinstance(facts.moved, Missing):
        return hidden(facts.moved.reason)
    evidence = {"transfers": facts.moved.transfers, "failures": facts.moved.failures}
    if facts.moved.failures:
        return failed(f"{facts.moved.failures:g} transfers failed", **evidence)
    if not facts.moved.transfers:
        return failed("nothing was transferred", **evidence)
    return passed(**evidence)


def _latency(field: str) -> Callable[[StageE], Finding]:
    def judge(facts: StageE) -> Finding:
        return not_worse(facts.load_before, facts.load, field, facts.worse_max, facts.samples_min)

    return judge


def _throughput(facts: StageE) -> Finding:
    before, after = facts.load_before, facts.load
    for load in (before, after):
        if isinstance(load, Missing):
            return hidden(load.reason)
    assert isinstance(before, Report)
    assert isinstance(after, Report)
    if after.failed:
        return failed(f"{after.failed} of {after.requests} requests failed")
    if after.requests < facts.samples_min:
        return too_few(after.requests, facts.samples_min)
    was, now = before.output_tokens_per_s, after.output_tokens_per_s
    evidence = {"before_tokens_per_s": was, "after_tokens_per_s": now}
    if not was or not now:
        return hidden("no output token was counted", **evidence)
    if now < was / facts.worse_max:
        return failed(f"throughput is {now / was:.2f} times what it was", **evidence)
    return passed(ratio=now / was, **evidence)


def _point(name: str, asks: str, shown: str) -> Point:
    return Point(f"e.{name}", "5.E", asks, shown)


E: tuple[Rule[StageE], ...] = (
    Rule(_point("on", "the optimisation is on", "the setting that it changes"), _on),
    Rule(_point("one", "one variable at a time", "all other settings are as before"), _one),
    Rule(_point("answers", "correctness again", "the baseline's answers"), _answers),
    Rule(_point("hits", "prefix hits again", "prompts that come again: cached tokens"), _hits),
    Rule(
        Point(
            "e.transfers", "5.E", "transfers are whole", "the engines' counters", declinable=True
        ),
        _transfers,
    ),
    Rule(_point("ttft", "TTFT, A/B", "the same load as before"), _latency("ttft_s")),
    Rule(_point("tpot", "TPOT, A/B", "the same load as before"), _latency("tpot_s")),
    Rule(_point("throughput", "throughput, A/B", "the same load as before"), _throughput),
)
