"""Does an engine that resumes from its node's tiers answer as one that computed everything?

Real engines and a real agent, each in a process of its own. The reference comes from an engine
without any connector. Then: saved and resumed in one engine (its own cache emptied), resumed in a
second one, resumed by a third from disk after the agent was killed; and, as a check of the check,
with bytes turned over on disk and in the agent's memory, after which the answer must be the same
because all is computed again. Every case has the tier named twice: by the engine and by the agent.
"""

from __future__ import annotations

import mmap
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

import kvatlas
from kvatlas.connectors import vllm_greedy
from kvatlas.connectors.agent_client import ask_status
from kvatlas.core.records import Tier
from kvatlas.dataplane.arena import SHARED_MEMORY
from kvatlas.errors import ConfigError, EngineError, StoreError
from kvatlas.validate.answering import Child
from kvatlas.validate.exactness import Answer, Difference, difference, last_position
from kvatlas.validate.exactness_vllm import Subject, _job, text

TIERS = ("dram", "disk")
DRAM_BYTES = 256_000_000
DISK_BYTES = 512_000_000
_SOURCES = {"host": "dram", "disk": "disk"}
_PAGE_BYTES = 4096
_WAIT_S = 60.0


class TierCase(msgspec.Struct, frozen=True):
    """One answer. ``tier``: where it should have come from, "" for nowhere; ``resumed`` tokens."""

    name: str
    tier: str
    resumed: int
    cached_tokens: dict[str, int]
    difference: Difference | None
    ok: bool


class TierReport(msgspec.Struct, frozen=True):
    """``cached_tokens_by_tier`` sums what engines and agent agree on; ``damaged``: units that the
    agent found wrong, in the negative controls."""

    model: str
    cases: list[TierCase]
    failures: list[str]
    cached_tokens_by_tier: dict[str, int]
    damaged: int

    def ok(self) -> bool:
        """Whether all went as expected."""
        return bool(self.cases) and not self.failures


