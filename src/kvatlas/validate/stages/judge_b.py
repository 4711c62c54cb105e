"""Stage B: the hand-over from prefill to decode, and nothing else: seven points. Pure."""

from __future__ import annotations

from kvatlas.core.transports import Moved
from kvatlas.validate.counters import Counters
from kvatlas.validate.stages.facts import Counted, EngineSeen, StageB
from kvatlas.validate.stages.rules import (
    frozen,
    known,
    off,
    prompt_tokens,
    right,
    too_few,
    unshared,
)
from kvatlas.validate.stages.values import (
    Finding,
    Missing,
    Point,
    Rule,
    declined,
    excerpt,
    failed,
    hidden,
    passed,
)

#: What both halves must have in common.
SAME = ("model", "model_digest", "tokenizer", "weights_dtype", "kv_dtype", "layout", "block_tokens")
_BACKENDS = ("nixl", "mooncake")
#: Of what engines count, so much must have passed the RDMA ports, as `core.transports` has it.
_ALL_SHARE = 0.75


def _halves(facts: StageB) -> tuple[EngineSeen, EngineSeen]:
    return facts.prefill, facts.decode


def _same(facts: StageB) -> Finding:
    prefill, decode = _halves(facts)
    shared: dict[str, str] = {}
    unknown: list[str] = []
    for name in SAME:
        ours, theirs = prefill.setting(name), decode.setting(name)
        if isinstance(ours, str) and isinstance(theirs, str):
            if ours != theirs:
                return failed(f"{name} differs", prefill=ours, decode=theirs)
            shared[name] = ours
        elif name != "model_digest" or not facts.declared.get(name):
            unknown += [v.reason for v in (ours, theirs) if isinstance(v, Missing)]
    return hidden("; ".join(unknown), **shared) if unknown else passed(**shared)


def _moved(facts: StageB) -> Moved | Missing:
    """Over both halves: some engines count where state is handed over, others where it arrives."""
    told = [c.moved for c in facts.phase.engines if isinstance(c.moved, Moved)]
    reasons = [c.moved.reason for c in facts.phase.engines if isinstance(c.moved, Missing)]
    total = Moved(
        sum(m.size_bytes for m in told),
        sum(m.seconds for m in told),
        sum(m.transfers for m in told),
        sum(m.failures for m in told),
    )
    if not told or (reasons and not total.transfers):  # the one that counts may be the silent one
        return Missing("; ".join(dict.fromkeys(reasons)) or "no engine was asked")
    return total


def _backend(facts: StageB) -> Finding:
    """Initialised: it is configured at both halves, and has moved something."""
    names = {half.role: half.setting("connector") for half in _halves(facts)}
    for role, name in names.items():
        if isinstance(name, str) and not any(b in name.lower() for b in _BACKENDS):
            return failed(f"the {role} half has no transfer backend", connector=name)
    moved = _moved(facts)
    if isinstance(moved, Missing):
        return hidden(moved.reason)
    evidence = {role: v for role, v in names.items() if isinstance(v, str)}
    if not moved.transfers:
        return failed("nothing was transferred", **evidence)
    unknown = [v.reason for v in names.values() if isinstance(v, Missing)]
    return hidden("; ".join(unknown)) if unknown else passed(transfers=moved.transfers, **evidence)


def _transport(facts: StageB) -> Finding:
    """No silent TCP: where TCP is what the operator declares, it is not silent."""
    seen = facts.transport_seen
    if facts.transport == "tcp":
        return declined("declared: transport = tcp: these halves have no RDMA to fall back from")
    if isinstance(seen, Missing):
        return hidden(seen.reason)
    if seen == "not rdma":
        return failed("state went over something else than RDMA", seen=seen)
    if seen != "rdma":
        return hidden("neither engine, ports nor gateway tell over what state went")
    return passed(seen=seen, inferred="what engines count passed the RDMA ports as well")


