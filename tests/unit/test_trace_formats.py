"""Every trace format: recognised, read into the one form, refused with file, line and reason."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvatlas.errors import ConfigError, TraceError
from kvatlas.workload.trace import TraceRequest, open_trace
from kvatlas.workload.trace_stats import stats
from kvatlas.workload.trace_write import encode, write

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def text(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def session(
    *requests: list[Any], id: str = "a", tool: int = 128, system: int = 64, bs: int = 64
) -> str:
    return json.dumps({"id": id, "bs": bs, "tool": tool, "sys": system, "r": list(requests)})


def turn(t: float, prompt: int, *runs: list[int], depth: int = 0, think: Any = 1.0) -> list[Any]:
    return [t, depth, prompt, 7, 2.0, think, list(runs)]


def words(api_path: str, body: Mapping[str, Any]) -> tuple[bytes, ...]:
    """A tokenizer: one id per word."""
    prompt = body.get("prompt") or " ".join(m["content"] for m in body["messages"])
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if "unknowable" in prompts[0]:
        raise ValueError("its token ids cannot be known: multimodal")
    return tuple(
        b"".join(sum(word.encode()).to_bytes(4, "little") for word in one.split())
        for one in prompts
    )


# -- Azure ----------------------------------------------------------------------------------------


def test_azure_prompts_are_all_new(tmp_path: Path) -> None:
    rows = ("2023-11-16 18:17:03.9799600,600,10", "2023-11-16 18:17:04.4799600,512,0")
    path = text(tmp_path / "t.csv", AZURE.strip(), *rows)
    trace = open_trace(path)
    assert (trace.format, trace.block_tokens) == ("azure", 512)
    assert list(trace) == [
        TraceRequest(0, 0.0, 600, 10, (0, 1)),
        TraceRequest(1, 0.5, 512, 0, (2,)),
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2023-11-16 18:17:03,5", "not a time and two numbers"),
        ("2023-11-16 18:17:03,x,1", "not a time and two numbers"),
        ("yesterday,5,1", "not a time and two numbers"),
        ("2023-11-16 18:17:03,0,1", "at least one token"),
        ("2023-11-16 18:17:03,-9,1", "at least one token"),
        ("2023-11-16 18:17:03,9999999999,1", "believed of no request"),
        ("2023-11-16 18:17:01,5,1", "sort the trace first"),
        ("2023-11-16 18:17:03+01:00,5,1", "not a time"),
        ('{"timestamp": 1}', "not a time"),
    ],
)
def test_azure_faults(tmp_path: Path, row: str, reason: str) -> None:
    path = text(tmp_path / "t.csv", AZURE.strip(), "2023-11-16 18:17:02,5,1", row)
    with pytest.raises(TraceError, match=rf"t\.csv:3: .*{reason}"):
        list(open_trace(path))


# -- Claude Code sessions -------------------------------------------------------------------------


def test_sessions_are_merged_and_share_what_is_the_same(tmp_path: Path) -> None:
    path = text(
        tmp_path / "s.jsonl",
        session(turn(0, 260, [1, 4], think=0.0), turn(5, 384, [1, 4], [9, 2]), id="a"),
        session(turn(0, 320, [1, 5]), id="b"),  # as many tools and system tokens
        session(turn(0, 256, [1, 4]), id="c", system=65),  # other system prompt
        session(turn(0, 256, [1, 4]), id="d", tool=64),  # other tools
    )
    trace = open_trace(path, session_gap_s=1e-6)
    assert (trace.format, trace.block_tokens) == ("claude-code", 64)
    found = {(r.session, r.input_tokens): r for r in trace}
    assert [r.index for r in trace] == [0, 1, 2, 3, 4]
    first, again = found["a", 260], found["a", 384]
    assert len(first.hash_ids) == 5  # four full blocks, and four tokens that nobody shares
    assert again.hash_ids[:4] == first.hash_ids[:4]
    assert (first.think_s, again.think_s) == (None, 1.0)
    assert again.arrival_s == pytest.approx(5)
    others = [found[name].hash_ids for name in (("b", 320), ("c", 256), ("d", 256))]
    alike = [sum(x == y for x, y in zip(first.hash_ids, ids, strict=False)) for ids in others]
    assert alike == [3, 2, 0]
    everything = [id for r in trace for id in r.hash_ids]
    assert len(set(everything)) == 7 + 2 + 2 + 4  # what a needs, then what is new in each


def test_a_system_prompt_that_changes_is_shared_no_further(tmp_path: Path) -> None:
    path = text(
        tmp_path / "s.jsonl",
        session(turn(0, 256, [1, 4]), turn(9, 256, [1, 2], [5, 2]), id="a", system=128),
        session(turn(0, 256, [1, 4]), id="b", system=128),
    )
    first, other, _ = open_trace(path, session_gap_s=1e-6)
    alike = [x == y for x, y in zip(first.hash_ids, other.hash_ids, strict=True)]
    assert alike == [True, True, False, False]


def test_sessions_start_by_seed_and_sub_agents_are_conversations(tmp_path: Path) -> None:
    rows = [
        session(turn(0, 64, [1, 1]), turn(1, 64, [7, 1], depth=1), id=str(n)) for n in range(50)
    ]
    path = text(tmp_path / "s.jsonl", *rows)
    one, same, other = (list(open_trace(path, session_gap_s=30, seed=seed)) for seed in (1, 1, 2))
    assert one == same != other
    assert [r.arrival_s for r in one] == sorted(r.arrival_s for r in one)
    assert 49 * 10 < one[-1].arrival_s < 49 * 90
    assert {r.session for r in one if r.session.startswith("3/")} == {"3/1"}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "truncated"),
        (session(turn(0, 64, [1, 1])).replace('"bs"', '"b"'), "bs"),
        (session(turn(0, 64, [1, 1]), bs=32), "blocks of 32 tokens, not of 64"),
        (session(turn(0, 63, [1, 1])), "request 0 of session a: 1 full blocks, but 63 tokens"),
        (session(turn(0, 640, [1, 1])), "1 hash_ids, but input_length 640"),
        (session(turn(0, 64, [0, 1])), "a run of blocks"),
        (session(turn(0, 64, [1, -1])), "a run of blocks"),
        (session(turn(0, 64, [1, 1 << 24])), "a run of blocks"),
        (session(turn(5, 64, [1, 1]), turn(4, 64, [1, 1])), "its time 4 s comes after 5"),
        (session(turn(-1, 64, [1, 1])), "its time -1 s comes after 0"),
        (session(turn(0, 64, [1, 1]), tool=-1), "tool -1"),
        (session(turn(0, 64, [1, 1]), turn(1, 64, [1, 1], think=-2)), "delay -2000 ms"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "required"),
    ],
)
def test_session_faults(tmp_path: Path, bad: str, reason: str) -> None:
    path = text(tmp_path / "s.jsonl", session(turn(0, 64, [1, 1]), id="0"), bad)
    with pytest.raises(TraceError, match=rf"s\.jsonl:2: .*{reason}"):
        list(open_trace(path))


def test_a_length_that_makes_no_block_is_told_with_its_line(tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": %d, "output_length": 1, "hash_ids": [1, 2]}'
    path = text(tmp_path / "m.jsonl", line % 10**18)
    with pytest.raises(TraceError, match=r"m\.jsonl:1: lengths above"):
        list(open_trace(path))


# -- token ids and request logs -------------------------------------------------------------------


def ids_line(time_ns: int, ids: list[int], **more: object) -> str:
    return json.dumps({"arrival_time_ns": time_ns, "input_tok_ids": ids, "output_toks": 3, **more})


def test_token_ids_share_as_far_as_they_agree(tmp_path: Path) -> None:
    path = text(
        tmp_path / "t.jsonl",
        ids_line(0, list(range(40)), input_toks=40),
        ids_line(10**9, [*range(32), 99, 98]),
    )
    trace = open_trace(path)
    one, two = trace
    assert (trace.format, trace.block_tokens, two.arrival_s) == ("token-ids", 16, 1.0)
    assert one.hash_ids[:2] == two.hash_ids[:2]
    assert one.hash_ids[2] != two.hash_ids[2]
    keyed = list(open_trace(path, secret=b"0123456789abcdef"))
    assert not {*keyed[0].hash_ids} & {*one.hash_ids}
    assert keyed[0].hash_ids[:2] == keyed[1].hash_ids[:2]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (ids_line(2, [1], input_toks=2), "1 ids, but input_toks 2"),
        (ids_line(2, [-1]), "unsigned"),
        (ids_line(2, [1 << 40]), "greater than maximum"),
        (ids_line(2, []), "at least one token"),
        (ids_line(10**400, [1]), "too large"),
        (ids_line(0, [1]), "sort the trace first"),
    ],
)
def test_token_id_faults(tmp_path: Path, bad: str, reason: str) -> None:
    path = text(tmp_path / "t.jsonl", ids_line(1, [1]), bad)
    with pytest.raises(TraceError, match=rf"t\.jsonl:2: .*{reason}"):
        list(open_trace(path))


def test_request_logs_become_blocks_without_content(tmp_path: Path) -> None:
    said = "one two three four five six"
    chat = {"messages": [{"role": "user", "content": f"{said} seven"}], "max_tokens": 9}
    path = text(
        tmp_path / "log.jsonl",
        json.dumps({"timestamp": "2026-01-01T00:00:00Z", "prompt": said, "max_tokens": 4}),
        json.dumps({"timestamp": 1767225601500, "body": chat, "session_id": "me"}),
        json.dumps(
            {"time": 1767225602, "prompt": [said, "x y"], "usage": {"completion_tokens": 2}}
        ),
        json.dumps({"ts": 1767225603e9, "input": said, "output": "a b c", "tenant": "acme"}),
    )
    trace = open_trace(path, tokenize=words, block_tokens=2)
    requests = list(trace)
    assert trace.format == "openai"
    assert [r.arrival_s for r in requests] == [0, 1.5, 2, 2, 3]
    assert [r.input_tokens for r in requests] == [6, 7, 6, 2, 6]
    assert [r.output_tokens for r in requests] == [4, 9, 2, 2, 3]
    assert requests[0].hash_ids == requests[1].hash_ids[:3] == requests[2].hash_ids
    assert not {*requests[0].hash_ids} & {*requests[4].hash_ids}  # another tenant's
    out = tmp_path / "out.jsonl"
    write(out, trace)
    assert not any(f'"{word}' in out.read_text() for word in ("one", "me", "acme"))
    assert list(open_trace(out, block_tokens=2)) == requests


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{}", "no time"),
        ('{"timestamp": 3}', "no messages, no prompt"),
        ('{"timestamp": "soon", "prompt": "a"}', "Invalid isoformat"),
        ('{"timestamp": true, "prompt": "a"}', "no time"),
        ('{"timestamp": 3, "prompt": "unknowable"}', "cannot be known: multimodal"),
        ('{"timestamp": 3, "prompt": "a", "max_tokens": -1}', "output_length -1"),
        ('{"timestamp": 3, "prompt": " "}', "at least one token"),
        ("[3]", "Expected `object`"),
        ('{"timestamp": NaN, "prompt": "a"}', "malformed"),
        (f'{{"timestamp": {10**400}, "prompt": "a"}}', "too large"),
    ],
)
def test_request_log_faults(tmp_path: Path, bad: str, reason: str) -> None:
    path = text(tmp_path / "log.jsonl", '{"timestamp": 2, "prompt": "a"}', bad)
    with pytest.raises(TraceError, match=rf"log\.jsonl:2: .*{reason}"):
        list(open_trace(path, tokenize=words))


def test_a_log_needs_a_tokenizer(tmp_path: Path) -> None:
    path = text(tmp_path / "log.jsonl", '{"timestamp": 2, "prompt": "a"}')
    with pytest.raises(ConfigError, match="--tokenizer"):
        list(open_trace(path))


# -- all formats ----------------------------------------------------------------------------------


def test_what_cannot_be_told_must_be_named(tmp_path: Path) -> None:
    path = text(tmp_path / "t", "", "hello")
    with pytest.raises(TraceError, match=r"t:2: the format cannot be told"):
        open_trace(path)
    with pytest.raises(ConfigError, match="unknown format 'x': use one of mooncake"):
        open_trace(path, format="x")
    with pytest.raises(TraceError, match=r"t:2: .*malformed"):
        open_trace(path, format="mooncake")
    with pytest.raises(TraceError, match="no requests in it"):
        open_trace(text(tmp_path / "empty", ""))
    for gap in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="--session-gap-s"):
            open_trace(path, session_gap_s=gap)


def test_a_pipe_is_refused_since_a_trace_is_read_again(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="pipe: a pipe can be read once"):
        open_trace(tmp_path / "pipe")


def test_sorting_is_offered(tmp_path: Path) -> None:
    rows = [TraceRequest(0, s, 16, 1, (i,)) for i, s in enumerate((3.0, 1.0, 2.0, 1.0))]
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"".join(encode(row) for row in rows))
    found = list(open_trace(path, block_tokens=16, sort=True))
    assert [(r.index, r.arrival_s, r.hash_ids) for r in found] == [
        (0, 1.0, (1,)), (1, 1.0, (3,)), (2, 2.0, (2,)), (3, 3.0, (0,)),
    ]  # fmt: skip
    log = text(tmp_path / "l.jsonl", *(f'{{"ts": {t}, "prompt": "a"}}' for t in (9, 7)))
    assert [r.arrival_s for r in open_trace(log, tokenize=words, sort=True)] == [0, 2]


def test_sorting_refuses_what_no_request_can_be_as_reading_does(tmp_path: Path) -> None:
    good = encode(TraceRequest(0, 5.0, 16, 1, (1,))).decode().strip()
    bad = {
        good.replace("16", f"{10**30}"): "believed of no request",
        good.replace("[1]", f"[{1 << 70}]"): "hash_ids must be below",
        good.replace("[1]", "[1,2]"): "2 hash_ids, but input_length 16",
        good.replace("5000", "1e300"): "timestamp 1e.300 ms is none",
    }
    for line, reason in bad.items():
        path = text(tmp_path / "t.jsonl", good, line)
        for sort in (False, True):
            with pytest.raises(TraceError, match=rf"t\.jsonl:2: .*{reason}"):
                list(open_trace(path, block_tokens=16, sort=sort))


def test_sorting_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.workload.trace.SORT_BYTES_MAX", 1000)
    path = tmp_path / "t.jsonl"
    path.write_bytes(encode(TraceRequest(0, 0.0, 16, 1, (1,))) * 20)
    with pytest.raises(TraceError, match=r"t\.jsonl:\d: more than 1000 bytes to sort"):
        list(open_trace(path, sort=True, block_tokens=16))


@pytest.mark.parametrize(("suffix", "packed"), [(".xz", lzma.compress), (".gz", gzip.compress)])
def test_compressed_files_are_read_written_and_refused(
    tmp_path: Path, suffix: str, packed: Callable[[bytes], bytes]
) -> None:
    requests = [
        TraceRequest(n, n / 8, 600, 1, (n, n + 1), f"s{n}", n / 4, "t") for n in range(3000)
    ]
    path = tmp_path / f"t.jsonl{suffix}"
    assert write(path, requests) == 3000
    trace = open_trace(path)
    assert trace.block_tokens == 512
    assert list(trace) == requests
    damaged = tmp_path / f"d.jsonl{suffix}"
    damaged.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(TraceError, match=rf"d\.jsonl{suffix}:\d+: cannot be read on"):
        list(open_trace(damaged, format="mooncake", block_tokens=512))
    body = bytearray(packed(b"x" * 10_000))
    body[len(body) // 2] ^= 0xFF
    damaged.write_bytes(body)
    with pytest.raises(TraceError, match=r"\.jsonl"):
        list(open_trace(damaged))


def test_writing_leaves_all_or_nothing(tmp_path: Path) -> None:
    there = text(tmp_path / "there.jsonl", "mine")
    with pytest.raises(ConfigError, match="exists already"):
        write(there, [])
    assert there.read_text() == "mine\n"
    with pytest.raises(ConfigError, match="cannot be written"):
        write(tmp_path / "no" / "folder.jsonl", [])
    bad = text(tmp_path / "bad.jsonl", encode(TraceRequest(0, 0.0, 1, 1, (1,))).decode(), "x")
    with pytest.raises(TraceError):
        write(tmp_path / "out.jsonl", open_trace(bad))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "there.jsonl"]


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    peaks = []
    for size in (500, 4000):
        path = tmp_path / f"{size}.jsonl"
        write(
            path,
            (TraceRequest(n, float(n), 1600, 1, tuple(range(n, n + 100))) for n in range(size)),
        )
        trace = open_trace(path)
        tracemalloc.start()
        assert sum(1 for _ in trace) == size
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens", "hit"),
    [
        ("azure_code.csv", 8_819, 18_059_974, 0.0),
        ("miniswe_bs64.jsonl", 402, 2_629_813, 0.9311),
        ("sharegpt_llama31_8b_300.jsonl.xz", 300, 257_239, 0.0759),
    ],
)
def test_public_traces(
    shared_file: Callable[[str], Path], name: str, requests: int, prompt_tokens: int, hit: float
) -> None:
    found = stats(open_trace(shared_file(f"traces/{name}")))
    assert found is not None
    assert (found.requests, found.prompt_tokens.total) == (requests, prompt_tokens)
    assert round(found.token_hit_rate, 4) == hit
