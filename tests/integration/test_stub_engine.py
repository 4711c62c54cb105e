"""The stub engine through real sockets: HTTP, server-sent events, ZMQ."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
import zmq
import zmq.asyncio
from tokenizers import models, pre_tokenizers, trainers

from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.connectors.stub_text import FileTokenizer, TextTokenizer, WordTokenizer
from kvatlas.connectors.stub_wire import EVENT_FORMATS, EventEncoder, EventFormat
from kvatlas.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvatlas.core.layout import plain
from kvatlas.errors import ConfigError, EngineError
from kvatlas.service.event_socket import END_OF_REPLAY
from kvatlas.service.http_client import HttpClient, Response
from kvatlas.service.wire import Decoder
from kvatlas.workload.device import device
from kvatlas.workload.models import load_layout
from kvatlas.workload.spec import EngineSpec

WAIT_S = 5.0
V4 = load_layout("deepseek-v4-flash", engine="vllm")
PLAIN = plain(16, model="plain")
V4_SPEC = EngineSpec(blocks=4096, device=device("H200"), time_scale=0.0)
PLAIN_SPEC = EngineSpec(
    blocks=256, prefill_tokens_per_s=1e5, decode_step_s=0.01, time_scale=0.0, context_tokens=4096
)
PROMPT = " ".join(f"word{i}" for i in range(700))

Ask = Callable[..., Any]


class Rig:
    """One cluster and one client."""

    def __init__(self, cluster: StubCluster, client: HttpClient) -> None:
        self.cluster = cluster
        self.client = client

    async def post(self, path: str, body: object, *, engine: int = 0) -> Response:
        url = self.cluster.addresses[engine].url + path
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return await self.client.request("POST", url, body=data, timeout_s=WAIT_S)

    async def get(self, path: str, *, engine: int = 0) -> Response:
        url = self.cluster.addresses[engine].url + path
        return await self.client.request("GET", url, timeout_s=WAIT_S)

    async def complete(self, prompt: object, *, engine: int = 0, **more: object) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 8} | more
        answer = await self.post("/v1/completions", body, engine=engine)
        assert answer.status == 200, answer.body
        return answer.json()  # type: ignore[no-any-return]

    async def chat(self, messages: list[dict[str, str]], **more: object) -> dict[str, Any]:
        body = {"messages": messages, "max_tokens": 8} | more
        answer = await self.post("/v1/chat/completions", body)
        assert answer.status == 200, answer.body
        return answer.json()  # type: ignore[no-any-return]

    async def state(self) -> dict[str, Any]:
        return (await self.get("/stub/state")).json()  # type: ignore[no-any-return]

    async def until(self, met: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Polls the engine's state until it is as wanted."""
        async with asyncio.timeout(WAIT_S):
            while not met(state := await self.state()):
                await asyncio.sleep(0.005)
        return state


@contextlib.asynccontextmanager
async def open_rig(
    options: StubOptions, make_tokenizer: Callable[[], TextTokenizer] = WordTokenizer
) -> AsyncIterator[Rig]:
    client = HttpClient()
    async with StubCluster(options, make_tokenizer) as cluster:
        try:
            yield Rig(cluster, client)
        finally:
            await client.close()


@pytest.fixture
async def v4() -> AsyncIterator[Rig]:
    async with open_rig(StubOptions(V4, V4_SPEC, model_name="v4", count=2)) as rig:
        yield rig


@pytest.fixture
async def small() -> AsyncIterator[Rig]:
    options = StubOptions(PLAIN, PLAIN_SPEC, model_name="plain", adapters=("lora-a",))
    async with open_rig(options) as rig:
        yield rig


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


# --- the answer is a digest of the state -----------------------------------------------------


async def test_the_same_prompt_gives_the_same_text_however_it_was_resumed(v4: Rig) -> None:
    cold = await v4.complete(PROMPT)
    warm = await v4.complete(PROMPT)
    elsewhere = await v4.complete(PROMPT, engine=1)
    longer = await v4.complete(PROMPT + " and more")
    assert [cached(a) for a in (cold, warm, elsewhere, longer)] == [0, 512, 0, 512]
    assert text_of(cold) == text_of(warm) == text_of(elsewhere)
    assert text_of(longer) != text_of(cold)
    assert text_of(longer) == text_of(await v4.complete(PROMPT + " and more", engine=1, seed=1))


