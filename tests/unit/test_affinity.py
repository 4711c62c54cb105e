"""A session has no home: a prompt goes back to its holder because, and while, that is cheaper."""

from __future__ import annotations

import pytest
from test_steering import PATH, Bench

from kvatlas.core.records import Publisher
from kvatlas.service.steer import Inbound, Outcome, Route

SESSION = {"x-session-id": "s", "cookie": "session=s", "x-user-id": "u"}


async def ask(bench: Bench, id: str, headers: dict[str, str] | None = None) -> Route:
    body: dict[str, object] = {"model": "m", "user": "u"}
    return await bench.steering.choose(Inbound(id, PATH, body, dict(headers or SESSION)))


def crowd(bench: Bench, publisher: Publisher, routes: list[Route]) -> None:
    """All of them are at that engine."""
    for route in routes:
        target = next(t for t in route.targets if t.worker == str(publisher))
        bench.steering.sent(route, target)


async def test_the_holders_queue_sends_a_session_elsewhere_and_back() -> None:
    bench = Bench()
    home, other = bench.add("home"), bench.add("other")
    bench.store(home, 5)
    route = await ask(bench, "turn 1")
    assert route.targets[0].worker == "home"
    # Some 25 ms each with what is cached: ten of them cost more than to compute all of it.
    waiting = [await ask(bench, f"w{n}") for n in range(10)]
    crowd(bench, home, waiting)
    assert (await ask(bench, "turn 2")).targets[0].worker == "other"
    for one in waiting:
        bench.steering.finished(one, Outcome(one.targets[0], 499))
    assert (await ask(bench, "turn 3")).targets[0].worker == "home"
    # Where it went is as good a home, once it holds as much.
    bench.store(other, 5)
    crowd(bench, home, [await ask(bench, f"more{n}") for n in range(6)])
    assert (await ask(bench, "turn 4")).targets[0].worker == "other"


@pytest.mark.parametrize("name", sorted(SESSION))
async def test_who_asks_is_no_reason(name: str) -> None:
    bench = Bench()
    for worker in ("a", "b", "c"):
        bench.add(worker)
    for number in range(6):
        asked = [await ask(bench, f"{number}{who}", {name: who}) for who in ("x", "y")]
        first, second = [[t.worker for t in route.targets] for route in asked]
        assert first == second
        bench.steering.sent(asked[0], asked[0].targets[0])
        bench.steering.finished(asked[0], Outcome(asked[0].targets[0], 200))
