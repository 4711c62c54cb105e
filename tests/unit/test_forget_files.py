"""What a gateway wrote of a purged tenant: gone from memory and files, and nothing else."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from kvatlas.core.directory import Limits
from kvatlas.core.dispatch import Question
from kvatlas.core.forgetting import Floor, Floors
from kvatlas.core.keys import Scope
from kvatlas.core.router import Decision, Params
from kvatlas.core.tenancy import Sharing
from kvatlas.service.decision_log import DecisionLog
from kvatlas.service.recording import Recorder
from kvatlas.service.steer import Outcome, Target

TAG = "a" * 24
OLD, NEW = f"{TAG}.0", f"{TAG}.1"
FLOORS = Floors((Floor(TAG, 1),))
END = Outcome(Target("w", ""), 200)


def decision(id: str) -> Decision:
    return Decision(id, 0.0, 10, "price", "", (), 0)


def ended(log: DecisionLog, id: str, owner: str) -> None:
    log.ended(log.decided(decision(id), None, owner), END)


def ids(path: Path) -> list[str]:
    lines = path.read_bytes().splitlines()
    return [msgspec.json.decode(line)["decision"]["id"] for line in lines]


def test_a_decision_log_loses_the_lines_of_an_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = DecisionLog(100, str(path))
    path.chmod(0o640)
    for n in range(6):
        ended(log, f"r{n}", ("", OLD, NEW)[n % 3])
    log.refused(decision("refused"), OLD)
    with path.open("ab") as file:
        file.write(b"{torn\n")
    before = path.stat().st_size
    places = asyncio.run(log.forget(FLOORS.forgotten))
    memory, file_part = places["memory"], places[str(path)]
    assert memory == (3, 0, 0)
    assert (file_part[0], file_part[2]) == (3, 0)
    assert before - path.stat().st_size == file_part[1]
    assert path.read_bytes().endswith(b"{torn\n")  # nobody's: it stays
    assert path.stat().st_mode & 0o777 == 0o640
    assert [log.get(f"r{n}") is None for n in range(6)] == [False, True, False] * 2
    ended(log, "later", NEW)
    log.close()
    lines = [line for line in path.read_bytes().splitlines() if line != b"{torn"]
    kept = [msgspec.json.decode(line)["decision"]["id"] for line in lines]
    assert kept == ["r0", "r2", "r3", "r5", "later"]
    assert sorted(os.listdir(tmp_path)) == ["log"]


def test_what_ends_after_a_purge_is_not_written_any_more(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = DecisionLog(100, str(path))
    under_way = log.decided(decision("r"), None, OLD)
    log.forgotten = FLOORS.forgotten
    asyncio.run(log.forget(FLOORS.forgotten))
    log.ended(under_way, END)
    ended(log, "other", NEW)
    log.close()
    assert ids(path) == ["other"]
    assert log.get("r") is None


def test_what_ends_while_the_file_is_written_anew_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = DecisionLog(100, str(path))
    ended(log, "before", OLD)

    async def both() -> None:
        forgetting = asyncio.create_task(log.forget(FLOORS.forgotten))
        while log._meanwhile is None:  # until it has begun
            await asyncio.sleep(0)
        ended(log, "meanwhile", NEW)
        ended(log, "meanwhile, old", OLD)
        await forgetting

    log.forgotten = FLOORS.forgotten
    asyncio.run(both())
    log.close()
    assert ids(path) == ["meanwhile"]


def test_a_file_that_cannot_be_written_anew_says_so_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    log = DecisionLog(100, str(path))
    ended(log, "r", OLD)

    def full(*_: object) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no room"):
            asyncio.run(log.forget(FLOORS.forgotten))
    assert sorted(os.listdir(tmp_path)) == ["log"]
    ended(log, "next", NEW)
    assert ids(path) == ["r", "next"]
    assert asyncio.run(log.forget(FLOORS.forgotten))[str(path)][0] == 1
    log.close()


@pytest.mark.parametrize("gone", [False, True])
def test_a_log_that_is_not_written_any_more_is_not_forgotten(tmp_path: Path, gone: bool) -> None:
    """It was closed, for its disk was full; or an operator has taken the file away."""
    path = tmp_path / "log"
    log = DecisionLog(100, str(path))
    ended(log, "old", OLD)
    ended(log, "new", NEW)
    if gone:
        path.unlink()
    else:
        log.close()
    places = asyncio.run(log.forget(FLOORS.forgotten))
    assert places[str(path)][0] == int(not gone)
    ended(log, "next", NEW)
    assert ids(path) == (["next"] if gone else ["new"])
    log.close()


def question(id: str, owner: str) -> Question:
    below = Sharing(Scope("tenant", owner), tenant=TAG) if owner else None
    return Question(id, (), b"\1\0\0\0", below=below)


def test_a_recording_is_removed_whoever_is_in_it(tmp_path: Path) -> None:
    """Of a request that was routed by load alone it does not say whose it is, nor of KV events."""
    path = tmp_path / "recording"
    recorder = Recorder(str(path), 1 << 20, Params(), Limits())
    unkeyed = Question("r", (), unkeyed="no_tokenizer")
    recorder(1.0, unkeyed, None)
    size_bytes, left_bytes = recorder.forget()
    assert size_bytes
    assert left_bytes == 0
    assert not path.exists()
    assert "purge" in recorder.error
    recorder(9.0, question("late", NEW), None)
    assert recorder.forget() == (0, 0)
    recorder.close()
    assert not path.exists()
