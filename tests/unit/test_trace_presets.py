"""Presets against what is published of their traces: how near each figure comes.

``WITHIN`` is what a preset promises, for every seed that we tried: lengths and gaps as a share of
the published figure, rates absolute. ``MISSED`` names the figures that come no nearer than what
stands there; they are told in the page "Traces" too.
"""

from __future__ import annotations

import pytest

from kvatlas.workload.families import generate
from kvatlas.workload.presets import PRESETS
from kvatlas.workload.published import PUBLISHED, compared
from kvatlas.workload.trace import TraceRequest
from kvatlas.workload.trace_stats import stats

WITHIN_LENGTH, WITHIN_RATE = 0.10, 0.025
MISSED: dict[tuple[str, str], float] = {}
SMALL = ("mooncake-conversation", "mooncake-toolagent")


def check(name: str, seed: int) -> None:
    found = stats(generate(PRESETS[name], seed))
    assert found is not None
    far = []
    for row in compared(found, name):
        assert row.here is not None
        rate = row.published <= 1
        apart = row.here - row.published if rate else row.here / row.published - 1
        within = MISSED.get((name, row.name), WITHIN_RATE if rate else WITHIN_LENGTH)
        if abs(apart) > within:
            far.append(f"{row.name}: {row.published} published, {row.here} here, {apart:+.3f}")
    assert not far


@pytest.mark.parametrize("name", SMALL)
def test_small_presets_are_like_their_traces(name: str) -> None:
    check(name, 0)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_presets_are_like_their_traces(name: str, seed: int) -> None:
    check(name, seed)


# Mean turns, appended and generated tokens, context: DualPath (arXiv 2602.21548).
DUALPATH = {
    "dualpath-agent-60": (60, 608, 148, 17_183),
    "dualpath-agent-106": (106, 474, 172, 25_120),
    "dualpath-agent-157": (157, 429, 176, 32_721),
}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("name", DUALPATH)
def test_agents_are_those_of_dualpath(name: str) -> None:
    """Within 15 %; what a session appends per turn, averaged over sessions, within 25 %."""
    sessions: dict[str, list[TraceRequest]] = {}
    for request in generate(PRESETS[name]):
        sessions.setdefault(request.session, []).append(request)
    ended = list(sessions.values())[: len(sessions) * 2 // 3]  # the last ones are cut off
    appended, generated, contexts = [], [], []
    for turns in ended:
        ends = [turn.input_tokens + turn.output_tokens for turn in turns]
        if len(turns) > 1:
            grown = [t.input_tokens - end for t, end in zip(turns[1:], ends, strict=False)]
            appended.append(mean([float(tokens) for tokens in grown]))
            contexts.append(mean([float(end) for end in ends[:-1]]))
        generated.append(mean([float(turn.output_tokens) for turn in turns]))
    reached = (len([t for turns in ended for t in turns]) / len(ended), mean(appended))
    target = DUALPATH[name]
    assert reached[0] == pytest.approx(target[0], rel=0.15)
    assert reached[1] == pytest.approx(target[1], rel=0.25)
    assert mean(generated) == pytest.approx(target[2], rel=0.15)
    assert mean(contexts) == pytest.approx(target[3], rel=0.15)