class AgentProcess:
    """A real `kvatlas agent`, started anew after it was killed."""

    def __init__(self, scratch: Path) -> None:
        self.socket = scratch / "agent.sock"
        self.disk = scratch / "disk"
        self._log = scratch / "agent.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Raises EngineError where it does not come up."""
        sizes = [f"--dram={DRAM_BYTES}", f"--disk={self.disk}={DISK_BYTES}"]
        command = [sys.executable, "-m", "kvatlas.cli.main", "agent", *sizes]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, f"--socket={self.socket}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.wait(lambda status: True)

    def wait(self, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Its status, once that is as wanted. Raises EngineError."""
        until = time.monotonic() + _WAIT_S
        while time.monotonic() < until:
            if self._process is not None and self._process.poll() is not None:
                break
            try:
                status = msgspec.json.decode(ask_status(self.socket), type=dict[str, Any])
            except (OSError, EngineError, StoreError):
                status = None
            if status is not None and true(status):
                return status
            time.sleep(0.05)
        raise EngineError(f"the agent did not answer as it should: {self._log.read_text('utf-8')}")

    def idle(self) -> dict[str, Any]:
        """Its status, with nothing under way and no engine left."""
        return self.wait(lambda status: not status["busy"] and not status["engines"])

    def end(self, number: int = signal.SIGTERM) -> None:
        """SIGKILL: as a crash would."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(_WAIT_S)
            self._process = None


def run(
    what: Subject,
    lengths: Sequence[int],
    tiers: Iterable[str],
    *,
    venv: Path,
    engine_path: Iterable[Path],
    seed: int,
    scratch: Path,
) -> TierReport:
    """All cases of one model. Raises ConfigError and EngineError."""
    grid = what.layout.grid_tokens
    wanted = sorted({n for n in lengths if last_position(n, grid)})
    if not wanted:
        raise ConfigError(f"prompts must be longer than {grid} tokens: shorter ones have no hit")
    agent = AgentProcess(scratch)
    source = Path(kvatlas.__file__).parents[1]
    child = Child(vllm_greedy.__file__, venv, [*engine_path, source], scratch)
    trial = _Trial(what, wanted, seed, child=child, agent=agent, scratch=scratch)
    agent.start()
    try:
        trial.reference()
        trial.phase("first engine", "", "dram")
        if "dram" in tiers:
            trial.phase("second engine", "dram")
            trial.damage("flipped in dram", _flip_arena)
        if "disk" in tiers:
            trial.restart()
            trial.phase("after the agent was killed", "disk")
            trial.restart(_flip_disk)
            trial.phase("flipped on disk", "", damaged=True)
    finally:
        agent.end()
    return trial.report()


class _Trial:
    """One model's run: what it has found so far."""

    def __init__(
        self,
        what: Subject,
        lengths: Sequence[int],
        seed: int,
        *,
        child: Child,
        agent: AgentProcess,
        scratch: Path,
    ) -> None:
        self._what = what
        self._lengths = lengths
        self._seed = seed
        self._child = child
        self._agent = agent
        self._scratch = scratch
        self._known: dict[str, Answer] = {}
        self._cases: list[TierCase] = []
        self._failures: list[str] = []
        self._sums: dict[str, int] = {}
        self._damaged = 0

    def reference(self) -> None:
        """Answers of an engine that has no connector."""
        self._known = self._child.run(self._job("reference", {}, 1))

    def phase(self, name: str, *tiers: str, damaged: bool = False) -> None:
        """A fresh engine answers all prompts, once per tier that should have them, "" for none."""
        settings = {"socket": str(self._agent.socket), "answer_s": 1.0}
        connector = {
            "kv_connector": "KvatlasConnector",
            "kv_connector_module_path": "kvatlas.connectors.vllm_offload",
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings,
        }
        before = self._agent.idle()
        answers = self._child.run(self._job(name, connector, len(tiers)))
        after = self._agent.idle()
        seen: dict[str, int] = {}
        for turn, tier in enumerate(tiers):
            for n in self._lengths:
                case = self._judge(answers[f"{name}-{turn}-{n}"], n, name, tier)
                self._cases.append(case)
                if not case.ok:
                    self._failures.append(f"{case.name}: {case.cached_tokens}, {case.difference}")
                for source, count in case.cached_tokens.items():
                    seen[source] = seen.get(source, 0) + count
        told = _more(before["loaded_tokens"], after["loaded_tokens"])
        if told != seen:
            self._failures.append(f"{name}: the agent says {told}, the engine {seen}")
        for source, count in seen.items():
            self._sums[source] = self._sums.get(source, 0) + count
        wrong = _more(before["counts"], after["counts"]).get("damaged", 0)
        self._damaged += wrong
        if damaged != bool(wrong):
            self._failures.append(f"{name}: {wrong} damaged units were noticed")

    def _judge(self, answer: Answer, n: int, name: str, tier: str) -> TierCase:
        found = {_SOURCES.get(s, s): count for s, count in answer.sources.items() if count}
        position = last_position(n, self._what.layout.grid_tokens) if tier else 0
        differs = difference(self._known[f"reference-0-{n}"], answer)
        ok = differs is None and found == ({tier: position} if tier else {})
        ok = ok and answer.cached_tokens == position
        return TierCase(f"{name}, {n}", tier, position, found, differs, ok)

    def damage(self, name: str, flip: Callable[[AgentProcess], None]) -> None:
        """What the agent holds is wrong from now on, and must not be used."""
        self._agent.idle()
        flip(self._agent)
        self.phase(name, "", damaged=True)

    def restart(self, between: Callable[[AgentProcess], None] = lambda _: None) -> None:
        """Kill the agent once all is on disk, and start it anew."""
        self._agent.idle()
        self._agent.end(signal.SIGKILL)
        between(self._agent)
        self._agent.start()

    def report(self) -> TierReport:
        """What was found."""
        name = self._what.name
        return TierReport(name, self._cases, self._failures, self._sums, self._damaged)

    def _job(self, name: str, connector: dict[str, Any], turns: int) -> dict[str, Any]:
        runs = [
            {
                "id": f"{name}-{turn}-{n}",
                "prompt": text(self._seed + n, n),  # of different text: none begins another
                "params": {},
                "forget": True,
                "like": f"reference-0-{n}" if connector else "",
            }
            for turn in range(turns)
            for n in self._lengths
        ]
        return _job(self._what, self._scratch, runs, self._known) | {"connector": connector}


def _more(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {k: n - before.get(k, 0) for k, n in after.items() if n != before.get(k, 0)}


def _flip_arena(agent: AgentProcess) -> None:
    """Turn over a bit in every page of the agent's memory, behind its back."""
    life = agent.wait(lambda status: True)["arena"]
    with (SHARED_MEMORY / life).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        (begin,) = struct.unpack_from("<Q", memory, 16)  # as in `dataplane.arena`
        for at in range(begin + 64, len(memory), _PAGE_BYTES):
            memory[at] ^= 1


def _flip_disk(agent: AgentProcess) -> None:
    """The same in every page of its segments."""
    largest = max(agent.disk.iterdir(), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for at in range(64, len(memory), _PAGE_BYTES):
            memory[at] ^= 1


def known_tiers(given: str) -> tuple[str, ...]:
    """Of a comma-separated list. Raises ConfigError for others, with the reason."""
    found = tuple(dict.fromkeys(part.strip() for part in given.split(",") if part.strip()))
    names = [tier.name.lower() for tier in Tier]
    for tier in found:
        if tier in names and tier not in TIERS:
            raise ConfigError(f"--tiers: the agent does not serve engines from {tier} yet")
    if not found or not set(found) <= set(TIERS):
        raise ConfigError(f"--tiers: {given!r}: one or more of {', '.join(TIERS)} are wanted")
    return found
