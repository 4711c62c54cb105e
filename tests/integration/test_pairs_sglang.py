"""Two real SGLang servers as a pair behind the gateway, over Mooncake's TCP: they meet by bootstrap
host, port and room, and the tokens are those of one engine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "scenarios"))
from harness import COMPLETION, Answer, Product
from real_engines import MODEL, post, require, running, sglang_engine, tiny_model

from kvatlas.config import RouterConfig, TokenizerConfig, WorkerConfig
from kvatlas.connectors.child import free_ports
from kvatlas.connectors.sglang_cpu import SglangEngine
from kvatlas.core.router import Policy
from kvatlas.service.engines import Timing

pytestmark = [pytest.mark.engine, pytest.mark.long]

PAGE = 16
PROMPT = [11 + i % 97 for i in range(40 * PAGE + 7)]
TOKENS = 24
MODES = {"p": "prefill", "d": "decode", "c": "null"}


@pytest.fixture(scope="module")
def bootstrap() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, bootstrap: int
) -> Iterator[dict[str, SglangEngine]]:
    """A pair, and a combined engine, which also tells what is right."""
    require("sglang-mooncake")
    folder = tmp_path_factory.mktemp("pair")
    found = {
        name: sglang_engine(
            folder,
            name=name,
            args=(
                *("--disaggregation-mode", mode, "--disaggregation-transfer-backend", "mooncake"),
                *("--disaggregation-bootstrap-port", str(bootstrap)),
            ),
            env={"MOONCAKE_PROTOCOL": "tcp", "MC_FORCE_TCP": "1", "SGLANG_HOST_IP": "127.0.0.1"},
        )
        for name, mode in MODES.items()
    }
    with running(found):
        yield found


def workers(engines: dict[str, SglangEngine], names: str, bootstrap: int) -> list[WorkerConfig]:
    meets = f"http://127.0.0.1:{bootstrap}"
    roles: dict[str, dict[str, Any]] = {
        "p": {"role": "prefill", "pairing": "sglang", "bootstrap": meets},
        "d": {"role": "decode", "pairing": "sglang"},
        "c": {},
    }
    return [
        WorkerConfig(name=name, url=engines[name].url, engine="sglang", **roles[name])
        for name in names
    ]


def product_of(configs: list[WorkerConfig], policy: Policy = "price") -> Product:
    return Product(
        configs,
        router=RouterConfig(policy=policy),
        tokenizer=TokenizerConfig(path=str(tiny_model()), engine_timeout_s=20.0),
        timing=Timing(poll_s=0.3, timeout_s=10.0, retry_max_s=0.5),
    )


@pytest.fixture
async def product(engines: dict[str, SglangEngine], bootstrap: int) -> AsyncIterator[Product]:
    """Of the pair alone."""
    async with product_of(workers(engines, "pd", bootstrap)) as product:
        await product.settled()
        yield product


def asked(prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0}
    return body | {"logprobs": 1} | more


async def ask(product: Product, prompt: list[int], **more: Any) -> Answer:
    """A greedy completion that tells its tokens."""
    return await product.post(COMPLETION, asked(prompt, **more))


def tokens_of(answer: Any) -> list[str]:
    return list(answer["choices"][0]["logprobs"]["tokens"])


async def alone(engines: dict[str, SglangEngine], prompt: list[int]) -> list[str]:
    """What one engine makes of it, without the gateway."""
    url = engines["c"].url
    answer = await asyncio.to_thread(post, url, COMPLETION, asked(prompt))
    found = tokens_of(answer)
    assert len(found) == TOKENS
    return found


async def test_a_pair_answers_as_one_engine_does(
    product: Product, engines: dict[str, SglangEngine]
) -> None:
    """The decode half of SGLang cannot compute a prompt: it has it from the other."""
    expected = await alone(engines, PROMPT)
    got = await ask(product, PROMPT)
    assert got.status == 200, got.body
    assert (got.worker, got.headers["x-kvatlas-prefilled-by"]) == ("d", "p")
    assert tokens_of(got.json()) == expected
    assert await product.metric("kvatlas_cached_tokens_total") == 0
    assert await product.metric("kvatlas_pairs_total", prefill="p", decode="d") == 1

    streamed = await ask(product, [7, *PROMPT[1:]], stream=True)
    assert b"[DONE]" in streamed.body
    assert await product.metric("kvatlas_pairs_total") == 2
    assert await product.metric("kvatlas_fallbacks_total") == 0
    assert not any(flag.startswith("pair_refused") for flag in await product.flags())


async def test_many_at_once_do_not_mix(product: Product, engines: dict[str, SglangEngine]) -> None:
    """Each pair of halves has a room of its own."""
    prompts = [[100 + n, *PROMPT[: 150 + n]] for n in range(6)]
    expected = [await alone(engines, prompt) for prompt in prompts]
    got = await asyncio.gather(*(ask(product, prompt) for prompt in prompts))
    assert {a.headers.get("x-kvatlas-prefilled-by") for a in got} == {"p"}, got
    assert [tokens_of(a.json()) for a in got] == expected


async def test_a_client_that_leaves_leaves_nothing(
    product: Product, engines: dict[str, SglangEngine]
) -> None:
    left = asyncio.create_task(ask(product, [4, *PROMPT[1:]], max_tokens=2000))
    await product.until(lambda: _sent_to(product, "d"))
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    await product.until_equal(product.in_flight, {})
    prompt = [6, *PROMPT[1:]]
    expected = await alone(engines, prompt)
    got = await ask(product, prompt)
    assert (got.status, got.headers.get("x-kvatlas-prefilled-by")) == (200, "p"), got.body
    assert tokens_of(got.json()) == expected


async def test_a_first_half_that_dies_is_left_for_a_combined_engine(
    engines: dict[str, SglangEngine], bootstrap: int
) -> None:
    """Last: the pair is none after it. It stands still first: so it surely did not answer. By price
    so short prompts would all go to the combined engine."""
    prompts = [[9 + n, *PROMPT[:300]] for n in range(2)]
    expected = [await alone(engines, prompt) for prompt in prompts]
    async with product_of(workers(engines, "pdc", bootstrap), "round_robin") as product:
        await product.settled()
        os.killpg(engines["p"].pid, signal.SIGSTOP)
        left = [asyncio.create_task(ask(product, prompt)) for prompt in prompts]
        await product.until(lambda: _sent_to(product, "p"))
        os.killpg(engines["p"].pid, signal.SIGKILL)
        got = await asyncio.gather(*left)
        assert {(a.status, a.worker) for a in got} == {(200, "c")}, got
        assert sum("prefill: failed" in a.fallback for a in got) == 1, got
        assert [tokens_of(a.json()) for a in got] == expected


async def _sent_to(product: Product, worker: str) -> bool:
    return (await product.in_flight()).get(worker, 0) > 0
