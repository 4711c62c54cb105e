"""`validate stage` on running stub engines: what it sees, does not see, and planted failures."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness import process
from stages_kit import DECLARED, REQUESTS, StillAgent, Stubs, replaced, status, stubs, why

from kvatlas.cli.main import main
from kvatlas.connectors.child import free_ports
from kvatlas.errors import ConfigError
from kvatlas.validate.stages.result import Previous, Result, load_result, path_of
from kvatlas.validate.stages.run import Order, run_stage
from kvatlas.validate.stages.stagefile import Engine

TCP = {"b.transport", "b.rdma_ports"}


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Stubs]:
    async with stubs(tmp_path) as found:
        yield found


def not_passed(result: Result) -> dict[str, str]:
    good = ("pass", "not applicable")
    return {v.point: f"{v.status}: {v.reason}" for v in result.verdicts if v.status not in good}


async def test_a_sound_pair_passes_both_stages_again_and_again(site: Stubs) -> None:
    first = await site.stage_a()
    assert not_passed(first) == {}
    assert {p for p, s in status(first).items() if s == "not applicable"} == {"a.hbm", "a.power"}
    assert first.baseline is not None
    assert len(set(first.baseline.answers)) == REQUESTS.count
    second = await site.stage_b()
    assert not_passed(second) == {}, second
    assert {p for p, s in status(second).items() if s == "not applicable"} == TCP
    fallback = next(v for v in second.verdicts if v.point == "b.fallback").evidence
    asked = fallback["prompt_tokens"]
    assert fallback["computed_without_prefill_half"] == asked == 4 * REQUESTS.prompt_tokens
    assert second.previous is not None
    assert second.previous.digest == first.digest
    assert load_result(path_of(site.folder, "b")) == second
    again = await site.stage_a()  # what the first run left in the cache is not found
    assert not_passed(again) == {}
    assert again.digest != first.digest
    assert again.baseline is not None
    assert again.baseline.answers == first.baseline.answers


async def test_damaged_state_is_a_wrong_answer(site: Stubs) -> None:
    await site.stage_a()
    side = site.engines["p"].engine.pairs
    keep = side.keep

    def damaged(*args: Any) -> dict[str, object]:
        params = keep(*args)
        for kept in side._kept.values():
            kept.blocks = {k: bytes(b ^ 1 for b in v) for k, v in kept.blocks.items()}
        return params

    side.keep = damaged  # type: ignore[method-assign]
    found = await site.stage_b()
    assert set(not_passed(found)) == {"b.answers"}
    assert "differ" in why(found, "b.answers")
    with pytest.raises(ConfigError, match=r"stage c stops here.*b\.answers fail"):
        await run_stage(Order("c", site.folder), site.file(site.engines["c"].described()))


async def test_state_that_gets_lost_is_computed_again_and_seen(site: Stubs) -> None:
    await site.stage_a()
    side = site.engines["p"].engine.pairs
    keep = side.keep

    def lost(*args: Any) -> dict[str, object]:
        params = keep(*args)
        for name in list(side._kept):
            side.taken(name)
        return params

    side.keep = lost  # type: ignore[method-assign]
    found = status(await site.stage_b())
    assert (found["b.transfers"], found["b.no_reprefill"]) == ("fail", "fail")
    assert found["b.answers"] == "pass"  # nobody would have noticed


async def test_what_must_be_off_is_seen_to_be_on(site: Stubs) -> None:
    await site.stage_a()
    info = site.engines["d"].info
    assert info is not None
    info["speculative_config"] = {"method": "eagle"}
    info["attention_config"] = {"hisparse_config": {"device_buffer_size": 1}}
    info["kv_transfer_config"] = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {
            "connectors": [
                {"kv_connector": "NixlConnector"},
                {"kv_connector": "LMCacheConnectorV1"},
            ]
        },
    }
    found = status(await site.stage_b())
    off = ("b.speculation_off", "b.hisparse_off", "b.shared_off", "b.frozen")
    assert [found[point] for point in off] == ["fail"] * 4


async def test_engines_that_tell_little_are_not_shown(site: Stubs) -> None:
    assert (await site.stage_a()).passed
    for name in "pd":
        site.engines[name].info = None
        site.engines[name].logged = lambda number: False
        site.engines[name].counts = False
    found = await site.stage_b()
    hidden = {p for p, s in status(found).items() if s == "not shown"}
    assert hidden == {
        "b.frozen",
        "b.hisparse_off",
        "b.speculation_off",
        "b.shared_off",
        "b.same",
        "b.backend",
        "b.request_ids",
        "b.transfers",
        "b.no_reprefill",
    }
    assert "VLLM_SERVER_DEV_MODE=1" in why(found, "b.hisparse_off")
    assert "--enable-log-requests" in why(found, "b.request_ids")
    assert not found.passed


async def test_a_request_that_one_log_does_not_name_is_red(site: Stubs) -> None:
    await site.stage_a()
    site.engines["d"].logged = lambda number: bool(number % 2)
    found = await site.stage_b()
    assert status(found)["b.request_ids"] == "fail"
    assert "3 of 6 request ids" in why(found, "b.request_ids")


async def test_tiny_samples_show_nothing(site: Stubs) -> None:
    few = replaced(REQUESTS, count=2)
    found = await site.stage_a(requests=few)
    tiny = {"a.requests", "a.correct", "a.ttft", "a.tpot", "a.throughput"}
    assert {p for p, s in status(found).items() if s == "not shown"} == tiny
    with pytest.raises(ConfigError, match=r"stage b stops here"):
        await site.stage_b(requests=few)


async def test_an_engine_without_a_configuration_is_no_baseline(site: Stubs) -> None:
    site.engines["c"].info = None
    site.engines["c"].counts = False
    found = await site.stage_a(declared=DECLARED | {"tensor_parallel": "1"}, not_applicable={})
    hidden = {p for p, s in status(found).items() if s == "not shown"}
    assert {"a.tensor_parallel", "a.dtypes", "a.graphs", "a.speculation"} <= hidden
    assert {"a.hbm", "a.power"} <= hidden  # nothing is not applicable by itself
    assert "read.power_w" in why(found, "a.power")


async def test_a_part_that_does_not_answer_shows_nothing(site: Stubs) -> None:
    (port,) = free_ports(1)
    away = Engine("away", f"http://127.0.0.1:{port}")
    file = site.file(site.engines["c"].described(), away)
    found = await run_stage(Order("a", site.folder), file)
    assert set(status(found).values()) == {"not shown"}
    assert f":{port}" in why(found, "a.correct")


async def test_stages_build_on_what_is_there_and_unchanged(site: Stubs) -> None:
    with pytest.raises(ConfigError, match=r"builds on stage a, and there is no"):
        await site.stage_b()
    first = await site.stage_a()
    p, d = site.engines["p"], site.engines["d"]
    halves = [p.described("prefill"), d.described("decode"), Engine("d2", d.url, "decode")]
    with pytest.raises(ConfigError, match=r"looks at one pair"):
        await run_stage(Order("b", site.folder), site.file(*halves))
    with pytest.raises(ConfigError, match=r"needs a \[\[gateway\]\]"):
        await run_stage(Order("b", site.folder), site.file(*halves[:2], gateway=()))
    with pytest.raises(ConfigError, match=r"with role decode"):
        await run_stage(Order("b", site.folder), site.file(halves[0]))
    with pytest.raises(ConfigError, match=r"\[requests\] are not those of the baseline"):
        await site.stage_b(requests=replaced(REQUESTS, seed=2))
    path = path_of(site.folder, "a")
    path.write_bytes(path.read_bytes().replace(b'"pass"', b'"fail"', 1))
    with pytest.raises(ConfigError, match=r"its digest does not fit"):
        await site.stage_b()
    second = await site.stage_a()
    assert second.digest != first.digest
    await site.stage_b()
    await site.stage_a()
    with pytest.raises(ConfigError, match=r"was run on another stage a"):
        await run_stage(Order("c", site.folder), site.file(site.engines["c"].described()))


async def test_host_memory_and_stores_that_do_nothing_never_pass(site: Stubs) -> None:
    """Stages C and D on engines that save nowhere, with agents that hold nothing, and no hook."""
    await site.stage_a()
    await site.stage_b()
    one, two = site.engines["c"], site.engines["d"]
    agents = [StillAgent("dram"), StillAgent("dram", "object")]
    async with AsyncExitStack() as stack:
        for agent in agents:
            await agent.server.start("127.0.0.1", 0)
            stack.push_async_callback(agent.server.close)
        nodes = tuple(a.described(f"n-{i}") for i, a in enumerate(agents))
        near = Engine(one.name, one.url, agent="n-0")
        third = await run_stage(
            Order("c", site.folder), site.file(near, gateway=(), agent=nodes[:1])
        )
        found = status(third)
        red = ("c.hits", "c.hbm_released", "c.host_memory", "c.bandwidth")
        assert [found[point] for point in red] == ["fail"] * len(red)
        path_of(site.folder, "c").write_bytes(as_if_passed(third))
        file = site.file(near, Engine(two.name, two.url, agent="n-1"), gateway=(), agent=nodes)
        fourth = await run_stage(Order("d", site.folder), file)
    found = status(fourth)
    passed = {point for point, s in found.items() if s == "pass"}
    assert passed == {"d.frozen"}
    assert {point for point, s in found.items() if s == "fail"} == {"d.across"}
    assert "no hook store_heal" in why(fourth, "d.partition")
    assert "store.ttl_s is 0" in why(fourth, "d.ttl")
    assert "store.fill_prompts is 0" in why(fourth, "d.eviction")
    assert "role = stranger" in why(fourth, "d.fingerprint")


async def test_two_engines_of_one_node_share_no_store(site: Stubs) -> None:
    await site.stage_a()
    kept = load_result(path_of(site.folder, "a"))
    for stage, before in (("b", "a"), ("c", "b")):
        older = load_result(path_of(site.folder, before))  # type: ignore[arg-type]
        made = msgspec.structs.replace(
            kept, stage=stage, baseline=None, previous=Previous(older.stage, older.digest)
        )
        path_of(site.folder, stage).write_bytes(as_if_passed(made))  # type: ignore[arg-type]
    engines = [site.engines[name].described() for name in "cd"]
    with pytest.raises(ConfigError, match=r"on nodes of their own"):
        await run_stage(Order("d", site.folder), site.file(*engines, gateway=()))


def as_if_passed(result: Result) -> bytes:
    verdicts = tuple(msgspec.structs.replace(v, status="pass") for v in result.verdicts)
    return msgspec.json.encode(msgspec.structs.replace(result, verdicts=verdicts).sealed())


async def test_one_optimisation_beside_the_stage_before(site: Stubs) -> None:
    """Stage E: the draft alone is on; then graphs change with it."""
    await site.stage_a()
    info = site.engines["c"].info
    assert info is not None
    info["speculative_config"] = {"method": "mtp"}
    against = path_of(site.folder, "a")
    order = Order("e", site.folder, "draft", against)
    file = site.file(
        site.engines["c"].described(),
        gateway=(),
        not_applicable={"e.transfers": "Combined: nothing is handed over"},
    )
    found = await run_stage(order, file)
    assert not_passed(found) == {}
    info["model_config"]["enforce_eager"] = False
    info["compilation_config"]["cudagraph_mode"] = "FULL"
    again = await run_stage(order, file)
    assert set(not_passed(again)) == {"e.one"}
    assert "c.graphs" in why(again, "e.one")


def test_the_command_on_an_engine_that_is_not_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All by the command, the engine a process: figures pass, what it does not tell does not."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    options = ["--port", str(port), "--layout", "32", "--model-name", "m", "--time-scale", "0"]
    engine = process(tmp_path, "stub-engine", *options, url=url)
    file = tmp_path / "stage.toml"
    file.write_text(
        f'name = "theirs"\n[[engine]]\nname = "e"\nurl = "{url}"\nengine = "stub"\n'
        "[requests]\ncount = 4\nprompt_tokens = 100\noutput_tokens = 3\nsamples_min = 4\n"
    )
    try:
        engine.wait_ready(60.0)
        command = ["validate", "stage", "a", "--file", str(file), "--out", str(tmp_path), "--json"]
        assert main(command) == 1
    finally:
        engine.stop()
    told = msgspec.json.decode(capsys.readouterr().out, type=Result)
    found = status(told)
    shown = {"a.context", "a.requests", "a.correct", "a.ttft", "a.throughput"}
    assert {p for p, s in found.items() if s == "pass"} >= shown
    assert "fail" not in found.values()
    assert {"a.model", "a.runtime", "a.tensor_parallel", "a.graphs", "a.power"} <= {
        p for p, s in found.items() if s == "not shown"
    }
    assert told == load_result(path_of(tmp_path, "a"))
