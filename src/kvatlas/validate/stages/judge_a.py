"""Stage A: the Combined baseline, frozen. Pure."""

from __future__ import annotations

from collections.abc import Callable

from kvatlas.report.latency import Report
from kvatlas.validate.stages.facts import Baseline, StageA
from kvatlas.validate.stages.rules import measured, too_few
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

#: No engine tells these: the operator's word is what is frozen, and the evidence says so.
_BY_WORD = ("image", "model_digest")


def _setting(*names: str) -> Callable[[StageA], Finding]:
    """Frozen where each is told, and as the operator says where he says something."""

    def judge(facts: StageA) -> Finding:
        evidence: dict[str, str] = {}
        unknown: list[str] = []
        for name in names:
            seen, said = facts.engine.setting(name), facts.declared.get(name, "")
            if isinstance(seen, str):
                evidence[name] = seen
                if said and said != seen:
                    return failed(
                        f"{name}: declared {said!r}, the engine has {seen!r}",
                        declared=said,
                        seen=seen,
                    )
            elif said and name in _BY_WORD:
                evidence[name] = f"{said} (declared, no engine tells it)"
            else:
                mend = f": declare {name}" if name in _BY_WORD else ""
                unknown.append(f"{seen.reason}{mend}")
        return hidden("; ".join(unknown), **evidence) if unknown else passed(**evidence)

    return judge


def _requests(facts: StageA) -> Finding:
    found = facts.requests
    if not found.digest or found.output_tokens < 2:
        return failed("the request set is empty, or its answers have no second token")
    if found.count < facts.samples_min:
        return too_few(found.count, facts.samples_min)
    return passed(
        digest=found.digest,
        requests=found.count,
        prompt_tokens=found.prompt_tokens,
        output_tokens=found.output_tokens,
    )


def _correct(facts: StageA) -> Finding:
    """All are answered, and the same twice: what differs by itself proves nothing later."""
    if len(facts.rounds) < 2 or not all(facts.rounds):
        return hidden("the request set was not asked twice")
    first, second = facts.rounds[0], facts.rounds[1]
    bad = [r for r in (*first, *second) if r.status != 200]
    if bad:
        return failed(
            f"{len(bad)} of {len(first) + len(second)} requests got no answer",
            request=bad[0].request_id,
            status=bad[0].status,
            error=excerpt(bad[0].error),
        )
    other = [(a, b) for a, b in zip(first, second, strict=False) if a.words != b.words]
    if other or len(first) != len(second):
        a, b = other[0] if other else (first[0], second[0])
        return failed(
            f"{len(other)} of {len(first)} answers differ from one time to the next: greedy answers"
            " must not, or nothing later can be compared",
            prompt=a.prompt,
            first=excerpt(a.words),
            second=excerpt(b.words),
        )
    if len({a.words for a in first}) < 2:
        return hidden("all prompts have the same answer: a wrong one would not be seen")
    if len(first) < facts.samples_min:
        return too_few(len(first), facts.samples_min)
    return passed(answers=len(first), times=2, different=0)


def _latency(field: str, slo: str) -> Callable[[StageA], Finding]:
    def judge(facts: StageA) -> Finding:
        return measured(facts.load, field, samples_min=facts.samples_min, slo_s=facts.slo.get(slo))

    return judge


def _throughput(facts: StageA) -> Finding:
    load = facts.load
    if isinstance(load, Missing):
        return hidden(load.reason)
    if load.failed:
        return failed(f"{load.failed} of {load.requests} requests failed")
    if load.requests < facts.samples_min:
        return too_few(load.requests, facts.samples_min)
    if not load.output_tokens_per_s:
        return hidden("no output token was counted")
    return passed(output_tokens_per_s=load.output_tokens_per_s, requests_per_s=load.requests_per_s)


def _hbm(facts: StageA) -> Finding:
    if isinstance(facts.hbm, Missing):
        return hidden(facts.hbm.reason)
    peak = facts.hbm.get("kv_usage_peak")
    if peak is not None and peak >= 1.0:
        return failed("the KV pool was full: the baseline measured preemptions", **facts.hbm)
    if peak == 0 and "hbm_bytes" not in facts.hbm:
        return hidden(
            "its KV pool was never seen in use, though a load ran: ask longer prompts, or give"
            " read.hbm_bytes",
            **facts.hbm,
        )
    return passed(**facts.hbm)


def _power(facts: StageA) -> Finding:
    if isinstance(facts.power_w, Missing):
        return hidden(facts.power_w.reason)
    if facts.power_w <= 0:
        return failed("the meter says nothing above 0", power_w=facts.power_w)
    return passed(power_w=facts.power_w)


def _frozen(name: str, asks: str, *settings: str) -> Rule[StageA]:
    how = "what the engine or its files tell, set beside what the operator declares"
    return Rule(Point(f"a.{name}", "5.A", asks, how), _setting(*settings))


A: tuple[Rule[StageA], ...] = (
    _frozen("model", "the model's digest is fixed", "model", "model_digest"),
    _frozen("runtime", "the runtime image is fixed", "runtime", "image"),
    _frozen("tensor_parallel", "TP is fixed", "tensor_parallel"),
    _frozen("context", "the context length is fixed", "context_tokens"),
    _frozen("dtypes", "the dtypes of weights and KV are fixed", "weights_dtype", "kv_dtype"),
    _frozen("graphs", "CUDA graphs are on or off, and stay so", "graphs"),
    _frozen("speculation", "speculation is on or off, and stays so", "speculation"),
    Rule(
        Point("a.requests", "5.A", "the request set is fixed", "its digest and size"),
        _requests,
    ),
    Rule(
        Point(
            "a.correct",
            "5.A",
            "correctness",
            "the request set asked twice, greedy: the same answers token by token",
        ),
        _correct,
    ),
    Rule(
        Point("a.ttft", "5.A", "TTFT", "the request set as a load, streamed"),
        _latency("ttft_s", "ttft_p95_s"),
    ),
    Rule(
        Point("a.tpot", "5.A", "TPOT", "the same load"),
        _latency("tpot_s", "tpot_p95_s"),
    ),
    Rule(Point("a.throughput", "5.A", "throughput", "the same load"), _throughput),
    Rule(
        Point(
            "a.hbm",
            "5.A",
            "HBM",
            "the engine's KV pool and its fullest moment, or the command read.hbm_bytes",
            declinable=True,
        ),
        _hbm,
    ),
    Rule(
        Point("a.power", "5.A", "power", "the command read.power_w under load", declinable=True),
        _power,
    ),
)


def baseline_of(facts: StageA, concurrency: int) -> Baseline | None:
    """What is kept of it; None where there is no load or no answer to compare with."""
    if not isinstance(facts.load, Report) or not facts.rounds:
        return None
    settings = dict(facts.engine.seen)
    for name in _BY_WORD:
        if not settings.get(name) and facts.declared.get(name):
            settings[name] = facts.declared[name]
    return Baseline(
        settings,
        facts.requests,
        tuple(reply.words for reply in facts.rounds[0]),
        facts.load,
        concurrency,
        {} if isinstance(facts.hbm, Missing) else facts.hbm,
        None if isinstance(facts.power_w, Missing) else facts.power_w,
    )
