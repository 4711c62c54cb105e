"""All checks of a cluster: facts in, findings out. What gathers the facts is `validate.doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvatlas.core.check_facts import EngineFacts, Facts
from kvatlas.core.checks_cluster import agents, events, gateway, pairs
from kvatlas.core.checks_engine import ENGINE_CHECKS, reach
from kvatlas.core.checks_model import MODEL_CHECKS
from kvatlas.core.findings import Finding, not_shown

#: Every check by name, and what it sets beside what. docs/guides/doctor.md has the same.
CHECKS = {
    "reach": "engine: its URL, its answer",
    "version": "engine: its version, the support matrix",
    "clock": "engine: the date of its answers, our clock",
    "metrics": "engine: what its counters counted, what it was asked",
    "hits-told": "engine: cached tokens in its answers",
    "prefix-cache": "engine: the same prompt twice, what the second resumed",
    "right-answer": "engine: a computed answer, the same from cached state",
    "salt": "engine: another salt, the same salt",
    "tokenizer": "engine: a text, its token ids; engines beside each other",
    "chat-template": "engine: a chat, its token ids; engines beside each other",
    "block-size": "engine: blocks in its events, as it tells, as configured",
    "dtype": "engine: KV dtype as it tells, as configured",
    "layout": "engine: whether its state is described; engines beside each other",
    "version-skew": "engines of a model: versions",
    "context": "engines of a model: longest prompts",
    "dtype-skew": "engines of a model: KV dtypes",
    "block-size-skew": "engines of a model: block sizes",
    "tensor-parallel": "engines of a model: ranks, where these split the state",
    "draft": "engines of a model: draft or none",
    "hash-algorithm": "engines of a model: their own hash",
    "weights-digest": "engines of a model: configured digests",
    "weights": "engines of a model: greedy answers and logprobs",
    "hash-seed": "engines of a model: their own hashes of one block",
    "events": "engine: a canary, its KV events",
    "event-source": "engine: the one that was asked, the one that announced it",
    "event-sequence": "engine: sequence numbers, readable events",
    "replay": "engine: batches, the same asked for again",
    "gateway": "gateway: it answers and is ready; its version, ours",
    "alarms": "gateway: flags of its /health",
    "workers": "gateway: its engines, the file's",
    "fingerprint": "gateway: the fingerprint that it keys with, the one that engines tell",
    "keys": "gateway: keys by ids, by text, by file and secret; what it believes, what was resumed",
    "routed-hit": "gateway: the hit that it expected, what the engine reported",
    "transport": "pair: expected transport, what was seen, GB/s",
    "agent": "agent: it answers, flags of its /health",
    "store-keys": "agent: where its keys begin, where the gateway's do",
    "disk": "agent: room, quarantined bytes, errors of its disk",
}


def check(facts: Facts) -> list[Finding]:
    """All findings, in the order of `CHECKS`, by part."""
    found = list(_all(facts))
    order = {name: index for index, name in enumerate(CHECKS)}
    return sorted(found, key=lambda finding: order[finding.check])


def _all(facts: Facts) -> Iterator[Finding]:
    for engine in facts.engines:
        if engine.error:
            yield from reach(engine)
            for name in ENGINE_CHECK_NAMES:
                yield not_shown(name, engine.name, f"it does not answer: {engine.error}")
            continue
        for one in ENGINE_CHECKS:
            yield from one(engine)
        yield from events(engine)
    for engines in _by_model(facts.engines):
        for several in MODEL_CHECKS:
            yield from several(engines)
    yield from gateway(facts)
    yield from pairs(facts)
    yield from agents(facts)


#: What is not shown of an engine that does not answer.
ENGINE_CHECK_NAMES = tuple(
    name for name, line in CHECKS.items() if line.startswith("engine:") and name != "reach"
)


def _by_model(engines: Sequence[EngineFacts]) -> list[list[EngineFacts]]:
    """Engines that answer, by the name that they serve."""
    found: dict[str, list[EngineFacts]] = {}
    for engine in engines:
        if not engine.error:
            found.setdefault(engine.model, []).append(engine)
    return list(found.values())
