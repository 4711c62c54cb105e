"""What was decided, why, and what then happened: in memory for `explain`, on disk if wanted.

No token ids and no text are kept, only counts, names and prices.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from io import FileIO
from pathlib import Path

import msgspec

from kvatlas.core.router import Decision, Plan
from kvatlas.errors import ConfigError
from kvatlas.service.steer import Outcome

log = logging.getLogger(__name__)


class Entry(msgspec.Struct):
    """One request from decision to end. ``confidence``: of engines that do not announce all that
    a resume needs, by worker, the share of what their events promised that was counted on."""

    decision: Decision
    outcome: Outcome | None = None
    tried: list[str] = msgspec.field(default_factory=list)
    confidence: dict[str, float] = {}


class DecisionLog:
    """The last ``entries_max`` decisions; each is appended to ``path`` once it has ended.

    ``error`` says why nothing is written any more: a full disk must not fail requests.
    """

    def __init__(self, entries_max: int, path: str = "") -> None:
        """Raises ConfigError when ``path`` cannot be written."""
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._entries_max = entries_max
        self._file: FileIO | None = None
        self.error = ""
        if path:
            try:
                self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 - open for long
            except OSError as error:
                raise ConfigError(f"router.decision_log: {path}: {error.strerror}") from error

    def decided(self, decision: Decision, confidence: dict[str, float] | None = None) -> Entry:
        """Keep a decision; the oldest one goes when there are too many."""
        self._entries.pop(decision.id, None)  # an id used before: this is the newest all the same
        entry = self._entries[decision.id] = Entry(decision, confidence=confidence or {})
        if len(self._entries) > self._entries_max:
            self._entries.popitem(last=False)
        return entry

    def ended(self, entry: Entry, outcome: Outcome) -> None:
        """Complete an entry and write it out."""
        entry.outcome = outcome
        if self._file is None:
            return
        try:
            self._file.write(msgspec.json.encode(entry) + b"\n")
        except OSError as error:
            self.error = f"{self._file.name}: nothing is written any more: {error.strerror}"
            log.error("decision log: %s", self.error)
            self.close()

    def get(self, request_id: str) -> Entry | None:
        """The entry of a request id, while it is kept."""
        return self._entries.get(request_id)

    def last(self) -> Entry | None:
        """The newest entry."""
        return self._entries[next(reversed(self._entries))] if self._entries else None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def explain(entry: Entry) -> str:
    """Every candidate with its price and why it lost, as text."""
    decision = entry.decision
    lines = [f"request {decision.id}: {_prompt(decision)}, policy {decision.policy}"]
    if decision.unkeyed:
        lines.append(f"  routed by load alone: {decision.unkeyed}")
    if not decision.plans:
        lines.append("  no engine was up that serves this model")
    width = max((len(str(p.publisher)) for p in decision.plans), default=0)
    best = decision.plans[0] if decision.plans else None
    for plan in decision.plans:
        price = plan.price
        mark = "→" if str(plan.publisher) in entry.tried[-1:] else " "
        lines.append(
            f"{mark} {plan.publisher!s:<{width}}  {price.total_s:8.3f} s ="
            f" wait {price.wait_s:.3f} + load {price.load_s:.3f}"
            f" + recompute {price.recompute_s:.3f} + crowd {price.crowd_s:.3f}"
            f" + charge {price.charge_s:.3f};"
            f" resumes at {plan.expected_tokens}{_held(plan.resume_tokens, plan.expected_tokens)}"
            f"{_tiers(plan.tier_tokens)}, {plan.in_flight} in flight"
        )
        share = entry.confidence.get(str(plan.publisher))
        if share is not None:
            lines.append(
                f"      believed: its events do not tell of its windows; of what they promise it"
                f" keeps {100 * share:.0f} %, and so much of it is counted"
            )
        if best is not None and plan is not best:
            lines.append(f"      lost: {_reason(decision, plan, best)}")
    others = decision.considered - len(decision.plans)
    if others > 0:
        what = "they hold none of it and are busier; not priced" if _priced(decision) else "later"
        lines.append(f"  {others} more engines: {what}")
    lines.extend(_outcome(entry))
    return "\n".join(lines)


def _priced(decision: Decision) -> bool:
    return decision.policy == "price" and not decision.unkeyed


def _reason(decision: Decision, plan: Plan, best: Plan) -> str:
    """Why ``plan`` stands behind ``best``."""
    if not _priced(decision):
        return "its turn comes later" if decision.policy == "round_robin" else "more loaded"
    if plan.over_share and not best.over_share:
        return "over its fair share"
    return f"{plan.price.total_s - best.price.total_s:+.3f} s"


def _prompt(decision: Decision) -> str:
    if decision.prompt_tokens < 0:
        return "prompt of unknown length"
    return f"{decision.prompt_tokens} prompt tokens"


def _held(resume: int, expected: int) -> str:
    return f" ({expected - resume} of it being computed there now)" if expected > resume else ""


def _tiers(tier_tokens: tuple[int, ...]) -> str:
    names = ("hbm", "dram", "disk", "object", "peer")
    lower = [f"{n} from {names[t]}" for t, n in enumerate(tier_tokens) if t and n]
    return f" ({', '.join(lower)})" if lower else ""


def _outcome(entry: Entry) -> list[str]:
    outcome = entry.outcome
    if outcome is None:
        return ["  still running"]
    cached = "not reported" if outcome.cached_tokens < 0 else f"{outcome.cached_tokens} tokens"
    lines = [
        f"  ended with status {outcome.status} on {outcome.target.worker}; engine reused {cached}"
    ]
    chosen = next(
        (p for p in entry.decision.plans if str(p.publisher) == outcome.target.worker), None
    )
    if outcome.ttft_s >= 0:
        predicted = f", predicted {chosen.price.ttft_s:.3f} s" if chosen else ""
        lines.append(f"  first token after {outcome.ttft_s:.3f} s{predicted}")
    if len(entry.tried) > 1:
        lines.append(f"  tried in order: {', '.join(entry.tried)}")
    return lines
