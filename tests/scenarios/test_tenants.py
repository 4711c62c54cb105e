"""Tenants at the gateway: who comes in, under which salt, and what is taken out of requests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from harness import CHAT, COMPLETION, EMBEDDINGS, FakeWorker, answer
from pairs_kit import decode, nixl_prefill, params_of, prefill
from picker_kit import picking
from stub_publisher import BLOCK, block_tokens, stored
from tenants_kit import (
    KEYS,
    NAMES,
    PROMPT,
    RING,
    bearer,
    body_of,
    complete,
    guarded,
    last,
    packed,
    public_policy,
    salt_in,
    tenants_file,
)

from kvatlas.core.tenancy import Sharing, TenantSalt, salt_of, session_of, sharing_of, tag_of
from kvatlas.service import picker_wire as wire
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply

ACME, OTHER = NAMES


async def test_only_who_is_known_comes_in(tmp_path: Path) -> None:
    async with FakeWorker("w1") as w1, guarded(tmp_path, [w1.config()]) as product:
        await product.settled()
        key = KEYS[ACME]
        strangers: list[dict[str, str]] = [
            {},
            {"authorization": ""},
            {"authorization": key},
            {"authorization": f"Basic {key}"},
            {"authorization": "Bearer "},
            bearer(key[:-1]),
            bearer(key + "x"),
            bearer(key.upper()),
            bearer(tag_of(RING, ACME)),
            bearer(ACME),
            bearer("k" * 9000),
            bearer("kl\u00fcssel"),
            bearer("a.b.c"),
            bearer(key, **{"x-api-key": KEYS[OTHER]}),
            {"x-kvatlas-cache-salt": salt_of(RING, TenantSalt(tag_of(RING, ACME), 0))},
        ]
        for headers in strangers:
            for path in (COMPLETION, CHAT, "/v1/anything"):
                got = await product.post(path, {"model": "m", "prompt": PROMPT}, headers)
                assert got.status == 401, (headers, got)
                assert got.error["code"] == "invalid_api_key"
                assert got.headers["www-authenticate"] == "Bearer"
            assert (await product.send("GET", "/v1/models", b"", headers)).status == 401
        assert not w1.got
        assert await product.metric("kvatlas_requests_refused_total", reason="invalid_api_key")
        for headers in (bearer(key), {"authorization": f"bearer  {key} "}, {"x-api-key": key}):
            got = await product.post(COMPLETION, {"model": "m", "prompt": PROMPT}, headers)
            assert got.status == 200
            assert last(w1) == TenantSalt(tag_of(RING, ACME), 0)
        assert (await product.send("GET", "/v1/models", b"", bearer(key))).status == 200


async def test_salts_are_the_gateways_to_say(tmp_path: Path) -> None:
    """Whatever a client sends: its own guess, another tenant's true salt, a path of SGLang's."""
    theirs = salt_of(RING, TenantSalt(tag_of(RING, OTHER), 0))
    async with FakeWorker("w1") as w1, guarded(tmp_path, [w1.config()]) as product:
        await product.settled()
        for path, body in (
            (COMPLETION, {"prompt": PROMPT}),
            (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
            (EMBEDDINGS, {"input": "text"}),
            ("/v1/responses", {"input": "text", "store": True}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}]}),
        ):
            raw = {"model": "m", **body}
            for more in (
                {},
                {"cache_salt": theirs},
                {"cache_salt": 7, "extra_key": theirs, "session_params": {"id": "theirs"}},
                {"cache_salt": None, "kv_transfer_params": {"remote_host": "10.0.0.1"}},
            ):
                headers = bearer(KEYS[ACME], **{"x-kvatlas-cache-salt": theirs})
                got = await product.post(path, raw | more, headers)
                assert got.status == 200, got
                assert last(w1) == TenantSalt(tag_of(RING, ACME), 0)
                told = body_of(w1.got[-1])
                told.pop("cache_salt")
                assert told == {**raw, **({"store": False} if "store" in raw else {})}
        twice = b'{"model":"m","prompt":[1],"cache_salt":"x","cache\\u005fsalt":"' + theirs.encode()
        got = await product.post(COMPLETION, twice + b'"}', bearer(KEYS[ACME]))
        assert got.status == 200
        assert last(w1) == TenantSalt(tag_of(RING, ACME), 0)


async def test_what_would_share_in_silence_is_refused(tmp_path: Path) -> None:
    """Endpoints that know no salt, that find by name what others stored, and media by name."""
    image = {"type": "image_url", "image_url": {"url": "data:,"}, "uuid": "theirs"}
    named = {"model": "m", "messages": [{"role": "user", "content": [image]}]}
    async with FakeWorker("w1") as w1, guarded(tmp_path, [w1.config()]) as product:
        await product.settled()
        for method, path, body in (
            ("POST", "/v1/audio/transcriptions", b"{}"),
            ("POST", "/v1/rerank", b"{}"),
            ("POST", "/v1/load_lora_adapter", b"{}"),
            ("POST", COMPLETION + "/", b"{}"),
            ("GET", "/v1/responses/resp_1", b""),
            ("DELETE", "/v1/responses/resp_1", b""),
        ):
            got = await product.send(method, path, body, bearer(KEYS[ACME]))
            assert got.status == 403, (path, got)
            assert got.error["code"] == "not_isolated"
        for path, body in (
            ("/v1/responses", {"model": "m", "input": "x", "previous_response_id": "resp_1"}),
            ("/v1/responses", {"model": "m", "input": "x", "background": True}),
            ("/v1/responses", {"model": "m", "input": [{"content": [image]}]}),
            (CHAT, named),
        ):
            got = await product.post(path, body, bearer(KEYS[ACME]))
            assert (got.status, got.error["code"]) == (403, "not_isolated")
        assert not w1.got
    async with (
        FakeWorker("w1") as w1,
        guarded(tmp_path, [w1.config(engine="sglang", events="")]) as product,
    ):
        got = await product.post(EMBEDDINGS, {"model": "m", "input": "x"}, bearer(KEYS[ACME]))
        assert got.status == 403  # it hands no salt on


async def test_both_halves_and_every_retry_have_the_salt(tmp_path: Path) -> None:
    async def busy(worker: FakeWorker, request: Request, reply: Reply) -> None:
        reply.send(503, [])

    async with (
        FakeWorker("w1", busy) as w1,
        FakeWorker("w2", busy) as w2,
        FakeWorker("w3") as w3,
        guarded(tmp_path, [w1.config(), w2.config(), w3.config()]) as product,
    ):
        await product.settled()
        for _ in range(6):
            assert (await complete(product, KEYS[ACME])).status == 200
        assert all((w1.got, w2.got, w3.got))
        for request in (*w1.got, *w2.got, *w3.got):
            assert salt_in(request) == TenantSalt(tag_of(RING, ACME), 0)

    async with (
        FakeWorker("p", nixl_prefill) as p,
        FakeWorker("d") as d,
        guarded(tmp_path, [prefill(p), decode(d)]) as product,
    ):
        await product.settled()
        forged = {"kv_transfer_params": {"remote_engine_id": "theirs"}}
        assert (await complete(product, KEYS[OTHER], **forged)).status == 200
        for half in (p, d):
            assert last(half) == TenantSalt(tag_of(RING, OTHER), 0)
        assert body_of(d.got[-1])["kv_transfer_params"] == params_of(d.got[-1])
        assert body_of(d.got[-1])["kv_transfer_params"]["remote_engine_id"] != "theirs"


async def test_a_tenant_hits_its_own_blocks_and_no_others(tmp_path: Path) -> None:
    async with FakeWorker("w1") as w1, guarded(tmp_path, [w1.config()]) as product:
        await w1.heard()
        await complete(product, KEYS[ACME])
        salt = body_of(w1.got[-1])["cache_salt"]
        w1.events.publish(stored("ABC", 3, group_idx=0, extra_keys=[[salt], None, None]))
        mine, theirs = bearer(KEYS[ACME]), bearer(KEYS[OTHER])
        await product.answers("ABC", {"w1": 3}, headers=mine)
        assert await product.blocks("ABC", headers=theirs) == {}
        forged = theirs | {"x-kvatlas-cache-salt": salt}
        assert await product.blocks("ABC", headers=forged) == {}


async def test_an_epoch_that_is_raised_makes_what_was_cached_unreachable(tmp_path: Path) -> None:
    async with FakeWorker("w1") as w1, guarded(tmp_path, [w1.config()]) as product:
        await product.settled()
        await complete(product, KEYS[ACME])
        before = body_of(w1.got[-1])["cache_salt"]
        tenants_file(tmp_path, "epoch = 1\n")
        await product.assembly.tenancy.refresh()
        await complete(product, KEYS[ACME])
        after = body_of(w1.got[-1])["cache_salt"]
        assert sharing_of(RING, before).scope != sharing_of(RING, after).scope
        assert last(w1).epoch > salt_in(w1.got[0]).epoch


async def test_the_file_is_read_again_and_a_broken_one_lets_nobody_new_in(tmp_path: Path) -> None:
    async with FakeWorker("w1") as w1, guarded(tmp_path, [w1.config()]) as product:
        await product.settled()
        path = tmp_path / "tenants.toml"
        good = path.read_text()
        path.write_text(good + '[[tenant]]\nname = "new"\nkeys = ["no digest"]\n')
        await product.assembly.tenancy.refresh()
        assert (await complete(product, KEYS[ACME])).status == 200
        assert "tenants:file" in await product.flags()
        path.write_text(good.partition("\n\n")[2] or good[good.rindex("[[") :])
        os.utime(path, ns=(1, 1))
        await product.assembly.tenancy.refresh()
        assert "tenants:file" not in await product.flags()
        assert (await complete(product, KEYS[ACME])).status == 401  # revoked
        assert (await complete(product, KEYS[OTHER])).status == 200


async def test_sessions_are_kept_apart_where_the_operator_says_so(tmp_path: Path) -> None:
    more = 'share = "session"\n'
    async with (
        FakeWorker("w1") as w1,
        guarded(tmp_path, [w1.config()], more, session_header=True) as product,
    ):
        await product.settled()
        tag = tag_of(RING, ACME)
        got = await complete(product, KEYS[ACME])
        assert (got.status, got.error["code"]) == (403, "session_needed")
        for bad in ("a/b", "..", "a\u0001"):
            got = await complete(product, KEYS[ACME], headers={"x-kvatlas-session": bad})
            assert got.status == 400
        for name in ("one", "two"):
            got = await complete(product, KEYS[ACME], headers={"x-kvatlas-session": name})
            assert got.status == 200
            assert last(w1) == TenantSalt(tag, 0, session_of(RING, tag, name))
        await complete(product, KEYS[OTHER], headers={"x-kvatlas-session": "one"})
        assert last(w1) == TenantSalt(tag_of(RING, OTHER), 0)  # it shares as a whole
    async with FakeWorker("w1") as w1, guarded(tmp_path, [w1.config()], more) as product:
        got = await complete(product, KEYS[ACME], headers={"x-kvatlas-session": "one"})
        assert got.error["code"] == "session_needed"  # clients may not say it themselves


# -- public prefixes ------------------------------------------------------------------------------


async def test_what_a_policy_names_is_public_and_nothing_else(tmp_path: Path) -> None:
    public = public_policy(tmp_path, PROMPT[:32], PROMPT[:48])
    async with (
        FakeWorker("w1") as w1,
        guarded(tmp_path, [w1.config()], public=public) as product,
    ):
        await product.settled()

        async def told(who: str, prompt: Any) -> Sharing:
            assert (await complete(product, KEYS[who], prompt)).status == 200
            salt_in(w1.got[-1])
            return sharing_of(RING, body_of(w1.got[-1])["cache_salt"])

        for prompt, tokens in (
            (PROMPT, 48),
            (PROMPT[:40] + [7] * 20, 32),
            (PROMPT[:31] + [7] * 20, 0),
            (PROMPT[1:], 0),
            (PROMPT[:20], 0),
            ([PROMPT, PROMPT[:40] + [7] * 20], 32),
            ([PROMPT, [7] * 20], 0),
            ([7] * 60, 0),
        ):
            mine, theirs = await told(ACME, prompt), await told(OTHER, prompt)
            assert mine.public_tokens == theirs.public_tokens == tokens
            assert mine.scope != theirs.scope
            first = packed(prompt[0] if isinstance(prompt[0], list) else prompt)
            assert mine.of(RING, first) == mine
            if tokens:  # other tokens under that salt: nothing of them is public
                assert mine.of(RING, packed([9, *PROMPT])).public_tokens == 0


async def test_public_tokens_hit_in_an_engines_memory_only_under_the_same_salt(
    tmp_path: Path,
) -> None:
    """The engine puts the salt into its first block: nothing is promised that it cannot find."""
    prompt = block_tokens("ABC")
    public = public_policy(tmp_path, prompt[: 2 * BLOCK])
    async with (
        FakeWorker("w1") as w1,
        guarded(tmp_path, [w1.config()], public=public) as product,
    ):
        await w1.heard()
        await complete(product, KEYS[ACME], prompt)
        assert last(w1).public_tokens == 2 * BLOCK
        salt = body_of(w1.got[-1])["cache_salt"]
        w1.events.publish(stored("ABC", 3, group_idx=0, extra_keys=[[salt], None, None]))
        await product.answers("ABC", {"w1": 3}, headers=bearer(KEYS[ACME]))
        assert await product.blocks("ABC", headers=bearer(KEYS[OTHER])) == {}


# -- behind a proxy -------------------------------------------------------------------------------


async def test_engines_are_shown_their_own_key_and_never_the_clients(tmp_path: Path) -> None:
    key = tmp_path / "engine.key"
    key.write_text("for-engines-only\n")
    async with (
        FakeWorker("w1") as w1,
        guarded(tmp_path, [w1.config()], engine_key_file=str(key)) as product,
        picking(product) as proxy,
    ):
        await product.settled()
        assert (await complete(product, KEYS[ACME])).status == 200
        got = dict(w1.got[-1].headers)
        assert got[b"authorization"] == b"Bearer for-engines-only"
        async with proxy.stream() as stream:
            told = await stream.ask({"model": "m", "prompt": PROMPT, "cache_salt": "x"})
            assert (told.status, told.error()["code"]) == (401, "invalid_api_key")
        async with proxy.stream() as stream:
            body = {"model": "m", "prompt": PROMPT, "cache_salt": "x"}
            headers = bearer(KEYS[ACME], **{"x-api-key2": "kept"})
            told = await stream.ask(body, headers=headers)
            assert told.endpoints
            request = wire.request_of(
                [(b":method", b"POST"), (b":path", COMPLETION.encode())], told.body
            )
            assert salt_in(request) == TenantSalt(tag_of(RING, ACME), 0)
            assert told.headers["authorization"] == "Bearer for-engines-only"


async def test_what_a_proxy_cannot_have_checked_is_refused_and_not_let_through(
    tmp_path: Path,
) -> None:
    """Its own failure mode may be to send a request on without us: to an engine, with no salt."""
    async with (
        FakeWorker("w1", answer) as w1,
        guarded(tmp_path, [w1.config()]) as product,
        picking(product) as proxy,
    ):
        await product.settled()
        async with proxy.stream(("NONE", "NONE")) as stream:
            await stream.ask_head(headers=bearer(KEYS[ACME]))
            reply = await stream.read()
            assert reply.immediate_response.status.code == 503
            assert b"not_checked" in reply.immediate_response.body
        tenants = product.assembly.tenancy.tenants
        assert tenants is not None
        tenants.check = None  # type: ignore[method-assign,assignment]
        async with proxy.stream() as stream:  # a fault of ours, in mid-check
            told = await stream.ask({"model": "m", "prompt": PROMPT}, headers=bearer(KEYS[ACME]))
            assert (told.status, told.error()["code"]) == (503, "not_checked")
        assert not w1.got
