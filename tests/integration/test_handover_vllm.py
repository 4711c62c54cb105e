"""P/D on real vLLM with DeepSeek V4: what a minimal load left unfilled is not handed over.

P and D are two engines with vLLM's own NixlConnector, and the probe beside it. P resumes a prompt
from stored state; D gets the state from P and decodes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from real_engines import HERE, require_v4

from kvatlas.connectors import vllm_greedy
from kvatlas.connectors.child import free_ports
from kvatlas.validate.exactness_vllm import _job, subject, text

pytestmark = pytest.mark.engine

AT = 512
NEAR = AT + 1  # the windows that P hands over reach back before the resume point
FAR = AT + 160  # they do not
TO_D: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
LOAD = {"load": "point", "at": AT}
MINIMAL = LOAD | {"minimal": True}


class Side:
    """One engine of the pair: `handover_child`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def ask(self, **run: Any) -> Any:
        """One line, one answer; fails with the end of the engine's log."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(run) + "\n")
        self._process.stdin.flush()
        return self.heard()

    def heard(self) -> Any:
        """The next line of the engine."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, self._log.read_text("utf-8", "replace")[-3000:]
        return json.loads(line)


@contextmanager
def side(name: str, tmp_path: Path) -> Iterator[Side]:
    """An engine that is about to start; `Side.heard` waits for it."""
    folder = tmp_path / name
    (folder / "store").mkdir(parents=True)
    what = subject("v4", tmp_path)
    nixl = {"kv_connector": "NixlConnector", "kv_role": f"kv_{name}", "kv_buffer_device": "cpu"}
    job = _job(what, folder / "store", [{"prompt": [0] * FAR}], {})
    job |= {"tokens": 8, "beside": [nixl]}
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {
        "PYTHONPATH": str(HERE / "vllm_v4_shim"),
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "lo",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)[0]),
    }
    python = str(require_v4("nixl") / "bin" / "python")
    script = str(HERE / "handover_child.py")
    command = [python, script, str(folder / "job.json"), str(Path(vllm_greedy.__file__).parent)]
    log = folder / "log"
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env=env,
            text=True,
        ) as process,
    ):
        try:
            yield Side(process, log)
        finally:
            process.kill()


def test_a_minimal_load_is_not_handed_over(tmp_path: Path) -> None:
    prompt = text(3, FAR)
    with side("producer", tmp_path) as p, side("consumer", tmp_path) as d:
        assert p.heard()["version"] == d.heard()["version"]
        save = {"save": [["point", AT]]}
        reference = p.ask(id="reference", prompt=prompt, params=save, forget=True)

        def through(name: str, n: int, wishes: dict[str, Any]) -> Any:
            """P with these wishes, then D; its answer."""
            first = {"id": f"{name}-{n}", "prompt": prompt[:n], "forget": True}
            there = p.ask(**first, params=wishes | TO_D, tokens=1)
            assert there["cached_tokens"] == (AT if wishes else 0)
            return d.ask(**first, params=there["handed_over"])

        def blank() -> tuple[int, int]:
            """Of the blocks from which D would resume at AT: those that hold nothing, and all."""
            asked = {"id": "again", "prompt": prompt[:NEAR], "forget": False, "tokens": 1}
            found = d.ask(**asked, params={"save": [["of-d", AT]]})
            assert found["cached_tokens"] == AT  # it counts them as held
            empty, held = d.ask(blank="of-d")
            return empty, held

        far = through("cold", FAR, {})
        assert far["tokens"] == reference["tokens"]
        assert through("minimal", FAR, MINIMAL)["logprobs"] == far["logprobs"]

        near = through("cold", NEAR, {})
        (none, held) = blank()
        assert through("minimal", NEAR, MINIMAL)["logprobs"] == near["logprobs"]
        assert blank() == (none, held) == (0, held)
        # Without care D would hold, announce and hand on what was never filled.
        assert through("careless", NEAR, MINIMAL | {"careless": True})["tokens"] == near["tokens"]
        assert blank()[0] > 0
