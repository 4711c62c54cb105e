"""What first tokens tell of an engine's speed. Pure."""

from __future__ import annotations

import msgspec

from kvatlas.core.cost import EngineCost, Work
from kvatlas.core.records import Tier

# Two first tokens so close, in shares of the time before the first of them, came out of one step.
_SAME_STEP = 0.1


class Answer(msgspec.Struct):
    """A request whose answer has begun. ``expected`` tokens were to be resumed; ``sure`` where
    nothing that was still to happen decided that. ``below``: of them, by tier as in `Resume`;
    ``beside``: requests that decoded there in the step that it had to wait for. ``seconds`` is its
    own prefill."""

    sent_at: float
    prompt_tokens: int
    expected: int
    sure: bool
    below: tuple[int, ...]
    beside: int
    seconds: float = 0.0
    together: list[Answer] = []  # what came out of the same step
    told: bool = False


class Measured:
    """Learns the prices of one engine: at once where it keeps its promises, so that a change is
    known before the answers are over, else when it has said what it resumed."""

    def __init__(self, cost: EngineCost) -> None:
        self._cost = cost
        self._keeps = True  # the last request resumed what was expected
        self._latest: Answer | None = None  # may still get company
        self._at = self._before = 0.0  # the last first token, and that of the step before

    def began(self, answer: Answer, now: float) -> None:
        """Its first token came."""
        latest = self._latest
        joins = (
            latest is not None
            and answer.sent_at < self._at
            and now - self._at < _SAME_STEP * latest.seconds
        )
        if latest is not None and joins:
            self._join(latest, answer, now)
        else:
            if latest is not None and latest.sure and self._keeps:
                self._learn(latest, latest.expected)
            self._before = self._at
            self._lead(answer, now)
        self._at = now

    def _lead(self, answer: Answer, now: float) -> None:
        answer.seconds = now - max(answer.sent_at, self._before)
        self._latest = answer

    def _join(self, latest: Answer, answer: Answer, now: float) -> None:
        """One step, one measurement, whichever first token was heard of first."""
        if answer.sent_at < latest.sent_at:
            answer.together, latest.together = [latest, *latest.together], []
            latest.told = True
            self._lead(answer, now)
        else:
            latest.together.append(answer)
            answer.told = True

    def ended(self, answer: Answer, *, ok: bool, cached_tokens: int) -> None:
        """It is over; ``cached_tokens`` is what the engine reported as resumed, else -1."""
        if self._latest is answer:
            self._latest = None
        if not ok:
            return
        if cached_tokens < 0:
            cached_tokens = answer.expected
        self._keeps = abs(cached_tokens - answer.expected) <= self._cost.grid_tokens
        if not answer.told:
            self._learn(answer, cached_tokens)

    def _learn(self, answer: Answer, cached_tokens: int) -> None:
        answer.told = True
        cost, every = self._cost, (answer, *answer.together)
        if any(each.prompt_tokens <= 0 for each in every):
            return
        start = min(cached_tokens, answer.prompt_tokens)
        work = cost.pool.work(start, answer.prompt_tokens, answer.beside)
        for other in sorted(answer.together, key=lambda each: each.sent_at):
            work = _sum(work, cost.pool.work(other.expected, other.prompt_tokens))
        lower = [t for t, n in enumerate(answer.below) if t != Tier.HBM and n]
        if not lower or not start:
            cost.observe_prefill(work, answer.seconds)
        elif not answer.together:
            beyond_s = answer.seconds - cost.recompute_s(start, answer.prompt_tokens, answer.beside)
            cost.observe_load(Tier(lower[0]), answer.below[lower[0]], beyond_s)


def _sum(work: Work, more: Work) -> Work:
    """Of one step: what it costs to have one at all counts once."""
    return work[0], work[1] + more[1], work[2] + more[2], work[3]