@pytest.mark.parametrize("group", range(5))
async def test_damage_to_any_component_changes_the_text(v4: Rig, group: int) -> None:
    first = await v4.complete(PROMPT)
    damaged = await v4.post("/stub/damage", {"group": group})
    assert damaged.json()["damaged_blocks"] > 0
    second = await v4.complete(PROMPT)
    assert cached(second) == 512
    assert text_of(second) != text_of(first)


async def test_an_answer_sent_back_is_found_again(small: Rig) -> None:
    messages = [{"role": "user", "content": "how many words are these, all in all, do you think"}]
    first = await small.chat(messages, max_tokens=40)
    messages += [
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "and now?"},
    ]
    second = await small.chat(messages)
    computed = first["usage"]["total_tokens"] - 1  # the last word was said, not computed
    assert cached(second) == computed // 16 * 16 > first["usage"]["prompt_tokens"]


async def test_salt_and_adapter_keep_caches_apart(small: Rig) -> None:
    prompt = list(range(100))
    await small.complete(prompt)
    assert cached(await small.complete(prompt)) == 96
    assert cached(await small.complete(prompt, cache_salt="tenant")) == 0
    assert cached(await small.complete(prompt, cache_salt="tenant")) == 96
    adapted = await small.complete(prompt, model="lora-a")
    assert cached(adapted) == 0
    assert adapted["model"] == "lora-a"
    assert cached(await small.complete(prompt, model="lora-a")) == 96


# --- tokens ------------------------------------------------------------------------------------


async def test_tokenize_agrees_with_what_is_computed(small: Rig) -> None:
    text = "Two  spaces,\n0001f <|end|> naïve 日本"
    listed = (await small.post("/tokenize", {"prompt": text})).json()
    assert listed["count"] == len(listed["tokens"])
    assert listed["max_model_len"] == 4096
    by_text = await small.complete(text)
    by_ids = await small.complete(listed["tokens"])
    assert by_text["usage"]["prompt_tokens"] == listed["count"]
    assert text_of(by_text) == text_of(by_ids)
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    rendered = (await small.post("/tokenize", {"messages": messages})).json()
    answer = await small.post("/v1/chat/completions", {"messages": messages})
    assert answer.json()["usage"]["prompt_tokens"] == rendered["count"]


def test_words_have_stable_ids_and_appending_keeps_earlier_ones() -> None:
    words = WordTokenizer()
    ids = memoryview(words.encode("0002a 1f8ff 1f900 x", special=True)).cast("I").tolist()
    assert ids[:2] == [42, 129_279]
    assert ids[2] != 0x1F900  # beyond the vocabulary: text like any other
    assert words.encode("a b", special=True) == words.encode("a b c", special=True)[:8]


