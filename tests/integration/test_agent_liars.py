"""A peer that has the secret and lies: it says that it has everything, and sends something else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from fake_engine import GRID, FakeEngine, content, tokens_of

from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.tiers.dram import DramStore, Unit
from kvatlas.dataplane.tiers.peer import PeerServer
from kvatlas.service.agent import NodeAgent, Settings
from kvatlas.service.agent_shared import SharedSettings, _token
from kvatlas.validate.exactness_tiers import SLOW

BLOCKS = 10
PROMPT = tokens_of(1, BLOCKS * GRID + 1)
UNIT_BYTES = 1 << 16
SECRET = b"s" * 32


class Liar(DramStore):
    """Whatever is asked for is there."""

    def __init__(self, arena: Arena, lie: str) -> None:
        super().__init__(arena)
        self.lie = lie
        self.fingerprint = b""

    def pin(self, name: bytes) -> Unit | None:
        if self.lie == "closes":
            raise OSError("gone")
        if self.lie == "has nothing":
            return None
        size = 100 if self.lie == "another size" else UNIT_BYTES
        if (slot := self.reserve(name, size)) is not None:
            data = content(b"another" if self.lie == "another value" else name, size)
            checksum = self.arena.copy_in(slot, [memoryview(bytearray(data))])
            made = Unit(slot, checksum, fingerprint=self.fingerprint)
            if self.lie == "another fingerprint":
                made = msgspec.structs.replace(made, fingerprint=b"x" * 32)
            if self.lie == "another value":
                made = msgspec.structs.replace(made, checksum=checksum ^ 1)
            self.commit(name, made)
        return super().pin(name)


@pytest.mark.parametrize(
    "lie",
    ["closes", "has nothing", "another size", "another fingerprint", "another value", "none"],
)
async def test_what_a_peer_lies_about_is_a_recompute(tmp_path: Path, lie: str) -> None:
    arena = Arena.create(4 << 20, directory=tmp_path)
    liar = Liar(arena, lie)
    server = PeerServer(liar, token=_token(SECRET), lend=lambda names: names)
    settings = Settings(
        tmp_path / "agent.sock",
        8 << 20,
        secret=SECRET,
        prefill_tokens_per_s=SLOW,
        shared=SharedSettings(peers=(server.address,), seek_s=5.0),
    )
    async with NodeAgent(settings) as agent:
        serving = asyncio.get_running_loop().create_task(agent.serve())
        with await asyncio.to_thread(FakeEngine, settings.path) as engine:
            (member,) = agent._members().values()
            liar.fingerprint = member.fingerprint.digest()
            tokens = BLOCKS * GRID if lie == "none" else 0
            found = await asyncio.to_thread(engine.load, "q", PROMPT)
            assert found == (tokens, {"peer": tokens} if tokens else {})
            assert agent.driver.ways.counts["peer_found"] >= BLOCKS
            await asyncio.to_thread(engine.save, "r", tokens_of(2, BLOCKS * GRID + 1))
        while agent._core.busy or agent._peers or agent._dram._rooms or agent._dram._slots._holds:
            await asyncio.sleep(0.002)
        assert not agent.driver.loads.held
        serving.cancel()
    server.close()
    arena.close()
