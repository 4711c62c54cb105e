"""What an agent has to do with stores and peers: the questions that are called off."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Unit
from kvatlas.dataplane.tiers.base import Finish, Shared
from kvatlas.dataplane.tiers.peer import PeerStore, Settings
from kvatlas.dataplane.tiers.peer_nixl import Reader
from kvatlas.service.agent_shared import Ways

BLOCKS = [(Unit(bytes([n]) * 16, Part.BODY, n, 100),) for n in range(3)]


class Mute:
    """A store that never answers."""

    def find(self, names: Sequence[bytes], done: Finish) -> None:
        pass


async def turns() -> None:
    """Of the loop, as many as it may take for a task to hear of its end."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_nothing_waits_for_a_store_any_more_at_the_end() -> None:
    mute = cast("Shared", Mute())
    ways = Ways({(Tier.OBJECT, ""): mute}, tell=lambda _: None, post=lambda *_: None)
    ended: list[bool] = []
    assert ways.seek(BLOCKS, b"", 1000.0, lambda: ended.append(True))
    await turns()
    assert len(asyncio.all_tasks()) > 2  # besides this one the search, and its questions
    ways.close()
    await turns()
    assert ended
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Faulty:
    """Of NIXL, what a peer's store shows."""

    fault = ""

    def status(self) -> dict[str, object]:
        return {"rests": self.fault}

    def close(self) -> None:
        pass


async def test_nixl_that_fails_is_a_flag_of_health_and_tcp_that_is_better_is_none() -> None:
    nixl = Faulty()
    peer = PeerStore(Settings("127.0.0.1", 1), nixl=cast("Reader", nixl))
    plain = PeerStore(Settings("127.0.0.1", 2), nixl="not_installed")
    stores = {(Tier.PEER, "a:1"): cast("Shared", peer), (Tier.PEER, "b:2"): cast("Shared", plain)}
    ways = Ways(stores, tell=lambda _: None, post=lambda *_: None)
    assert ways.problems() == {}
    nixl.fault = "late"
    assert ways.problems() == {"peer_nixl": "peer a:1: over TCP: late"}
    shown = cast("dict[str, dict[str, object]]", ways.status()["peer"])
    assert shown["a:1"]["nixl"] == {"rests": "late"}
    assert shown["b:2"]["nixl"] == "not_installed"
    ways.close()
    peer.close()
    plain.close()
