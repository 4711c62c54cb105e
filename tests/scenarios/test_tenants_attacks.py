"""What a tenant who knows the engines behind the gateway may try with the body of a request."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec
import pytest
from harness import CHAT, COMPLETION, Answer, FakeWorker
from tenants_kit import KEYS, NAMES, PROMPT, bearer, body_of, complete, guarded, last
from tiny_bpe import train

from kvatlas.config import TokenizerConfig
from kvatlas.config_tenants import TenantsConfig
from kvatlas.service import encoder

ACME, OTHER = NAMES

#: Where state is, or whose requests end: what one tenant says here reaches others (vLLM 0.32,
#: SGLang 0.5.23).
STEERING = {
    "rid": "a",  # SGLang ends every request whose rid begins so when this client leaves
    "request_id": "of another",  # names what tools keep between two calls of vLLM
    "session_id": "of another",  # SGLang's radix sessions
    "session_params": {"id": "of another"},
    "extra_key": "of another",
    "ec_transfer_params": {"hash": {"peer_host": "10.0.0.1"}},
    "kv_transfer_params": {"remote_host": "10.0.0.1"},
    "bootstrap_room": 7,
}


@pytest.mark.parametrize("path", [COMPLETION, CHAT, "/v1/responses"])
@pytest.mark.parametrize("name", STEERING)
async def test_names_of_others_state_do_not_reach_an_engine(
    tmp_path: Path, path: str, name: str
) -> None:
    async with FakeWorker("w1") as w1, guarded(tmp_path, [w1.config()]) as product:
        await product.settled()
        said = {"model": "m", "prompt": PROMPT, "messages": [], "input": "x", name: STEERING[name]}
        assert (await product.post(path, said, bearer(KEYS[ACME]))).status == 200
        assert name not in body_of(w1.got[-1])
        assert last(w1).tag


async def test_what_only_an_object_may_be_does_not_come_in_as_text(tmp_path: Path) -> None:
    """vLLM takes the fields out of `vllm_xargs`, too; a connector that calls a method of a text
    ends the engine for everybody."""
    async with FakeWorker("w1") as w1, guarded(tmp_path, [w1.config()]) as product:
        await product.settled()
        xargs = {"kv_transfer_params": "x", "ec_transfer_params": ["x"], "mine": 1.5}
        assert (await complete(product, KEYS[ACME], vllm_xargs=xargs)).status == 200
        assert body_of(w1.got[-1])["vllm_xargs"] == {"mine": 1.5}
        assert await product.metric("kvatlas_pairing_fields_dropped_total") == 1


async def test_code_for_engines_is_refused(tmp_path: Path) -> None:
    async with FakeWorker("w1") as w1, guarded(tmp_path, [w1.config()]) as product:
        await product.settled()
        got = await complete(product, KEYS[ACME], custom_logit_processor='{"callable": "80"}')
        assert (got.status, got.error["code"]) == (403, "not_isolated")
        assert not w1.got


async def test_nobody_can_take_the_id_that_tells_equal_ones_apart(tmp_path: Path) -> None:
    """The books of a gateway and of agents go by it. Equal ids of two tenants get a suffix, which
    one could foresee."""
    async with FakeWorker("w1") as w1, guarded(tmp_path, [w1.config()]) as product:
        await product.settled()
        w1.gate = asyncio.Event()
        asked: list[asyncio.Task[Answer]] = []
        for name in (*(f"same#{count}" for count in range(8, 18)), "same", "same"):
            headers, key = {"x-request-id": name}, KEYS[NAMES[len(asked) % 2]]
            asked.append(asyncio.create_task(complete(product, key, headers=headers)))
            async with asyncio.timeout(30):
                while len(w1.got) < len(asked):
                    await asyncio.sleep(0.01)
        assert sum((await product.in_flight()).values()) == len(asked)
        w1.gate.set()
        answers = await asyncio.gather(*asked)
        assert [answer.status for answer in answers] == [200] * len(asked)
        assert len({answer.headers["x-request-id"] for answer in answers}) == len(asked)
        assert len({request.header("x-request-id") for request in w1.got}) == len(asked)
        await product.until_equal(product.in_flight, {})


async def test_no_text_is_kept_that_another_tenant_could_be_faster_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "fastokens", None)
    folder = train(tmp_path / "model", split=False)
    async with FakeWorker("w1") as w1:
        product = guarded(tmp_path, [w1.config()])
        settings = TokenizerConfig(path=str(folder))
        for tenants in (product.config.tenants, TenantsConfig()):
            product.config = msgspec.structs.replace(
                product.config, tokenizer=settings, tenants=tenants
            )
            async with product:
                await product.settled()
                answer = await complete(product, KEYS[ACME], prompt="a text that one has sent")
                assert answer.status == 200
                assert product.assembly.tokenizer is not None
                made = product.assembly.tokenizer._encoder
                assert made is not None
                backend = made._backend
                assert isinstance(backend, encoder._Tokenizers)
                assert bool(backend._kept) == (not tenants.on)


async def test_no_long_body_of_a_stranger_is_held(tmp_path: Path) -> None:
    """A few who send slowly would fill the room that all requests have for their bodies."""
    async with FakeWorker("w1") as w1, guarded(tmp_path, [w1.config()]) as product:
        await product.settled()
        body = b'{"model":"m","prompt":"' + b"x" * (1 << 20)
        for path, headers in (
            (COMPLETION, bearer("a stranger's")),
            (COMPLETION, {}),
            ("/v1/anything", {}),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", product.port)
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {8 << 20}\r\n"
            head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            writer.write(head.encode() + b"\r\n" + body)  # and never the rest
            async with asyncio.timeout(20):
                assert b" 401 " in await reader.readline()
                writer.transport.abort()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
        assert await product.metric("kvatlas_requests_refused_total", reason="invalid_api_key") == 3
        answer = await complete(product, KEYS[ACME], prompt="x" * (1 << 20))
        assert answer.status == 200
