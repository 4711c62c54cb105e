"""What was decided, why, and what then happened: in memory for `explain`, on disk if wanted.

No token ids and no text are kept, only counts, names and prices.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Protocol

import msgspec

from kvatlas.core.ladder import Below, Fallback, Rung
from kvatlas.core.pairs import HandOff
from kvatlas.core.promises import regret_s
from kvatlas.core.rivals import RIVALS
from kvatlas.core.router import Decision, Plan
from kvatlas.errors import ConfigError
from kvatlas.service.steer import Outcome

log = logging.getLogger(__name__)


class Entry(msgspec.Struct):
    """One request from decision to end. ``fallbacks``: what it left on its way, and at what cost,
    in order. ``owner``: whose it is, by the id of the tenant's scope; "" for nobody's. ``halves``:
    workers whose plan is one of a pair. ``confidence``: of engines that do not announce all that a
    resume needs, by worker, the share of what their events promised that was counted on.

    Of an answer whose first token was seen: ``error_s``, how much later it came than predicted, and
    ``regret_s``, how much sooner the best other plan would have been by its price.
    """

    decision: Decision
    outcome: Outcome | None = None
    tried: list[str] = msgspec.field(default_factory=list)
    fallbacks: list[Fallback] = msgspec.field(default_factory=list)
    halves: tuple[str, ...] = ()
    confidence: dict[str, float] = {}
    error_s: float | None = None
    regret_s: float | None = None
    hand_off: HandOff | None = None
    owner: str = ""


class Watcher(Protocol):
    """Who is told of requests as they pass. It must not raise."""

    def decided(self, entry: Entry) -> None:
        """Sent, or refused; its dispatcher still knows what it was routed by."""
        ...

    def ended(self, entry: Entry) -> None:
        """It is over."""
        ...

    def purged(self) -> None:
        """Of some owners nothing is kept any more."""
        ...


class DecisionLog:
    """The last ``entries_max`` decisions; each is appended to ``path`` once it has ended.

    ``error`` says why nothing is written any more: a full disk must not fail requests.
    """

    def __init__(self, entries_max: int, path: str = "") -> None:
        """Raises ConfigError when ``path`` cannot be written."""
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._entries_max = entries_max
        self._path = Path(path) if path else None
        self._file: FileIO | None = None  # of it, until it cannot be written to
        self.error = ""
        self.watcher: Watcher | None = None  # while somebody looks at the page
        self.forgotten: Callable[[str], bool] = lambda _: False  # owners of whom nothing is kept
        self._meanwhile: list[Entry] | None = None  # ended while the file is written anew
        if self._path is not None:
            try:
                self._file = self._path.open("ab", buffering=0)
            except OSError as error:
                raise ConfigError(f"router.decision_log: {path}: {error.strerror}") from error

    def decided(
        self, decision: Decision, confidence: dict[str, float] | None = None, owner: str = ""
    ) -> Entry:
        """Keep a decision; the oldest one goes when there are too many."""
        self._entries.pop(decision.id, None)  # an id used before: this is the newest all the same
        entry = self._entries[decision.id] = Entry(
            decision, confidence=confidence or {}, owner=owner
        )
        if len(self._entries) > self._entries_max:
            self._entries.popitem(last=False)
        if self.watcher is not None:
            self.watcher.decided(entry)
        return entry

    def ended(self, entry: Entry, outcome: Outcome) -> None:
        """Complete an entry and write it out."""
        entry.outcome = outcome
        _judge(entry, outcome)
        if self.watcher is not None:
            self.watcher.ended(entry)
        self._write(entry)

    def refused(self, decision: Decision, owner: str = "") -> None:
        """Keep and write out a decision that comes to nothing."""
        self._write(self.decided(decision, owner=owner))

    async def forget(self, meant: Callable[[str], bool]) -> dict[str, tuple[int, int, int]]:
        """Of some owners nothing is kept: entries in memory and lines of the file, by place: how
        many there were, their bytes, and how many a second look finds. Raises OSError where the
        file cannot be written anew."""
        ids = [id for id, entry in self._entries.items() if meant(entry.owner)]
        for id in ids:
            del self._entries[id]
        if self.watcher is not None:
            self.watcher.purged()
        places = {"memory": (len(ids), 0, 0)}
        path = self._path
        if path is None or self._meanwhile is not None:
            return places
        self._meanwhile = []
        try:
            count, size_bytes = await asyncio.to_thread(_rewrite, path, meant)
            if self._file is not None:
                self._file.close()
                self._file = path.open("ab", buffering=0)
            places[str(path)] = count, size_bytes, await asyncio.to_thread(_count, path, meant)
        finally:
            waiting, self._meanwhile = self._meanwhile, None
            for entry in waiting:
                self._write(entry)
        return places

    def _write(self, entry: Entry) -> None:
        if self._file is None or self.forgotten(entry.owner):
            return
        if self._meanwhile is not None:
            self._meanwhile.append(entry)
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
        return next(iter(self.newest(1)), None)

    def newest(self, count: int) -> list[Entry]:
        """The last ``count`` entries, the newest first."""
        return [self._entries[id] for id in itertools.islice(reversed(self._entries), count)]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class _Owned(msgspec.Struct):
    """All that has to be known of a line to be forgotten."""

    owner: str = ""


def _meant_lines(path: Path, meant: Callable[[str], bool]) -> Iterator[tuple[bytes, bool]]:
    """A line that is none is nobody's: it stays. None of a file that somebody has taken away."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                owner = msgspec.json.decode(line, type=_Owned).owner
            except (msgspec.MsgspecError, UnicodeDecodeError):
                owner = ""
            yield line, bool(owner) and meant(owner)


