"""Does an engine that resumes from cached state answer as one that computed everything?

For each prompt the answer is computed once from nothing (the reference), and again with its state
found in the engine's own cache, loaded from a file in a process that never computed it, or loaded
as the minimal resume point. Tokens and logprobs must be equal to the last bit: both sides run one
thread and cut the prompt into the same steps. A harness that notices nothing would pass all that,
so parts of the state are also left out, zeroed, damaged or taken from another prompt, each alone,
and the answer must differ.

Here is what is tried and what became of it; `kvatlas.validate.exactness_vllm` runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from kvatlas.core.layout import Layout, Rule, round_up
from kvatlas.workload.proofs import Proof, Runtime

DECODE_TOKENS = 132  # a wrong ratio-128 entry shows only when its 128 tokens are complete
FAULTS = ("omit", "zero", "flip", "swap")
LONG_MARGIN_TOKENS = 256  # indexer keys matter only beyond top-k entries
INDEX_PARTS = ("c4_index", "c4_index_state")
_WIDE_TOKENS = 64

Way = Literal["cold", "local", "load", "minimal", "again", "resaved", "second"]
Expected = Literal["same", "different", "unread"]


class Fault(msgspec.Struct, frozen=True):
    """``part`` is a component of the layout; ``how`` one of `FAULTS`: not loaded (the pool's old
    bytes stay), zeroed, one bit flipped in each byte of one block of one layer, or taken from
    another prompt at the same position."""

    part: str
    how: str


class Case(msgspec.Struct, frozen=True):
    """One answer. ``position``: where it resumes, 0 for not at all.

    ``way``: "cold" computes the reference; "local" finds its own blocks in the engine's cache;
    "load" and "minimal" load them in a process that never had them; "again" comes after a minimal
    load and may find nothing of it in the engine's cache, since not all of it is there; "resaved"
    and "second" load what a request saved that itself had resumed from a minimal point, there and
    one grid block later. ``expected`` "unread": a fault in a part that is not read there, so that
    nothing may change.
    """

    prompt_tokens: int
    position: int
    way: Way
    fault: Fault | None = None
    expected: Expected = "same"

    def name(self) -> str:
        """Unique in a run: also the id of its request."""
        fault = f"-{self.fault.part}-{self.fault.how}" if self.fault else ""
        return f"{self.prompt_tokens}-{self.way}-{self.position}{fault}"


class Answer(msgspec.Struct, frozen=True):
    """What the engine said: greedy tokens, and for each the logprobs of its most likely ones.

    It ends at its first difference to the reference, where it was compared with one.
    """

    id: str
    tokens: list[int]
    logprobs: list[list[tuple[int, float]]]
    cached_tokens: int
    seconds: float = 0.0
    sources: dict[str, int] = {}  # where they came from, by the engine's own counters


class Difference(msgspec.Struct, frozen=True):
    """``at``: the first decoded token that differs, or whose logprobs do. ``token``: it is another
    one. ``logprob``: the largest change among tokens that both list there; None if none is."""

    at: int
    token: bool
    logprob: float | None


class Finding(msgspec.Struct, frozen=True):
    """A case and what became of it. ``cached_tokens`` as the engine reports them."""

    case: Case
    cached_tokens: int
    decoded: int
    difference: Difference | None
    ok: bool


class Report(msgspec.Struct, frozen=True):
    """All that was tried and found; ``fresh``: state was loaded by another process."""

    model: str
    runtime: Runtime
    torch: str
    state: str
    seed: int
    date: str
    fresh: bool
    decode_tokens: int
    findings: list[Finding]

    def ok(self) -> bool:
        """Whether every case went as expected."""
        return bool(self.findings) and all(f.ok for f in self.findings)

    def proof(self) -> Proof | None:
        """What this run shows of the minimal resume point; None where it shows nothing.

        It needs a fresh process, minimal resumes, and faults that were noticed.
        """
        minimal = sum(f.case.way in ("minimal", "resaved", "second") for f in self.findings)
        noticed = sum(f.case.expected == "different" for f in self.findings)
        if not (self.ok() and self.fresh and minimal and noticed):
            return None
        return Proof(
            runtime=self.runtime.digest(),
            state=self.state,
            about=self.runtime,
            model=self.model,
            seed=self.seed,
            date=self.date,
            same=sum(f.case.expected == "same" for f in self.findings),
            minimal=minimal,
            noticed=noticed,
        )


def difference(reference: Answer, seen: Answer) -> Difference | None:
    """Where ``seen`` first departs from ``reference``; None where no bit does.

    An answer that is shorter than the reference without having departed from it is one that was
    not finished: ValueError.
    """
    for at, (told, logprobs) in enumerate(zip(seen.tokens, seen.logprobs, strict=True)):
        old, new = dict(reference.logprobs[at]), dict(logprobs)
        if told != reference.tokens[at] or old != new:
            change = max((abs(old[t] - new[t]) for t in old.keys() & new.keys()), default=None)
            return Difference(at, told != reference.tokens[at], change)
    if len(seen.tokens) != len(reference.tokens):
        raise ValueError(
            f"{seen.id}: {len(seen.tokens)} tokens of {len(reference.tokens)}, and no difference"
        )
    return None


def judge(case: Case, reference: Answer, seen: Answer) -> Finding:
    """Whether a case went as expected; also where the engine resumed must be what was asked."""
    found = difference(reference, seen)
    # How much of its own blocks an engine keeps is its policy; what it was given is not.
    resumed = case.way == "local" or seen.cached_tokens == case.position
    return Finding(
        case=case,
        cached_tokens=seen.cached_tokens,
        decoded=len(seen.tokens),
        difference=found,
        ok=resumed and (found is not None) == (case.expected == "different"),
    )


def last_position(prompt_tokens: int, grid_tokens: int) -> int:
    """The deepest resume position of a prompt: its last token is always computed."""
    return max(prompt_tokens - 1, 0) // grid_tokens * grid_tokens


def middle_length(layout: Layout) -> int:
    """A prompt of more than 512 tokens that ends inside a block: the faults' own."""
    grid = layout.grid_tokens
    return round_up(512, grid) + grid // 3 + 3


