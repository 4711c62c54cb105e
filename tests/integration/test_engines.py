"""The registry of workers against HTTP and ZMQ stubs: discovery, load, health, restart, sleep."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest
from stub_http import StubHttp
from stub_publisher import BLOCK, StubPublisher, block_tokens, stored

from kvatlas.config import WorkerConfig
from kvatlas.core import layout, sequence
from kvatlas.core.directory import Directory, Limits
from kvatlas.core.keys import Keyring
from kvatlas.core.records import Publisher
from kvatlas.errors import ConfigError
from kvatlas.service.engines import LOOKS_PER_S, Engines, Timing, Worker
from kvatlas.service.feed import Feed, Source
from kvatlas.service.http_client import HttpClient
from kvatlas.service.probe import Adapter, Load, configured_source, source_of

FINGERPRINT = b"f" * 32
QUICK = Timing(poll_s=0.02, timeout_s=0.3, describe_every_s=0.05, retry_max_s=0.05)
FEED = sequence.Limits(
    replay_timeout_s=0.3, retry_s=0.05, settle_s=0.02, orphan_replay_s=0.0, give_up_s=0.2
)


class House:
    """Directory, feed and registry as the service wires them."""

    def __init__(self) -> None:
        self.keyring = Keyring(b"a test's own secret")
        self.directory = Directory(self.keyring)
        self.feed = Feed(self.directory, limits=FEED)
        self.client = HttpClient(connect_timeout_s=0.3)
        self.engines = Engines(self.feed, self, self.client, QUICK)
        self.told: list[str] = []

    def described(self, worker: Worker) -> None:
        self.told.append(f"described {worker.name}")
        for publisher in worker.publishers():
            self.directory.register(publisher, layout.plain(BLOCK), FINGERPRINT)

    def gone(self, worker: Worker, publishers: Iterable[Publisher]) -> None:
        for publisher in publishers:
            self.told.append(f"gone {publisher}")
            self.directory.unregister(publisher)

    def ask(self, path: str) -> dict[str, int]:
        tokens = b"".join(token.to_bytes(4, "little") for token in block_tokens(path))
        keys = self.keyring.chain(self.keyring.root(FINGERPRINT), tokens, BLOCK)
        found = self.directory.peek(keys, FINGERPRINT)
        return {str(resume.publisher): resume.tokens // BLOCK for resume in found}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        await self.engines.close()
        await self.feed.close()
        await self.client.close()


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    yield house
    await house.close()


def metrics(start: float = 1.0, work: float = 100, awake: int = 1, running: int = 2) -> str:
    return f"""# HELP vllm:num_requests_running Number of requests in execution.
