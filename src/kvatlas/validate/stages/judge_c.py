"""Stage C: host memory below the engine, and nothing shared. Pure."""

from __future__ import annotations

from kvatlas.validate.stages.facts import AgentSeen, Phase, StageC
from kvatlas.validate.stages.rules import (
    CHANCE_MAX,
    chance,
    external,
    frozen,
    known,
    measured,
    median,
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
    failed,
    hidden,
    passed,
)

_HIT_SHARE = 0.5  # of the tokens of prompts that come again


def _hits(facts: StageC) -> Finding:
    """By the engine's own count; where an agent holds the memory, by its count too."""
    found = external(facts.warm, facts.engine.name)
    if isinstance(found, Missing) or isinstance(facts.warm, Missing):
        return hidden(found.reason if isinstance(found, Missing) else "")
    asked = prompt_tokens(facts.warm.replies)
    loaded = sum(a.loaded_tokens.get("dram", 0) for a in known(facts.warm.agents))
    evidence: dict[str, object] = {"prompt_tokens": asked, "from_host_tokens": found}
    if known(facts.warm.agents):
        evidence["agents_say"] = loaded
        if loaded != found:
            return failed("engine and agent count different tokens", **evidence)
    if not asked:
        return hidden("no request was answered")
    if found < _HIT_SHARE * asked:
        return failed("most of what was computed before did not come back", **evidence)
    return passed(**evidence)


def _answers(facts: StageC) -> Finding:
    if isinstance(facts.warm, Missing):
        return hidden(facts.warm.reason)
    return right(facts.warm.replies, facts.baseline.answers, samples_min=facts.samples_min)


def _released(facts: StageC) -> Finding:
    """What came from host memory was not in the engine's own any more."""
    warm = facts.warm
    if isinstance(warm, Missing):
        return hidden(warm.reason)
    counters = warm.counted(facts.engine.name)
    if isinstance(counters, Missing):
        return hidden(counters.reason)
    local, outside = counters.local_hit_tokens, counters.external_hit_tokens
    if local is None or outside is None:
        return hidden(f"{facts.engine.name} does not tell its own hits from others")
    evidence: dict[str, object] = {"released_tokens": outside, "still_held_tokens": local}
    held = _dram(warm)
    if isinstance(held, AgentSeen):
        evidence["released_bytes"] = held.moved_bytes.get("load dram", 0)
    if local:
        return failed("the engine still held what it should have let go", **evidence)
    if not outside:
        return failed("nothing was released and resumed", **evidence)
    return passed(**evidence)


def _dram(phase: Phase) -> AgentSeen | Missing:
    """The agent that has host memory."""
    for agent in phase.agents:
        if isinstance(agent, AgentSeen) and "dram" in agent.tiers:
            return agent
    reasons = [a.reason for a in phase.agents if isinstance(a, Missing)]
    return Missing("; ".join(reasons) or "no agent is named: nothing tells of host memory")


def _host(facts: StageC) -> Finding:
    if isinstance(facts.warm, Missing):
        return hidden(facts.warm.reason)
    agent = _dram(facts.warm)
    if isinstance(agent, Missing):
        return hidden(agent.reason)
    tier = agent.tiers["dram"]
    held, capacity = tier.get("held_bytes", 0), tier.get("capacity_bytes", 0)
    evidence = {"held_bytes": held, "capacity_bytes": capacity, "units": tier.get("units", 0)}
    if held > capacity:
        return failed("it holds more than it may", **evidence)
    if not held:
        return failed("host memory holds nothing", **evidence)
    return passed(**evidence)


def _bandwidth(facts: StageC) -> Finding:
    """Bytes that were loaded over all the time that the requests took to their first token: the
    link was at least that fast."""
    warm = facts.warm
    if isinstance(warm, Missing):
        return hidden(warm.reason)
    agent = _dram(warm)
    if isinstance(agent, Missing):
        return hidden(agent.reason)
    times = [r.ttft_s for r in warm.replies if r.ttft_s]
    size = agent.moved_bytes.get("load dram", 0)
    if not times:
        return hidden("no request was streamed: nobody saw how long loads took")
    if not size:
        return failed("nothing was loaded", loaded_bytes=size)
    rate = size / sum(times)
    evidence = {"loaded_bytes": size, "seconds_at_most": sum(times), "bytes_per_s_at_least": rate}
    if facts.bandwidth_min and rate < facts.bandwidth_min:
        return failed(f"below limits.host_bytes_per_s ({facts.bandwidth_min:g})", **evidence)
    return passed(**evidence)


