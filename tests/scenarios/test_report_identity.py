"""Field reports of classes B and C, keys and token ids, on the assembled product."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from chat_cases import TEMPLATES
from harness import (
    CHAT,
    COMPLETION,
    Answer,
    FakeWorker,
    Product,
    announce,
    answer,
    fresh_tokens,
    process,
    stub_workers,
)
from stub_publisher import BLOCK, block_tokens, stored
from tokenizers import Tokenizer, processors

from kvatlas.config import TokenizerConfig
from kvatlas.connectors.child import Child, free_ports
from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.connectors.stub_text import FileTokenizer
from kvatlas.core.layout import plain
from kvatlas.demo.vocabulary import write_tokenizer
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply
from kvatlas.service.verify import GOLDEN
from kvatlas.workload.spec import EngineSpec

GRID = 16
SPEC = EngineSpec(blocks=2000, prefill_tokens_per_s=1e6, decode_step_s=0.0, step_overhead_s=0.0)


@contextlib.asynccontextmanager
async def stubs(*options: StubOptions, **settings: object) -> AsyncIterator[Product]:
    """The product in front of clusters of plain stub engines, the one after the other."""
    async with contextlib.AsyncExitStack() as stack:
        workers = []
        for number, option in enumerate(options):
            cluster = await stack.enter_async_context(StubCluster(option))
            for config in stub_workers(cluster, str(GRID)):
                name = f"{option.model_name}-{number}-{config.name}"
                workers.append(type(config)(**_fields(config) | {"name": name}))
        product = await stack.enter_async_context(Product(workers, **settings))  # type: ignore
        await product.settled()
        yield product


def _fields(config: object) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__struct_fields__}  # type: ignore


# -- vllm#53495 -----------------------------------------------------------------------------------


async def test_vllm_53495_salt_adapter_and_model_partition_everything() -> None:
    """What the router predicts and what the engine itself reused, both by the client's view."""
    ours = StubOptions(plain(GRID), SPEC, model_name="m", adapters=("lora-a", "lora-b"))
    other = StubOptions(plain(GRID), SPEC, model_name="other")
    prompt = fresh_tokens(3 * GRID + 1)
    salt = {"x-kvatlas-cache-salt": "x"}
    async with stubs(ours, other) as product:

        async def hit(model: str = "m", **fields: object) -> tuple[int, int]:
            got = await product.complete(prompt, model, **fields)
            assert got.status == 200, got
            return got.expected, got.cached

        async def learnt() -> bool:
            return any((await product.ask(prompt[:-1], headers=salt)).values())

        assert await hit(cache_salt="x") == (0, 0)
        await product.until(learnt)
        assert await hit(cache_salt="x") == (48, 48)
        assert await hit(cache_salt="y") == (0, 0)
        assert await hit() == (0, 0)
        assert await hit("lora-a", cache_salt="x") == (0, 0)
        assert await hit("lora-b", cache_salt="x") == (0, 0)
        assert await hit("other", cache_salt="x") == (0, 0)
        assert await hit(cache_salt="x") == (48, 48)
        # One documented precedence: the header's salt, and the engine gets it too.
        body = {"model": "m", "prompt": prompt, "max_tokens": 4}
        for inside in ({}, {"cache_salt": "y"}, {"cache_salt": None}):
            got = await product.post(COMPLETION, body | inside, salt)
            assert (got.expected, got.cached) == (48, 48)
        wrong = await product.post(COMPLETION, body | {"cache_salt": "x"}, {salt_name: "z"})
        assert (wrong.expected, wrong.cached) == (0, 0)


salt_name = "x-kvatlas-cache-salt"


