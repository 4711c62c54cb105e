"""What a gateway with [tenants] runs beside the rest: the door, public prefixes, salts, limits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvatlas.config import Config
from kvatlas.core.keys import Keyring
from kvatlas.errors import RequestError
from kvatlas.service.isolation import paths_for
from kvatlas.service.public_prefixes import PublicPrefixes
from kvatlas.service.purge import PAGE, Purger
from kvatlas.service.salts import Salts
from kvatlas.service.steer import Inbound
from kvatlas.service.tenants import Tenants
from kvatlas.service.tokens import Tokenizer

log = logging.getLogger(__name__)

REFRESH_S = 2.0


class Tenancy:
    """`start` it on a running loop, `close` it. Without [tenants] there is no door."""

    def __init__(self, config: Config, ring: Keyring, tokenizer: Tokenizer | None) -> None:
        """Raises ConfigError for files that cannot be used."""
        self.tenants: Tenants | None = None
        self.public: PublicPrefixes | None = None
        if config.tenants.on:
            paths = paths_for({worker.engine for worker in config.worker})
            self.tenants = Tenants(config.tenants, ring, paths=paths)
        if config.tenants.public and tokenizer is not None:
            self.public = PublicPrefixes(Path(config.tenants.public), tokenizer.prompt)
        self.salts = Salts(ring, self.public)
        self.purger: Purger | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look for what has changed from now on."""
        if self.tenants is not None:
            await self.refresh()
            self._task = asyncio.create_task(self._keep(), name="tenants")
        if self.purger is not None:
            self.purger.start()

    async def close(self) -> None:
        if self.purger is not None:
            await self.purger.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self.refresh()
            except Exception:  # ours: what counted before still does
                log.exception("the files of tenants could not be looked at")

    async def refresh(self) -> None:
        """Reads again what has changed; what could not be made into tokens is tried once more."""
        if self.tenants is not None:
            self.tenants.refresh()
        if self.public is not None:
            await self.public.refresh(again=bool(self.public.problems))

    def problems(self) -> dict[str, str]:
        """What is wrong with them, for /health: by file or entry."""
        found = {}
        if self.tenants is not None and self.tenants.problem:
            found["file"] = self.tenants.problem
        if self.public is not None:
            found |= {f"public {name}": why for name, why in self.public.problems.items()}
        if self.purger is not None:
            found |= self.purger.problems()
        return found

    def questions(self) -> dict[str, Callable[[Inbound], Awaitable[object]]]:
        """The gateway's POST paths of theirs."""

        async def purge(request: Inbound) -> object:
            if self.purger is None:
                why = "no purge without a receipt: set tenants.receipts to a folder"
                raise RequestError(why, status=409, code="not_purged")
            return await self.purger.question(request)

        return {PAGE: purge}
