"""Results of ``kvatlas validate predictions``: one file, which an interrupted run goes on with.

Lines of JSON: first a `Header`, then one `Outcome` per sequence, in their order.
"""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvatlas import __version__
from kvatlas.errors import ConfigError
from kvatlas.validate.predictions import Engine, Outcome, Play
from kvatlas.validate.tiny import Tiny


class Header(msgspec.Struct, frozen=True):
    """What all outcomes of a file have in common."""

    model: str
    seed: int
    sequence_requests: int
    engine: str
    kvatlas: str
    date: str


class Summary(msgspec.Struct, frozen=True):
    """A file's outcomes, counted."""

    requests: int
    exact: int
    false_hits: int
    under: int
    hits: int
    reported_tokens: int
    steps: dict[str, int]
    applied: dict[str, int]


def summary(outcomes: Sequence[Outcome]) -> Summary:
    """Sums over all sequences. ``hits`` are requests that the engine had something of."""
    requests = sum(len(o.predicted) for o in outcomes)
    exact = sum(o.exact() for o in outcomes)
    false_hits = sum(o.false_hits() for o in outcomes)
    return Summary(
        requests=requests,
        exact=exact,
        false_hits=false_hits,
        under=requests - exact - false_hits,
        hits=sum(r > 0 for o in outcomes for r in o.reported),
        reported_tokens=sum(sum(o.reported) for o in outcomes),
        steps=_added([o.steps for o in outcomes]),
        applied=_added([o.applied for o in outcomes]),
    )


def _added(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    names = sorted({name for each in counts for name in each})
    return {name: sum(each.get(name, 0) for each in counts) for name in names}


def read(path: Path) -> tuple[Header, list[Outcome]] | None:
    """What is in a results file; None where there is none, or nothing in it.

    A last line without its end, as a killed run leaves it, does not count. Raises ConfigError.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    if not lines:
        return None
    try:
        header = msgspec.json.decode(lines[0], type=Header)
        outcomes = [msgspec.json.decode(line, type=Outcome) for line in lines[1:]]
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not a file of predictions: {error}") from error
    if [o.sequence for o in outcomes] != list(range(len(outcomes))):
        raise ConfigError(f"{path}: its sequences are not numbered from 0 up without a gap")
    return header, outcomes


def extend(
    path: Path,
    model: Tiny,
    *,
    seed: int,
    requests: int,
    engine: Engine,
    told: Callable[[Outcome], None],
) -> list[Outcome]:
    """Plays what ``path`` lacks of ``requests`` predicted requests, appending each sequence.

    ``engine`` is a started host. Raises ConfigError where the file belongs to another run.
    """
    found = read(path)
    header, outcomes = found or (None, [])
    if header is not None:
        _check(path, header, model, seed)
        _cut_unfinished(path)
    done = sum(len(o.predicted) for o in outcomes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_bytes(model.config())
        while done < requests:
            count = min(model.sequence_requests, requests - done)
            outcome = Play(engine, model, folder, len(outcomes)).run(seed, count)
            if header is None:
                header = _header(model, seed, engine.version)
                _append(path, header)
            elif header.engine != engine.version:
                raise ConfigError(f"{path}: was made with {header.engine}, not {engine.version}")
            _append(path, outcome)
            outcomes.append(outcome)
            done += count
            told(outcome)
    return outcomes


def _header(model: Tiny, seed: int, engine: str) -> Header:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Header(model.name, seed, model.sequence_requests, engine, __version__, today)


def _check(path: Path, header: Header, model: Tiny, seed: int) -> None:
    wanted = (model.name, seed, model.sequence_requests)
    there = (header.model, header.seed, header.sequence_requests)
    if there != wanted:
        raise ConfigError(
            f"{path}: holds model {there[0]}, seed {there[1]} with {there[2]} requests a sequence,"
            f" not {wanted[0]}, {wanted[1]}, {wanted[2]}: name another file"
        )


def _cut_unfinished(path: Path) -> None:
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(data.rfind(b"\n") + 1)


def _append(path: Path, line: Header | Outcome) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")
