"""What was promised against what came: hits of one engine, and its times to first token."""

from __future__ import annotations

from collections.abc import Iterable

_REQUESTS_MIN = 20  # before anything is concluded of an engine
_GAP_SHARE_MAX = 0.5
_DECAY = 0.95
_SPREADS = 2.0  # of the usual deviation: nine answers of ten are not later than that
_BELIEF_TOKENS = 4096  # so many promised tokens weigh as much as the belief that all will be kept


class HitGap:
    """Expected against reported hits of one engine: the alarm for silent failures.

    Both directions count: hits that were promised and did not come, and hits that came unforeseen
    (then our keys are not those of its events, no prefix ever matches, and routing is blind).
    """

    def __init__(self) -> None:
        self.requests = 0
        # In tokens, fading: promised, and reused of these; reused, and foreseen of these.
        self.expected = self.kept = self.reported = self.foreseen = 0.0

    def observe(self, expected: int, reported: int, foreseen: int = 0) -> None:
        """Token counts of one request whose engine reported what it resumed.

        ``foreseen``: expected, and what other requests were computing there when it was sent.
        """
        if expected <= 0 and reported <= 0:
            return
        self.requests += 1
        self.expected = self.expected * _DECAY + expected
        self.kept = self.kept * _DECAY + min(reported, expected)
        self.reported = self.reported * _DECAY + reported
        self.foreseen = self.foreseen * _DECAY + min(reported, max(expected, foreseen))

    def confidence(self) -> float:
        """Share of the promised tokens that the engine reuses; near 1 until enough were promised.

        It stands in for events that an engine does not send: SGLang 0.5.23 announces its chain,
        and not that a window was dropped, without which nothing can be resumed there.
        """
        return (self.kept + _BELIEF_TOKENS) / (self.expected + _BELIEF_TOKENS)

    @property
    def flag(self) -> str:
        """Why this engine is suspect, "" when it is not."""
        if self.requests < _REQUESTS_MIN:
            return ""
        if self.kept < _GAP_SHARE_MAX * self.expected:
            share = 100 * self.kept / self.expected
            found = f"the engine reused only {share:.0f} % of the tokens that its events promised"
        elif self.foreseen < _GAP_SHARE_MAX * self.reported:
            share = 100 * self.foreseen / self.reported
            found = f"its events promised only {share:.0f} % of the tokens that the engine reused"
        else:
            return ""
        return f"{found}: compare tokenizer, chat template, block size and salt"


def regret_s(measured_s: float, others_s: Iterable[float]) -> float:
    """Seconds that the best of the other plans would have been sooner, by its own price; 0 where
    none would, or where there was no other."""
    return max(0.0, measured_s - min(others_s, default=measured_s))


class PredictionError:
    """Predicted against measured time to first token of one engine, and what was missed by going
    there, as running means."""

    def __init__(self) -> None:
        self.requests = 0
        self.error_s = self.regret_s = 0.0
        # Fading: predicted, measured, and how far apart measured and what is usual.
        self._predicted_s = self._measured_s = self._apart_s = 0.0

    def observe(self, predicted_s: float, measured_s: float, others_s: Iterable[float]) -> None:
        """One answered request; ``others_s``: the times predicted of the plans not taken."""
        self.requests += 1
        weight = max(1 / self.requests, 1 - _DECAY)
        self.error_s += weight * (abs(measured_s - predicted_s) - self.error_s)
        self.regret_s += weight * (regret_s(measured_s, others_s) - self.regret_s)
        self._predicted_s = self._predicted_s * _DECAY + predicted_s
        self._measured_s = self._measured_s * _DECAY + measured_s
        usual = self._measured_s / self._predicted_s if self._predicted_s else 0.0
        self._apart_s = self._apart_s * _DECAY + abs(measured_s - usual * predicted_s)

    def lateness(self) -> float | None:
        """What a predicted second may become: the usual, and twice the usual deviation from it.
        None until enough was answered to tell."""
        if self.requests < _REQUESTS_MIN or not self._predicted_s:
            return None
        return (self._measured_s + _SPREADS * self._apart_s) / self._predicted_s
