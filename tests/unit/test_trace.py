"""Mooncake traces: what is read, what is refused, and which tokens the ids stand for."""

from __future__ import annotations

import itertools
import json
import lzma
from array import array
from pathlib import Path

import pytest

from kvatlas.errors import TraceError
from kvatlas.workload.trace import VOCAB_SIZE, TraceRequest, open_trace, tokens_of

REAL = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl.xz"


def line(timestamp: float, tokens: int, ids: list[int], output: int = 5) -> str:
    return json.dumps(
        {
            "timestamp": timestamp,
            "input_length": tokens,
            "output_length": output,
            "hash_ids": ids,
        }
    )


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_reads_in_order_with_times_in_seconds(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line(0, 513, [0, 1]), "", line(1500, 512, [0], output=0))
    assert list(open_trace(path, block_tokens=512)) == [
        TraceRequest(0, 0.0, 513, 5, (0, 1)),
        TraceRequest(1, 1.5, 512, 0, (0,)),
    ]


def test_reads_xz_and_other_block_sizes(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.xz"
    with lzma.open(path, "wt") as file:
        file.write(line(0, 130, [4, 5, 6]) + "\n")
    assert [r.hash_ids for r in open_trace(path)] == [(4, 5, 6)]


def test_the_mark_that_windows_begins_a_file_with_is_no_part_of_it(tmp_path: Path) -> None:
    for name in ("t.jsonl", "t.jsonl.xz"):
        opened = lzma.open if name.endswith("xz") else open
        with opened(tmp_path / name, "wt", encoding="utf-8-sig") as file:
            file.write(line(0, 130, [4]) + "\n")
        assert [r.hash_ids for r in open_trace(tmp_path / name)] == [(4,)]


def test_is_a_stream_that_looks_no_further_than_it_must(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line(0, 9, [0, 1]), line(1, 1, [0]), "garbage")
    assert len(list(itertools.islice(open_trace(path), 2))) == 2
    requests = iter(open_trace(path))
    next(requests)
    next(requests)
    with pytest.raises(TraceError, match=r"t\.jsonl:3: "):
        next(requests)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "truncated"),
        ("[1]", "object"),
        ('{"timestamp": 5}', "missing required field `input_length`"),
        (line(5, 1, [0]).replace("[0]", '["a"]'), r"hash_ids"),
        (line(-5, 1, [0]), "timestamp -5 is negative"),
        (line(4, 1, [0]), "timestamp 4 comes after 5: sort the trace first"),
        (line(5, 0, []), "at least one token"),
        (line(5, -3, []), "at least one token"),
        (line(5, 1, [0], output=-1), "output_length -1 is negative"),
        (line(5, 1, [-1]), "hash_ids must not be negative"),
        (line(5, 513, [0]), "1 hash_ids, but input_length 513 makes 2 blocks of 512 tokens"),
        (line(5, 1500, [3, 4, 3]), "hash id 3 twice in one prompt"),
        (line(5, 512, [0, 1]), "2 hash_ids, but input_length 512 makes 1 blocks"),
    ],
)
def test_refuses_with_line_and_reason(tmp_path: Path, bad: str, reason: str) -> None:
    path = write(tmp_path / "t.jsonl", line(5, 1, [0]), bad)
    with pytest.raises(TraceError, match=rf"t\.jsonl:2: .*{reason}"):
        list(open_trace(path, block_tokens=512))


def test_refuses_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="absent"):
        list(open_trace(tmp_path / "absent.jsonl"))
    truncated = tmp_path / "t.jsonl.xz"
    truncated.write_bytes(lzma.compress(line(0, 1, [0]).encode() * 50)[:-20])
    with pytest.raises(TraceError, match="cannot be read"):
        list(open_trace(truncated))
    plain = tmp_path / "p.jsonl.xz"
    plain.write_text(line(0, 1, [0]))
    with pytest.raises(TraceError, match="cannot be read"):
        list(open_trace(plain))


def ids(request: TraceRequest, *, vocab_size: int = VOCAB_SIZE) -> list[int]:
    tokens = tokens_of(request, block_tokens=512, vocab_size=vocab_size)
    return array("I", tokens).tolist()


def test_equal_leading_ids_give_an_equal_prefix_and_nothing_more() -> None:
    one = ids(TraceRequest(0, 0.0, 1500, 1, (7, 8, 9)))
    two = ids(TraceRequest(1, 0.0, 1100, 1, (7, 8, 10)))
    assert len(one) == 1500
    assert one[:1024] == two[:1024]
    assert one[1024:1100] != two[1024:]
    assert len(set(one)) > 1400  # no pattern inside a block


def test_tokens_are_the_same_in_every_process() -> None:
    first = ids(TraceRequest(0, 0.0, 4, 1, (0,)))
    assert first == [17260, 29617, 62564, 15190]


@pytest.mark.parametrize("vocab_size", [2, 1000, 4096, 49_152, 65_536, 129_280, 1 << 25])
def test_tokens_stay_inside_the_vocabulary_and_use_it(vocab_size: int) -> None:
    tokens = ids(TraceRequest(0, 0.0, 5120, 1, tuple(range(10))), vocab_size=vocab_size)
    assert max(tokens) < vocab_size
    assert max(tokens) >= min(vocab_size, 1 << 24) // 4


@pytest.mark.skipif(not REAL.exists(), reason="the public Mooncake trace is not beside the repo")
def test_the_public_trace_has_its_published_totals() -> None:
    requests = list(open_trace(REAL))
    assert len(requests) == 12_031
    assert sum(r.input_tokens for r in requests) == 144_793_823
    assert len({i for r in requests for i in r.hash_ids}) == 182_790
