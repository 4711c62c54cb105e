"""The compiled copies of the data plane and their twin in plain Python cannot be told apart."""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import twins_copies
from hypothesis import example, given
from hypothesis import strategies as st
from test_twins import ROOT, described, outcome

from kvatlas.dataplane import _copies

Copy = Callable[..., int]
WAYS = [
    pytest.param(_copies.gather, _copies.scatter, id="best"),
    pytest.param(_copies.gather_plain, _copies.scatter_plain, id="plain"),
]
V4_PAGES = (37_376,) * 3 + (8_448,) * 3 + (1_168,) * 5
# Around the ends of stripes (64), of blocks of them (1,024), and of what the library sums (240).
EDGES = [0, 1, 16, 63, 64, 65, 128, 239, 240, 241, 1023, 1024, 1025, 1088, 1089, 2048, 2049]
sizes = st.lists(st.sampled_from(EDGES) | st.integers(0, 5000), max_size=8)
shifts = st.integers(0, 65)


def placed(sizes: list[int], shift: int) -> tuple[list[bytearray], list[memoryview]]:
    """Parts that begin anywhere, with room before and behind that must stay as it is."""
    rooms = [bytearray(b"\x5a" * (shift + size + 70)) for size in sizes]
    views = [memoryview(room)[shift:][:size] for room, size in zip(rooms, sizes, strict=True)]
    return rooms, views


@pytest.mark.parametrize(("gather", "scatter"), WAYS)
@given(sizes=sizes, shift=shifts, seed=st.integers(0, 3))
@example(sizes=list(V4_PAGES), shift=0, seed=0)
@example(sizes=[1 << 20], shift=32, seed=1)
@example(sizes=[31] * 70, shift=1, seed=2)
def test_both_ways_are_the_twins(
    gather: Copy, scatter: Copy, sizes: list[int], shift: int, seed: int
) -> None:
    source = random.Random(seed)
    parts = [source.randbytes(size) for size in sizes]
    ends = []
    for copy in (gather, twins_copies.gather):
        [room], [target] = placed([sum(sizes) + 9], shift)
        ends.append((copy(target, parts), bytes(room)))
    assert ends[0] == ends[1]
    joined = b"".join(parts) + b"more"
    ends = []
    for copy in (scatter, twins_copies.scatter):
        rooms, views = placed(sizes, shift)
        ends.append((copy(joined, views), b"".join(rooms)))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("gather", "scatter"), WAYS)
@given(
    layers=st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 70)), max_size=5),
    block=st.integers(0, 3),
    shift=shifts,
)
@example(layers=[(37_376, 64)] * 3 + [(1_168, 0)] * 3, block=2, shift=0)
def test_blocks_in_rows_are_the_twins(
    gather: Copy, scatter: Copy, layers: list[tuple[int, int]], block: int, shift: int
) -> None:
    """Three blocks in each layer: asked for one more, both refuse and touch nothing."""
    size, ends = sum(page for page, _ in layers), []
    for copy, back, kind in (
        (gather, scatter, _copies.Rows),
        (twins_copies.gather, twins_copies.scatter, twins_copies.Rows),
    ):
        source = random.Random(7)
        memory = [bytearray(source.randbytes(2 * (p + gap) + p + shift)) for p, gap in layers]
        views = [memoryview(held)[shift:] for held in memory]
        rows = kind([(v, p, p + gap) for v, (p, gap) in zip(views, layers, strict=True)])
        assert rows.size_bytes == size
        target = bytearray(size + 9)
        ends.append(
            (
                outcome(lambda: copy(target, [(rows, block), b"end"])),  # noqa: B023
                outcome(lambda: back(source.randbytes(size), [(rows, block)])),  # noqa: B023
                bytes(target),
                memory,
            )
        )
    assert ends[0] == ends[1]
    assert not layers or (block == 3) == (ends[0][0] == (IndexError, ("no such block",)))


@pytest.mark.parametrize("kind", [_copies.Rows, twins_copies.Rows])
def test_rows_that_cannot_be_are_refused(kind: type[_copies.Rows]) -> None:
    for page, step in ((0, 5), (6, 5)):
        with pytest.raises(ValueError, match="do not overlap"):
            kind([(bytearray(20), page, step)])
    rows = kind([(bytearray(20), 5, 5)])
    with pytest.raises((TypeError, RuntimeError, IndexError)):
        _copies.gather(bytearray(20), [(rows, -1)])
    with pytest.raises((TypeError, RuntimeError)):
        _copies.gather(bytearray(20), [(1, 2)])


