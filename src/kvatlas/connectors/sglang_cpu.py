"""SGLang servers without a GPU, as processes of SGLang's own virtual environment.

SGLang has no CPU build among Python's packages; its usual one serves plain attention on a CPU once
a few functions are put in place of CUDA's. Those are not part of kvatlas: ``path`` is the directory
that has them (kvatlas's own tests have one).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import kvatlas
from kvatlas.connectors.child import Child
from kvatlas.connectors.vllm_cpu import environment, python_of

SGLANG = "sglang==0.5.23"


def installed(venv: Path) -> bool:
    """Whether ``venv`` holds SGLang, without starting its Python."""
    package = SGLANG.replace("==", "-")
    return any(venv.glob(f"lib/python3*/site-packages/{package}.dist-info"))


def storage(
    socket: Path, settings: Mapping[str, float], *, layout: str = "page_first_direct"
) -> list[str]:
    """Arguments for HiCache with the agent at ``socket`` as its storage; the host pool is twice the
    device's. ``settings``: further ones of our backend and of SGLang's for it."""
    extra = {
        "backend_name": "kvatlas",
        "module_path": "kvatlas.connectors.sglang_hicache",
        "class_name": "KvatlasHiCache",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "socket": str(socket),
    }
    return [
        *("--enable-hierarchical-cache", "--hicache-ratio", "2"),
        *("--hicache-io-backend", "direct", "--hicache-mem-layout", layout),
        *("--hicache-write-policy", "write_through"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend", "dynamic"),
        *("--hicache-storage-backend-extra-config", json.dumps({**extra, **settings})),
    ]


class SglangEngine(Child):
    """One ``sglang.launch_server`` on loopback, one OpenMP thread, steps that do not overlap.

    One thread makes its output the same from run to run. ``pool_tokens``: what its own cache holds.
    ``args`` are appended to its command line, ``env`` to its environment.
    """

    def __init__(
        self,
        venv: Path,
        model_dir: Path,
        *,
        name: str,
        port: int,
        log: Path,
        model_name: str,
        path: Sequence[Path] = (),
        page_tokens: int = 16,
        pool_tokens: int = 16384,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        argv = [
            *(python_of(venv), "-m", "sglang.launch_server"),
            *("--model-path", str(model_dir.absolute()), "--served-model-name", model_name),
            *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu"),
            *("--attention-backend", "torch_native", "--page-size", str(page_tokens)),
            *("--mem-fraction-static", "0.1", "--max-total-tokens", str(pool_tokens)),
            *("--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup"),
            *("--enable-cache-report", *args),
        ]
        found = [*path, Path(kvatlas.__file__).parents[1]]  # our backend runs in its processes
        own = {"PYTHONPATH": os.pathsep.join(str(p.absolute()) for p in found)}
        url = f"http://127.0.0.1:{port}"
        super().__init__(name, argv, log=log, url=url, env=environment(own | dict(env or {})))
