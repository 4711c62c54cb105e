"""Steering: from a request's token ids to a route, and what is learnt from its end."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, get_args

import msgspec
import pytest

from kvatlas.config import PairingProtocol, Role
from kvatlas.core.compat import Member
from kvatlas.core.directory import Directory
from kvatlas.core.dispatch import Dispatcher
from kvatlas.core.events import BlockStored
from kvatlas.core.keys import Fingerprint, Keyring
from kvatlas.core.layout import plain
from kvatlas.core.records import Publisher
from kvatlas.core.router import Params, Router
from kvatlas.errors import RequestError
from kvatlas.service.decision_log import DecisionLog, explain
from kvatlas.service.steer import Inbound, Outcome, Route, Target
from kvatlas.service.steering import Rank, Steering
from kvatlas.service.tokens import Prompt

BLOCK = 16
FP, OTHER = b"\1" * 32, b"\2" * 32
IDS = array("I", range(100)).tobytes()
PATH = "/v1/completions"


class FakeTokens:
    """Answers with what it was given; an exception is raised."""

    def __init__(self, answer: Prompt | Exception) -> None:
        self.answer = answer

    async def prompt(self, path: str, body: Mapping[str, Any]) -> Prompt:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Bench:
    def __init__(self, answer: Prompt | Exception | None = None, policy: str = "price") -> None:
        self.now = self.tick_s = 0.0  # each look at the clock takes so long
        self.ring = Keyring(b"a secret for the tests")
        self.directory = Directory(self.ring)
        self.log = DecisionLog(100)
        self.steering = Steering(
            dispatcher=Dispatcher(
                self.directory, Router(Params(policy=policy, prefill_tokens_per_s=1000)), self.ring
            ),
            log=self.log,
            tokens=FakeTokens(Prompt(tokens=IDS) if answer is None else answer),
            clock=self.clock,
        )

    def clock(self) -> float:
        self.now += self.tick_s
        return self.now

    def add(self, name: str, fingerprint: bytes = FP, **models: str) -> Publisher:
        publisher = Publisher(name)
        served = models or {"m": ""}
        entries = tuple({"id": model} for model in served)
        rank = Rank(publisher, f"http://{name}", served, plain(BLOCK), fingerprint, (), entries)
        self.steering.add(rank)
        return publisher

    def store(
        self, publisher: Publisher, blocks: int, *, salt: str = "", adapter: str = ""
    ) -> None:
        event = BlockStored(
            tuple(range(blocks)), None, IDS[: blocks * BLOCK * 4], BLOCK, salt=salt, adapter=adapter
        )
        assert self.directory.apply(publisher, [event]).stored == blocks

    async def route(self, request_id: str = "r", path: str = PATH, **body: object) -> Route:
        headers = {"x-kvatlas-cache-salt": str(body.pop("header"))} if "header" in body else {}
        return await self.steering.choose(
            Inbound(request_id, path, {"model": "m", **body}, headers)
        )

    def end(self, route: Route, cached: int = -1, status: int = 200) -> None:
        self.steering.finished(route, Outcome(route.targets[0], status, 100, cached, 5))


async def test_the_holder_is_chosen_and_the_hit_is_announced() -> None:
    bench = Bench()
    bench.add("a")
    bench.store(bench.add("b"), 6)
    route = await bench.route()
    assert [t.worker for t in route.targets] == ["b", "a"]
    assert (route.targets[0].expected_hit_tokens, route.prompt_tokens, route.unkeyed) == (
        96,
        100,
        "",
    )


async def test_one_token_is_always_left_to_compute() -> None:
    bench = Bench(Prompt(tokens=IDS[: 96 * 4]))
    bench.store(bench.add("a"), 6)
    assert (await bench.route()).targets[0].expected_hit_tokens == 80


@pytest.mark.parametrize("other", [{"cache_salt": "y"}, {"model": "lora"}, {"header": "y"}])
async def test_salt_and_adapter_partition_everything(other: dict[str, object]) -> None:
    bench = Bench()
    publisher = bench.add("a", m="", lora="lora")
    bench.store(publisher, 6, salt="x")
    same = await bench.route("1", cache_salt="x")
    assert same.targets[0].expected_hit_tokens == 96
    bench.end(same)
    assert (await bench.route("2", **other)).targets[0].expected_hit_tokens == 0


async def test_the_header_wins_over_the_body() -> None:
    bench = Bench()
    bench.store(bench.add("a"), 6, salt="x")
    route = await bench.route(header="x", cache_salt="y")
    assert route.targets[0].expected_hit_tokens == 96


async def test_another_fingerprint_never_shares() -> None:
    bench = Bench()
    old = bench.add("old")
    bench.store(old, 6)
    bench.add("new", OTHER)
    route = await bench.route()
    assert {t.worker: t.expected_hit_tokens for t in route.targets} == {"old": 96, "new": 0}
    bench.end(route)
    bench.add("old", OTHER)  # upgraded in place: its old claims are void
    assert {t.expected_hit_tokens for t in (await bench.route("2")).targets} == {0}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Prompt(reason="multimodal"), "multimodal"),
        (Prompt(tokens=b""), "empty_prompt"),
        (RuntimeError("broken"), "tokenizer_failed"),
    ],
)
async def test_what_cannot_be_keyed_is_routed_by_load_and_counted(
    answer: Prompt | Exception, reason: str
) -> None:
    bench = Bench(answer)
    for name in ("a", "b"):
        bench.add(name)
    workers = []
    for number in range(4):
        route = await bench.route(str(number))
        assert route.unkeyed == reason
        bench.steering.sent(route, route.targets[0])
        workers.append(route.targets[0].worker)
    assert sorted(workers) == ["a", "a", "b", "b"]
    last = bench.log.last()
    assert last is not None
    assert "lost: more loaded" in explain(last)
    assert bench.steering.fallbacks == {reason: 4}


async def test_other_endpoints_are_counted_in_flight_too() -> None:
    bench = Bench()
    for name in ("a", "b"):
        bench.add(name)
    routes = [await bench.route(str(n), "/v1/embeddings") for n in range(1)]
    bench.steering.sent(routes[0], routes[0].targets[0])
    second = await bench.route("x", "/v1/rerank")
    assert second.targets[0].worker != routes[0].targets[0].worker
    assert second.unkeyed == "no_prompt"


async def test_wrong_model_and_no_engine_are_clear_errors() -> None:
    bench = Bench()
    with pytest.raises(RequestError, match="no engine has been reached") as nobody:
        await bench.route()
    assert nobody.value.status == 503
    publisher = bench.add("a")
    with pytest.raises(RequestError, match="'q' does not exist; there is: m") as wrong:
        await bench.route(model="q")
    assert (wrong.value.status, wrong.value.param) == (404, "model")
    bench.steering.set_up(publisher, False)
    assert bench.steering.health().flags == ("engine_down:a",)
    assert not bench.steering.health().ready
    assert [t.worker for t in (await bench.route()).targets] == ["a"]  # tried all the same


async def test_where_no_connection_could_be_made_nothing_is_sent_before_a_good_look() -> None:
    bench = Bench()
    dead, well = bench.add("a"), bench.add("b")
    bench.store(dead, 6)
    bench.now = 5.0
    route = await bench.route()
    assert [target.worker for target in route.targets] == ["a", "b"]
    bench.steering.unreached(route, route.targets[0])
    assert [t.worker for t in (await bench.route("next")).targets] == ["b"]
    assert bench.steering.reached(well, 1.0)
    assert not bench.steering.reached(dead, 5.0)
    bench.steering.set_up(dead, bench.steering.reached(dead, 5.5))
    assert bench.steering.reached(dead, 1.0), "it is forgotten after a good look"
    assert [t.worker for t in (await bench.route("last")).targets] == ["a", "b"]
    bench.steering.unreached(Route("unknown", route.targets), route.targets[0])
    assert bench.steering.reached(dead, 0.0)


@pytest.mark.parametrize("model", [[], {}, 7, False, ["m"], "x" * 100_000])
async def test_what_is_no_model_name_is_not_found(model: object) -> None:
    bench = Bench()
    bench.add("a")
    with pytest.raises(RequestError, match="does not exist; there is: m") as wrong:
        await bench.route(model=model)
    assert wrong.value.status == 404
    assert len(str(wrong.value)) < 300


@pytest.mark.parametrize(
    ("among", "workers"),
    [(None, ["b", "a"]), ({"a"}, ["a"]), ({"a:80", "x:1"}, ["a"]), ({"a:81"}, []), (set(), [])],
)
async def test_a_request_may_be_limited_to_some_engines(
    among: set[str] | None, workers: list[str]
) -> None:
    """By host, or by host and port; the deepest holder is then no candidate either."""
    bench = Bench()
    bench.add("a")
    bench.store(bench.add("b"), 6)
    limited = None if among is None else frozenset(among)
    request = Inbound("r", PATH, {"model": "m"}, {}, limited)
    if workers:
        assert [t.worker for t in (await bench.steering.choose(request)).targets] == workers
        return
    with pytest.raises(RequestError, match="limited to") as refused:
        await bench.steering.choose(request)
    assert (refused.value.status, refused.value.code) == (503, "no_engine")


async def test_engines_that_leave_while_a_prompt_is_tokenized() -> None:
    bench = Bench()
    publisher = bench.add("a")

    class Leaving(FakeTokens):
        async def prompt(self, path: str, body: Mapping[str, Any]) -> Prompt:
            bench.steering.remove(publisher)
            return Prompt(tokens=IDS)

    bench.steering._tokens = Leaving(Prompt())
    with pytest.raises(RequestError, match="no engine") as nobody:
        await bench.route()
    assert nobody.value.status == 503
    assert bench.log.last() is None


async def test_a_gap_between_promise_and_report_raises_a_flag() -> None:
    bench = Bench()
    bench.store(bench.add("a"), 6)
    for number in range(25):
        route = await bench.route(str(number))
        bench.steering.sent(route, route.targets[0])
        bench.steering.first_token(route, 0.01)
        bench.end(route, cached=0)
    assert bench.steering.health().flags == ("hit_gap:a",)
    for number in range(40):
        bench.end(await bench.route(f"good{number}"), cached=96)
    assert bench.steering.health().flags == ()


async def test_hits_that_nobody_foresaw_raise_it_too() -> None:
    bench = Bench()
    bench.store(bench.add("a"), 1)  # of another prompt, for all that our keys say
    for number in range(25):
        bench.end(await bench.route(str(number)), cached=96)
    assert bench.steering.health().flags == ("hit_gap:a",)
    text = bench.steering.gaps[Publisher("a")].flag
    assert "promised only 17 % of the tokens that the engine reused" in text


async def test_an_engine_without_events_has_no_gap() -> None:
    bench = Bench()
    bench.add("a")
    for number in range(25):
        bench.end(await bench.route(str(number)), cached=96)
    assert bench.steering.health().flags == ()


async def test_equal_request_ids_do_not_share_books() -> None:
    bench = Bench()
    bench.add("a")
    crafted = await bench.route("same#2")  # what a second "same" would be called
    first, second = await bench.route("same"), await bench.route("same")
    assert len({crafted.id, first.id, second.id}) == 3
    bench.end(crafted)
    for route in (first, second):
        bench.steering.sent(route, route.targets[0])
    assert bench.steering.in_flight() == {Publisher("a"): 2}
    for route in (first, second, first):
        bench.end(route)
    assert bench.steering.in_flight() == {Publisher("a"): 0}


async def test_the_last_decision_is_the_newest_whatever_its_id() -> None:
    bench = Bench()
    bench.add("a")
    for request_id in ("one", "two", "one"):
        bench.end(await bench.route(request_id))
    last = bench.log.last()
    assert last is not None
    assert last.decision.id == "one"


async def test_explain_names_every_candidate_and_the_end() -> None:
    bench = Bench()
    bench.add("a")
    bench.store(bench.add("b"), 6)
    route = await bench.route("abc")
    bench.steering.sent(route, route.targets[0])
    entry = bench.log.get("abc")
    assert entry is not None
    assert "still running" in explain(entry)
    bench.steering.first_token(route, 0.5)
    bench.end(route, cached=96)
    text = explain(entry)
    assert "request abc: 100 prompt tokens, policy price" in text
    assert "→ b" in text
    assert "resumes at 96" in text
    assert "lost: +" in text
    assert "engine reused 96 tokens" in text


async def test_regret_is_what_the_best_other_plan_was_priced_at() -> None:
    """1,000 tokens/s: 4 of 100 tokens are left to compute on b, all of them on a and c."""
    bench = Bench()
    bench.add("a")
    bench.add("c")
    b = bench.add("b")
    bench.store(b, 6)
    for id, ttft_s in (("sooner", 0.004), ("later", 0.605)):
        route = await bench.route(id)
        bench.steering.sent(route, route.targets[0])
        bench.steering.finished(route, Outcome(route.targets[0], 200, 100, 96, 5, ttft_s))
    sooner, later = bench.log.get("sooner"), bench.log.get("later")
    assert sooner is not None
    assert later is not None
    other = min(p.price.ttft_s for p in later.decision.plans[1:])
    assert later.regret_s == pytest.approx(0.605 - other)
    assert later.error_s == pytest.approx(0.605 - later.decision.plans[0].price.ttft_s)
    assert sooner.regret_s == 0
    assert f"regret {later.regret_s:.3f} s: a was priced at {other:.3f} s" in explain(later)
    assert "regret 0.000 s: no other plan was priced sooner" in explain(sooner)
    mean = bench.steering.errors[b]
    assert mean.regret_s == pytest.approx(later.regret_s / 2)


async def test_without_a_first_token_nothing_is_regretted() -> None:
    bench = Bench()
    bench.add("a")
    route = await bench.route("gone")
    bench.steering.sent(route, route.targets[0])
    bench.steering.finished(route, Outcome(route.targets[0], 499))
    entry = bench.log.get("gone")
    assert entry is not None
    assert (entry.error_s, entry.regret_s) == (None, None)
    assert "regret" not in explain(entry)


async def test_a_prefill_half_teaches_nothing_of_decoding() -> None:
    bench = Bench()
    bench.add("a")
    busy = await bench.route("busy")
    bench.steering.sent(busy, busy.targets[0])
    bench.tick_s = 1e-5

    async def crowd_s(id: str) -> float:
        bench.end(await bench.route(id), status=499)
        entry = bench.log.get(id)
        assert entry is not None
        return entry.decision.plans[0].price.crowd_s

    before = await crowd_s("before")
    assert before > 0
    for number in range(100):
        route = await bench.route(str(number))
        bench.steering.sent(route, route.targets[0])
        bench.steering.prefilled(route, route.targets[0], 0, 0.1)
        bench.end(route)
    assert await crowd_s("after") == before


@pytest.mark.parametrize("pairing", get_args(PairingProtocol))
async def test_a_hand_off_is_timed_where_one_half_follows_the_other(
    pairing: PairingProtocol,
) -> None:
    """Halves that run at once: the second one's wait for the prefill is no hand-off."""
    bench = Bench()
    member = Member(("m",), Fingerprint("m"), plain(BLOCK))
    roles: dict[str, Role] = {"p": "prefill", "d": "decode"}
    for name, role in roles.items():
        rank = Rank(Publisher(name), f"http://{name}", {"m": ""}, plain(BLOCK), FP)
        half = msgspec.structs.replace(rank, member=member, role=role, pairing=pairing)
        bench.steering.add(half)

    async def pair(id: str) -> float:
        route = await bench.route(id)
        (first,) = route.targets
        assert first.half == "prefill"
        bench.steering.sent(route, first)
        (second,) = bench.steering.decoders(route, first)
        bench.steering.sent(route, second)
        bench.now += 5.0
        bench.steering.first_token(route, 5.0)
        bench.steering.finished(route, Outcome(second, 200))
        entry = bench.log.get(id)
        assert entry is not None
        return entry.decision.plans[0].price.hand_off_s

    before, after = [await pair(id) for id in ("before", "after")]
    assert (after > before) == (pairing == "nixl")


