"""A gateway that was recorded decides the same again; damaged recordings are refused."""

from __future__ import annotations

import json
import random
import stat
from pathlib import Path

import pytest
from harness import Product, stub_workers

from kvatlas.cli.main import main
from kvatlas.config import RouterConfig
from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.core.directory import Limits
from kvatlas.core.router import Params
from kvatlas.errors import ConfigError, TraceError
from kvatlas.service import recording
from kvatlas.service.recording import Recorder
from kvatlas.validate.replay import replay
from kvatlas.workload.models import load_layout
from kvatlas.workload.spec import EngineSpec

LAYOUT = "deepseek-v4-flash"
SPEC = EngineSpec(blocks=20_000, prefill_tokens_per_s=1e6, decode_step_s=1e-4)


async def recorded(path: Path, *, max_bytes: int = 1 << 30) -> set[str]:
    """Forty chats' turns over three V4 engines, one of which restarts. Returns the flags."""
    layout = load_layout(LAYOUT, engine="vllm")
    router = RouterConfig(recording=str(path), recording_max_bytes=max_bytes)
    rng = random.Random(5)
    heads = [[rng.randrange(30_000) for _ in range(900)] for _ in range(4)]
    async with (
        StubCluster(StubOptions(layout, SPEC, model_name="v4", count=3)) as cluster,
        Product(stub_workers(cluster, LAYOUT), router=router) as product,
    ):
        await product.settled()
        for number in range(40):
            head = heads[number % 4] + [number] * (number * 7 % 400)
            got = await product.complete(head, model="v4", max_tokens=3)
            assert got.status == 200
        await product.settled()
        return await product.flags()


async def test_a_recorded_gateway_decides_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gateway.kvr"
    assert await recorded(path) == set()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    result = replay(path)
    assert (result.decisions, result.different) == (40, 0)
    assert result.inputs["Apply"] > 20
    assert main(["validate", "replay", str(path)]) == 0
    assert "decisions 40: the same 40, different 0" in capsys.readouterr().out
    hits = [
        frame.answer.plans[0].resume_tokens
        for frame in recording.read(path)[1]
        if frame.answer is not None
    ]
    assert sum(hits) > 10_000  # it is not forty times the same empty decision


async def test_what_is_missing_from_a_recording_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Negative control: without the KV events the decisions must come out otherwise."""
    path, thinned = tmp_path / "gateway.kvr", tmp_path / "thinned.kvr"
    await recorded(path)
    header, frames = recording.read(path)
    writer = Recorder(str(thinned), 1 << 30, header.params, header.limits)
    for frame in frames:
        if type(frame.event).__name__ != "Apply":
            writer(frame.at, frame.event, frame.answer)
    writer.close()
    assert replay(thinned).different > 20
    assert main(["validate", "replay", str(thinned), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["different"] > 20


async def test_a_recording_ends_at_its_limit_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "gateway.kvr"
    assert await recorded(path, max_bytes=50_000) == {"recording:file"}
    assert path.stat().st_size <= 50_000
    result = replay(path)
    assert 0 < result.decisions < 40
    assert not result.different


def test_damaged_recordings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "gateway.kvr"
    recorder = Recorder(str(path), 1 << 20, Params(), Limits())
    recorder.close()
    with pytest.raises(ConfigError, match="File exists"):
        Recorder(str(path), 1 << 20, Params(), Limits())
    whole = path.read_bytes()
    path.write_bytes(whole + b"\x05\0\0\0abcde")
    with pytest.raises(TraceError, match="frame 1"):
        replay(path)
    path.write_bytes(whole + b"\x05\0\0\0ab")  # cut short by a kill
    assert replay(path).decisions == 0
    for damaged in (b"", b"PK", b"\xff\xff\xff\xff", whole[8:], b"\x01\0\0\0\xc0"):
        path.write_bytes(damaged)
        with pytest.raises(TraceError, match=r"not a recording|damaged"):
            replay(path)
    assert main(["validate", "replay", str(tmp_path / "nowhere.kvr")]) == 2
