"""The stage file, its hooks and what is read of pages: told where it is wrong, never guessed."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from kvatlas.errors import ConfigError, EngineError
from kvatlas.service.http_client import Response
from kvatlas.service.load_answer import Answer
from kvatlas.validate.stages.asking import Prompts, _reply, words_of
from kvatlas.validate.stages.cpu_model import VOCAB_SIZE, write_model
from kvatlas.validate.stages.gather import _lines_of
from kvatlas.validate.stages.hooks import Hooks
from kvatlas.validate.stages.identity import _sglang, _vllm, files_digest, look_at
from kvatlas.validate.stages.stagefile import Engine, Requests, load_stage_file
from kvatlas.validate.stages.values import Missing
from kvatlas.validate.stages.watching import agent_page

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "stages.md"
ENGINE = '[[engine]]\nname = "e"\nurl = "http://h:1"\n'


def loaded(folder: Path, text: str) -> Any:
    path = folder / "stage.toml"
    path.write_text(text)
    return load_stage_file(path)


def test_the_guides_file_loads_and_shows_every_key(tmp_path: Path) -> None:
    blocks = re.findall(r"(?ms)^```\n(name = .*?)^```", GUIDE.read_text("utf-8"))
    assert len(blocks) == 1
    found = loaded(tmp_path, blocks[0])
    for table in ("requests", "limits", "store"):
        told = re.search(rf"(?ms)^\[{table}\].*?(?=^\[|\Z)", blocks[0])
        assert told is not None
        keys = set(re.findall(r"(?m)^(\w+) =", told[0]))
        assert keys == set(getattr(found, table).__struct_fields__), table


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "missing required field `name`"),
        ('name = "x"\n', "no [[engine]]"),
        (f'name = "x"\nmodle = "m"\n{ENGINE}', "unknown key 'modle': did you mean 'model'?"),
        (f'name = "x"\n{ENGINE}{ENGINE}', "two parts are named 'e'"),
        (f'name = "x"\n{ENGINE}role = "both"\n', "role"),
        (f'name = "x"\n{ENGINE.replace("http", "https")}', "is not of the form http://host:port"),
        (f'name = "x"\n{ENGINE}agent = "n"\n', "there is no agent 'n'"),
        (f'name = "x"\n{ENGINE}[[agent]]\nname = "n"\n', "missing required field `url`"),
        (f'name = "x"\n{ENGINE}[requests]\noutput_tokens = 1\n', "there is no TPOT"),
        (f'name = "x"\n{ENGINE}[requests]\nvocab_size = 1\n', "requests.vocab_size: at least 2"),
        (f'name = "x"\n{ENGINE}[declared]\ntransport = "ib"\n', "neither rdma nor tcp"),
        (f'name = "x"\n{ENGINE}[declared]\ncolour = "red"\n', "'colour' is not possible there"),
        (f'name = "x"\n{ENGINE}[hooks]\nstore_explode = "x"\n', "'store_explode' is not possible"),
        (f'name = "x"\n{ENGINE}[hooks]\nstore_stop = " "\n', "'store_stop' is empty"),
        (f'name = "x"\n{ENGINE}[not_applicable]\n"b.answers" = "no"\n', "'b.answers' is not"),
        (f'name = "x"\n{ENGINE}[trial]\n"d.tenant" = "true"\n', "'d.tenant' is not possible"),
        (f'name = "x"\n{ENGINE}[limits]\nsame_min = 1.5\n', "same_min"),
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(fault)):
        loaded(tmp_path, text)


def run(hooks: Hooks, name: str) -> Any:
    return asyncio.run(hooks.run(name))


def test_hooks_do_it_or_say_why_not(tmp_path: Path) -> None:
    commands = {
        "store_stop": f"touch {tmp_path}/stopped",
        "store_start": "echo no such unit >&2; exit 5",
        "store_heal": "sleep 60",
        "hbm_bytes": "echo 1234.5",
        "power_w": "echo watts",
    }
    hooks = Hooks(commands, timeout_s=0.2, own={"node_stop": _raises})
    assert run(hooks, "store_stop") is None
    assert (tmp_path / "stopped").exists()
    for name, fault in (
        ("store_start", "status 5: no such unit"),
        ("store_heal", "no end within 0.2 s"),
        ("index_stop", "no hook index_stop"),
        ("node_stop", "it is not there"),
    ):
        why = run(hooks, name)
        assert isinstance(why, Missing)
        assert fault in why.reason
    assert asyncio.run(hooks.number("hbm_bytes")) == 1234.5
    for name in ("power_w", "unknown"):
        assert isinstance(asyncio.run(hooks.number(name)), Missing)


def _raises() -> None:
    raise EngineError("it is not there")


def test_the_request_set_is_fixed_by_its_seed() -> None:
    wanted = Requests(count=3, prompt_tokens=200, output_tokens=4, vocab_size=256)
    first, second = Prompts(wanted), Prompts(wanted)
    assert first.described() == second.described()
    assert first.tokens(0) != first.tokens(1)
    assert len(first.tokens(2)) == 200
    assert max(first.tokens(0)) < 256
    other = Prompts(Requests(count=3, prompt_tokens=200, output_tokens=4, vocab_size=256, seed=2))
    assert other.described().digest != first.described().digest
    assert [r.hash_ids for r in first.fresh(2)] != [r.hash_ids for r in first.fresh(2)]


def test_words_are_token_ids_where_they_are_told() -> None:
    def event(**choice: Any) -> bytes:
        return b"data: " + repr({"choices": [choice]}).replace("'", '"').encode() + b"\n\n"

    assert words_of(event(text="a", token_ids=[1, 2]) + event(text="b", token_ids=[3])) == "1 2 3"
    assert words_of(event(text="a") + event(text="b") + b"data: [DONE]\n\n") == "ab"
    assert words_of(b"data: {broken\n\n") == ""


def test_a_request_id_is_not_the_beginning_of_another(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Received request cmpl-stage-a-12-0: x\n")
    assert _lines_of(log, ["stage-a-1"]) == {}
    assert set(_lines_of(log, ["stage-a-12"])) == {"stage-a-12"}  # type: ignore[arg-type]
    assert isinstance(_lines_of(tmp_path / "none", ["x"]), Missing)


VLLM_CONFIG: dict[str, Any] = {
    "model_config": {"dtype": "torch.bfloat16", "max_model_len": 4096, "enforce_eager": False},
    "cache_config": {"cache_dtype": "fp8"},
    "parallel_config": {"tensor_parallel_size": 8},
    "attention_config": {},
    "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
}


def test_what_vllm_tells() -> None:
    found = _vllm({"vllm_config": VLLM_CONFIG})
    assert found["kv_dtype"] == "fp8"
    assert found["graphs"] == "FULL_AND_PIECEWISE"
    assert (found["speculation"], found["hisparse"]) == ("off", "off")
    assert (found["connector"], found["shared_store"]) == ("none", "none")
    tiers = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"secondary_tiers": [{"type": "fs"}]},
    }
    assert (
        _vllm({"vllm_config": VLLM_CONFIG | {"kv_transfer_config": tiers}})["shared_store"]
        == "secondary_tiers"
    )
    sparse = {"attention_config": {"hisparse_config": {"x": 1}}}
    assert _vllm({"vllm_config": VLLM_CONFIG | sparse})["hisparse"] == "on"
    assert _vllm({}) == {}
    assert _vllm({"vllm_config": "as text"}) == {}


def test_what_sglang_tells() -> None:
    info = {
        "tp_size": 8,
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "context_length": 65536,
        "disable_cuda_graph": False,
        "speculative_algorithm": None,
        "enable_hisparse": False,
        "disaggregation_mode": "decode",
        "disaggregation_transfer_backend": "mooncake",
        "enable_hierarchical_cache": False,
        "hicache_storage_backend": None,
    }
    found = _sglang(info)
    assert found["kv_dtype"] == "bfloat16"
    assert (found["connector"], found["shared_store"]) == ("mooncake", "none")
    assert (found["speculation"], found["hisparse"], found["graphs"]) == ("off", "off", "on")
    more = {"speculative_algorithm": "EAGLE", "hicache_storage_backend": "mooncake"}
    other = _sglang(info | more | {"disaggregation_mode": "null", "enable_hisparse": None})
    assert (other["speculation"], other["shared_store"], other["connector"]) == (
        "EAGLE",
        "mooncake",
        "none",
    )
    assert "hisparse" not in other
    plain = _sglang(info | {"dtype": "auto", "context_length": None})
    assert (plain["weights_dtype"], plain["kv_dtype"]) == ("the model's own",) * 2
    assert plain["context_tokens"] == ""  # then /v1/models tells it
    assert _sglang({}) == {}


def test_an_agents_page() -> None:
    page = """\
