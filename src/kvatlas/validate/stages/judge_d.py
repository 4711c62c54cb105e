"""Stage D: a store that several engines share, and what becomes of it when it breaks. Pure."""

from __future__ import annotations

from collections.abc import Callable

from kvatlas.validate.stages.facts import Outage, Phase, StageD, StoreSample
from kvatlas.validate.stages.rules import (
    external,
    frozen,
    known,
    prompt_tokens,
    right,
    summed,
)
from kvatlas.validate.stages.values import (
    Finding,
    Missing,
    Point,
    Rule,
    failed,
    hidden,
    passed,
)

_HIT_SHARE = 0.5
_REFUSED = ("full", "refused", "_rests", "queue_full", "busy")


def _across(facts: StageD) -> Finding:
    """The reader never saw these prompts: what it has of them is the store's."""
    phase = facts.across
    found = external(phase, facts.reader.name)
    if isinstance(phase, Missing) or isinstance(found, Missing):
        return hidden(found.reason if isinstance(found, Missing) else "")
    same = right(phase.replies, facts.baseline.answers, samples_min=facts.samples_min)
    asked = prompt_tokens(phase.replies)
    loaded = sum(a.loaded_tokens.get("object", 0) for a in known(phase.agents))
    evidence: dict[str, object] = {"prompt_tokens": asked, "from_store_tokens": found}
    if known(phase.agents):
        evidence["agents_say"] = loaded
        if loaded != found:
            return failed("engine and agents count different tokens", **evidence)
    if same.status != "pass":
        return same
    if found < _HIT_SHARE * asked:
        return failed("most of what the other engine computed was not found", **evidence)
    return passed(answers=len(phase.replies), **evidence)


def _tenant(facts: StageD) -> Finding:
    """The control first: the same tenant finds it."""
    ours = external(facts.same_tenant, facts.reader.name)
    theirs = external(facts.other_tenant, facts.reader.name)
    for found in (ours, theirs):
        if isinstance(found, Missing):
            return hidden(found.reason)
    assert isinstance(ours, int)
    assert isinstance(theirs, int)
    evidence = {"same_tenant_tokens": ours, "other_tenant_tokens": theirs}
    if theirs:
        return failed("another tenant resumed from it", **evidence)
    if not ours:
        return hidden("not even the same tenant found it: nothing is told apart", **evidence)
    return passed(**evidence)


def _fingerprint(facts: StageD) -> Finding:
    stranger = facts.stranger
    if isinstance(stranger, Missing):
        return hidden(stranger.reason)
    if not stranger.replies or any(r.status != 200 for r in stranger.replies):
        return failed("the engine of another fingerprint did not answer")
    name = stranger.engines[0].engine if stranger.engines else ""
    found = external(stranger, name)
    across = external(facts.across, facts.reader.name)
    if isinstance(found, Missing):
        return hidden(found.reason)
    if found:
        return failed(
            "an engine that computes differently resumed from it", engine=name, tokens=found
        )
    if isinstance(across, Missing) or not across:
        return hidden("nobody found it: nothing is told apart")
    return passed(engine=name, tokens=0, beside=across)


def _ttl(facts: StageD) -> Finding:
    before = external(facts.ttl_before, facts.reader.name)
    after = external(facts.ttl_after, facts.reader.name)
    for found in (before, after):
        if isinstance(found, Missing):
            return hidden(found.reason)
    assert isinstance(before, int)
    assert isinstance(after, int)
    evidence = {"within_ttl_tokens": before, "after_ttl_tokens": after}
    if after:
        return failed("what should have expired was found", **evidence)
    if not before:
        return hidden("nothing was found before its end either", **evidence)
    return passed(**evidence)


def _all_answered(facts: StageD, phase: Phase) -> Finding:
    """Right, and in time. A prompt beyond the baseline's must be answered, no more."""
    late = [r for r in phase.replies if r.seconds > facts.answer_max_s]
    if late:
        return failed(
            f"{len(late)} of {len(phase.replies)} answers took more than"
            f" limits.answer_s ({facts.answer_max_s:g})",
            seconds=max(r.seconds for r in late),
        )
    return right(phase.replies, facts.baseline.answers, samples_min=1)


