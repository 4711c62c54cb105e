"""Claude Code sessions in compact form: one whole session a line.

``{id, bs, tool, sys, r: [[t, depth, in, out, api, think, [[start, len], …]], …]}``: seconds from
the start of the session, depth of the sub-agent, tokens in and out, seconds that the answer took,
seconds of thinking before, and the prompt's full blocks as runs of ids that count per session.
Source: kv-cache-tester (Apache-2.0), whose block ids start at 1 in each session.

What sessions share is not in the ids, so it is decided here. ``tool`` and ``sys`` are the tokens
of the tools and of the system prompt, which come first. Tools are taken as shared by sessions that
have the same number of tool tokens; the system prompt by those that have as many of its tokens too,
and only as far as it stays the same inside the session itself: in a third of them its last blocks
change between requests (date, state of the repository), and what changes there is shared with
nobody. Equal counts are evidence, not proof: 355 sessions have 65 counts for their tools.

There is no wall clock between sessions: their starts are drawn, exponential with
``Options.session_gap_s`` on average. The last tokens of a prompt, which fill no block, get an id
that nobody else has. Memory holds the sessions that are under way.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec

from kvatlas.workload.trace_lines import Options, Row, fault, lines

NAME = "claude-code"

# Ids are put together from numbers within these limits, so that no table of them is needed.
_LOCAL_BITS, _COUNT_BITS, _BLOCK_BITS = 24, 19, 20  # beside the session's number, below 2**36
_TAIL, _TOOLS, _SYSTEM = 1 << 60, 2 << 60, 3 << 60
_REQUESTS_MAX = 1 << 20  # of one session

_Request = tuple[float, int, int, int, float | None, float | None, list[tuple[int, int]]]


class _Session(msgspec.Struct):
    id: str | int
    bs: int
    tool: int
    sys: int
    r: list[_Request]


def recognises(line: bytes) -> bool:
    """By the names of a session's fields."""
    return all(name in line for name in (b'"r"', b'"bs"', b'"tool"', b'"sys"'))


def block_tokens_of(path: Path, options: Options) -> int:
    """The file's own; asking for another is a fault that `read` tells."""
    for number, line in lines(path):
        return options.block_tokens or _decode(path, number, line).bs
    return options.block_tokens or 64


def read(path: Path, block_tokens: int, options: Options) -> Iterator[Row]:
    """Rows of all sessions in order of arrival. Raises TraceError for lines not of this form."""
    rng = random.Random(options.seed)
    under_way: list[tuple[float, int, Iterator[Row], Row]] = []
    start_s = 0.0
    for index, (number, line) in enumerate(lines(path)):
        if index:
            start_s += rng.expovariate(1 / options.session_gap_s)
        while under_way and under_way[0][0] <= start_s:
            yield _next(under_way)
        session = _decode(path, number, line)
        if session.bs != block_tokens:
            raise fault(path, number, f"blocks of {session.bs} tokens, not of {block_tokens}")
        rows = _rows(path, number, index, session, start_s)
        first = next(rows, None)
        if first is not None:
            heapq.heappush(under_way, (first.arrival_s, index, rows, first))
    while under_way:
        yield _next(under_way)


def _next(under_way: list[tuple[float, int, Iterator[Row], Row]]) -> Row:
    _, index, rows, row = under_way[0]
    after = next(rows, None)
    if after is None:
        heapq.heappop(under_way)
    else:
        heapq.heapreplace(under_way, (after.arrival_s, index, rows, after))
    return row


def _decode(path: Path, number: int, line: bytes) -> _Session:
    try:
        session = msgspec.json.decode(line, type=_Session)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise fault(path, number, str(error)) from error
    for name, value in (("tool", session.tool), ("sys", session.sys)):
        if not 0 <= value < 1 << _COUNT_BITS:
            raise fault(path, number, f"{name} {value} is no number of tokens")
    if session.bs < 1 or len(session.r) > _REQUESTS_MAX:
        raise fault(path, number, f"bs {session.bs} or {len(session.r)} requests: impossible")
    return session


def _rows(path: Path, number: int, index: int, session: _Session, start_s: float) -> Iterator[Row]:
    shared = _Shared(session)
    base = index << _LOCAL_BITS
    last_s = 0.0
    for turn, (t_s, depth, prompt, output, _api, think_s, runs) in enumerate(session.r):
        where = f"request {turn} of session {session.id}"
        if not t_s >= last_s:
            raise fault(path, number, f"{where}: its time {t_s:g} s comes after {last_s:g}")
        last_s = t_s
        if not all(start >= 1 and n >= 1 and start + n < 1 << _LOCAL_BITS for start, n in runs):
            raise fault(path, number, f"{where}: a run of blocks below 1 or above {1 << 24}")
        blocks = sum(n for _, n in runs)
        if blocks > prompt // session.bs:
            raise fault(path, number, f"{where}: {blocks} full blocks, but {prompt} tokens")
        ids = shared.translated(runs, base)
        tail = [_TAIL | base | turn] if prompt % session.bs else []
        name = f"{session.id}/{depth}" if depth else str(session.id)
        yield Row(
            number, start_s + t_s, prompt, output, (*ids, *tail), name, think_s if turn else None
        )


class _Shared:
    """Which of a session's first blocks it shares, and by which ids."""

    def __init__(self, session: _Session) -> None:
        self._tools = session.tool // session.bs
        self._system = (session.tool + session.sys) // session.bs
        for _, depth, *_, runs in session.r:
            if depth == 0 and runs and runs[0][0] == 1:
                self._system = max(self._tools, min(self._system, runs[0][1]))
        self._tools_base = _TOOLS | session.tool << _BLOCK_BITS
        self._system_base = _SYSTEM | (session.tool << _COUNT_BITS | session.sys) << _BLOCK_BITS

    def translated(self, runs: list[tuple[int, int]], base: int) -> Iterator[int]:
        return chain.from_iterable(self._run(start, start + n, base) for start, n in runs)

    def _run(self, start: int, end: int, base: int) -> Iterator[int]:
        tools, system = self._tools + 1, self._system + 1
        if start >= system:
            return iter(range(base | start, base + end))
        return iter(
            [
                self._tools_base | id
                if id < tools
                else (self._system_base + id - tools if id < system else base | id)
                for id in range(start, end)
            ]
        )
