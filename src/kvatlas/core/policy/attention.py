"""Attention: seed document 003's strategy 2. Blocks that later tokens attend to little go first.

The statistics are an input, as nobody but the engine has them: attention mass per block of a
trained model, or how often V4's indexer (CSA) selects a block. They say something of the model
they were measured on and of no other: no engine reports CSA selections today, so that for V4 the
honest entry is "not known", and a model with random weights proves mechanism only.

The file, JSON (`AttentionScores.decode`):

    {"format": "kvatlas.attention-scores.1",
     "model": "SmolLM2-135M",         whose statistics these are
     "statistic": "attention",        or "csa_selection"
     "trained": true,                 false: random weights, mechanism only
     "source": "how it was measured", for the reader
     "block_tokens": 64,              the blocks that the scores are of
     "from_start": [9.1, 1.2],        mean score of a prompt's first, second… block
     "last": 4.0,                     of its last
     "middle": 0.3,                   of all others
     "by_key": {"17": 2.5}}           of single blocks of one trace, by number from 0 in order of
                                      first use (not by hash id); may be left out

``kvatlas study attention`` writes such a file; blocks of another size are `for_blocks`.

A score is the mean share of attention (or of selections) that one block gets from the tokens after
it, in any unit: only the order counts.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from kvatlas.core.policy.base import Facts, Key, MayGo
from kvatlas.core.policy.ranked import Ranked
from kvatlas.errors import ConfigError

NOT_KNOWN = "not known"
_FORMAT = "kvatlas.attention-scores.1"
_BLOCK_TOKENS_MAX = 1 << 16
_FROM_START_MAX = 1 << 20


class AttentionScores(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured scores of one model; the fields are explained above."""

    format: Literal["kvatlas.attention-scores.1"]
    model: str
    statistic: Literal["attention", "csa_selection"]
    trained: bool
    source: str
    block_tokens: int
    from_start: tuple[float, ...] = ()
    last: float = 0.0
    middle: float = 0.0
    by_key: dict[str, float] = {}

    @classmethod
    def decode(cls, data: bytes, name: str) -> AttentionScores:
        """Raises ConfigError that names the file ``name`` and what is wrong in it."""
        try:
            made = msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{name}: no attention scores ({_FORMAT}): {error}") from error
        scores = (*made.from_start, made.last, made.middle, *made.by_key.values())
        if not all(math.isfinite(score) and score >= 0 for score in scores):
            raise ConfigError(f"{name}: scores must be finite numbers of at least 0")
        if not 1 <= made.block_tokens <= _BLOCK_TOKENS_MAX:
            raise ConfigError(
                f"{name}: block_tokens is {made.block_tokens}: 1 to {_BLOCK_TOKENS_MAX} can be"
            )
        return made

    def speaks_for(self, model: str) -> str:
        """ "" where a conclusion about ``model`` may be drawn from these; else why not."""
        if not self.trained:
            return f"{NOT_KNOWN}: measured on random weights, which prove mechanism only"
        if model.lower() != self.model.lower():
            return f"{NOT_KNOWN}: measured on {self.model}, which says nothing of {model}"
        if "v4" in model.lower() and self.statistic != "csa_selection":
            return f"{NOT_KNOWN}: {model} selects by its indexer; give CSA selection statistics"
        return ""

    def for_blocks(self, block_tokens: int) -> AttentionScores:
        """The same for blocks of another size, which get the attention of all that is in them.

        Raises ConfigError where single blocks are named, since those are of one size, and where
        that would make more than 2^20 blocks with a score of their own.
        """
        if block_tokens == self.block_tokens:
            return self
        if self.by_key:
            raise ConfigError(
                f"attention scores are of single blocks of {self.block_tokens} tokens, these have"
                f" {block_tokens}: measure or merge (--merge) so that they agree"
            )
        by, known = block_tokens / self.block_tokens, len(self.from_start)
        count = math.ceil(known / by)
        if count > _FROM_START_MAX:
            raise ConfigError(
                f"attention scores of {count} blocks of {block_tokens} tokens: at most"
                f" {_FROM_START_MAX} can be had: use larger blocks (--merge)"
            )

        def held(begin: float, end: float) -> float:
            within = range(int(begin), min(known, math.ceil(end)))
            shares = (self.from_start[j] * (min(end, j + 1) - max(begin, j)) for j in within)
            return sum(shares) + self.middle * max(0.0, end - max(begin, known))

        return msgspec.structs.replace(
            self,
            block_tokens=block_tokens,
            from_start=tuple(held(i * by, (i + 1) * by) for i in range(count)),
            last=self.last * min(1.0, by) + self.middle * max(0.0, by - 1),
            middle=self.middle * by,
        )

    def of(self, key: Key, index: int, *, last: bool) -> float:
        """The score of the block ``index`` from the start of its prompt."""
        named = self.by_key.get(str(key)) if self.by_key else None
        if named is not None:
            return named
        if index < len(self.from_start):
            return self.from_start[index]
        return self.last if last else self.middle


class Attention:
    """Lowest score first, those of equal score by LRU. Does not know the tree.

    A block is the last of its prompt until one follows it (the next turn moves the end away).
    """

    tree = False

    def __init__(self, scores: AttentionScores) -> None:
        self._scores = scores
        self._ranked = Ranked()
        self._ends: dict[Key, Facts] = {}  # blocks that nothing followed yet

    def __len__(self) -> int:
        return len(self._ranked)

    def added(self, key: Key, facts: Facts, now: float) -> None:
        parent = facts.parent
        ended = None if parent is None else self._ends.pop(parent, None)
        if parent is not None and ended is not None:
            self._ranked.rerank(parent, self._scores.of(parent, ended.index, last=False))
        self._ends[key] = facts
        self._ranked.add(key, self._scores.of(key, facts.index, last=True), facts.size_bytes)

    def touched(self, key: Key, now: float) -> None:
        self._ranked.use(key, 0.0)

    def removed(self, key: Key) -> None:
        self._ranked.remove(key)
        self._ends.pop(key, None)

    def evict(self, need_bytes: int, now: float, may_go: MayGo | None = None) -> list[Key]:
        found = self._ranked.take(need_bytes, may_go)
        for key in found:
            self._ends.pop(key, None)
        return found
