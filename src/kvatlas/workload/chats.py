"""Multi-turn chats whose groups share a system prompt: what a prefix cache lives from.

Everything follows from a seed. The text is made here, word by word, from short lists: plain
English in shape, without meaning, never the same twice by chance. Sizes are in words, which are
about 1.2 to 1.4 tokens each in byte-pair tokenizers of 50,000 entries and one token each in the
stub engine's.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec


class Turn(msgspec.Struct, frozen=True):
    """One user message, sent ``think_s`` seconds after the answer before it (or the start)."""

    text: str
    think_s: float


class Chat(msgspec.Struct, frozen=True):
    """One session. ``group`` names those with the same ``system`` prompt."""

    id: str
    group: int
    system: str
    start_s: float
    turns: tuple[Turn, ...]


class Shape(msgspec.Struct, frozen=True):
    """How many chats, how long, how fast.

    Session i belongs to group i modulo ``groups`` and starts at a random moment of the first
    ``arrival_s`` seconds; pauses between its turns are drawn from 0.5 to 1.5 times ``think_s``.
    """

    sessions: int
    groups: int
    turns: int
    system_words: int
    turn_words: int
    arrival_s: float
    think_s: float


def generate(shape: Shape, seed: int = 0) -> tuple[Chat, ...]:
    """Chats in order of their start. The same shape and seed give the same chats everywhere."""
    rng = random.Random(seed)
    systems = [_system(rng, group, shape.system_words) for group in range(shape.groups)]
    starts = sorted(rng.uniform(0.0, shape.arrival_s) for _ in range(shape.sessions))
    chats = []
    for index, start_s in enumerate(starts):
        turns = [
            Turn(
                text=_message(rng, shape.turn_words),
                think_s=shape.think_s * rng.uniform(0.5, 1.5) if number else 0.0,
            )
            for number in range(shape.turns)
        ]
        group = index % shape.groups
        chats.append(Chat(f"chat-{index}", group, systems[group], start_s, tuple(turns)))
    return tuple(chats)


_PARTS = tuple(
    part.split("|")
    for part in (
        "the clerk|a guest|our courier|the night shift|every new member|the front desk|a supplier"
        "|the older system|one of the drivers|the kitchen|a returning customer|the warehouse",
        "checks|files|repeats|delays|confirms|returns|weighs|labels|collects|signs|counts|moves",
        "the invoice|two parcels|a green form|the last order|each receipt|an empty crate|the key"
        "|a spare battery|the guest list|three samples|the delivery note|a broken seal",
        "before noon|after the second call|on the ground floor|without a signature|at gate four"
        "|when it rains|in the smaller office|once a week|near the east stairs|by registered mail",
    )
)


def _sentence(rng: random.Random) -> str:
    return " ".join(rng.choice(part) for part in _PARTS)


def _system(rng: random.Random, group: int, words: int) -> str:
    opening = f"You are the assistant of branch {group + 1}. Answer briefly. The house rules:"
    return _fill(opening, lambda number: f"Rule {number}: {_sentence(rng)}.", words)


def _message(rng: random.Random, words: int) -> str:
    number = rng.randrange(1000, 10_000)
    opening = f"Case {number}. These are my notes:"
    question = "Which rule comes first here, and why?"
    notes = _fill(
        opening, lambda _: f"{_sentence(rng).capitalize()}.", words - len(question.split())
    )
    return f"{notes} {question}"


def _fill(opening: str, line: Callable[[int], str], words: int) -> str:
    """``opening`` and as many lines as reach ``words`` words."""
    parts = [opening]
    count = len(opening.split())
    while count < words:
        parts.append(line(len(parts)))
        count += len(parts[-1].split())
    return " ".join(parts)