def prompt_lengths(layout: Layout, long_tokens: int = 0) -> tuple[int, ...]:
    """Lengths at every kind of position: shorter than a block, on the grid and one to each side,
    127 to 129 tokens, the edge of each window counted from the start and from a resume point.

    ``long_tokens`` adds one prompt that ends soon after that position.
    """
    grid = layout.grid_tokens
    # Edges of narrower windows are at every few tokens: each length is one of them.
    windows = {
        c.window_tokens
        for c in layout.components
        if c.rule is Rule.WINDOW and c.window_tokens >= _WIDE_TOKENS
    }
    found = {max(2, grid // 2), middle_length(layout)}
    for middle in (grid, 2 * grid, 128, *windows, *(grid + w for w in windows)):
        found |= {middle - 1, middle, middle + 1}
    if long_tokens:
        found.add(long_tokens + 6)
    return tuple(sorted(n for n in found if n > 1))


def good_cases(layout: Layout, lengths: Sequence[int]) -> list[Case]:
    """Everything that must not change an answer."""
    grid = layout.grid_tokens
    cases = []
    for n in lengths:
        position = last_position(n, grid)
        ways: list[Way] = ["local"]
        if position:
            ways.append("load")
            if layout.has_minimal():
                ways.append("minimal")
                if n in (middle_length(layout), max(lengths)):
                    ways += ["again", "resaved"]
                    ways += ["second"] if position > grid else []
        cases += [Case(n, 0 if way == "again" else position, way) for way in ways]
    return cases


def bad_cases(
    layout: Layout, prompt_tokens: int, top_k_tokens: int = 0, parts: Iterable[str] = ()
) -> list[Case]:
    """Every fault in every part alone, at the last position of one prompt; ``parts`` limits it.

    ``top_k_tokens``: up to so many tokens V4's indexer lets all entries through, whatever its keys
    say, so that a fault in them cannot show; they are not tried there.
    """
    position = last_position(prompt_tokens, layout.grid_tokens)
    wanted = set(parts) or {c.name for c in layout.components}
    if position < top_k_tokens + LONG_MARGIN_TOKENS:
        wanted -= set(INDEX_PARTS)
    return [
        Case(
            prompt_tokens,
            position,
            "load",
            Fault(part.name, how),
            "unread" if part.least_blocks == 0 else "different",
        )
        for part in layout.components
        if part.name in wanted
        for how in FAULTS
    ]