def _eviction(facts: StageD) -> Finding:
    samples = facts.eviction
    if isinstance(samples, Missing):
        return hidden(samples.reason)
    if isinstance(facts.filling, Missing):
        return hidden(facts.filling.reason)
    if facts.filling.failed:
        return failed(f"{facts.filling.failed} requests got no answer while it was filled")
    if len(samples) < 2:
        return hidden("the store was not looked at before and after")
    gone = samples[-1].evicted - samples[0].evicted
    evidence = {
        "evicted": gone,
        "used_bytes": samples[-1].used_bytes,
        "max_bytes": samples[-1].max_bytes,
        "requests": facts.filling.requests,
    }
    if gone > 0:
        return passed(**evidence)
    if samples[-1].max_bytes and samples[-1].used_bytes > samples[-1].max_bytes:
        return failed("it is over its limit and evicts nothing", **evidence)
    return hidden("it was not filled: nothing had to go", **evidence)


def _backpressure(facts: StageD) -> Finding:
    full = facts.full
    if isinstance(full, Missing):
        return hidden(full.reason)
    found = _all_answered(facts, full)
    if found.status != "pass":
        return found
    refused = summed(known(full.agents), *_REFUSED)
    for agent in known(full.agents):
        counts = agent.tiers.get("object", {}).get("counts", {})
        refused |= {f"store {k}": v for k, v in counts.items() if k.endswith(_REFUSED) and v}
    if not known(full.agents):
        return hidden("no agent tells what a full store refused")
    if not refused:
        return hidden("nobody counted a refusal: the store was not full, or it is silent")
    return passed(answers=len(full.replies), counted=refused)


def _watermarks(facts: StageD) -> Finding:
    evidence: dict[str, object] = {}
    for name, samples in (("store", facts.eviction), ("dram", facts.dram)):
        if isinstance(samples, Missing):
            return hidden(f"{name}: {samples.reason}")
        limited = [s for s in samples if s.max_bytes]
        if not limited:
            return hidden(f"the {name} tells no limit")
        fullest: StoreSample = max(limited, key=lambda s: s.used_bytes / s.max_bytes)
        evidence[name] = {
            "fullest_bytes": fullest.used_bytes,
            "max_bytes": fullest.max_bytes,
            "looks": len(limited),
        }
        if fullest.used_bytes > fullest.max_bytes:
            return failed(f"the {name} went over its limit", **evidence)
        if not any(s.evicted for s in limited):
            return hidden(f"the {name} was never full: its watermark was not reached", **evidence)
    return passed(**evidence)


def _lost(name: str, what: str) -> Callable[[StageD], Finding]:
    """While something is away all is answered, right and in time; afterwards hits come back."""

    def judge(facts: StageD) -> Finding:
        outage: Outage | Missing = getattr(facts, name)
        if isinstance(outage, Missing):
            return hidden(outage.reason)
        during = _all_answered(facts, outage.during)
        if during.status != "pass":
            return _more(during, f"{what}: ")
        after = _all_answered(facts, outage.after)
        if after.status != "pass":
            return _more(after, "afterwards: ")
        evidence: dict[str, object] = {
            "answers_during": len(outage.during.replies),
            "slowest_s": max(r.seconds for r in outage.during.replies),
            "counted": summed(known(outage.during.agents), "silent", "slow", "rests", "lost"),
        }
        if isinstance(outage.hits_after, Missing):
            return hidden(f"afterwards: {outage.hits_after.reason}", **evidence)
        evidence["hits_after_tokens"] = outage.hits_after
        if not outage.hits_after:
            return failed("afterwards nothing was found any more", **evidence)
        return passed(**evidence)

    return judge


def _more(finding: Finding, before: str) -> Finding:
    """The same with its reason said more fully."""
    return Finding(finding.status, before + finding.reason, finding.evidence)