@given(sizes=sizes, ahead=st.integers(0, 3000), shift=shifts, seed=st.integers(0, 3))
@example(sizes=[600_000, 0, 241, 5], ahead=700, shift=3, seed=1)
@example(sizes=[1 << 20], ahead=0, shift=32, seed=1)
def test_what_a_socket_brings_is_the_twins(
    sizes: list[int], ahead: int, shift: int, seed: int
) -> None:
    data = random.Random(seed).randbytes(sum(sizes))
    ends = []
    for receive in (_copies.receive, twins_copies.receive):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            sender = threading.Thread(target=theirs.sendall, args=(data[ahead:],))
            sender.start()
            rooms, views = placed(sizes, shift)
            until = time.monotonic() + 20
            ends.append((receive(ours.fileno(), data[:ahead], views, until), b"".join(rooms)))
            sender.join()
    assert ends[0] == ends[1]


@pytest.mark.parametrize("receive", [_copies.receive, twins_copies.receive])
def test_a_socket_that_brings_too_little_ends_it(receive: Callable[..., list[int]]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"some")
        with pytest.raises(TimeoutError):
            receive(ours.fileno(), b"", [bytearray(5)], time.monotonic() + 0.01)
        with pytest.raises(TimeoutError):
            receive(ours.fileno(), b"", [bytearray(5)], time.monotonic() - 1)
        ender = threading.Timer(0.01, ours.shutdown, (socket.SHUT_RDWR,))
        ender.start()
        with pytest.raises(ConnectionResetError):
            receive(ours.fileno(), b"x", [bytearray(1), bytearray(5)], time.monotonic() + 20)
        ender.join()
        with pytest.raises((TypeError, BufferError)):
            receive(ours.fileno(), b"xxxxx", [bytes(5)], time.monotonic() + 20)
    with pytest.raises(OSError, match="Bad file descriptor"):
        receive(-1, b"", [bytearray(5)], time.monotonic() + 20)


@pytest.mark.parametrize("bit", [0, 7, 63 * 8, 64 * 8, 1024 * 8 + 3, 4999 * 8 + 7])
@pytest.mark.parametrize(("gather", "scatter"), WAYS)
def test_each_bit_counts(gather: Copy, scatter: Copy, bit: int) -> None:
    good = bytearray(random.Random(5).randbytes(5000))
    before = gather(bytearray(5000), [good])
    good[bit // 8] ^= 1 << bit % 8
    assert gather(bytearray(5000), [good]) != before
    assert scatter(good, [bytearray(2500), bytearray(2500)]) == gather(bytearray(5000), [good])


@pytest.mark.parametrize("total", [11, 5001])
@pytest.mark.parametrize(("gather", "scatter"), WAYS)
def test_what_does_not_fit_is_refused_and_touches_nothing(
    gather: Copy, scatter: Copy, total: int
) -> None:
    row, part = bytearray(total - 1), bytearray(b"x" * total)
    for copy, twin in ((gather, twins_copies.gather), (scatter, twins_copies.scatter)):
        said = []
        for each in (copy, twin):
            with pytest.raises(ValueError, match=f"parts of {total} bytes") as refused:
                each(row, [part])
            said.append(str(refused.value))
        assert said[0] == said[1]
    assert not any(row)
    assert part == b"x" * total


@pytest.mark.parametrize(("gather", "scatter"), WAYS)
def test_only_bytes_are_taken_and_only_writable_ones_written(gather: Copy, scatter: Copy) -> None:
    for wrong in (1, "text", None, memoryview(bytes(20))[::2]):
        with pytest.raises((TypeError, BufferError)):
            gather(bytearray(20), [wrong])
        with pytest.raises((TypeError, BufferError)):
            scatter(bytes(20), [wrong])
    with pytest.raises((TypeError, BufferError)):
        gather(bytes(20), [bytes(20)])
    with pytest.raises((TypeError, BufferError)):
        scatter(bytes(20), [bytes(20)])
    with pytest.raises(TypeError):
        gather(bytearray(20), 5)


def test_other_threads_run_meanwhile() -> None:
    """Nobody is made to let others in here, so that only a copy does."""
    source, target, ran = bytearray(1 << 20), bytearray(1 << 20), []
    go = threading.Lock()
    go.acquire()

    def wait() -> None:
        with go:
            ran.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        go.release()
        for _ in range(10_000):
            if ran:
                break
            _copies.gather(target, [source])
        assert ran
    finally:
        sys.setswitchinterval(interval_s)
        thread.join(60)


def test_both_are_described_in_the_same_words() -> None:
    stub = described(ROOT / "src/kvatlas/dataplane/_copies.pyi")
    twin = described(Path(twins_copies.__file__))
    for inside in ("_views", "Rows._pages"):
        twin.pop(inside)
    assert twin == {name: said for name, said in stub.items() if not name.endswith("_plain")}
