"""Checkpoints: at which positions of a request a resume point is kept, and what that costs.

A prefix of a model with windows can be resumed only where its windows were kept. One such point of
DeepSeek V4 Flash weighs as much as a thousand tokens of its compressed KV, so that spacing, not
KV, decides what a store holds. "Zero", "periodic" and "full" are the choices of the V4 report
(arXiv 2606.19348, §3.5.2); end of prompt is vLLM's default, end of prompt and of output
DeepSeek's own practice; a junction is where a later request was seen to leave the prefix.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvatlas.core.layout import Layout, Rule
from kvatlas.errors import ConfigError

_EVERY_MAX = 1 << 24  # tokens


class Spacing(msgspec.Struct, frozen=True):
    """Which positions get a resume point. None of them: "zero"; ``every_tokens`` = grid: "full"."""

    prompt_end: bool = False
    output_end: bool = False
    junctions: bool = False
    every_tokens: int = 0

    def positions(
        self, grid_tokens: int, prompt_tokens: int, output_tokens: int, seen: Iterable[int] = ()
    ) -> tuple[int, ...]:
        """Positions on the grid, ascending. ``seen`` are the junctions observed so far.

        One token of a prompt is computed anew in any case, and the last token of an answer never
        went through the model: neither end counts its last token. Raises ConfigError where
        ``every_tokens`` is no multiple of the grid.
        """
        if self.every_tokens < 0 or self.every_tokens % grid_tokens:
            raise ConfigError(
                f"a resume point every {self.every_tokens} tokens: give a multiple of the grid "
                f"({grid_tokens})"
            )
        end = max(prompt_tokens + output_tokens - 1, 0)
        wanted: set[int] = set()
        if self.prompt_end:
            wanted.add(prompt_tokens - 1)
        if self.output_end and output_tokens > 0:
            wanted.add(end)
        if self.junctions:
            wanted.update(position for position in seen if position <= end)
        if self.every_tokens:
            wanted.update(range(self.every_tokens, end + 1, self.every_tokens))
        on_grid = {position // grid_tokens * grid_tokens for position in wanted}
        return tuple(sorted(position for position in on_grid if position > 0))


#: Names for tables and configuration; "periodic" is ``Spacing(every_tokens=…)``.
ZERO = Spacing()
PROMPT_END = Spacing(prompt_end=True)
ENDS = Spacing(prompt_end=True, output_end=True)
ENDS_AND_JUNCTIONS = Spacing(prompt_end=True, output_end=True, junctions=True)
_NAMED = {"prompt-end": PROMPT_END, "ends": ENDS, "junctions": ENDS_AND_JUNCTIONS}


def spacing_of(text: str) -> Spacing | None:
    """By its name, or every so many tokens; None: all positions. Raises ConfigError for others."""
    if text == "all":
        return None
    if text.isascii() and text.isdecimal() and 0 < int(text) <= _EVERY_MAX:
        return Spacing(every_tokens=int(text))
    if text not in _NAMED:
        raise ConfigError(f"{text!r}: all, {', '.join(_NAMED)}, or a number of tokens is wanted")
    return _NAMED[text]


class Priced(msgspec.Struct, frozen=True):
    """Bytes that one request leaves in a store: what grows with it, and its resume points."""

    chain_bytes: float
    points: int
    point_bytes: float

    @property
    def total_bytes(self) -> float:
        """Both together."""
        return self.chain_bytes + self.points * self.point_bytes


def point_bytes(layout: Layout, *, minimal: bool) -> float:
    """Bytes of one resume point before padding. ``minimal``: what a resume reads, where that was
    shown to be exact (`kvatlas.workload.proofs`)."""
    return sum(
        (c.window_blocks(minimal=minimal) or 0) * c.exact_block_bytes()
        for c in layout.components
        if c.rule is Rule.WINDOW
    )


def price(
    layout: Layout,
    spacing: Spacing,
    prompt_tokens: int,
    output_tokens: int,
    *,
    seen: Iterable[int] = (),
    minimal: bool = True,
) -> Priced:
    """What a request costs to keep under a spacing. A model without windows pays no points."""
    points = spacing.positions(layout.grid_tokens, prompt_tokens, output_tokens, seen)
    tokens = max(prompt_tokens + output_tokens - 1, 0) // layout.grid_tokens * layout.grid_tokens
    each = point_bytes(layout, minimal=minimal)
    return Priced(layout.bytes_per_token() * tokens, len(points) if each else 0, each)


def bytes_per_token(layout: Layout, every_tokens: int, *, minimal: bool = True) -> float:
    """Bytes per token of context at one resume point each ``every_tokens``, KV included.

    Raises ConfigError where that is no multiple of the grid above zero.
    """
    if every_tokens <= 0 or every_tokens % layout.grid_tokens:
        raise ConfigError(
            f"a resume point every {every_tokens} tokens: give a multiple of the grid "
            f"({layout.grid_tokens})"
        )
    return layout.bytes_per_token() + point_bytes(layout, minimal=minimal) / every_tokens


def break_even_tokens(layout: Layout, *, minimal: bool = True) -> float:
    """Tokens of KV that weigh as much as one resume point."""
    return point_bytes(layout, minimal=minimal) / layout.bytes_per_token()
