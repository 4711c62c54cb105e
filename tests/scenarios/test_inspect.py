"""``kvatlas directory inspect`` on a running gateway: sizes, positions, bytes, what is missing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from harness import FakeWorker, Product, fresh_tokens, stub_workers
from stub_publisher import BLOCK, block_tokens, removed, stored

from kvatlas.cli.main import main
from kvatlas.config import DirectoryConfig, WorkerConfig
from kvatlas.connectors.stub_api import ENGINE_VERSION
from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.errors import ConfigError
from kvatlas.service.assembly import Assembly
from kvatlas.workload.models import load_layout
from kvatlas.workload.proofs import Proof, Runtime, add_proof
from kvatlas.workload.spec import EngineSpec

SPEC = EngineSpec(blocks=4000, prefill_tokens_per_s=1e6, decode_step_s=0.0, step_overhead_s=0.0)
FLASH = load_layout("deepseek-v4-flash", engine="vllm", kv_dtype="fp8")


async def run(product: Product, *argv: str) -> int:
    """The command beside the gateway, whose loop goes on meanwhile."""
    command = ["directory", "inspect", "--url", product.url, *argv]
    return await asyncio.to_thread(main, command)


async def test_positions_of_a_prompt_on_two_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        FakeWorker("w1") as w1,
        FakeWorker("w2") as w2,
        Product([w1.config(), w2.config()]) as product,
    ):
        await product.settled()
        w1.events.publish(stored("ABC", 3))
        w2.events.publish(stored("ABC", 3), stored("AB", 2, medium="CPU"), removed("AB"))
        await product.answers("ABC", {"w1": 3, "w2": 2})
        ids = tmp_path / "ids.txt"
        ids.write_text(" ".join(str(i) for i in [*block_tokens("ABC"), 7]))
        assert await run(product, "--tokens", str(ids), "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["prompt_tokens"], found["unkeyed"]) == (3 * BLOCK + 1, "")
        w1_found, w2_found = found["workers"]["w1"], found["workers"]["w2"]
        assert w1_found["positions"] == {"hbm": [[BLOCK, 3 * BLOCK]], "lower": []}
        assert w1_found["missing"] == []
        assert w2_found["resume_tokens"] == 2 * BLOCK
        assert w2_found["positions"] == {"hbm": [[BLOCK, BLOCK]], "lower": [[2 * BLOCK] * 2]}
        assert w2_found["chain_tokens"] == {"hbm": BLOCK, "with_lower": 2 * BLOCK}
        assert await run(product, "--tokens", str(ids), "--worker", "w2") == 0
        out = capsys.readouterr().out
        assert "w2: resumes at" in out
        assert "w1" not in out
        assert await run(product, "--worker", "w3") == 2
        assert "no such engine; there is: w1, w2" in capsys.readouterr().err
        assert await run(product) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["w1", "kv", "hbm", "3", "–"] in rows
        assert ["w2", "kv", "dram", "2", "–"] in rows
        assert (await product.directory())["decisions"] > 0
        before = (await product.directory())["decisions"]
        await run(product, "--tokens", str(ids))
        assert (await product.directory())["decisions"] == before  # nothing was routed


async def test_v4_says_what_is_missing_and_what_a_position_weighs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = fresh_tokens(1000)
    options = StubOptions(FLASH, SPEC, model_name="m")
    config = tmp_path / "config.json"
    async with (
        StubCluster(options) as cluster,
        Product(stub_workers(cluster, "deepseek-v4-flash")) as product,
    ):
        await product.settled()
        assert (await product.complete(prompt)).status == 200
        worker = cluster.addresses[0].name

        async def learnt() -> bool:
            return bool(await product.ask(prompt))

        await product.until(learnt)
        config.write_text(json.dumps({"model": "m", "prompt": [*prompt, 1]}))
        assert await run(product, "--body", str(config), "--json") == 0
        whole = json.loads(capsys.readouterr().out)["workers"][worker]
        assert whole["positions"]["hbm"] == [[768, 768]]
        assert sum(whole["bytes"].values()) == FLASH.resume_bytes(768)
        assert whole["bytes"]["c128_state"] == 10_506_240
        config.write_text(json.dumps({"model": "m", "prompt": prompt[:700]}))
        assert await run(product, "--body", str(config), "--json") == 0
        part = json.loads(capsys.readouterr().out)["workers"][worker]
        assert (part["resume_tokens"], part["chain_tokens"]["hbm"]) == (0, 512)
        assert part["missing"][0] == {
            "tokens": 256,
            "groups": ["swa", "c4_state", "c128_state"],
        }
        held = (await product.directory())["held"][worker]
        assert held["global"]["hbm"]["blocks"] == 3
        assert held["global"]["hbm"]["bytes"] == 3 * 256 * 3915
        assert held["swa"]["hbm"] == {"blocks": 2, "bytes": 2 * 37_440 * 43}
        assert held["c128_state"]["hbm"]["bytes"] == 10_506_240


async def test_what_cannot_be_asked_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt"
    async with FakeWorker("w1") as w1, Product([w1.config()]) as product:
        await product.settled()
        file.write_text("1, 2, x")
        assert await run(product, "--tokens", str(file)) == 2
        assert "expected token ids" in capsys.readouterr().err
        file.write_text("[1]")
        assert await run(product, "--body", str(file)) == 2
        assert "not a JSON object" in capsys.readouterr().err
        assert await run(product, "--prompt", str(tmp_path / "absent")) == 2
        assert "cannot be read" in capsys.readouterr().err
        file.write_text("some text")  # nobody here can make token ids of it
        assert await run(product, "--prompt", str(file)) == 0
        assert "cannot be keyed" in capsys.readouterr().out
        assert await run(product, "--prompt", str(file), "--model", "absent") == 2
        assert "404" in capsys.readouterr().err
        assert (await product.get("/kvatlas/inspect")).status == 405


async def test_which_resume_point_counts_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The minimal one where it was shown for that version and device; the full one elsewhere."""
    ids = tmp_path / "ids.txt"
    ids.write_text(" ".join(str(token) for token in fresh_tokens(300)))
    async with StubCluster(StubOptions(FLASH, SPEC, model_name="m", count=4)) as cluster:
        runtime = Runtime("vllm", ENGINE_VERSION, "cuda sm100")
        proof = Proof(runtime.digest(), FLASH.state_digest(), runtime, "v4", 1, "", 9, 3, 20)
        add_proof(tmp_path / "proofs.json", proof)
        said: dict[str, dict[str, Any]] = {
            "shown": {"device": "cuda sm100"},
            "elsewhere": {"device": "cuda sm90"},
            "unsaid": {},
            "drafts": {"device": "cuda sm100", "draft": True},
        }
        model = "deepseek-v4-flash"
        workers = [
            WorkerConfig(name=name, url=stub.url, layout=model, kv_dtype="fp8", **more)
            for stub, (name, more) in zip(cluster.addresses, said.items(), strict=True)
        ]
        directory = DirectoryConfig(proofs=str(tmp_path / "proofs.json"))
        async with Product(workers, directory=directory) as product:
            await product.settled()
            assert await run(product, "--tokens", str(ids)) == 0
            told = capsys.readouterr().out.split("\n\n")
            points = {part.split(":")[0]: part for part in told[1:]}
            assert "resume point: minimal, 4,090,752 bytes: shown on vllm" in points["shown"]
            assert "full, 15,467,904 bytes: less was not shown" in points["elsewhere"]
            assert "full, 15,467,904 bytes: on which device" in points["unsaid"]
            assert "full" in points["drafts"]
            assert "no resume is known to read less" in points["drafts"]


@pytest.mark.parametrize("data", [None, b"", b"[", b"{}", b"[1]", b"\xff" * 9, b"[" * 2_000_000])
def test_proofs_that_cannot_be_read_end_the_start(tmp_path: Path, data: bytes | None) -> None:
    file = tmp_path / "proofs.json"
    if data is not None:
        file.write_bytes(data)
    config = Product([], directory=DirectoryConfig(proofs=str(file))).config
    with pytest.raises(ConfigError, match="proofs"):
        Assembly(config)
