"""What a bench is told and what comes of it."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvatlas.service.load import LoadPlan, LoadResult, Record
from kvatlas.validate.bench.knee import Knee
from kvatlas.validate.bench.texts import Form

ROUNDS_MAX = 1000
REQUESTS_MAX = 100_000  # of one play: their records are kept
ARMS_MAX = 8


class Arm(msgspec.Struct, frozen=True):
    """One configuration. ``engines``: where its engines count and empty their caches (the target
    itself where none is named); ``before``: a command that makes the configuration be there."""

    name: str
    target: str
    engines: tuple[str, ...] = ()
    before: str = ""

    @property
    def counted(self) -> tuple[str, ...]:
        return self.engines or (self.target,)


class KneePlan(msgspec.Struct, frozen=True):
    """``share`` of the requests must meet the SLO; a step takes ``step_s`` of arrivals."""

    share: float = 0.95
    tolerance: float = 0.1
    steps_max: int = 12
    step_s: float = 30.0


class BenchPlan(msgspec.Struct, frozen=True):
    """``load`` is the plan of every arm's plays, but for target and model. ``rate``: requests per
    second on average, None as the trace's own."""

    load: LoadPlan
    rounds: int = 5
    requests: int = 100
    rate: float | None = None
    warm_up: int = 4
    seed: int = 0
    form: Form = "text"
    ready_s: float = 300.0
    knee: KneePlan | None = None


class Endpoint(msgspec.Struct, frozen=True):
    """What an arm's endpoint said at the start. None: it did not tell."""

    model: str
    context_tokens: int | None
    tokens_per_word: float | None
    ignore_eos: bool
    engines: dict[str, str]  # URL → what counts there, or why nothing does


class Clean(msgspec.Struct, frozen=True):
    """How it was made sure that a play finds no state of one before: the engines' caches were
    emptied, or the play's text is new. ``detail``: how that is known, or why it was needed."""

    how: Literal["reset", "new text"]
    detail: str


class EngineHits(msgspec.Struct, frozen=True):
    """What the engines counted in one play; figures are None with a reason where they do not count
    or where what they counted is not what was sent."""

    prompt_tokens: int | None = None
    local_tokens: int | None = None
    external_tokens: int | None = None
    hit_tokens: int | None = None
    reason: str = ""


class Round(msgspec.Struct, frozen=True):
    """One play of one arm. ``position``: its turn within the round. ``whole`` is False where it was
    interrupted: then it is in the per-request data only."""

    arm: str
    number: int
    position: int
    seed: int
    started_unix_s: float
    clean: Clean
    load: LoadResult | None
    hits: EngineHits
    whole: bool = True


class Row(msgspec.Struct, frozen=True):
    """One request as it ended: in which play of which arm."""

    arm: str
    play: str
    record: Record


class Outcome(msgspec.Struct, frozen=True):
    """All of a bench. ``left``: arms that could not be played to the end, and why; ``notes``: what
    a reader must know."""

    workload: str
    plan: BenchPlan
    arms: tuple[Arm, ...]
    endpoints: dict[str, Endpoint]
    rounds: tuple[Round, ...]
    knees: tuple[Knee, ...]
    left: dict[str, str]
    notes: tuple[str, ...]
    interrupted: bool
    kvatlas: str
    started_unix_s: float

    @property
    def sound(self) -> bool:
        """Every request of every arm was answered, to the end."""
        return (
            not self.left
            and not self.interrupted
            and not any(round.load is None or round.load.errors for round in self.rounds)
        )