def _pays(facts: StageC) -> Finding:
    """Prompt by prompt: is the first token sooner with a load than with computing?"""
    if isinstance(facts.cold, Missing) or isinstance(facts.warm, Missing):
        return hidden(
            "; ".join(p.reason for p in (facts.cold, facts.warm) if isinstance(p, Missing))
        )
    cold = {r.prompt: r.ttft_s for r in facts.cold.replies}
    both = [(c, r.ttft_s) for r in facts.warm.replies if r.ttft_s and (c := cold.get(r.prompt))]
    if len(both) < facts.samples_min:
        return too_few(len(both), facts.samples_min)
    wins = sum(warm < was for was, warm in both)
    losses = sum(warm > was for was, warm in both)
    evidence = {
        "pairs": len(both),
        "computed_p50_s": median([was for was, _ in both]),
        "loaded_p50_s": median([warm for _, warm in both]),
        "sooner": wins,
        "by_chance": chance(wins, losses),
    }
    if chance(wins, losses) <= CHANCE_MAX:
        return passed(**evidence)
    if chance(losses, wins) <= CHANCE_MAX:
        return failed("loading takes longer than computing: host memory does not pay", **evidence)
    return hidden("loading and computing differ no more than by chance", **evidence)


def _tpot(facts: StageC) -> Finding:
    found = measured(facts.load, "tpot_s", samples_min=facts.samples_min)
    if found.status != "pass":
        return found
    was = facts.baseline.load.tpot_s.p50
    now = found.evidence["p50_s"]
    if not was:
        return hidden("the baseline has no TPOT")
    evidence = {
        "concurrency": facts.baseline.concurrency,
        "baseline_p50_s": was,
        "p50_s": now,
        "ratio": now / was,
        "ratio_max": facts.tpot_worse_max,
    }
    if now > facts.tpot_worse_max * was:
        return failed("loads slow the others' tokens down", **evidence)
    return passed(**evidence)


def _rule(name: str, seed: str, asks: str, shown: str) -> Point:
    return Point(f"c.{name}", seed, asks, shown)


C: tuple[Rule[StageC], ...] = (
    Rule(
        _rule("frozen", "5.A", "the engine is what the baseline froze", "its settings beside it"),
        lambda f: frozen([f.engine], f.baseline, f.declared),
    ),
    Rule(
        _rule("speculation_off", "5.B", "speculation is off still", "as the engine tells"),
        lambda f: off([f.engine], "speculation"),
    ),
    Rule(
        _rule("shared_off", "5.C", "inside the node: no distributed store", "engine and agents"),
        lambda f: unshared(f.shared, [f.engine]),
    ),
    Rule(
        _rule(
            "hits",
            "5.C",
            "cache hits come from host memory",
            "prompts again after the engine let go: tokens from outside by its own count, which"
            " must be the agent's",
        ),
        _hits,
    ),
    Rule(_rule("answers", "5.C", "they are right", "the baseline's answers"), _answers),
    Rule(
        _rule("hbm_released", "5.C", "HBM is released", "none of it was in the engine any more"),
        _released,
    ),
    Rule(_rule("host_memory", "5.C", "host memory in use", "the agent's own figures"), _host),
    Rule(
        _rule("bandwidth", "5.C", "PCIe bandwidth", "bytes loaded over time to first tokens"),
        _bandwidth,
    ),
    Rule(
        _rule(
            "pays",
            "5.C",
            "a repeated long prefix pays for its load",
            "time to first token computed and loaded, prompt by prompt; sign test, 5 %",
        ),
        _pays,
    ),
    Rule(
        _rule(
            "tpot",
            "5.C",
            "TPOT at high concurrency",
            "repeated prefixes beside the baseline's load",
        ),
        _tpot,
    ),
)
