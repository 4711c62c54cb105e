"""The result of one run of a stage: a file that is signed, and that the next stage builds on."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from kvatlas.errors import ConfigError
from kvatlas.validate.stages.facts import Baseline, Figures
from kvatlas.validate.stages.values import STAGES, Stage, Status, Verdict


class Previous(msgspec.Struct, frozen=True):
    """The result that a stage builds on: its file's stage and digest."""

    stage: Stage
    digest: str
    change: str = ""


class Result(msgspec.Struct, frozen=True):
    """One run of a stage. ``declared``: what the operator said, which nobody checked;
    ``digest``: SHA-256 over all else in it, by which it is signed and built on."""

    stage: Stage
    cluster: str
    kvatlas: str
    began: str
    took_s: float
    verdicts: tuple[Verdict, ...]
    declared: dict[str, str] = {}
    figures: Figures = Figures()
    baseline: Baseline | None = None
    previous: Previous | None = None
    change: str = ""
    digest: str = ""

    @property
    def passed(self) -> bool:
        """Whether the next stage may begin."""
        good = ("pass", "not applicable")
        return bool(self.verdicts) and all(v.status in good for v in self.verdicts)

    def counts(self) -> dict[str, int]:
        """Points by status."""
        order: tuple[Status, ...] = ("pass", "fail", "not shown", "not applicable")
        return {s: sum(v.status == s for v in self.verdicts) for s in order}

    def sealed(self) -> Result:
        """The same with its digest."""
        return msgspec.structs.replace(self, digest=digest_of(self))


class Unwritten(ConfigError):
    """A result that could not be kept: whoever asked for it can still be told it."""

    def __init__(self, path: Path, error: OSError, result: Result) -> None:
        super().__init__(f"{path}: cannot be written: {error.strerror or error}")
        self.result = result


def digest_of(result: Result) -> str:
    """Over all of it but its own digest."""
    bare = msgspec.structs.replace(result, digest="")
    return hashlib.sha256(msgspec.json.encode(bare, order="deterministic")).hexdigest()


def path_of(folder: Path, stage: Stage, change: str = "") -> Path:
    """Where the result of a stage is kept."""
    return folder / f"stage-{stage}{f'-{change}' if change else ''}.json"


def load_result(path: Path) -> Result:
    """Raises ConfigError for what is no result, or one that was changed after it was made."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Result)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: no result of a stage: {error}") from error
    if digest_of(found) != found.digest:
        raise ConfigError(f"{path}: its digest does not fit: it was changed; run that stage again")
    return found


def built_on(folder: Path, stage: Stage, against: Path | None = None) -> tuple[Result, Baseline]:
    """What ``stage`` builds on, and stage A's baseline: all of them passed, each made on the one
    before it. ``against``: instead of the stage before. Raises ConfigError."""
    before = STAGES[STAGES.index(stage) - 1]
    path = against or path_of(folder, before)
    if not path.exists():
        raise ConfigError(f"stage {stage} builds on stage {before}, and there is no {path}: run it")
    found = newest = load_result(path)
    while True:
        if not newest.passed:
            raise ConfigError(
                f"stage {stage} stops here: {path} did not pass: {_open_points(newest)}"
            )
        if newest.previous is None:
            break
        path = path_of(folder, newest.previous.stage, newest.previous.change)
        older = load_result(path)
        if older.digest != newest.previous.digest:
            raise ConfigError(
                f"stage {newest.stage} was run on another stage {older.stage} than {path} has now:"
                f" run stage {newest.stage} again"
            )
        newest = older
    if newest.stage != "a" or newest.baseline is None:
        raise ConfigError(f"{path}: has no baseline: run stage a")
    return found, newest.baseline


def _open_points(result: Result) -> str:
    found = [
        f"{v.point} {v.status}"
        for v in result.verdicts
        if v.status not in ("pass", "not applicable")
    ]
    return ", ".join(found) or "it has no point"
