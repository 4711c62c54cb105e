"""A pass-through in this process, its recorder beside it, and what it recorded in the end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from harness import WAIT_S

from kvatlas.service.http_client import Origin
from kvatlas.service.observe_copies import Copies
from kvatlas.service.observe_record import Recorded, read
from kvatlas.service.observe_runs import Observer, Settings, Summary, watch
from kvatlas.service.observe_tunnel import Tunnel


class Observed:
    """A pass-through before ``port``, and what its recording holds in the end."""

    def __init__(self, port: int, file: Path, **settings: Any) -> None:
        self.port = port
        self.file = file
        self.settings = Settings(
            record=str(file), mode="front", block_tokens=16, started_s=time.monotonic(), **settings
        )
        self.observer: Observer
        self.recorded: Recorded
        self.summary: Summary

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[Tunnel]:
        ours, theirs = socket.socketpair()
        copies, ready = Copies(), asyncio.Future[Observer]()
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: copies, sock=ours)
        reader, writer = await asyncio.open_connection(sock=theirs)
        watched = asyncio.create_task(watch(reader, self.settings, ready.set_result))
        self.observer = await ready
        tunnel = Tunnel(Origin("127.0.0.1", self.port, ""), copies)
        await tunnel.start()
        try:
            yield tunnel
        finally:
            await tunnel.close()
            copies.close()
            self.summary = await watched
            writer.close()
            self.recorded = read(self.file)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():
            await asyncio.sleep(0.01)