def _dirty(facts: StageD) -> Finding:
    dirty = facts.dirty
    if isinstance(dirty, Missing):
        return hidden(dirty.reason)
    found = _all_answered(facts, dirty)
    if found.status != "pass":
        return found
    used = external(dirty, facts.reader.name)
    if isinstance(used, Missing):
        return hidden(used.reason)
    noticed = summed(known(dirty.agents), "damaged")
    evidence = {"answers": len(dirty.replies), "used_tokens": used, "noticed": noticed}
    if used:
        return failed("damaged state was resumed from", **evidence)
    if not noticed:
        return hidden("nobody counted damage: perhaps none was there", **evidence)
    return passed(**evidence)


def _point(name: str, asks: str, shown: str, *, trial: bool = False, bare: bool = True) -> Point:
    return Point(f"d.{name}", "5.D", asks, shown, declinable=bare, trial=trial)


D: tuple[Rule[StageD], ...] = (
    Rule(
        Point("d.frozen", "5.A", "both engines are what the baseline froze", "their settings"),
        lambda f: frozen([f.writer, f.reader], f.baseline, f.declared),
    ),
    Rule(
        _point(
            "across",
            "hits across engines",
            "prompts of one engine at another on another node: its own count of tokens from"
            " outside, the agents' of tokens from the store, the baseline's answers",
            bare=False,
        ),
        _across,
    ),
    Rule(
        _point(
            "index",
            "the global block index and its watcher are highly available",
            "requests while index_stop holds, and hits that are foreseen again after index_start",
            trial=True,
        ),
        _lost("index", "without the index"),
    ),
    Rule(
        _point(
            "node",
            "so is the cache engine",
            "requests while node_stop holds, and hits again after node_start",
            trial=True,
        ),
        _lost("node", "without the cache engine"),
    ),
    Rule(
        _point(
            "tenant",
            "tenants and sessions are kept apart",
            "one prompt under two cache salts: found under its own, not under the other",
            bare=False,
        ),
        _tenant,
    ),
    Rule(
        _point(
            "fingerprint",
            "models and runtimes are kept apart",
            "the same prompts at an engine of another fingerprint (role = stranger)",
            trial=True,
        ),
        _fingerprint,
    ),
    Rule(_point("ttl", "TTL", "prompts again within and after store.ttl_s", trial=True), _ttl),
    Rule(
        Point(
            "d.quota",
            "5.D",
            "quotas",
            "a trial of the operator's",
            declinable=True,
            trial=True,
        ),
        lambda f: hidden(f.quota.reason),
    ),
    Rule(
        _point("eviction", "eviction", "the store filled: its own count of evictions", trial=True),
        _eviction,
    ),
    Rule(
        _point(
            "backpressure",
            "back-pressure",
            "requests while store_full holds: all answered, refusals counted",
            trial=True,
        ),
        _backpressure,
    ),
    Rule(
        _point(
            "watermarks",
            "watermarks",
            "store and host memory, looked at while they are filled: never over their limits",
            trial=True,
        ),
        _watermarks,
    ),
    Rule(
        _point(
            "outage",
            "the store fails",
            "requests while store_stop holds: the baseline's answers in time; hits again after"
            " store_start",
            bare=False,
        ),
        _lost("outage", "without the store"),
    ),
    Rule(
        _point(
            "partition",
            "the network parts",
            "the same with store_partition and store_heal",
            bare=False,
        ),
        _lost("partition", "behind the partition"),
    ),
    Rule(
        _point(
            "dirty",
            "dirty entries",
            "requests after store_damage: noticed, not used, the baseline's answers",
            bare=False,
        ),
        _dirty,
    ),
    Rule(
        Point(
            "d.rebalance",
            "5.D",
            "data moves when cache nodes come and go, and hot spots move",
            "a trial of the operator's",
            declinable=True,
            trial=True,
        ),
        lambda f: hidden(f.rebalance.reason),
    ),
)
