"""Between two gateways over HTTP and TLS: who is told, by whom, and agents' shelves with it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from snapshot_kit import AGENTS, ENGINES, LAYOUTS, PLACE, RING, believed, replica, stored
from test_tls_gateway import Quiet
from tls_kit import Authority

from kvatlas.config import GatewayConfig
from kvatlas.config_tls import AdminConfig, AuditConfig
from kvatlas.core.dispatch import Dispatcher
from kvatlas.core.events import UnitsHeld
from kvatlas.core.records import Place, Publisher, Tier
from kvatlas.dataplane.tls import Trust
from kvatlas.service.admin import safety_of
from kvatlas.service.gateway import Gateway
from kvatlas.service.http_client import HttpClient
from kvatlas.service.snapshots import SNAPSHOT, Snapshots
from kvatlas.service.tls import from_outside, to_agents, to_gateways
from kvatlas.service.warm_start import Start, WarmStart


class Streams:
    """In the place of a feed: all streams stand still at `PLACE`."""

    def __init__(self, *busy: Publisher) -> None:
        self.busy = busy
        self.held: set[Publisher] = set()
        self.taken: dict[Publisher, Place] = {}

    def hold(self, publisher: Publisher) -> bool:
        self.held.add(publisher)
        return publisher not in self.busy

    def release(self, publisher: Publisher) -> None:
        self.held.discard(publisher)

    def place(self, publisher: Publisher) -> Place | None:
        return PLACE

    def outdone(self, publisher: Publisher, place: Place) -> str:
        return ""

    def take_up(self, publisher: Publisher, place: Place) -> None:
        self.taken[publisher] = place

    def idle(self, publisher: Publisher) -> bool:
        return True


def fed() -> Dispatcher:
    dispatcher = replica(LAYOUTS["plain"])
    event = stored((LAYOUTS["plain"], 0), 0, (0, 80), 20, Tier.HBM)
    assert event is not None
    dispatcher.apply(ENGINES[0], [event])
    key = (b"k" * 16,)
    dispatcher.apply(AGENTS[0], [UnitsHeld(Tier.DRAM, key, key), UnitsHeld(Tier.OBJECT, key)])
    return dispatcher


@contextlib.asynccontextmanager
async def serving(snapshots: Snapshots, trust: Trust | None = None) -> AsyncIterator[str]:
    safety = safety_of(AdminConfig(), AuditConfig(), trust, "gateway", closed=trust is not None)
    gateway = Gateway(
        GatewayConfig(port=0),
        Quiet(),  # type: ignore[arg-type]
        talks={SNAPSHOT: snapshots.answer},
        trust=trust,
        guard=safety.guard,
    )
    await gateway.start()
    try:
        yield f"{'http' if trust is None else 'https'}://127.0.0.1:{gateway.port}"
    finally:
        await gateway.close()


async def begin(
    url: str, client: HttpClient, new: Dispatcher | None = None, streams: Streams | None = None
) -> Start:
    new, streams = new or replica(LAYOUTS["plain"]), streams or Streams()
    try:
        return await WarmStart(RING, new, lambda: streams, client).run([url], 20.0)  # type: ignore[arg-type, return-value]
    finally:
        await client.close()


async def test_engines_agents_and_stores_are_told() -> None:
    old, new, streams, theirs = fed(), replica(LAYOUTS["plain"]), Streams(), Streams()
    snapshots = Snapshots(RING, old, lambda: theirs)  # type: ignore[arg-type, return-value]
    async with serving(snapshots) as url:
        start = await begin(url, HttpClient(), new, streams)
    assert (start.kind, start.refusals, start.left_out) == ("warm", {}, {})
    assert streams.taken == dict.fromkeys((*ENGINES, *AGENTS), PLACE)
    believed(new)
    assert new.directory.digest() == old.directory.digest()
    assert not theirs.held, "all go on"
    assert snapshots.counts == {"told": 1}


@pytest.mark.parametrize("busy", [ENGINES[0], AGENTS[1]])
async def test_who_never_stands_still_is_left_out(
    busy: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.service.snapshots._HOLD_S", 0.02)
    old, new, streams, theirs = fed(), replica(LAYOUTS["plain"]), Streams(), Streams(busy)
    snapshots = Snapshots(RING, old, lambda: theirs)  # type: ignore[arg-type, return-value]
    async with serving(snapshots) as url:
        start = await begin(url, HttpClient(), new, streams)
    assert start.kind == "warm"
    assert busy not in streams.taken
    assert ENGINES[1] in streams.taken
    assert not theirs.held
    assert snapshots.counts == {"told": 1, "left_out": 1}


async def test_a_gateway_is_told_by_its_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    trust = authority.trust("gateway", "old")
    snapshots = Snapshots(RING, fed(), Streams)  # type: ignore[arg-type, return-value]
    async with serving(snapshots, trust) as url:
        for trusted, outgoing, why in (
            (True, to_gateways(authority.trust("gateway", "new")), ""),
            (False, from_outside(authority.ca), "wanted"),
            (False, to_agents(authority.trust("gateway", "new")), "agent is wanted"),
        ):
            start = await begin(url, HttpClient(outgoing=outgoing))
            assert (start.kind == "warm") is trusted
            assert why in "".join(start.refusals.values())
        plain = await begin(url.replace("https", "http"), HttpClient())
        assert plain.kind == "cold"
    assert snapshots.counts == {"told": 1}


@pytest.mark.parametrize("part", ["agent", "engine"])
async def test_another_part_with_a_good_certificate_is_not_told(tmp_path: Path, part: str) -> None:
    authority = Authority(tmp_path / "ca")
    made = authority.config(part, "one")
    outgoing = from_outside(made.ca, made.cert, made.key, parts=("gateway",))
    snapshots = Snapshots(RING, fed(), Streams)  # type: ignore[arg-type, return-value]
    async with serving(snapshots, authority.trust("gateway")) as url:
        start = await begin(url, HttpClient(outgoing=outgoing))
    assert start.kind == "cold"
    assert f"kvatlas://{part}/one" in start.refusals[url]
    assert not snapshots.counts


async def test_a_gateway_is_not_taken_up_from_another_part(tmp_path: Path) -> None:
    """An agent with a good certificate that would answer in a gateway's place."""
    authority = Authority(tmp_path / "ca")
    snapshots = Snapshots(RING, fed(), Streams)  # type: ignore[arg-type, return-value]
    async with serving(snapshots, authority.trust("agent")) as url:
        outgoing = to_gateways(authority.trust("gateway", "new"))
        start = await begin(url, HttpClient(outgoing=outgoing))
    assert "gateway is wanted" in start.refusals[url]
