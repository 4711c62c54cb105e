"""Workloads by name: the four families to vary, and presets that follow published traces.

A preset's numbers are fitted, by estimate and random search, to what is published of a trace that
is not public or not here. `published.py` holds what they were fitted to, so that tests and the page
"Traces" can set the result beside it. What the sources do not tell (output lengths of some traces,
how many system prompts there are) is whatever made the rest fit.
"""

from __future__ import annotations

from kvatlas.workload.families import Family, Lengths, always, spread

FAMILIES: dict[str, Family] = {
    # No two prompts share a block: what a cache costs where it cannot help.
    "random": Family(
        requests=1000,
        duration_s=300,
        block_tokens=16,
        first_tokens=spread(1500, 8000, 64),
        output_tokens=spread(200, 1000, 1),
    ),
    # A few applications, each with a system prompt and sets of examples; single questions.
    "shared-prompt": Family(
        requests=1000,
        duration_s=300,
        block_tokens=16,
        first_tokens=spread(300, 2000, 16),
        output_tokens=spread(200, 1000, 1),
        groups=8,
        group_skew=1.0,
        system_tokens=spread(1000, 3000, 300),
        example_sets=5,
        example_tokens=always(500),
    ),
    # Conversations of people: short messages, minutes between them.
    "multi-turn": Family(
        requests=1000,
        duration_s=600,
        block_tokens=16,
        first_tokens=spread(400, 4000, 16),
        output_tokens=spread(300, 1500, 1),
        groups=20,
        group_skew=1.0,
        system_tokens=spread(200, 2000, 32),
        turns=spread(5, 20, 1),
        append_tokens=spread(60, 1500, 4),
        think_s=spread(30, 300, 2),
    ),
    # Programs that call tools: many turns, seconds between them, long contexts.
    "agent": Family(
        requests=1000,
        duration_s=600,
        block_tokens=16,
        first_tokens=spread(2000, 12_000, 200),
        output_tokens=spread(120, 900, 8),
        groups=4,
        group_skew=1.0,
        system_tokens=spread(6000, 15_000, 2000),
        turns=spread(30, 90, 10),
        append_tokens=spread(250, 5000, 10),
        think_s=spread(3, 60, 0.2),
    ),
}

# Pauses between the turns of people who chat: half below two minutes, one in a hundred an hour.
_PAUSES = Lengths(((0, 1), (0.2, 30), (0.5, 112), (0.65, 240), (0.99, 5000), (1, 7500)))


def _dualpath(
    context_max: int, first: float, append: tuple[float, float], pace_sigma: float, output: float
) -> Family:
    """Agents that run until their context is full: those that append little run longest. Arrivals
    are not published: 12,000 requests in two hours are ours."""
    return Family(
        requests=12_000,
        duration_s=7200,
        block_tokens=64,
        first_tokens=spread(first, first * 3, first / 3),
        output_tokens=spread(output, output * 6, 8),
        system_tokens=always(1000),
        turns=always(400),
        append_tokens=spread(*append, 10),
        pace_sigma=pace_sigma,
        think_s=spread(2, 20, 0.2),
        context_max=context_max,
    )


PRESETS: dict[str, Family] = {
    # People who chat: turns make most of the hits.
    "qwen-to-c": Family(
        requests=43_058,
        duration_s=7200,
        block_tokens=16,
        first_tokens=spread(105, 13_200, 5, p90=3400),
        output_tokens=spread(375, 1641, 1, p90=870),
        groups=3000,
        group_skew=1.15,
        ungrouped=0.15,
        system_tokens=spread(275, 3500, 16),
        turns=Lengths(((0, 1), (0.5, 1.2), (0.9, 3.6), (0.99, 11), (1, 16))),
        append_tokens=spread(50, 5000, 5),
        pace_sigma=0.3,
        think_s=_PAUSES,
    ),
    # Programs that ask once: all hits are system prompts, most of them frequent ones.
    "qwen-api": Family(
        requests=172_800,
        duration_s=7200,
        block_tokens=16,
        first_tokens=spread(70, 6500, 5),
        output_tokens=spread(200, 1500, 1),
        groups=3000,
        group_skew=1.2,
        ungrouped=0.03,
        system_tokens=spread(405, 2750, 16),
    ),
    # Editors: long system prompts, few turns.
    "qwen-coder": Family(
        requests=43_011,
        duration_s=7200,
        block_tokens=16,
        first_tokens=spread(1150, 10_400, 5, p90=7700),
        output_tokens=spread(200, 1500, 1),
        groups=2000,
        group_skew=1.22,
        ungrouped=0.03,
        system_tokens=spread(2850, 10_400, 16),
        turns=Lengths(((0, 1), (0.5, 1.01), (0.9, 2.5), (0.99, 7), (1, 10.5))),
        append_tokens=spread(150, 2500, 5),
        pace_sigma=0.3,
        think_s=spread(112, 6000, 1),
    ),
    # Tools and agents behind three system prompts, of 10,938, 9,203 and 3,449 requests.
    "mooncake-toolagent": Family(
        requests=23_608,
        duration_s=3600,
        block_tokens=512,
        first_tokens=spread(2100, 59_000, 5, p90=8900),
        output_tokens=spread(30, 3200, 1),
        groups=3,
        group_weights=(10_938, 9203, 3449),
        system_tokens=Lengths(((0, 1500), (1, 6000))),
        example_sets=265,
        example_tokens=spread(800, 3800),
        turns=Lengths(((0, 1), (0.5, 1), (0.9, 2.45), (0.99, 3.7), (1, 5.5))),
        append_tokens=spread(256, 5760, 5),
        think_s=spread(150, 1800, 3),
    ),
    # Conversations with long documents: one block that all share, and turns.
    "mooncake-conversation": Family(
        requests=12_031,
        duration_s=3537,
        block_tokens=512,
        first_tokens=spread(5150, 86_000, 5),
        output_tokens=spread(350, 1120, 1, p90=597),
        system_tokens=always(600),
        example_sets=42,
        example_tokens=spread(185, 740),
        turns=Lengths(((0, 1), (0.5, 1.001), (0.9, 2.4), (0.99, 10), (1, 15))),
        append_tokens=spread(316, 7560, 5),
        think_s=spread(165, 1400, 3),
    ),
    "dualpath-agent-60": _dualpath(32_768, 1200, (182, 4700), 0.9, 110),
    "dualpath-agent-106": _dualpath(49_152, 1000, (124, 3000), 0.88, 129),
    "dualpath-agent-157": _dualpath(65_536, 700, (99, 2600), 0.95, 131),
    # Seed document 003, chapter 8: 20 prompts of 8,000 tokens and 80 of 2,000; 1,500 are the system
    # prompt of all, 500 the examples of 20 each. That leaves the short ones no token of their own.
    "seed-003": Family(
        requests=100,
        duration_s=0,
        block_tokens=4,
        first_tokens=Lengths(((0.0, 0.0), (0.7999, 0.0), (0.8001, 6000.0), (1.0, 6000.0))),
        output_tokens=always(200),
        system_tokens=always(1500),
        example_sets=5,
        example_tokens=always(500),
        dealt=True,
    ),
}