def _request_ids(facts: StageB) -> Finding:
    ids = [r.request_id for r in facts.phase.replies]
    if not ids:
        return hidden("no request was sent")
    found: dict[str, dict[str, str]] = {}
    for half in _halves(facts):
        log = facts.logs.get(half.name, Missing(f"{half.name}: no log is named in the stage file"))
        if isinstance(log, Missing):
            return hidden(log.reason)
        found[half.name] = log
    lost = [i for i in ids if not all(i in log for log in found.values())]
    if lost:
        where = {name: lost[0] in log for name, log in found.items()}
        return failed(
            f"{len(lost)} of {len(ids)} request ids are not in both logs",
            request=lost[0],
            in_log=where,
        )
    lines = {name: excerpt(log[ids[0]]) for name, log in found.items()}
    return passed(joined=len(ids), request=ids[0], **lines)


def _transfers(facts: StageB) -> Finding:
    moved, count = _moved(facts), len(facts.phase.replies)
    if isinstance(moved, Missing):
        return hidden(moved.reason)
    evidence = {
        "requests": count,
        "transfers": moved.transfers,
        "bytes": moved.size_bytes,
        "failures": moved.failures,
    }
    if moved.failures:
        return failed(f"{moved.failures:g} transfers failed", **evidence)
    if not count:
        return hidden("no request was sent")
    if moved.transfers < count or not moved.size_bytes:
        return failed("fewer transfers were counted than requests sent", **evidence)
    return passed(**evidence)


def _rdma_ports(facts: StageB) -> Finding:
    if facts.transport == "tcp":
        return declined("declared: transport = tcp: nothing passes RDMA ports")
    moved = _moved(facts)
    if isinstance(moved, Missing):
        return hidden(moved.reason)
    told = [a for a in known(facts.phase.agents) if a.rdma_bytes is not None]
    if not told:
        reasons = [a.rdma_why or f"{a.name} sees no RDMA port" for a in known(facts.phase.agents)]
        reasons += [a.reason for a in facts.phase.agents if isinstance(a, Missing)]
        return hidden("; ".join(reasons) or "no agent is named that reads the RDMA ports")
    received = max(a.rdma_bytes or 0 for a in told)
    evidence = {"engine_bytes": moved.size_bytes, "port_bytes": received}
    if not moved.size_bytes:
        return failed("the engines counted no bytes", **evidence)
    if received < _ALL_SHARE * moved.size_bytes:
        return failed("the ports received less than the engines counted", **evidence)
    return passed(**evidence)


def _no_reprefill(facts: StageB) -> Finding:
    """By the decode half's own count: what it computed is at most the end of each prompt."""
    name, count = facts.decode.name, len(facts.phase.replies)
    counters = facts.phase.counted(name)
    if isinstance(counters, Missing):
        return hidden(counters.reason)
    if counters.computed_tokens is None or not facts.block_tokens:
        return hidden(f"{name} does not tell computed prompt tokens from others, or its block size")
    allowed = count * facts.block_tokens
    evidence = {
        "computed_tokens": counters.computed_tokens,
        "allowed_tokens": allowed,
        "from_outside_tokens": counters.external_hit_tokens,
        "prompt_tokens": prompt_tokens(facts.phase.replies),
    }
    if not count:
        return hidden("no request was sent")
    if allowed >= prompt_tokens(facts.phase.replies):
        return hidden("the prompts are no longer than a block: nothing can be told", **evidence)
    if counters.computed_tokens > allowed:
        return failed("the decode half computed what was handed over", **evidence)
    return passed(**evidence)


def _answers(facts: StageB) -> Finding:
    apart = [r for r in facts.phase.replies if r.status == 200 and not r.prefilled_by]
    if any(r.prefilled_by for r in facts.phase.replies) and apart:
        return failed(
            f"{len(apart)} of {len(facts.phase.replies)} requests were not split",
            request=apart[0].request_id,
            fallback=apart[0].fallback,
        )
    return right(facts.phase.replies, facts.baseline.answers, samples_min=facts.samples_min)


