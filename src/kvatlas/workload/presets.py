"""Workloads by name: the four families to vary, and presets that follow published traces.

A preset's numbers are fitted, by random search, to what is published of a trace that is not
public or not here; `TARGETS` holds what they were fitted to, so that tests and the page "Traces"
can set the result beside it. What the sources do not tell (output lengths of some traces, how many
system prompts there are) is whatever made the rest fit.
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

PRESETS: dict[str, Family] = {
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