def _rewrite(path: Path, meant: Callable[[str], bool]) -> tuple[int, int]:
    """The file without those lines, in one step; how many there were, and their bytes."""
    made = path.with_name(f".{path.name}.purged")
    count = size_bytes = 0
    if not path.exists():
        return 0, 0
    try:
        with made.open("wb") as file:
            made.chmod(path.stat().st_mode & 0o777)
            for line, goes in _meant_lines(path, meant):
                if goes:
                    count, size_bytes = count + 1, size_bytes + len(line)
                else:
                    file.write(line)
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)
    return count, size_bytes


def _count(path: Path, meant: Callable[[str], bool]) -> int:
    return sum(goes for _, goes in _meant_lines(path, meant))


def taken_plan(entry: Entry) -> Plan | None:
    """The plan by which it was answered; a pair's is its first half's."""
    if entry.outcome is None:
        return None
    worker = entry.outcome.prefilled_by or entry.outcome.target.worker
    return next((p for p in entry.decision.plans if str(p.publisher) == worker), None)


def _judge(entry: Entry, outcome: Outcome) -> None:
    """What really happened against what was predicted. Where load alone decided, nothing was."""
    plans = entry.decision.plans
    taken = taken_plan(entry)
    if taken is None or outcome.ttft_s < 0 or entry.decision.unkeyed:
        return
    entry.error_s = outcome.ttft_s - taken.price.ttft_s
    others = (plan.price.ttft_s for plan in plans if plan is not taken)
    entry.regret_s = regret_s(outcome.ttft_s, others)


def explain(entry: Entry) -> str:
    """Every candidate with its price and why it lost, as text."""
    decision = entry.decision
    lines = [f"request {decision.id}: {_prompt(decision)}, policy {decision.policy}"]
    if decision.unkeyed:
        lines.append(f"  routed by load alone: {decision.unkeyed}")
    if decision.ttft_slo_s:
        lines.append(f"  objective: the first token within {decision.ttft_slo_s:.3f} s")
    if not decision.plans:
        lines.append("  no engine was up that serves this model")
    width = max((len(str(p.publisher)) for p in decision.plans), default=0)
    best = decision.plans[0] if decision.plans else None
    planned = {str(plan.publisher) for plan in decision.plans}
    taken = next((worker for worker in reversed(entry.tried) if worker in planned), "")
    for plan in decision.plans:
        price = plan.price
        mark = "→" if str(plan.publisher) == taken else " "
        lines.append(
            f"{mark} {plan.publisher!s:<{width}}  {price.total_s:8.3f} s ="
            f" wait {price.wait_s:.3f} + load {price.load_s:.3f}"
            f" + recompute {price.recompute_s:.3f}{_hand_off(price.hand_off_s)}"
            f" + crowd {price.crowd_s:.3f}"
            f" + charge {price.charge_s:.3f};"
            f" resumes at {plan.expected_tokens}{_held(plan.resume_tokens, plan.expected_tokens)}"
            f"{_tiers(plan.tier_tokens)}, {plan.in_flight} in flight"
            f"{'; prefills for a pair' if str(plan.publisher) in entry.halves else ''}"
        )
        share = entry.confidence.get(str(plan.publisher))
        if share is not None:
            lines.append(
                f"      believed: its events do not tell of its windows; of what they promise it"
                f" keeps {100 * share:.0f} %, and so much of it is counted"
            )
        if best is not None and plan is not best:
            lines.append(f"      lost: {reason(decision, plan, best)}")
    others = decision.considered - len(decision.plans)
    if others > 0:
        what = "they hold none of it and are busier; not priced" if _priced(decision) else "later"
        lines.append(f"  {others} more engines: {what}")
    lines.extend(_outcome(entry))
    return "\n".join(lines)