async def test_vllm_53495_what_has_no_token_ids_never_hits() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    async with FakeWorker("w1") as w1, Product([w1.config()]) as product:
        await product.settled()
        w1.events.publish(stored("ABC", 3))
        await product.answers("ABC", {"w1": 3})
        ids = [*block_tokens("ABC"), 1]
        keyed = await product.complete(ids)
        assert (keyed.expected, keyed.fallback) == (3 * BLOCK, "")
        unkeyed = [
            await product.complete(ids, prompt_embeds="AAAA"),
            await product.complete([[1.5], "?"]),
            await product.complete(ids, truncate_prompt_tokens=8),
            await product.chat([{"role": "user", "content": [picture]}]),
        ]
        for got in unkeyed:
            assert (got.status, got.expected) == (200, 0)
            assert got.fallback
        assert await product.metric("kvatlas_fallbacks_total") == len(unkeyed)


# -- LMCache#2136 ---------------------------------------------------------------------------------

PRINT_KEYS = """
from array import array
from kvatlas.core.keys import Fingerprint, Keyring
print_of = Fingerprint(model="m", engine="vllm", engine_version="0.32.0", block_tokens=4).digest()
ring = Keyring(b"a secret for a golden vector")
keys = ring.chain(ring.root(print_of), array("I", range(100, 112)).tobytes(), 4)
print(*[key.hex() for key in keys])
"""
GOLDEN_KEYS = """
db501e2af5ad38bf4e46269b117d8050
2ae38b8544d9d975d9b3dc9bafde2f54
425cd9c2339828d218fb473a3be5ab13
"""


@pytest.mark.parametrize("seed", [None, "0", "1"])
def test_lmcache_2136_keys_do_not_depend_on_the_process(seed: str | None) -> None:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    env |= {"PYTHONHASHSEED": seed} if seed is not None else {}
    command = [sys.executable, "-c", PRINT_KEYS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == GOLDEN_KEYS.split()


async def test_lmcache_2136_a_hit_across_processes_and_restarts(tmp_path: Path) -> None:
    engines, gateway = free_ports(2)
    secret = tmp_path / "secret"
    secret.write_bytes(b"sixteen bytes or more")
    options = f"--layout {GRID} --port {engines} --model-name m --pool-blocks 500 --time-scale 0"
    speed = "--prefill-tokens-per-s 1e6 --decode-step-s 0"
    stub = process(
        tmp_path,
        "stub-engine",
        *options.split(),
        *speed.split(),
        url=f"http://127.0.0.1:{engines}",
        seed="0",
    )
    config = tmp_path / "kvatlas.toml"
    config.write_text(
        f'[gateway]\nport = {gateway}\n[keys]\nsecret_file = "{secret}"\n[[worker]]\nname = "w"\n'
        f'url = "{stub.url}"\nengine = "stub"\nlayout = "{GRID}"\n'
    )
    children: list[Child] = [stub]
    client = Product([])
    prompt = fresh_tokens(3 * GRID + 1)

    async def told() -> bool:
        return (await client.complete(prompt)).expected == 48

    try:
        for seed in ("1", None, "0"):
            url = f"http://127.0.0.1:{gateway}"
            command = ("serve", "--config", str(config))
            serve = process(tmp_path, *command, url=url, health="/ready", seed=seed)
            children.append(serve)
            await asyncio.to_thread(serve.wait_ready, 60.0)
            async with client.only_as_client(gateway):
                if seed == "1":
                    assert (await client.complete(prompt)).cached == 0
                await client.until(told)
                assert (await client.complete(prompt)).cached == 48
            serve.stop()
    finally:
        for child in children:
            child.stop()


# -- llm-d-kv-cache#211 ---------------------------------------------------------------------------

BOS = "<|begin|>"
WORDS = [f"{a}{b}{c}" for a in "abcd" for b in "eiou" for c in "lmnr"]
TEXT = " ".join(WORDS)
TEMPLATE = "{{ bos_token }}" + TEMPLATES["chatml"]


def write_model(directory: Path, template: str) -> Path:
    """A tokenizer that puts a start token before plain text; chats render it themselves."""
    write_tokenizer(directory, [TEXT, "\n".join(WORDS)])
    made = Tokenizer.from_file(str(directory / "tokenizer.json"))
    made.add_special_tokens([BOS])
    bos = made.token_to_id(BOS)
    made.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, bos)]
    )
    made.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": "<|end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture(scope="module")