kvatlas_agent_tier_held_bytes{tier="dram"} 10.0
kvatlas_agent_tier_capacity_bytes{tier="dram"} 1e2
kvatlas_agent_tier_transport_info{tier="object",transport="tcp"} 1.0
kvatlas_agent_store_events_total{event="write_full",tier="object"} 3.0
kvatlas_agent_loaded_tokens_total{tier="object"} 64.0
kvatlas_agent_moved_bytes_total{operation="load",tier="dram"} 5.0
kvatlas_agent_events_total{event="damaged"} 2.0
kvatlas_agent_events_total{event="odd"} NaN
kvatlas_agent_busy 1.0
"""
    tiers, sums = agent_page(page)
    assert tiers["dram"] == {"held_bytes": 10, "capacity_bytes": 100}
    assert tiers["object"]["counts"] == {"write_full": 3}
    assert sums["loaded_tokens"] == {"object": 64}
    assert sums["moved_bytes"] == {"load dram": 5}
    assert sums["counts"] == {"damaged": 2}
    assert sums["busy"] == {"": 1}


def test_the_cpu_model_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_model(tmp_path / name)
    assert files_digest(tmp_path / "one") == files_digest(tmp_path / "two") != ""
    weights = (tmp_path / "one" / "model.safetensors").read_bytes()
    size = int.from_bytes(weights[:8], "little")
    assert len(weights) > VOCAB_SIZE * 128 * 2 * 2 + size
    assert files_digest(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("told", "expected"), [("64", 64), ("9" * 5000, None), ("9" * 19, None), ("-1", None)]
)
def test_a_count_in_a_header_is_read_or_none(told: str, expected: int | None) -> None:
    answer = Answer(lambda: 0.0)
    answer.status = 200
    answer.headers = {"x-kvatlas-expected-hit-tokens": told}
    answer.usage = {"prompt_tokens": 1 << 60, "prompt_tokens_details": {"cached_tokens": True}}
    found = _reply(0, "r", answer, b"", 0.0)
    assert (found.expected_tokens, found.prompt_tokens, found.cached_tokens) == (expected, 0, None)


class _Busy:
    """vLLM that tells its metrics, and not in time what it is configured with."""

    async def request(self, method: str, url: str, **_: object) -> Response:
        page = b'vllm:cache_config_info{cache_dtype="auto",block_size="32"} 1\n'
        return Response(200, [], page if url.endswith("/metrics") else b'{"data": [{"id": "m"}]}')

    async def get_json(self, url: str, *, timeout_s: float) -> object:
        raise EngineError(f"GET {url}: no answer within {timeout_s:g} s")

    async def post_json(self, url: str, body: object, *, timeout_s: float) -> object:
        return await self.get_json(url, timeout_s=timeout_s)


async def test_what_came_too_late_is_not_shown_and_says_so() -> None:
    seen = await look_at(_Busy(), Engine("e", "http://h:1"))  # type: ignore[arg-type]
    for name in ("kv_dtype", "weights_dtype", "tokenizer"):
        found = seen.setting(name)
        assert isinstance(found, Missing), name
        assert "/server_info?config_format=json: no answer within" in found.reason
    assert seen.setting("block_tokens") == "32"
