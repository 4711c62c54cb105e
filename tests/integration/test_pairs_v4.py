"""Two real vLLM servers with DeepSeek V4 as a NIXL pair behind the gateway: all five groups of
state are handed over, and the tokens are those of one engine."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_engines import HERE, MODEL, READY_S, require_v4, tiny_model
from test_pairs_vllm import ROLES, alone, ask, from_outside, ids_of

# (after that module, which puts the scenarios' directory on the path)
from harness import Product  # isort: skip

from kvatlas.config import TokenizerConfig, WorkerConfig
from kvatlas.connectors.child import free_ports
from kvatlas.connectors.vllm_cpu import VllmEngine
from kvatlas.service.engines import Timing
from kvatlas.validate.tiny import tiny

pytestmark = [pytest.mark.engine, pytest.mark.long]

GRID = 256
PROMPT = [11 + (i * 7 + i * i // 5) % 97 for i in range(2 * GRID + 116)]  # 12 tokens before 640


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny V4, with the tokenizer of the other tiny model: no more words than that has."""
    made = tmp_path_factory.mktemp("v4") / "model"
    skip = shutil.ignore_patterns("*.safetensors", "config.json", "generation_config.json")
    shutil.copytree(tiny_model(), made, ignore=skip)
    words = json.loads((tiny_model() / "config.json").read_bytes())["vocab_size"]
    config = json.loads(tiny("v4").config()) | {"vocab_size": words}
    (made / "config.json").write_text(json.dumps(config))
    return made


def half(folder: Path, name: str) -> VllmEngine:
    """One half of the pair, not started yet. Its weights come from the shim."""
    port, side = free_ports(2)
    nixl = {"kv_connector": "NixlConnector", "kv_role": ROLES[name], "kv_buffer_device": "cpu"}
    return VllmEngine(
        require_v4("nixl"),
        folder,
        name=name,
        port=port,
        log=folder.parent / f"{name}.log",
        model_name=MODEL,
        block_tokens=GRID,
        context_tokens=2048,
        kv_cache_bytes=256 << 20,
        args=(
            *("--load-format", "dummy", "--max-num-batched-tokens", str(GRID)),
            *("--kv-transfer-config", json.dumps(nixl)),
        ),
        env={
            "PYTHONPATH": str(HERE / "vllm_v4_shim"),
            "UCX_TLS": "tcp",
            "UCX_NET_DEVICES": "lo",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side),
        },
    )


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[dict[str, VllmEngine]]:
    found = {name: half(folder, name) for name in ROLES}
    try:
        for engine in found.values():
            engine.start()
        for engine in found.values():
            engine.wait_ready(3 * READY_S)
        yield found
    finally:
        for engine in found.values():
            engine.stop()


async def test_a_pair_of_v4_answers_as_one_engine_does(
    pair: dict[str, VllmEngine], folder: Path
) -> None:
    """Past the next multiple of 128, where a lost row of a ratio-128 entry would show."""
    workers = [
        WorkerConfig(name="p", url=pair["p"].url, role="prefill"),
        WorkerConfig(name="d", url=pair["d"].url, role="decode"),
    ]
    product = Product(
        workers,
        tokenizer=TokenizerConfig(path=str(folder), engine_timeout_s=60.0),
        timing=Timing(poll_s=0.3, timeout_s=30.0, retry_max_s=0.5),
    )
    async with product:
        await product.settled()
        expected = await asyncio.to_thread(alone, pair["p"], PROMPT)
        before = await asyncio.to_thread(from_outside, pair["d"])
        got = await ask(product, PROMPT)
        assert got.status == 200, got.body
        assert (got.worker, got.headers["x-kvatlas-prefilled-by"]) == ("d", "p")
        assert ids_of(got.json()) == expected
        assert len(set(expected)) > 1, "an answer that says nothing"
        external = await asyncio.to_thread(from_outside, pair["d"]) - before
        assert external >= 2 * GRID, external
        assert await product.metric("kvatlas_pairs_total", prefill="p", decode="d") == 1
        assert await product.metric("kvatlas_fallbacks_total") == 0
        (row,) = (await product.get("/kvatlas/transports")).json()["pairs"]
        assert row["state"] == "ok", row