def other_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changed = TEMPLATE.replace("You are helpful.", "You are a helpful assistant.")
    return write_model(tmp_path_factory.mktemp("other"), changed)


@contextlib.asynccontextmanager
async def with_tokenizer(
    model: Path, engines_model: Path
) -> AsyncIterator[tuple[Product, StubCluster]]:
    options = StubOptions(plain(GRID), SPEC, model_name="m")
    async with StubCluster(options, lambda: FileTokenizer(engines_model)) as cluster:
        settings = TokenizerConfig(path=str(model), engine_timeout_s=20.0)
        async with Product(stub_workers(cluster, str(GRID)), tokenizer=settings) as product:
            await product.settled()
            await product.until_equal(lambda: compared(product), True)
            yield product, cluster


async def compared(product: Product) -> bool:
    tokenizer = product.assembly.tokenizer
    assert tokenizer is not None
    return tokenizer.state().compared >= len(GOLDEN)


async def promise_kept(product: Product, path: str, fields: dict[str, object]) -> Answer:
    """The same request twice: the second is expected to hit, and hits, all it can."""
    body = {"model": "m", "max_tokens": 1} | fields
    first = await product.post(path, body)
    assert first.status == 200, first
    count = first.usage["prompt_tokens"]
    explained = (await product.get("/kvatlas/explain/last")).body.decode()
    assert f" {count} prompt tokens" in explained
    wanted = (count - 1) // GRID * GRID

    async def told() -> bool:
        return (await product.post(path, body)).expected == wanted

    await product.until(told)
    again = await product.post(path, body)
    assert (again.expected, again.cached, again.fallback) == (wanted, wanted, "")
    return again


async def test_llm_d_kv_cache_211_golden_set(model: Path) -> None:
    tokens = FileTokenizer(model)
    start = tokens.encode("", special=True)
    assert len(start) == 4
    async with with_tokenizer(model, model) as (product, _):
        for name, path, fields in GOLDEN:
            long = await promise_kept(product, path, fields)
            assert long.cached >= GRID, name
        assert not [flag for flag in await product.flags() if flag.startswith("tokenizer")]
    for _, path, fields in GOLDEN:
        if path == CHAT:
            assert tokens.encode_chat(fields).count(start) == 1


async def test_llm_d_kv_cache_211_another_template_on_the_worker(
    model: Path, other_version: Path
) -> None:
    async with with_tokenizer(model, other_version) as (product, _):
        assert "tokenizer:mismatch" in await product.flags()
        question = {"messages": [{"role": "user", "content": TEXT}]}
        await promise_kept(product, CHAT, question)  # by the engine's own tokens from now on
        await promise_kept(product, COMPLETION, {"prompt": TEXT})


class Caching:
    """An engine that tells nobody how it tokenizes, but reuses and announces what it has."""

    def __init__(self, model: Path) -> None:
        self.tokens = FileTokenizer(model)
        self.cached: set[bytes] = set()

    async def __call__(self, worker: FakeWorker, request: Request, reply: Reply) -> None:
        ids = self.tokens.encode_chat(json.loads(request.body))
        ends = range(4 * BLOCK, len(ids), 4 * BLOCK)
        worker.cached_tokens = sum(BLOCK for end in ends if ids[:end] in self.cached)
        if worker.cached_tokens < len(ids) // 4 - BLOCK:
            announce(worker.events, ids, ids.hex())
        self.cached.update(ids[:end] for end in ends)
        await answer(worker, request, reply)