async def test_a_model_directory_gives_its_own_tokens(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    corpus = ["the cat and the hat saw the cat", "and the hat", "the", "cat", "hat"] * 20
    made.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    made.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>' }}{% endfor %}"
    )
    config = {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    options = StubOptions(PLAIN, PLAIN_SPEC, model_name="plain")
    async with open_rig(options, lambda: FileTokenizer(tmp_path)) as rig:
        messages = [{"role": "user", "content": "the cat saw the hat and " * 4}]
        first = await rig.chat(messages, max_tokens=30)
        assert set(text_of(first).split()) <= {"the", "cat", "hat", "and", "saw"}
        rendered = (await rig.post("/tokenize", {"messages": messages})).json()
        expected = made.encode("user:" + messages[0]["content"] + "<|im_end|>").ids
        assert rendered["tokens"] == expected
        # What was said is one token a word: sent back as ids of the text, it is found again.
        said = made.encode(text_of(first)).ids
        assert len(said) == 30
        again = await rig.complete([*expected, *said, 1, 2, 3])
        assert cached(again) == (len(expected) + 29) // 16 * 16


# --- server-sent events --------------------------------------------------------------------------


def events_of(body: bytes) -> list[Any]:
    parts = body.decode().split("\n\n")
    assert parts.pop() == ""
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


async def test_stream_has_vllms_order_and_the_same_text(small: Rig) -> None:
    messages = [{"role": "user", "content": "hello"}]
    whole = await small.chat(messages, max_tokens=3)
    body = {
        "messages": messages,
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = await small.post("/v1/chat/completions", body)
    kinds = dict(answer.headers)
    assert kinds[b"content-type"] == b"text/event-stream; charset=utf-8"
    role, one, two, three, usage = events_of(answer.body)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    pieces = [e["choices"][0]["delta"]["content"] for e in (one, two, three)]
    assert "".join(pieces) == text_of(whole)
    finish = [e["choices"][0]["finish_reason"] for e in (role, one, two, three)]
    assert finish == [None, None, None, "length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert len({e["id"] for e in (role, one, two, three, usage)}) == 1


async def test_stream_without_usage_ends_with_the_finish_chunk(small: Rig) -> None:
    answer = await small.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "stream": True})
    events = events_of(answer.body)
    assert [e["choices"][0]["finish_reason"] for e in events] == [None, "length"]
    assert all("usage" not in e for e in events)


async def test_leaving_frees_what_the_request_held() -> None:
    slow = msgspec.structs.replace(PLAIN_SPEC, time_scale=1.0, blocks=200)
    async with open_rig(StubOptions(PLAIN, slow)) as rig:
        for stream in (True, False):
            before = (await rig.state())["numbers"]["aborted"]
            port = int(rig.cluster.addresses[0].url.rpartition(":")[2])
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            body = msgspec.json.encode({"prompt": "a", "max_tokens": 3000, "stream": stream})
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await rig.until(lambda s: s["numbers"]["running"] == 1 and s["free_share"] < 1)
            writer.close()
            state = await rig.until(lambda s: s["numbers"]["running"] == 0)
            assert state["free_share"] == 1.0
            assert state["numbers"]["aborted"] == before + 1


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/completions", b'{"prompt', 400, "not valid JSON"),
        ("/v1/completions", b"\xff\xfe", 400, "not valid JSON"),
        ("/v1/completions", b"[1]", 400, "JSON object"),
        ("/v1/completions", b"[" * 100_000, 400, "not valid JSON"),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "`other` does not exist"),
        ("/v1/chat/completions", {"messages": [], "model": "other"}, 404, "does not exist"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": ["a", "b"]}, 400, "one text"),
        ("/v1/completions", {"prompt": [1, -1]}, 400, "token ids"),
        ("/v1/completions", {"prompt": [1, "a"]}, 400, "token ids"),
        ("/v1/completions", {"prompt": ""}, 400, "empty"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 5000}, 400, "maximum context length"),
        ("/v1/completions", {"prompt": "a", "n": 2}, 400, "one choice"),
        ("/v1/completions", {"prompt": "a", "cache_salt": 5}, 400, "cache_salt"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400, "role"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, "content"),
        ("/v1/embeddings", {"input": []}, 400, "input"),
        ("/tokenize", {}, 400, "prompt or messages"),
        ("/stub/damage", {"group": 7}, 400, "groups 0 to 0"),
        ("/stub/fault", {"typo": 1}, 400, "unknown field `typo`"),
        ("/stub/pace", {"typo": 1}, 400, "unknown field `typo`"),
        ("/stub/pace", {"memory": 0}, 400, "memory"),
    ],
)
async def test_faults_of_the_client(
    small: Rig, path: str, body: object, status: int, said: str
) -> None:
    answer = await small.post(path, body)
    fault = answer.json()["error"]
    assert answer.status == status
    assert said in fault["message"]
    assert fault["code"] == status
    assert (await small.complete("still well"))["usage"]["completion_tokens"] == 8


async def test_other_paths_and_methods_are_answered_as_by_vllm(small: Rig) -> None:
    nowhere = await small.post("/nowhere", {})
    assert (nowhere.status, nowhere.json()) == (404, {"detail": "Not Found"})
    method = await small.get("/v1/completions")
    assert (method.status, method.json()) == (405, {"detail": "Method Not Allowed"})
    model = await small.post("/v1/completions", {"prompt": "a", "model": "x"})
    assert model.json()["error"]["param"] == "model"


async def test_faults_that_tests_ask_for(small: Rig) -> None:
    await small.post("/stub/fault", {"fail_next": 1, "fail_status": 503, "health_status": 500})
    assert (await small.post("/v1/completions", {"prompt": "a"})).status == 503
    assert (await small.post("/v1/completions", {"prompt": "a"})).status == 200
    assert (await small.get("/health")).status == 500
    await small.post("/stub/fault", {"cut_after_tokens": 2, "health_status": 200})
    with pytest.raises(Exception, match=r"complete|closed|broke"):
        await small.post("/v1/completions", {"prompt": "a", "max_tokens": 9, "stream": True})
    assert (await small.get("/health")).status == 200


# --- vLLM's own paths ----------------------------------------------------------------------------


