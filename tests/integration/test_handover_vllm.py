"""P/D on real vLLM with DeepSeek V4: what a minimal load left unfilled is not handed over.

P and D are two engines with vLLM's own NixlConnector, and the probe beside it. P resumes a prompt
from stored state; D gets the state from P and decodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from real_engines import HERE, require_v4
from steered import Steered, steered

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


@contextmanager
def side(name: str, tmp_path: Path) -> Iterator[Steered]:
    """One engine of the pair, about to start: `handover_child`."""
    folder = tmp_path / name
    (folder / "store").mkdir(parents=True)
    what = subject("v4", tmp_path)
    nixl = {"kv_connector": "NixlConnector", "kv_role": f"kv_{name}", "kv_buffer_device": "cpu"}
    job = _job(what, folder / "store", [{"prompt": [0] * FAR}], {})
    job |= {"tokens": 8, "beside": [nixl]}
    env = {
        "PYTHONPATH": str(HERE / "vllm_v4_shim"),
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "lo",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)[0]),
    }
    venv = require_v4("nixl")
    with steered("handover_child.py", venv, msgspec.json.encode(job), folder, env) as made:
        yield made


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
            told = d.ask(blank="of-d")
            return told["blank"], told["all"]

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
