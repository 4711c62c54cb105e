"""From a seen request to its line: lengths, times and hashes, and nothing of the content."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvatlas.config import TokenizerConfig
from kvatlas.errors import ConfigError, TraceError
from kvatlas.service.body import Usage
from kvatlas.service.observe_log import LogReader
from kvatlas.service.observe_record import About, Recorded, Recording, read
from kvatlas.service.observe_shadow import Ended, Seen, Shadow
from kvatlas.service.tokens import Tokenizer
from kvatlas.workload.trace import open_trace
from kvatlas.workload.trace_tokens import Hashed

SECRET = b"a secret of sixteen bytes"
PROMPT = list(range(7000, 7100))
ABOUT = About(1, "0", "front", "2026-01-01", 16)


class Kit:
    """A shadow that records into a file."""

    def __init__(self, folder: Path, max_bytes: int = 1 << 20) -> None:
        self.path = folder / "seen.jsonl"
        self.recording = Recording(self.path, ABOUT, max_bytes)
        self.tokenizer = Tokenizer.load(TokenizerConfig())
        self.shadow = Shadow(self.recording, self.tokenizer, Hashed(16, SECRET), 16)

    async def see(self, body: object, ended: Ended, **more: Any) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        seen = Seen("POST", "/v1/completions", {}, raw, 1.5)
        for name, value in more.items():
            seen = type(seen)(
                **{f: getattr(seen, f) for f in seen.__struct_fields__} | {name: value}
            )
        case = self.shadow.begin(seen)
        if case is not None:
            self.shadow.first(case, "", 0.1)
            self.shadow.end(case, ended)

    async def recorded(self) -> Recorded:
        await self.shadow.settle()
        self.recording.close()
        return read(self.path)


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[Kit]:
    made = Kit(tmp_path)
    yield made
    await made.shadow.close()
    await made.tokenizer.close()
    made.recording.close()


def prompt(tokens: list[int] = PROMPT, **more: object) -> dict[str, object]:
    return {"model": "m", "prompt": tokens, "max_tokens": 9} | more


DONE = Ended(200, ttft_s=0.25, e2e_s=1.0, usage=Usage(100, 7, 48), engine="e1", told="answer")


async def test_a_line_is_a_traces_and_holds_no_content(kit: Kit) -> None:
    await kit.see(prompt(), DONE)
    await kit.see(prompt([*PROMPT[:64], 1, 2, 3]), DONE, arrival_s=0.5)  # ended later
    recorded = await kit.recorded()
    late, early = recorded.rows[1], recorded.rows[0]
    assert (late.timestamp, late.input_length, late.output_length) == (1500, 100, 7)
    assert late.observed.ttft_s == 0.25
    assert (late.observed.cached_tokens, late.observed.engine) == (48, "e1")
    assert late.hash_ids[:4] == early.hash_ids[:4]  # what they share, they share here
    assert late.hash_ids[4] != early.hash_ids[4]
    assert recorded.about == ABOUT
    trace = list(open_trace(kit.path, sort=True, block_tokens=16))
    assert [r.hash_ids for r in trace] == [early.hash_ids, late.hash_ids]
    line = json.loads(kit.path.read_bytes().splitlines()[0])
    assert set(line) == {"timestamp", "input_length", "output_length", "hash_ids", "observed"}
    told = {"ttft_s", "e2e_s", "cached_tokens", "output", "engine", "told", "about"}
    assert set(line["observed"]) == told
    assert min(line["hash_ids"]) > 1 << 32  # no token is one
    assert stat.S_IMODE(kit.path.stat().st_mode) == 0o600


async def test_hashes_of_another_key_and_of_other_tenants_differ(kit: Kit) -> None:
    await kit.see(prompt(), DONE)
    await kit.see(prompt(cache_salt="tenant"), DONE)
    await kit.see(prompt(model="another"), DONE)
    rows = (await kit.recorded()).rows
    assert len({row.hash_ids for row in rows}) == 3
    assert len({row.scope for row in rows}) == 3
    assert Hashed(16, SECRET[1:]).ids(b"".join(t.to_bytes(4, "little") for t in PROMPT)) != (
        rows[0].hash_ids
    )


async def test_what_cannot_be_keyed_counts_by_its_length(kit: Kit) -> None:
    text = {"model": "m", "prompt": "no tokenizer here"}
    await kit.see(text, DONE)
    await kit.see(text, DONE)
    await kit.see(text, Ended(200))  # nobody tells how long it is
    recorded = await kit.recorded()
    one, other = recorded.rows
    assert one.input_length == 100
    assert len(one.hash_ids) == 7
    assert not set(one.hash_ids) & set(other.hash_ids)
    assert one.observed.unkeyed == "no_tokenizer"
    assert kit.shadow.lost == {"no_tokenizer": 1}


async def test_output_is_told_by_the_best_that_there_is(kit: Kit) -> None:
    await kit.see(prompt(), Ended(200, output_tokens=5))
    await kit.see(prompt(), Ended(0))  # a mirror
    await kit.see({"prompt": PROMPT}, Ended(0))
    rows = (await kit.recorded()).rows
    assert [(r.output_length, r.observed.output) for r in rows] == [
        (5, "events"),
        (9, "limit"),
        (1, "none"),
    ]


async def test_a_client_that_left_is_load_and_no_measurement(kit: Kit) -> None:
    await kit.see(prompt(), Ended(499))
    await kit.see(prompt(), Ended(200, whole=False, ttft_s=0.2, output_tokens=2))
    rows = (await kit.recorded()).rows
    assert [(r.input_length, r.observed.whole) for r in rows] == [(100, False)] * 2


async def test_a_recording_of_nothing_leaves_no_file(kit: Kit) -> None:
    kit.recording.close()
    assert not kit.path.exists()


async def test_what_is_not_recorded_is_counted(kit: Kit) -> None:
    await kit.see(b"{", DONE)
    await kit.see(b"", DONE)
    await kit.see(prompt(), DONE, path="/v1/embeddings")
    await kit.see(prompt(), DONE, path="/metrics")
    await kit.see(prompt(), DONE, method="GET")
    await kit.see(prompt(), Ended(503))
    await kit.see(prompt(), Ended(500, fault="broken"))  # the status of its head was another
    await kit.see(prompt(), Ended(-1))  # counted where it was lost
    await kit.see(prompt(), DONE)
    recorded = await kit.recorded()
    assert len(recorded.rows) == 1
    expected = {"no JSON object": 2, "other endpoint": 1, "status 503": 1, "broken": 1}
    assert kit.shadow.lost == recorded.lost == expected


async def test_more_than_may_be_pending_are_not_followed(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.service.observe_shadow.PENDING_MAX", 2)
    raw = json.dumps(prompt()).encode()
    cases = [kit.shadow.begin(Seen("POST", "/v1/completions", {}, raw, 0.0)) for _ in range(3)]
    assert [case is None for case in cases] == [False, False, True]
    assert kit.shadow.lost == {"too many at once": 1}
    await kit.shadow.close()
    assert kit.shadow.lost["the observer ended"] == 2


async def test_a_fault_of_ours_costs_one_line(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(kit.shadow, "_row", broken)
    await kit.see(prompt(), DONE)
    await kit.shadow.settle()
    monkeypatch.undo()
    await kit.see(prompt(), DONE)
    recorded = await kit.recorded()
    assert len(recorded.rows) == 1
    assert recorded.lost == {"a fault of ours": 1}


async def test_a_recording_has_an_end(tmp_path: Path) -> None:
    kit = Kit(tmp_path, max_bytes=700)
    for _ in range(3):
        await kit.see(prompt(), DONE)
        await kit.shadow.settle()
    assert "as long as it may be" in kit.recording.error
    assert len((await kit.recorded()).rows) == kit.recording.rows == 1
    with pytest.raises(ConfigError, match="File exists"):
        Recording(kit.path, ABOUT)
    await kit.tokenizer.close()


async def test_a_damaged_recording_is_refused_and_a_cut_one_is_read(kit: Kit) -> None:
    await kit.see(prompt(), DONE)
    await kit.see(prompt(), DONE)
    await kit.recorded()
    lines = kit.path.read_bytes().splitlines(keepends=True)
    kit.path.write_bytes(lines[0] + lines[1][:50])
    assert len(read(kit.path).rows) == 1
    for damage, said in (
        (lines[0] + b"{}\n", ":2: not of a recording"),
        (lines[1], ":1: the first line does not tell"),
        (lines[0].replace(b'"format":1', b'"format":9'), "recorded in format 9"),
        (lines[0].replace(b'"input_length":100', b'"input_length":1000'), ":1: 7 hashes"),
        (b"", "no requests"),
    ):
        kit.path.write_bytes(damage)
        with pytest.raises(TraceError, match=said):
            read(kit.path)


# Logs --------------------------------------------------------------------------------------------

LINES: list[tuple[object, str]] = [
    ({"timestamp": "2026-01-01T00:00:00Z", "body": prompt(), "ttft_ms": 250, "status": 200}, ""),
    ({"msec": "1767225602.5", "request_body": json.dumps(prompt()), "request_time": "0.5"}, ""),
    ({"ts": 1767225603000, "upstream_addr": "10.0.0.1:8001", **prompt()}, ""),
    ({"ts": 1767225603, "request": prompt(), "response": {"usage": {"prompt_tokens": 3}}}, ""),
    ("no object", "no JSON object"),
    (b"{broken", "no JSON"),
    (b"\xff\xfe", "no JSON"),
    ({"body": prompt()}, "no time"),
    ({"timestamp": "yesterday", "body": prompt()}, "a time that is none"),
    ({"timestamp": True, "body": prompt()}, "a time that is none"),
    *(
        ({"timestamp": value, "body": prompt()}, "a time before 1970 or after 2099")
        for value in (-1e308, 1e308, -1, "1e10", "0001-01-01T00:00:00+14:00", "2100-01-01")
    ),
    ({"msec": 0, "body": prompt()}, "a time more than a year from that of the first line"),
    ({"timestamp": 1, "body": "{"}, "its body is no JSON"),
    ({"timestamp": 1, "body": [1]}, "no request body"),
    ({"timestamp": 1, "body": {"input": "x"}}, "no messages and no prompt"),
]


async def test_a_log_is_read_and_its_bad_lines_are_counted(kit: Kit, tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line, _ in LINES]
    log.write_bytes(b"\n".join([*raw, b"", b"   "]))
    reader = LogReader(log, kit.shadow)
    await reader.play()
    rows = (await kit.recorded()).rows
    assert [row.timestamp for row in rows] == [0, 2000, 3000, 3000]  # NGINX's less what it took
    assert rows[0].observed.ttft_s == 0.25
    assert rows[1].observed.ttft_s == -1.0  # a time of headers would be none
    assert rows[2].observed.engine == "10.0.0.1:8001"
    assert reader.timed == 1
    bad = [reason for _, reason in LINES if reason]
    assert reader.bad.total() == len(bad)
    assert set(reader.bad) == set(bad)
    assert reader.example == f"{log}:5: no JSON object"
    assert kit.shadow.lost == {f"line: {reason}": bad.count(reason) for reason in bad}


async def test_a_log_is_followed_while_it_grows_and_is_replaced(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.service.observe_log._POLL_S", 0.001)
    log, line = tmp_path / "access.jsonl", json.dumps(LINES[0][0]).encode()
    log.write_bytes(line + b"\n" + line[:30])
    ended = asyncio.Event()
    following = asyncio.create_task(LogReader(log, kit.shadow).play(follow=ended))

    async def rows(count: int) -> None:
        async with asyncio.timeout(10):
            while kit.recording.rows < count:
                await asyncio.sleep(0.002)

    await rows(1)
    with log.open("ab") as file:
        file.write(line[30:] + b"\n")
    await rows(2)
    log.rename(tmp_path / "access.jsonl.1")
    log.write_bytes(line + b"\n")
    await rows(3)
    ended.set()
    await following
    assert not kit.shadow.lost


async def test_a_log_that_is_not_there_is_told(kit: Kit, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        await LogReader(tmp_path / "none", kit.shadow).play()