async def test_round_robin_does_not_look_at_the_prompt() -> None:
    bench = Bench(RuntimeError("must not be asked"), policy="round_robin")
    for name in ("a", "b"):
        bench.add(name)
    seen = []
    for number in range(4):
        route = await bench.route(str(number))
        bench.steering.sent(route, route.targets[0])
        seen.append(route.targets[0].worker)
    assert seen == ["a", "b", "a", "b"]
    last = bench.log.last()
    assert last is not None
    assert "lost: its turn comes later" in explain(last)


async def test_beyond_the_plans_everybody_else_is_left_to_be_asked() -> None:
    bench = Bench()
    names = [f"w{i:02}" for i in range(30)]
    for name in names:
        bench.add(name)
    for name in names[:3]:
        bench.steering.set_up(Publisher(name), False)
    route = await bench.route()
    tried = [target.worker for target in route.targets]
    assert len(tried) < 30
    while bench.steering.left(route):
        more = bench.steering.more(route)
        assert more
        tried += [target.worker for target in more]
    assert sorted(tried) == names
    assert set(tried[-3:]) == set(names[:3])  # those that look down come last
    assert bench.steering.more(route) == ()
    bench.steering.sent(route, Target("w00", ""))
    bench.steering.finished(route, Outcome(Target("w00", ""), 200))
    assert not any(bench.steering.in_flight().values())
    assert bench.steering.more(route) == ()
    entry = bench.log.get(route.id)
    assert entry is not None
    assert "w00" in explain(entry)