@pytest.mark.parametrize("same", [True, False])
async def test_llm_d_kv_cache_211_an_engine_that_cannot_be_asked(
    model: Path, other_version: Path, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every component works, no prefix ever matches: only the engine's own report can tell."""
    # By events alone: what it sent there a moment ago the router foresees in any case.
    monkeypatch.setattr("kvatlas.core.router.EXPECTED_GRACE_S", 0.0)
    worker = FakeWorker("w1", Caching(model if same else other_version))
    settings = TokenizerConfig(path=str(model))
    chats = [[{"role": "user", "content": f"{number} {TEXT}"}] for number in range(25)]
    async with worker, Product([worker.config()], tokenizer=settings) as product:
        await product.settled()
        first = [await product.chat(messages) for messages in chats]
        await product.settled()
        second = [await product.chat(messages) for messages in chats]
        assert {got.status for got in (*first, *second)} == {200}  # served all the while
        assert min(got.cached for got in second) > 0
        assert ("hit_gap:w1" in await product.flags()) is not same
        assert all((got.expected > got.cached / 2) is same for got in second)


# -- bifrost#3362 ---------------------------------------------------------------------------------

TOOLS = (
    b'[{"type":"function","function":{"name":"z","parameters":{"type":"object","properties":'
    b'{"b":{"type":"number","minimum":1.0,"maximum":1},"a":{"enum":[9007199254740993,null,'
    b'"\\u00e9\\u4f60",  "\xc3\xa9"]}},"required":["b"]},"strict":null}},'
    b'{"function":{"parameters":{},"name":"a"},"type":"function","x-unknown":{"z":1,"a":[]}},'
    b'{"type":"function","function":{"name":"m","description":"a \\"b\\" \\/ c"}}]'
)
MESSAGES = (
    b'[{"role":"user","content":"abc"},{"role":"assistant","content":null,"tool_calls":[{"id":"1",'
    b'"type":"function","function":{"name":"z","arguments":"{\\"b\\": 1.0, \\"a\\":1}"}}]},'
    b'{"content":"dem","role":"tool","tool_call_id":"1"}]'
)
RAW = (
    b'{ "tools" : ' + TOOLS + b',\n"model":"m","messages":' + MESSAGES + b',"unknown":{"z":1.50,'
    b'"a":1E2},"temperature":1.0,"max_tokens":4 }'
)


async def test_bifrost_3362_bodies_arrive_as_they_were_sent(model: Path) -> None:
    worker = FakeWorker("w1")
    settings = TokenizerConfig(path=str(model))
    streamed = RAW.replace(b'"max_tokens":4', b'"stream":true,"max_tokens":4')
    expected = set()
    async with worker, Product([worker.config()], tokenizer=settings) as product:
        await product.settled()
        announce(worker.events, FileTokenizer(model).encode_chat(json.loads(RAW)), "all")

        async def told() -> bool:
            return (await product.post(CHAT, RAW)).expected > 0

        for restart in range(5):
            if restart:
                await product.restart()
            await product.until(told)
            worker.got.clear()
            for _ in range(5):
                expected.add((await product.post(CHAT, RAW)).expected)
                expected.add((await product.post(CHAT, streamed)).expected)
            whole, spliced = worker.got[::2], worker.got[1::2]
            assert {request.body for request in whole} == {RAW}
            for request in spliced:  # one field is set in front; all the rest stays
                assert request.body.endswith(streamed[1:])
                assert json.loads(request.body)["stream_options"] == {"include_usage": True}
    assert len(expected) == 1


async def test_an_engine_of_a_version_that_nobody_tested_is_named() -> None:
    """It is routed to all the same; who looks finds out why a hit may be other than foreseen."""
    async with FakeWorker("old") as old, FakeWorker("known") as known:
        old.version = "0.9.1"
        async with Product([old.config(), known.config()]) as product:
            await product.settled()
            health = (await product.get("/health")).json()
            said = health["details"]["version_untested"]
            assert said == {"old": "vllm 0.9.1 is not in the support matrix"}
            assert not [flag for flag in health["flags"] if "version" in flag]