vllm:num_requests_running{{engine="0",model_name="m"}} {running}.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} 3.0
vllm:num_requests_running{{engine="1",model_name="m"}} 1.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {awake}.0
vllm:engine_sleep_state{{engine="0",sleep_state="discard_all"}} {1 - awake}.0
vllm:prompt_tokens_total{{engine="0",model_name="m"}} {work}
vllm:generation_tokens_total{{engine="0",model_name="m"}} 5.0
vllm:cache_config_info{{block_size="4",cache_dtype="fp8",engine="0"}} 1.0
process_start_time_seconds {start}
"""


def vllm(http: StubHttp, *stubs: StubPublisher) -> None:
    card = {"id": "m", "root": "/models/m", "parent": None, "max_model_len": 4096}
    adapter = {"id": "sql", "root": "/adapters/sql", "parent": "m"}
    http.set("/health", "")
    http.set("/v1/models", {"data": [card, adapter]})
    http.set("/version", {"version": "0.32.0"})
    http.set("/metrics", metrics())
    http.set(
        "/kv_event_sources",
        {
            str(rank): {"endpoint": stub.endpoint, "replay_endpoint": stub.replay, "topic": "kv"}
            for rank, stub in enumerate(stubs)
        },
    )


async def test_a_vllm_engine_is_described_followed_and_polled(house: House) -> None:
    async with StubHttp() as http, StubPublisher() as rank0, StubPublisher() as rank1:
        vllm(http, rank0, rank1)
        rank1.publish(stored("AB", 2))
        worker = house.engines.add(WorkerConfig("w", http.url))
        assert await house.engines.first_look(5.0)
        assert worker.up
        assert worker.error == ""
        told = worker.description
        assert told is not None
        assert (told.version, told.models, told.model_path) == ("0.32.0", ("m",), "/models/m")
        assert (told.block_tokens, told.context_tokens, told.kv_dtype) == (4, 4096, "fp8")
        assert told.adapters == (Adapter("sql", "m", "/adapters/sql"),)
        assert worker.loads == {0: Load(2, 3, 0.25), 1: Load(1, -1, -1.0)}
        assert worker.publishers() == [Publisher("w", 0), Publisher("w", 1)]
        await house.until(lambda: house.ask("AB") == {"w#1": 2})
        http.set("/metrics", metrics(running=7))
        await house.until(lambda: worker.loads[0].running == 7)
        assert house.told == ["described w"]


async def test_an_sglang_engine_is_described(house: House) -> None:
    async with StubHttp() as http, StubPublisher() as stub:
        http.set("/health", "")
        http.set("/v1/models", {"data": [{"id": "m", "root": "m", "max_model_len": 8192}]})
        port, replay = (int(e.rpartition(":")[2]) for e in (stub.endpoint, stub.replay))
        told = {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": port,
            "replay_endpoint_port_base": replay,
            "block_size": 16,
            "dp_size": 1,
        }
        info = {"version": "0.5.23", "page_size": 64, "model_path": "/m", "kv_events": told}
        http.set("/server_info", info | {"random_seed": 1, "startup_time": {"load": 2.5}})
        row = {"dp_rank": 0, "num_running_reqs": 4, "num_waiting_reqs": 2, "token_usage": 0.5}
        row["num_used_tokens"] = 8192
        http.set("/v1/loads", {"loads": [row]})
        worker = house.engines.add(WorkerConfig("s", http.url, engine="sglang"))
        assert await house.engines.first_look(5.0)
        found = worker.description
        assert found is not None
        assert (found.version, found.block_tokens, found.model_path) == ("0.5.23", 16, "/m")
        assert found.sources == ((0, Source(stub.endpoint, stub.replay, False)),)
        assert worker.loads == {0: Load(4, 2, 0.5, 8192)}
        stub.publish(stored("AB", 2))
        await house.until(lambda: house.ask("AB") == {"s": 2})
        stub.sent.clear()
        http.set("/server_info", info | {"random_seed": 9, "startup_time": {"load": 2.1}})
        await house.until(lambda: house.ask("AB") == {})
        assert worker.restarts == 1


async def test_for_how_long_an_engine_did_nothing(house: House) -> None:
    """It is healthy at every look, and stands still; then it computes a token."""
    async with StubHttp() as http, StubPublisher(replay=False) as stub:
        vllm(http, stub)
        assert house.engines.quiet_s("w") == math.inf
        house.engines.add(WorkerConfig("w", http.url))
        assert await house.engines.first_look(5.0)

        async def looked(times: int) -> None:
            asked = len(http.asked)
            await house.until(lambda: http.asked[asked:].count("/health") >= times)

        await looked(2)
        began = house.engines.workers["w"].got_on_s
        await looked(3)
        assert house.engines.workers["w"].got_on_s == began
        assert house.engines.quiet_s("w") > 0
        http.set("/metrics", metrics(work=101))
        await looked(2)
        assert house.engines.workers["w"].got_on_s > began


@pytest.mark.parametrize(
    "change", [{"start": 2.0, "work": 200}, {"work": 3}], ids=["start time", "counters"]
)
async def test_2287b_a_restart_seen_in_the_metrics(house: House, change: dict[str, Any]) -> None:
    async with StubHttp() as http, StubPublisher(replay=False) as stub:
        vllm(http, stub)
        worker = house.engines.add(WorkerConfig("w", http.url))
        await stub.subscribed()
        stub.publish(stored("AB", 2))
        await house.until(lambda: house.ask("AB") == {"w": 2})
        http.set("/metrics", metrics(work=150))
        asked = len(http.asked)
        await house.until(lambda: http.asked[asked:].count("/health") >= 3)
        assert house.ask("AB") == {"w": 2}
        http.set("/metrics", metrics(**change))
        await house.until(lambda: house.ask("AB") == {})
        await house.until(lambda: worker.restarts == 1)
        assert worker.up


async def test_2287b_sleep_seen_in_the_metrics(house: House) -> None:
    async with StubHttp() as http, StubPublisher() as stub:
        vllm(http, stub)
        worker = house.engines.add(WorkerConfig("w", http.url))
        await stub.subscribed()
        stub.publish(stored("AB", 2))
        await house.until(lambda: house.ask("AB") == {"w": 2})
        http.set("/metrics", metrics(awake=0))
        await house.until(lambda: worker.asleep)
        assert house.ask("AB") == {}
        http.set("/metrics", metrics())
        await house.until(lambda: not worker.asleep)
        stub.publish(stored("A"))
        await house.until(lambda: house.ask("AB") == {"w": 1})


async def test_an_engine_that_is_not_there_is_asked_again(house: House) -> None:
    http = StubHttp()
    async with http, StubPublisher() as stub:
        await http.stop()
        worker = house.engines.add(WorkerConfig("w", http.url))
        assert await house.engines.first_look(5.0)
        assert not worker.up
        assert str(http.port) in worker.error
        vllm(http, stub)
        await http.start()
        await house.until(lambda: worker.up)
        assert worker.error == ""
        await http.stop()
        await house.until(lambda: not worker.up)
        assert worker.loads == {}
        await http.start()
        await house.until(lambda: worker.up)
        assert worker.successes >= QUICK.up_after


async def test_one_lost_answer_does_not_take_an_engine_down(house: House) -> None:
    async with StubHttp() as http, StubPublisher() as stub:
        vllm(http, stub)
        worker = house.engines.add(WorkerConfig("w", http.url))
        await house.until(lambda: worker.up)
        health = http.pages.pop("/health")
        await house.until(lambda: worker.failures >= 1)
        http.pages["/health"] = health
        assert worker.up or worker.failures >= QUICK.down_after
        await house.until(lambda: worker.up and worker.failures == 0)


async def test_an_engine_that_accepts_and_never_answers(house: House) -> None:
    async with StubHttp() as http, StubHttp() as good, StubPublisher() as stub:
        http.hang = True
        vllm(good, stub)
        silent = house.engines.add(WorkerConfig("silent", http.url))
        fine = house.engines.add(WorkerConfig("fine", good.url))
        await house.until(lambda: fine.up)
        await house.until(lambda: silent.failures >= 1)
        assert "no answer within" in silent.error
        assert [worker.name for worker in house.engines.up()] == ["fine"]


@pytest.mark.parametrize("page", ["no json", "[]", '{"data": []}', '{"data": [1, {"id": 2}]}'])
async def test_a_wrong_list_of_models_is_the_engines_fault(house: House, page: str) -> None:
    async with StubHttp() as http, StubPublisher() as stub:
        vllm(http, stub)
        http.set("/v1/models", page)
        worker = house.engines.add(WorkerConfig("w", http.url))
        assert await house.engines.first_look(5.0)
        assert not worker.up
        assert "/v1/models" in worker.error


async def test_an_engine_without_events_says_so_and_still_serves(house: House) -> None:
    async with StubHttp() as http:
        vllm(http)
        worker = house.engines.add(WorkerConfig("w", http.url))
        quiet = house.engines.add(WorkerConfig("quiet", http.url, events=""))
        assert await house.engines.first_look(5.0)
        assert worker.up
        assert "--kv-events-config" in worker.error
        assert quiet.up
        assert quiet.error == ""
        assert house.feed.status() == []


async def test_an_engine_that_ends_its_events_is_believed_no_more(house: House) -> None:
    async with StubHttp() as http, StubPublisher() as rank0:
        vllm(http, rank0)
        house.engines.add(WorkerConfig("w1", http.url))
        await rank0.subscribed()
        rank0.publish(stored("AB", 2))
        await house.until(lambda: house.ask("AB") == {"w1": 2})
        http.set("/kv_event_sources", {})
        await house.until(lambda: house.ask("AB") == {})
        await house.until(lambda: not house.feed.status())
        vllm(http, rank0)
        await house.until(lambda: len(house.feed.status()) == 1)


async def test_figures_that_are_none_are_not_believed(house: House) -> None:
    async with StubHttp() as http, StubPublisher() as rank0:
        vllm(http, rank0)
        many = "\n".join(
            f'vllm:num_requests_{what}{{engine="{rank}"}} {value}'
            for what, rank, value in (
                ("running", "0", "1e308"),
                ("waiting", "0", "NaN"),
                ("running", "²", "3"),
                ("waiting", "9" * 5000, "4"),
            )
        )
        http.set("/metrics", many)
        source = {"endpoint": rank0.endpoint, "replay_endpoint": rank0.replay}
        ranks = ("0", "²", "-1", "1024", "9" * 5000, "")
        http.set("/kv_event_sources", dict.fromkeys(ranks, source))
        worker = house.engines.add(WorkerConfig("w1", http.url))
        await house.until(lambda: worker.up)
        assert worker.publishers() == [Publisher("w1")]
        assert worker.loads == {0: Load(running=3, waiting=4)}


async def test_ranks_that_do_not_fit_leave_nothing_behind(house: House) -> None:
    house.directory.limits = Limits(publishers_max=1)
    async with StubHttp() as http, StubPublisher() as rank0, StubPublisher() as rank1:
        vllm(http, rank0, rank1)
        worker = house.engines.add(WorkerConfig("w1", http.url))
        await house.until(lambda: "asking it failed" in worker.error)
        assert house.directory.publishers() == []


async def test_a_new_port_and_another_model_are_noticed(house: House) -> None:
    async with StubHttp() as http, StubPublisher() as old, StubPublisher() as new:
        vllm(http, old)
        worker = house.engines.add(WorkerConfig("w", http.url))
        await old.subscribed()
        old.publish(stored("AB", 2))
        await house.until(lambda: house.ask("AB") == {"w": 2})
        vllm(http, new)
        await house.until(lambda: house.ask("AB") == {})
        new.publish(stored("A"))
        await house.until(lambda: house.ask("A") == {"w": 1})
        http.set("/v1/models", {"data": [{"id": "m", "root": "/models/other"}]})
        await house.until(lambda: house.ask("A") == {})
        assert worker.description is not None
        assert worker.description.adapters == ()


async def test_new_adapters_cost_nothing_changed_ones_cost_the_claims(house: House) -> None:
    async with StubHttp() as http, StubPublisher() as stub:
        vllm(http, stub)
        worker = house.engines.add(WorkerConfig("w", http.url))
        await stub.subscribed()
        stub.publish(stored("A"))
        await house.until(lambda: house.ask("A") == {"w": 1})
        card = {"id": "m", "root": "/models/m", "parent": None, "max_model_len": 4096}
        sql = {"id": "sql", "root": "/adapters/sql", "parent": "m"}
        more = {"id": "more", "root": "/adapters/more", "parent": "m"}
        http.set("/v1/models", {"data": [card, sql, more]})
        await house.until(lambda: len(worker.description.adapters) == 2)  # type: ignore[union-attr]
        assert house.ask("A") == {"w": 1}
        http.set("/v1/models", {"data": [card, sql | {"root": "/adapters/sql2"}, more]})
        await house.until(lambda: house.ask("A") == {})


async def test_workers_come_and_go_at_run_time(house: House) -> None:
    async with StubHttp() as http, StubPublisher() as stub:
        vllm(http, stub)
        house.engines.add(WorkerConfig("w", http.url))
        with pytest.raises(ConfigError, match="'w'"):
            house.engines.add(WorkerConfig("w", http.url))
        await stub.subscribed()
        stub.publish(stored("AB", 2))
        await house.until(lambda: house.ask("AB") == {"w": 2})
        await house.engines.remove("w")
        assert house.ask("AB") == {}
        assert house.feed.status() == []
        assert house.told[-1] == "gone w"
        house.engines.add(WorkerConfig("w", http.url))
        await house.until(lambda: house.ask("AB") == {"w": 2})
        with pytest.raises(KeyError):
            await house.engines.remove("nobody")


def test_addresses_that_an_engine_reports() -> None:
    url = "http://10.0.0.7:8000"
    assert source_of(url, "tcp://*:5557", "tcp://*:5558") == Source(
        "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558", False
    )
    assert source_of(url, "tcp://0.0.0.0:5557", "", 2) == Source("tcp://10.0.0.7:5559", "", False)
    assert source_of("http://[fd00::7]:8000", "tcp://[::]:5557", "") == Source(
        "tcp://[fd00::7]:5557", "", False
    )
    # A concrete address: the engine connects to it, or had bound it by itself.
    assert source_of(url, "tcp://10.0.0.1:5557", "tcp://*:5558") == Source(
        "tcp://10.0.0.1:5557", "tcp://10.0.0.7:5558", None
    )
    assert source_of(url, "ipc:///run/kv", "ipc:///run/replay") == Source(
        "ipc:///run/kv", "ipc:///run/replay", False
    )


def test_addresses_that_the_operator_gives() -> None:
    there = WorkerConfig("w", "http://h:1", events="tcp://h:5557", replay="tcp://h:6000")
    assert configured_source(there, 1) == Source("tcp://h:5558", "tcp://h:6001", False)
    ours = WorkerConfig("w", "http://h:1", events="tcp://*:5557", replay="tcp://*:6000")
    assert configured_source(ours, 0) == Source("tcp://*:5557", "tcp://h:6000", True)


async def test_of_many_engines_each_is_looked_at_less_often() -> None:
    house = House()
    engines = house.engines
    assert engines._pause_s() == QUICK.poll_s
    for number in range(4 * LOOKS_PER_S):
        config = WorkerConfig(name=f"w{number}", url="http://127.0.0.1:1")
        engines.workers[config.name] = Worker(config)
    assert engines._pause_s() == 4.0
    await house.feed.close()
    await house.client.close()
