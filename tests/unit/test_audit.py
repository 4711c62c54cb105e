"""The audit log: what is in it, what a full disk does to it, and how it stays small."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from kvatlas.config_tls import AuditConfig
from kvatlas.errors import ConfigError, RequestError
from kvatlas.service.audit import ADDRESSES_MAX, REFUSALS_S, Audit


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def opened(path: Path, **more: object) -> Audit:
    return Audit(AuditConfig(str(path), **more), "gateway", wall=lambda: 0.0)  # type: ignore[arg-type]


def test_a_line_says_who_did_what(tmp_path: Path) -> None:
    audit = opened(tmp_path / "audit.jsonl")
    assert audit.note("token ops", "GET /kvatlas/explain/last", address="10.0.0.1")
    audit.changing("kvatlas://client/ops", "POST /kvatlas/purge", "t" * 1000)
    audit.close()
    read, change = lines(tmp_path / "audit.jsonl")
    assert read == {
        "at": "1970-01-01T00:00:00.000+00:00",
        "part": "gateway",
        "who": "token ops",
        "what": "GET /kvatlas/explain/last",
        "address": "10.0.0.1",
        "outcome": "done",
    }
    assert change["outcome"] == "begins"
    assert change["target"] == "t" * 256
    assert os.stat(tmp_path / "audit.jsonl").st_mode & 0o777 == 0o600


def test_a_name_with_a_line_end_makes_no_second_line(tmp_path: Path) -> None:
    audit = opened(tmp_path / "audit.jsonl")
    audit.note('x\n{"who":"forged"}', "GET /")
    audit.close()
    assert len(lines(tmp_path / "audit.jsonl")) == 1


def test_nothing_is_changed_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = opened(tmp_path / "audit.jsonl")

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert not audit.note("ops", "GET /kvatlas/directory")
        with pytest.raises(RequestError, match="No space left on device") as refused:
            audit.changing("ops", "POST /kvatlas/purge")
    assert refused.value.status == 503
    assert refused.value.code == "audit_unavailable"
    assert audit.counts == {"failed": 2, "changes_refused": 1}
    assert audit.error
    audit.changing("ops", "POST /kvatlas/purge")
    assert not audit.error
    assert len(lines(tmp_path / "audit.jsonl")) == 1
    audit.close()


def test_a_line_that_was_written_in_part_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = opened(tmp_path / "audit.jsonl")
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:10]))
        assert not audit.note("ops", "GET /a")
    assert audit.note("ops", "GET /b")
    audit.close()
    torn, whole = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert len(torn) == 10
    assert json.loads(whole)["what"] == "GET /b"


def test_what_a_dead_process_left_in_part_is_ended_first(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").write_text('{"who":"x"')
    audit = opened(tmp_path / "audit.jsonl")
    audit.note("ops", "GET /b")
    audit.close()
    assert json.loads((tmp_path / "audit.jsonl").read_text().splitlines()[1])["who"] == "ops"


def test_it_stays_small_and_keeps_the_newest(tmp_path: Path) -> None:
    audit = opened(tmp_path / "audit.jsonl", file_max_bytes=600, keep=2)
    for number in range(40):
        assert audit.note("ops", f"GET /{number}")
    audit.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert all(path.stat().st_size <= 600 for path in tmp_path.iterdir())
    told = [line["what"] for name in reversed(names) for line in lines(tmp_path / name)]
    assert told == [f"GET /{number}" for number in range(40 - len(told), 40)]


def test_who_is_refused_again_and_again_fills_no_disk(tmp_path: Path) -> None:
    now = [0.0]
    config = AuditConfig(str(tmp_path / "audit.jsonl"))
    audit = Audit(config, "gateway", clock=lambda: now[0])
    for _ in range(1000):
        audit.refused("10.0.0.1", "GET /metrics", "nobody known")
    now[0] += REFUSALS_S
    audit.refused("10.0.0.1", "GET /metrics", "nobody known")
    first, second = lines(tmp_path / "audit.jsonl")
    assert "times" not in first
    assert second["times"] == 1000
    for number in range(3 * ADDRESSES_MAX):
        audit.refused(f"10.1.{number >> 8}.{number & 255}", "GET /", "nobody known")
    assert len(audit._refusals) <= ADDRESSES_MAX + 1
    assert len(lines(tmp_path / "audit.jsonl")) <= ADDRESSES_MAX + 3
    audit.close()


def test_a_file_that_cannot_be_opened_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"audit\.file: .*No such file"):
        opened(tmp_path / "nowhere" / "audit.jsonl")


def test_a_file_that_was_taken_away_is_begun_anew(tmp_path: Path) -> None:
    """Lines in a file that has no name are in nobody's log, and a change would follow them."""
    path = tmp_path / "audit.jsonl"
    audit = opened(path)
    assert audit.note("a", "GET /1")
    path.unlink()
    audit.changing("a", "POST /2")
    audit.close()
    assert [line["what"] for line in lines(path)] == ["POST /2"]


def test_no_empty_file_pushes_out_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.jsonl"
    audit = opened(path, file_max_bytes=1, keep=2)
    for number in range(3):
        assert audit.note("a", f"GET /{number}")

    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", none_left)
        assert not audit.note("a", "GET /lost")
    assert audit.note("a", "GET /3")
    audit.close()
    kept = [lines(tmp_path / f"audit.jsonl{end}")[0]["what"] for end in (".2", ".1", "")]
    assert kept == ["GET /1", "GET /2", "GET /3"]