def _priced(decision: Decision) -> bool:
    return decision.policy == "price" and not decision.unkeyed


def reason(decision: Decision, plan: Plan, best: Plan) -> str:
    """Why ``plan`` stands behind ``best``."""
    if not _priced(decision):
        if decision.policy in RIVALS and not decision.unkeyed:
            return "later by the policy's rule"
        return "its turn comes later" if decision.policy == "round_robin" else "more loaded"
    if plan.over_share and not best.over_share:
        return "over its fair share"
    if decision.ttft_slo_s and plan.price.total_s < best.price.total_s:
        return f"{plan.price.total_s - best.price.total_s:+.3f} s, but it misses the objective"
    return f"{plan.price.total_s - best.price.total_s:+.3f} s"


def _prompt(decision: Decision) -> str:
    if decision.prompt_tokens < 0:
        return "prompt of unknown length"
    return f"{decision.prompt_tokens} prompt tokens"


def _hand_off(seconds: float) -> str:
    """Only pairs have one."""
    return f" + hand-off {seconds:.3f}" if seconds else ""


def _held(resume: int, expected: int) -> str:
    return f" ({expected - resume} of it being computed there now)" if expected > resume else ""


def _tiers(tier_tokens: tuple[int, ...]) -> str:
    names = ("hbm", "dram", "disk", "object", "peer")
    lower = [f"{n} from {names[t]}" for t, n in enumerate(tier_tokens) if t and n]
    return f" ({', '.join(lower)})" if lower else ""


def _outcome(entry: Entry) -> list[str]:
    outcome = entry.outcome
    lines = [fell_text(fallback) for fallback in entry.fallbacks]
    if outcome is None:
        return [*lines, _refused(entry.decision) or "  still running"]
    cached = "not reported" if outcome.cached_tokens < 0 else f"{outcome.cached_tokens} tokens"
    worker, first = outcome.target.worker, outcome.prefilled_by
    reused = f"{first or 'engine'} reused {cached}"
    lines.append(f"  ended with status {outcome.status} on {worker}; {reused}")
    if outcome.ttft_s >= 0:
        lines.append(f"  first token after {outcome.ttft_s:.3f} s{_judgement(entry, outcome)}")
    if first:
        lines.append(f"  prefilled by {first}, decoded by {worker}")
    if entry.hand_off is not None and entry.hand_off.took_s is not None:
        lines.append(_handed_over(entry.hand_off))
    return lines


def _refused(decision: Decision) -> str:
    refusal = decision.refusal
    if refusal is None:
        return ""
    text = f"  refused: {refusal.reason}"
    if refusal.soonest is not None:
        text += f": the soonest would be {refusal.soonest}, after {refusal.ttft_s:.3f} s"
    return f"{text}; to be asked again in {refusal.retry_after_s:.1f} s"


_RUNGS: dict[Rung, str] = {
    "lookup": "the lookup",
    "remote": "loading from a lower tier on",
    "pair": "a pair",
    "prefill": "the prefill half",
    "decode": "the decode half",
    "engine": "engine",
}
_BELOW: dict[Below, str] = {
    "by_load": "a choice by load alone",
    "local": "what the engine held itself",
    "recompute": "computing all of it",
    "pair": "another pair",
    "engine": "one engine",
    "error": "an error: nobody is left",
}


def fell_text(step: Fallback) -> str:
    """One step down the ladder, in words."""
    worker = f" {step.worker}" if step.worker else ""
    below = "an error" if step.reason == "deadline" else _BELOW[step.to]
    return (
        f"  fell back from {_RUNGS[step.rung]}{worker} after {step.cost_s:.3f} s"
        f" ({step.reason}) to {below}"
    )


def _handed_over(one: HandOff) -> str:
    what = f"{one.size_bytes / 1e6:.1f} MB handed over by {one.prefill}"
    foreseen = f"foreseen {one.foreseen_s:.3f} ± {one.error_s:.3f} s"
    return f"  {what}: first token {one.took_s:.3f} s later, {foreseen}"


def _judgement(entry: Entry, outcome: Outcome) -> str:
    if entry.error_s is None or entry.regret_s is None:
        return ""
    predicted = f", predicted {outcome.ttft_s - entry.error_s:.3f} s; regret {entry.regret_s:.3f} s"
    if not entry.regret_s:
        return f"{predicted}: no other plan was priced sooner"
    plans = entry.decision.plans
    worker = outcome.prefilled_by or outcome.target.worker
    others = [p for p in plans if str(p.publisher) != worker]
    best = min(others, key=lambda plan: plan.price.ttft_s)
    return f"{predicted}: {best.publisher} was priced at {best.price.ttft_s:.3f} s"