def _fallback(facts: StageB) -> Finding:
    trial = facts.trial
    if isinstance(trial, Missing):
        return hidden(trial.reason)
    found = right(trial.replies, facts.baseline.answers, samples_min=1)
    if found.status != "pass":
        return found
    steps = sorted({r.fallback for r in trial.replies if r.fallback})
    asked = prompt_tokens(trial.replies)
    computed = sum(_computed(counted) for counted in trial.engines)
    evidence = {
        "answers": len(trial.replies),
        "steps": steps,
        "prompt_tokens": asked,
        "computed_without_prefill_half": computed,
    }
    if steps or (asked and computed > asked / 2):
        return passed(**evidence)
    return hidden(
        "neither the gateway nor the counters of what is left tell that these requests were not"
        " split: perhaps the backend did not fail",
        **evidence,
    )


def _computed(counted: Counted) -> int:
    """Prompt tokens that an engine computed; 0 where it does not tell."""
    counters = counted.counters
    return (counters.computed_tokens or 0) if isinstance(counters, Counters) else 0


def _samples(facts: StageB) -> Finding:
    found = frozen(_halves(facts), facts.baseline, facts.declared)
    if found.status == "pass" and len(facts.phase.replies) < facts.samples_min:
        return too_few(len(facts.phase.replies), facts.samples_min)
    return found


def _point(name: str, seed: str, asks: str, shown: str) -> Point:
    return Point(f"b.{name}", seed, asks, shown)


B: tuple[Rule[StageB], ...] = (
    Rule(
        _point(
            "frozen", "5.A", "both halves are what the baseline froze", "their settings beside it"
        ),
        _samples,
    ),
    Rule(
        _point("hisparse_off", "5.B", "HiSparse is off", "as both halves tell"),
        lambda f: off(_halves(f), "hisparse"),
    ),
    Rule(
        _point("speculation_off", "5.B", "speculation is off", "as both halves tell"),
        lambda f: off(_halves(f), "speculation"),
    ),
    Rule(
        _point("shared_off", "5.B", "no shared L3", "as both halves and the agents tell"),
        lambda f: unshared(f.shared, _halves(f)),
    ),
    Rule(
        _point(
            "same",
            "5.B 1",
            "model, tokenizer, dtype and KV layout are the same at both halves",
            "as both tell; the tokenizers by the ids that they make of one text",
        ),
        _same,
    ),
    Rule(
        _point("backend", "5.B 2", "the backend is initialised", "configured, and has transferred"),
        _backend,
    ),
    Rule(
        _point("transport", "5.B 2", "no silent TCP", "RDMA ports beside what the engines count"),
        _transport,
    ),
    Rule(
        _point(
            "request_ids", "5.B 3", "logs join P and D by one request id", "the logs of both halves"
        ),
        _request_ids,
    ),
    Rule(
        _point("transfers", "5.B 4", "successful transfers are counted", "the engines' counters"),
        _transfers,
    ),
    Rule(
        _point(
            "rdma_ports",
            "5.B 4",
            "the RDMA ports' hardware counters rise with them",
            "the kernel's counters, by the agents of the nodes",
        ),
        _rdma_ports,
    ),
    Rule(
        _point(
            "no_reprefill",
            "5.B 5",
            "the decode half does not prefill again",
            "prompt tokens that it computed, by its own count",
        ),
        _no_reprefill,
    ),
    Rule(
        _point(
            "answers", "5.B 6", "fixed prompts have the right answers", "the baseline's answers"
        ),
        _answers,
    ),
    Rule(
        _point(
            "fallback",
            "5.B 7",
            "on failure Combined or recompute, never partial state",
            "requests while the hook backend_fail holds: the baseline's answers, and the steps down"
            " that the gateway tells, or what the other engines computed",
        ),
        _fallback,
    ),
)