async def test_metrics_use_vllms_names(small: Rig) -> None:
    prompt = list(range(40))
    await small.complete(prompt)
    await small.complete(prompt)
    text = (await small.get("/metrics")).body.decode()
    label = '{engine="0",model_name="plain"}'
    assert f"vllm:prefix_cache_queries_total{label} 80.0" in text
    assert f"vllm:prefix_cache_hits_total{label} 32.0" in text
    assert f"vllm:num_requests_running{label} 0.0" in text
    assert f"vllm:kv_cache_usage_perc{label} 0.0" in text
    assert 'vllm:cache_config_info{block_size="16"' in text
    awake = '{engine="0",sleep_state="awake",model_name="plain"}'
    assert f"vllm:engine_sleep_state{awake} 1.0" in text
    assert "process_start_time_seconds 1" in text


async def test_models_version_and_embeddings(small: Rig) -> None:
    cards = (await small.get("/v1/models")).json()["data"]
    assert [(c["id"], c["parent"]) for c in cards] == [("plain", None), ("lora-a", "plain")]
    assert (await small.get("/version")).json() == {"version": "0.32.0"}
    one = (await small.post("/v1/embeddings", {"input": ["a b", [1, 2]]})).json()
    two = (await small.post("/v1/embeddings", {"input": "a b"})).json()
    assert one["data"][0]["embedding"] == two["data"][0]["embedding"]
    assert one["usage"]["prompt_tokens"] == 4


async def test_sleep_drops_the_cache_and_refuses(small: Rig) -> None:
    prompt = list(range(40))
    await small.complete(prompt)
    assert (await small.post("/sleep?level=1", b"")).json() == {"status": "sleeping", "level": 1}
    assert (await small.get("/is_sleeping")).json() == {"is_sleeping": True}
    assert (await small.post("/v1/completions", {"prompt": prompt})).status == 503
    await small.post("/wake_up", b"")
    assert cached(await small.complete(prompt)) == 0


# --- KV events -----------------------------------------------------------------------------------


