"""State through the agent: an engine's end of the socket, the shared arena, and a real agent.

The engine here has no model, but memory that lies as an engine's does: one array of pages per
layer. It saves and resumes as vLLM's connector does (ask, copy pages to or from slots, tell), each
copy by `Arena.copy_in` and `copy_out`. What that is compared with is one thread's memcpy of the
same pages, and reads with O_DIRECT of as many bytes, eight in flight; both in turns with it.

- *put* and *get*: bodies of DeepSeek V4 Flash, and blocks of about 1 MiB (DeepSeek V3, 16 tokens);
- *restore*: a prompt of V4 Flash, from the question to the last page in the engine's memory;
- several engines at once, against one of them;
- how long 400 blocks are looked for.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.dataplane import DEPTH, LOOKUP_BLOCKS, MIB, Raw, bench_directory, memory, micros
from benchmarks.peers import ROOT
from kvatlas.connectors.agent_client import AgentClient, ask_status
from kvatlas.core import agent_values as words
from kvatlas.core.agent import Agent
from kvatlas.core.layout import Layout, Rule
from kvatlas.core.ledger import Ledger
from kvatlas.core.ledger_values import Limits
from kvatlas.core.policy.registry import make_policy
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Sizes
from kvatlas.dataplane._copies import Rows
from kvatlas.dataplane.arena import Part as ArenaPart
from kvatlas.service import agent_wire as wire
from kvatlas.service.agent import NodeAgent, Settings
from kvatlas.workload.models import load_config, load_layout

V4 = ("deepseek-v4-flash", 0)
V3 = ("deepseek-v3", 16)
MODELS = {"V3 block, 1.07 MiB": V3, "V4 body": V4}
PROMPTS = (4096, 32_768, 100_096)  # tokens of V4 Flash, whole blocks
BODIES = 128  # in one put or get
ROUNDS = 11
DISK_ROUNDS = 5
ENGINES = 4
SLICE_S = 0.5
DRAM_BYTES = 2_000_000_000
DISK_BYTES = 6_000_000_000
WAIT_S = 60.0
GRID = 256  # tokens
RAW_BLOCKS = 256


class Pages:
    """An engine's memory: for each layer of each component a row of pages."""

    def __init__(self, layout: Layout, blocks: int) -> None:
        grid = layout.grid_tokens
        chains = [c for c in layout.components if c.rule is Rule.CHAIN]
        self.body_sizes = [
            c.stored_block_bytes // c.layers
            for c in chains
            for _ in range(c.layers * (grid // c.block_tokens))
        ]
        windows = [c for c in layout.components if c.rule is Rule.WINDOW]
        self.point_sizes = [
            c.stored_block_bytes // c.layers
            for c in windows
            for _ in range(c.layers * (c.window_blocks() or 0))
        ]
        self._memory = memory(blocks * sum(self.body_sizes) + sum(self.point_sizes) + MIB)
        self._rows: list[tuple[memoryview, int, int]] = []
        at = 0
        for size in self.body_sizes:
            self._rows.append((self._memory[at : at + size * blocks], size, size))
            at += size * blocks
        self._bodies = Rows(self._rows)
        self._points: list[memoryview] = []
        for size in self.point_sizes:
            self._points.append(self._memory[at : at + size])
            at += size

    def of(self, piece: wire.Piece) -> Sequence[ArenaPart]:
        """Where a unit lies."""
        return [(self._bodies, piece.index)] if piece.part == Part.BODY else self._points

    def plain(self, blocks: int) -> list[memoryview]:
        """All pages of the first blocks and of the windows."""
        rows = [
            view[n * step : n * step + size]
            for n in range(blocks)
            for view, size, step in self._rows
        ]
        return rows + self._points


class Engine:
    """One engine at an agent's socket."""

    def __init__(self, socket: Path, model: tuple[str, int], blocks: int) -> None:
        name, block_tokens = model
        self.layout = load_layout(name, engine="vllm", block_tokens=block_tokens or None)
        config = msgspec.json.encode(load_config(name))
        hello = wire.Hello(
            wire.VERSION, name, (name,), config, "vllm", "0.32.0", "auto", block_tokens
        )
        self.client = AgentClient(socket, hello, answer_s=WAIT_S)
        welcome = self.client.welcome
        if welcome is None or welcome.grid_tokens != self.layout.grid_tokens:
            raise RuntimeError(f"the agent does not serve {name}")
        self.pages = Pages(self.layout, blocks)
        self._number = os.getpid() << 20

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def prompt(self, blocks: int) -> bytes:
        """Tokens that nobody has seen, and one more than whole blocks."""
        self._number += 1
        size = blocks * self.layout.grid_tokens + 1
        return array("I", [self._number % 2**32, *range(1, size)]).tobytes()

    def put(self, tokens: bytes) -> int:
        """Saves a prompt; bytes."""
        staged = self.ask("put", tokens)
        blocks = len(tokens) // 4 // self.layout.grid_tokens
        points = (blocks,) if self.pages.point_sizes else ()
        told = wire.Filled("put", 0, b"", blocks, points, staged.tokens, len(tokens) // 4)
        copied = 0
        arena = self.client._channel.arena  # type: ignore[union-attr]
        for order in self.client.filled(told, memoryview(tokens)):
            sums = []
            for piece in order.pieces:
                checksum = arena.copy_in(piece.slot, self.pages.of(piece))
                sums.append((piece.name, checksum.to_bytes(16, "big")))
                copied += piece.slot.size_bytes
            self.client.saved(order.op, tuple(sums))
        self.client.end("put")
        return copied

    def ask(self, request: str, tokens: bytes, local_tokens: int = 0) -> wire.Staged:
        """How far a prompt can be resumed."""
        self.client.want(request, tokens, local_tokens, WAIT_S)
        staged = self.client.staged(request)
        if staged is None:
            raise RuntimeError("the agent does not answer")
        return staged

    def get(self, tokens: bytes, tier: str = "dram") -> int:
        """Resumes a prompt, all of it from ``tier``; bytes."""
        staged = self.ask("get", tokens)
        if [name for name, _ in staged.tiers] != [tier] or len(tokens) // 4 - 1 > staged.tokens:
            raise RuntimeError(f"not all from {tier}: {staged.tiers}, {staged.why}")
        arena = self.client._channel.arena  # type: ignore[union-attr]
        copied = 0
        for piece in staged.pieces:
            if not arena.copy_out(piece.slot, self.pages.of(piece)):
                raise RuntimeError("gone")
            copied += piece.slot.size_bytes
        self.client.release("get", used=True)
        self.client.end("get")
        return copied


@contextmanager
def agent(directory: Path, disk: Path | None = None) -> Iterator[tuple[Path, int]]:
    """A real one, in a process of its own; ends with the block. Its socket and its number."""
    socket = directory / "agent.sock"
    command = [sys.executable, "-m", "benchmarks.connector", "agent", str(socket)]
    child = subprocess.Popen(
        [*command, *([str(disk)] if disk else [])], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        answer(child)
        yield socket, child.pid
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(WAIT_S)


async def serve_agent(socket: Path, disk: Path | None) -> None:
    """Child: an agent that saves whatever it is offered."""
    through = (Tier.DISK,) if disk else ()
    config = words.Config(write_through=through, hit_share=1.0)
    settings = Settings(socket, DRAM_BYTES, disk, DISK_BYTES, secret=bytes(32), agent=config)
    async with NodeAgent(settings) as node:
        print("ready", flush=True)
        serving = asyncio.ensure_future(node.serve())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
        await asyncio.wait([serving])


class Rate(float):
    """Bytes per second; ``spent``: bytes per second of processor time, of all who took part."""

    spent: float = 0.0


def rate(act: Callable[[], int], agent: int = 0) -> Rate:
    """Of one call; ``agent``: the process that works for it beside this one."""
    used, start = processor_s(agent), time.perf_counter()
    size_bytes = act()
    made = Rate(size_bytes / (time.perf_counter() - start))
    made.spent = size_bytes / (processor_s(agent) - used)
    return made


def processor_s(other: int) -> float:
    """Of this thread, and of all threads of another process (0: none): clock_getcpuclockid(3)."""
    return time.thread_time() + (time.clock_gettime((~other << 3) | 2) if other else 0.0)


class Memcpy:
    """One thread that copies the pages of some blocks, and of a point, to one buffer or back."""

    def __init__(self, pages: Pages, blocks: int) -> None:
        parts = pages.plain(blocks)
        self.size_bytes = sum(map(len, parts))
        whole = memory(self.size_bytes)
        self._pairs: list[tuple[memoryview, memoryview]] = []
        at = 0
        for part in parts:
            self._pairs.append((part, whole[at : at + len(part)]))
            at += len(part)

    def put(self) -> int:
        """Out of the engine."""
        for page, place in self._pairs:
            place[:] = page
        return self.size_bytes

    def get(self) -> int:
        """Into it."""
        for page, place in self._pairs:
            page[:] = place
        return self.size_bytes


def put_and_get(figures: dict[str, Any], table: Table) -> None:
    """Bodies alone, beside memcpy."""
    for label, model in MODELS.items():
        with (
            bench_directory() as directory,
            agent(directory) as (socket, pid),
            Engine(socket, model, BODIES) as engine,
        ):
            plain = Memcpy(engine.pages, BODIES)
            rates: dict[str, list[Rate]] = {"put": [], "get": []}
            plain_rates: dict[str, list[Rate]] = {"put": [], "get": []}
            for _ in range(ROUNDS):
                tokens = engine.prompt(BODIES)
                plain_rates["put"].append(rate(plain.put))
                rates["put"].append(rate(lambda tokens=tokens: engine.put(tokens), pid))  # type: ignore[misc]
                plain_rates["get"].append(rate(plain.get))
                rates["get"].append(rate(lambda tokens=tokens: engine.get(tokens), pid))  # type: ignore[misc]
        for what, found in rates.items():
            add(figures, table, (f"dram {what}", label, "memcpy"), found, plain_rates[what])


def restores(figures: dict[str, Any], table: Table) -> None:
    """Prompts of V4 Flash from dram and from disk, beside memcpy and O_DIRECT."""
    with bench_directory() as directory:
        with agent(directory) as (socket, pid), Engine(socket, V4, PROMPTS[-1] // GRID) as engine:
            rows = {("dram", n): pair for n, pair in from_dram(engine, pid).items()}
        disk = directory / "disk"
        with (
            agent(directory, disk) as (socket, pid),
            Engine(socket, V4, PROMPTS[-1] // GRID) as engine,
        ):
            saved = save_all(socket, engine)
        # Of a new life, so that all of it comes from disk.
        with (
            agent(directory, disk) as (socket, pid),
            Engine(socket, V4, PROMPTS[-1] // GRID) as engine,
        ):
            found = from_disk(engine, pid, saved, directory / "raw")
            rows |= {("disk", n): pair for n, pair in found.items()}
    sizes = Sizes(engine.layout)
    least = engine.layout.resume_point_bytes(minimal=True)
    for (tier, n), (ours, theirs) in rows.items():
        limit = "memcpy" if tier == "dram" else f"O_DIRECT reads, {DEPTH} in flight"
        add(figures, table, (f"restore from {tier}", f"{n:,} tokens", limit), ours, theirs)
        bodies = n // GRID * sizes.body_bytes
        moved = bodies + sizes.point_bytes(n // GRID - 1)
        figures[f"restore from {tier}, {n:,} tokens, ms"] = round(
            moved / statistics.median(ours) * 1e3, 1
        )
        figures[f"restore, {n:,} tokens, bytes"] = moved
        figures[f"restore, {n:,} tokens, bytes with a minimal point"] = bodies + least


Pair = tuple[list[Rate], list[Rate]]


def from_dram(engine: Engine, pid: int) -> dict[int, Pair]:
    """By prompt: rates of restores, and of memcpy just before each."""
    plains = [Memcpy(engine.pages, n // GRID) for n in PROMPTS]
    prompts = [engine.prompt(n // GRID) for n in PROMPTS]
    for tokens in prompts:
        engine.put(tokens)
    rows: dict[int, Pair] = {n: ([], []) for n in PROMPTS}
    for _ in range(ROUNDS):
        for n, tokens, plain in zip(PROMPTS, prompts, plains, strict=True):
            rows[n][1].append(rate(plain.get))
            rows[n][0].append(rate(lambda tokens=tokens: engine.get(tokens), pid))  # type: ignore[misc]
    return rows


def save_all(socket: Path, engine: Engine) -> list[list[bytes]]:
    """A prompt of each length per round, each on disk when it returns."""
    saved = [[engine.prompt(n // GRID) for n in PROMPTS] for _ in range(DISK_ROUNDS)]
    written = 0
    for tokens in (tokens for row in saved for tokens in row):
        written += engine.put(tokens)
        until = time.monotonic() + WAIT_S
        while disk_bytes(socket) < written:
            if time.monotonic() > until:
                raise RuntimeError("the agent does not write all to its disk")
            time.sleep(0.05)
    return saved


def disk_bytes(socket: Path) -> int:
    """What the agent says that its disk holds."""
    return int(msgspec.json.decode(ask_status(socket))["tiers"]["disk"]["held_bytes"])


def from_disk(engine: Engine, pid: int, saved: list[list[bytes]], path: Path) -> dict[int, Pair]:
    """By prompt: rates of restores, and of reads of an own file just before each."""
    area = memory(RAW_BLOCKS * MIB)
    raw = Raw(path, MIB, [area[n * MIB : (n + 1) * MIB] for n in range(RAW_BLOCKS)])
    raw.run(os.pwritev)
    rows: dict[int, Pair] = {n: ([], []) for n in PROMPTS}
    for row in saved:
        for n, tokens in zip(PROMPTS, row, strict=True):
            rows[n][1].append(rate(lambda: (raw.run(os.preadv), RAW_BLOCKS * MIB)[1]))
            rows[n][0].append(rate(lambda tokens=tokens: engine.get(tokens, "disk"), pid))  # type: ignore[misc]
    os.close(raw.fd)
    return rows


def add(
    figures: dict[str, Any],
    table: Table,
    names: tuple[str, str, str],
    ours: Sequence[float],
    theirs: Sequence[float],
) -> None:
    """A row: medians, and the median of the ratios within one round with its quartiles. ``names``:
    what, of which kind, beside what."""
    what, label, limit = names
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    quartiles = [round(ratios[len(ratios) // 4], 2), round(ratios[-1 - len(ratios) // 4], 2)]
    figures[f"{what}, {label} / {limit}"] = round(statistics.median(ratios), 3)
    figures[f"{what}, {label} / {limit}, quartiles"] = quartiles
    figures[f"{what}, {label}, GB/s"] = round(statistics.median(ours) / 1e9, 2)
    figures[f"{what}, {label}, {limit}, GB/s"] = round(statistics.median(theirs) / 1e9, 2)
    if isinstance(ours[0], Rate) and isinstance(theirs[0], Rate) and limit == "memcpy":
        # Where processors are shared, who waits in line twice waits longer.
        spent = sorted(a.spent / b.spent for a, b in zip(ours, theirs, strict=True))
        figures[f"{what}, {label} / {limit}, of processor time"] = round(
            statistics.median(spent), 3
        )
    table.add_row(
        what,
        label,
        f"{statistics.median(ours) / 1e9:.2f}",
        limit,
        f"{statistics.median(theirs) / 1e9:.2f}",
        f"{statistics.median(ratios):.2f}",
        f"{quartiles[0]:.2f} … {quartiles[1]:.2f}",
    )


# -- several engines ------------------------------------------------------------------------------


def engines(figures: dict[str, Any], table: Table) -> None:
    """Together against one alone, in slices that alternate."""
    with bench_directory() as directory, agent(directory) as (socket, _):
        command = [sys.executable, "-m", "benchmarks.connector", "engine", str(socket)]
        children = [
            subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(ENGINES)
        ]
        try:
            for child in children:
                answer(child)
            for what in ("put", "get"):
                alone, together = [], []
                for _ in range(ROUNDS + 1):
                    alone.append(sum(run_slice(children[:1], what)))
                    together.append(sum(run_slice(children, what)))
                name = f"{ENGINES} engines, dram {what}"
                add(figures, table, (name, "V4 body", "one engine"), together[1:], alone[1:])
        finally:
            for child in children:
                child.kill()
                child.wait()


def run_slice(children: Sequence[subprocess.Popen[str]], what: str) -> list[float]:
    """Bytes per second of each, all at once."""
    for child in children:
        assert child.stdin is not None
        child.stdin.write(f"{what}\n")
        child.stdin.flush()
    return [float(answer(child)) for child in children]


def answer(child: subprocess.Popen[str]) -> str:
    """A line of a child that lives."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError("an engine has ended: see above")
    return line


def one_engine(socket: Path) -> None:
    """Child: puts or gets for a slice of time when told so."""
    blocks = 32
    engine = Engine(socket, V4, blocks)
    kept = engine.prompt(blocks)
    print("ready", flush=True)
    for line in sys.stdin:
        moved, start = 0, time.perf_counter()
        if line.strip() == "get":
            engine.put(kept)  # if it is not there any more
            start = time.perf_counter()
        while time.perf_counter() < start + SLICE_S:
            moved += (
                engine.get(kept) if line.strip() == "get" else engine.put(engine.prompt(blocks))
            )
        print(moved / (time.perf_counter() - start), flush=True)


# -- lookups --------------------------------------------------------------------------------------


def lookups(figures: dict[str, Any]) -> None:
    """400 blocks, all held: by core alone, and by an engine over the socket."""
    with (
        bench_directory() as directory,
        agent(directory) as (socket, _),
        Engine(socket, V4, LOOKUP_BLOCKS) as engine,
    ):
        tokens = engine.prompt(LOOKUP_BLOCKS)
        engine.put(tokens)
        here = LOOKUP_BLOCKS * GRID  # the engine has it all: the answer is that nothing is to load
        looked(figures, "all held, asked over the socket", lambda: engine.ask("look", tokens, here))
        unknown = engine.prompt(LOOKUP_BLOCKS)
        looked(figures, "none held, asked over the socket", lambda: engine.ask("look", unknown))
        layout = engine.layout
    core = Agent({Tier.DISK: Ledger(Limits(10**12), make_policy("lru_sink", Tier.DISK))})
    core.handle(words.Attach("a", layout, bytes(32)), 0.0)
    keys = [b"%016d" % n for n in range(LOOKUP_BLOCKS)]
    sizes = Sizes(layout)
    units = [sizes.body(keys, n) for n in range(LOOKUP_BLOCKS)]
    units.append(sizes.point(keys, LOOKUP_BLOCKS - 1))
    core.handle(words.Found(Tier.DISK, tuple(units), (keys[-1],)), 1.0)
    ask = words.Ask("r", "a", tuple(keys), 0, LOOKUP_BLOCKS * GRID + 1, 10.0)
    if core.offer(ask).tokens != LOOKUP_BLOCKS * GRID:
        raise RuntimeError("the core does not find what it was told of")
    looked(figures, "all held, core alone", lambda: core.offer(ask))


def looked(figures: dict[str, Any], how: str, act: Callable[[], object]) -> None:
    """Median of single calls, and the tenth percentile, which a busy machine disturbs less."""
    taken = sorted(micros(act, 1) for _ in range(300))
    for name, value in (("median", statistics.median(taken)), ("p10", taken[len(taken) // 10])):
        figures[f"lookup of 400 blocks, {how}, {name}, µs"] = round(value)


def run() -> dict[str, Any]:
    """All of it; prints a table."""
    console, figures = Console(), dict[str, Any]()
    table = Table("", "", "GB/s", "beside", "GB/s", "ratio", "quartiles")
    put_and_get(figures, table)
    restores(figures, table)
    engines(figures, table)
    lookups(figures)
    console.print(table)
    for name, value in figures.items():
        if name.endswith(("µs", "ms", "bytes", "point", "time")):
            console.print(f"{name}: {value:,}")
    return figures


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        one_engine(Path(sys.argv[2]))
    else:
        asyncio.run(serve_agent(Path(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3:] else None))