async def replay(rig: Rig, start: int = 0) -> list[tuple[int, bytes]]:
    """What vLLM's replay protocol gives from ``start`` on."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(rig.cluster.addresses[0].replay)
    await socket.send_multipart([b"", start.to_bytes(8, "big")])
    batches = []
    async with asyncio.timeout(WAIT_S):
        while True:
            empty, topic, seq, payload = await socket.recv_multipart()
            assert (empty, topic) == (b"", b"")
            if seq == END_OF_REPLAY:
                break
            batches.append((int.from_bytes(seq, "big"), payload))
    context.destroy(linger=0)
    return batches


async def test_events_have_vllms_form_on_the_wire(v4: Rig) -> None:
    await v4.complete(PROMPT, cache_salt="tenant")
    ((seq, payload),) = await replay(v4)
    ts, events, dp_rank = msgspec.msgpack.decode(payload)
    assert (seq, dp_rank) == (0, 0)
    assert ts > 1e9
    chain = next(e for e in events if e["kv_cache_spec_kind"] == "mla_attention")
    assert list(chain) == [
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ]
    tokens = memoryview(WordTokenizer().encode(PROMPT, special=True)).cast("I").tolist()
    assert chain["type"] == "BlockStored"
    assert chain["token_ids"] == tokens[:512]
    assert len(chain["block_hashes"]) == 2
    assert chain["extra_keys"] == [["tenant"], None]
    assert chain["medium"] == "GPU"
    window = next(e for e in events if e.get("kv_cache_spec_sliding_window") == 128)
    assert len(window["token_ids"]) == 512
    assert len(window["block_hashes"]) < 512 // window["block_size"]


async def test_subscribers_hear_live_what_replay_repeats(small: Rig) -> None:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    sources = (await small.get("/kv_event_sources")).json()
    assert list(sources) == ["0"]
    assert sources["0"]["publisher"] == "zmq"
    socket.connect(sources["0"]["endpoint"])
    socket.subscribe(b"")
    heard: list[tuple[int, bytes]] = []
    async with asyncio.timeout(WAIT_S):
        while not heard:  # the subscription takes a moment: ask until something comes
            await small.complete(
                [len(heard), *range(31)], cache_salt=str(asyncio.get_running_loop().time())
            )
            if await socket.poll(20):
                _, seq, payload = await socket.recv_multipart()
                heard.append((int.from_bytes(seq, "big"), payload))
    context.destroy(linger=0)
    first = heard[0][0]
    assert (await replay(small, first))[0] == heard[0]
    assert [seq for seq, _ in await replay(small)] == list(range((await small.state())["next_seq"]))


async def test_a_reset_is_announced_with_the_next_step(small: Rig) -> None:
    await small.complete(list(range(40)))
    before = (await small.state())["next_seq"]
    assert (await small.post("/reset_prefix_cache", b"")).json() == {"success": True}
    assert (await small.state())["next_seq"] == before
    assert cached(await small.complete(list(range(40)))) == 0
    _, events, _ = msgspec.msgpack.decode((await replay(small, before))[0][1])
    assert [e["type"] for e in events] == ["AllBlocksCleared", "BlockStored"]


async def test_eviction_is_announced(small: Rig) -> None:
    for start in range(0, 3 * 256 * 16, 1600):
        await small.complete(list(range(start, start + 1600)))
    kinds = [
        event["type"]
        for _, payload in await replay(small)
        for event in msgspec.msgpack.decode(payload)[1]
    ]
    assert "BlockRemoved" in kinds
    stored = kinds.count("BlockStored")
    assert stored >= 8


def test_every_wire_form_says_the_same() -> None:
    tokens = bytes(range(128))
    stored = BlockStored(
        hashes=(2**64 - 1, 7),
        parent=2**63 + 5,
        tokens=tokens,
        block_tokens=16,
        adapter="lora-a",
        group=None,
    )
    events = (stored, BlockRemoved(hashes=(2**63 + 1,)), AllBlocksCleared())
    for form in EVENT_FORMATS:
        batch = Decoder().decode(3, EventEncoder(form).payload(events, 12.5))
        assert (batch.seq, batch.ts, batch.malformed, batch.unknown) == (3, 12.5, 0, 0), form
        assert batch.events == events, form


@pytest.mark.parametrize("form", EVENT_FORMATS)
async def test_every_wire_form_is_decoded_from_a_running_engine(form: EventFormat) -> None:
    options = StubOptions(V4, V4_SPEC, event_format=form)
    async with open_rig(options) as rig:
        await rig.complete(PROMPT)
        ((seq, payload),) = await replay(rig)
        batch = Decoder().decode(seq, payload)
        assert (batch.malformed, batch.unknown) == (0, 0)
        stored = [e for e in batch.events if isinstance(e, BlockStored)]
        chains = [e for e in stored if e.window_tokens is None]
        assert len(chains[0].tokens) == 512 * 4
        assert (len(stored) > len(chains)) is (form != "sglang")  # it tells of one component


async def test_garbage_and_gaps_on_request(small: Rig) -> None:
    made = await small.post("/stub/events", {"skip": 2, "payloads": ["c1", "93"]})
    assert made.json() == {"next_seq": 4}
    assert await replay(small) == [(2, b"\xc1"), (3, b"\x93")]
    for body in ({"payloads": ["x"]}, {"payloads": [1]}, {"skip": "1"}):
        assert (await small.post("/stub/events", body)).status == 400
    assert (await small.state())["next_seq"] == 4


async def test_a_restart_keeps_the_ports_and_nothing_else(small: Rig) -> None:
    prompt = list(range(40))
    before = small.cluster.addresses
    await small.complete(prompt)
    await small.cluster.stop(0)
    with pytest.raises(EngineError):
        await small.get("/health")
    await small.cluster.start(0)
    assert small.cluster.addresses == before
    assert cached(await small.complete(prompt)) == 0
    assert [seq for seq, _ in await replay(small)] == [0]


# --- ports ---------------------------------------------------------------------------------------


async def test_a_taken_port_is_the_operators_fault(small: Rig) -> None:
    port = int(small.cluster.addresses[0].url.rpartition(":")[2])
    options = StubOptions(PLAIN, PLAIN_SPEC, port=port)
    with pytest.raises(ConfigError, match=f"{port}: .*in use"):
        async with StubCluster(options):
            pass
    taken = int(small.cluster.addresses[0].events.rpartition(":")[2])
    options = StubOptions(PLAIN, PLAIN_SPEC, events_port=taken)
    with pytest.raises(ConfigError, match=f"ports {taken} and {taken + 1}"):
        async with StubCluster(options):
            pass


def test_no_engine_and_no_room_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 engines"):
        StubCluster(StubOptions(PLAIN, PLAIN_SPEC, count=0))
    with pytest.raises(ConfigError, match="no room for 8 engines"):
        StubCluster(StubOptions(PLAIN, PLAIN_SPEC, count=8, port=65_530))
