"""What a gateway with [tenants] runs beside the rest: the door, public prefixes, salts, limits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from kvatlas.config import Config
from kvatlas.config_tenants import TenantsFile
from kvatlas.core.keys import Keyring
from kvatlas.errors import EngineError, RequestError
from kvatlas.service.agent_orders import ask
from kvatlas.service.agents import Agents
from kvatlas.service.http_client import HttpClient
from kvatlas.service.isolation import paths_for
from kvatlas.service.public_prefixes import PublicPrefixes
from kvatlas.service.purge import PAGE, Purger
from kvatlas.service.salts import Salts
from kvatlas.service.steer import Inbound
from kvatlas.service.tenant_limits import LIMITS, Limits, limits_of
from kvatlas.service.tenants import Tenants
from kvatlas.service.tokens import Tokenizer

log = logging.getLogger(__name__)

REFRESH_S = 2.0
_TIMEOUT_S = 5.0


class Tenancy:
    """`start` it on a running loop, `close` it. Without [tenants] there is no door."""

    def __init__(
        self, config: Config, ring: Keyring, tokenizer: Tokenizer | None, client: HttpClient
    ) -> None:
        """``client``: to agents. Raises ConfigError for files that cannot be used."""
        self._registered = config.register.on
        self.agents: Agents | None = None  # before they are there, none is told of limits
        self._teller = Teller(ring, client)
        self.tenants: Tenants | None = None
        self.public: PublicPrefixes | None = None
        if config.tenants.on:
            paths = paths_for({worker.engine for worker in config.worker})
            self.tenants = Tenants(config.tenants, ring, paths=paths)
        if config.tenants.public and tokenizer is not None:
            self.public = PublicPrefixes(Path(config.tenants.public), tokenizer.prompt)
        self.salts = Salts(ring, self.public)
        self.purger: Purger | None = None
        #: Called when the file of tenants is another one, and good.
        self.changed: Callable[[], None] = lambda: None
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
            # Ten thousand tenants take two seconds to read.
            if await asyncio.to_thread(self.tenants.refresh):
                self.changed()
            if self.agents is not None:
                await self._teller.tell(self.agents, self.tenants.file)
        if self.public is not None:
            await self.public.refresh()

    def problems(self) -> dict[str, str]:
        """What is wrong with them, for /health: by file or entry."""
        found = {f"limits at {name}": why for name, why in self._teller.problems.items()}
        if self.tenants is not None and self.tenants.problem:
            found["file"] = self.tenants.problem
        if self.public is not None:
            found |= {f"public {name}": why for name, why in self.public.problems.items()}
        if self.purger is not None:
            found |= self.purger.problems()
        if self.tenants is not None and not self._registered:
            stored = [t.name for t in self.tenants.file.tenant if t.quota_bytes.object is not None]
            if stored:
                found["quota of object"] = (
                    f"of {len(stored)} tenants, {stored[0]!r} first: nobody holds them to it: it "
                    "needs a [register]"
                )
        return found

    def questions(self) -> dict[str, Callable[[Inbound], Awaitable[object]]]:
        """The gateway's POST paths of theirs."""

        async def purge(request: Inbound) -> object:
            if self.purger is None:
                why = "no purge without a receipt: set tenants.receipts to a folder"
                raise RequestError(why, status=409, code="not_purged")
            return await self.purger.question(request)

        return {PAGE: purge}


class Teller:
    """A gateway's side. On the event loop."""

    def __init__(self, ring: Keyring, client: HttpClient) -> None:
        self.problems: dict[str, str] = {}  # agent → why it does not know the limits as they are
        self._ring = ring
        self._client = client
        self._file = TenantsFile()
        self._wanted = Limits()  # those of the file
        self._told: dict[str, Limits] = {}

    async def tell(self, agents: Agents, file: TenantsFile) -> None:
        """Each agent that is there and knows other limits than those of the file."""
        if file is not self._file:  # ten thousand tenants' tags take a tenth of a second
            self._file, self._wanted = file, limits_of(self._ring, file)
        wanted = self._wanted
        there = {n: node for n, node in agents.nodes.items() if node.told is not None}
        self._told = {name: told for name, told in self._told.items() if name in there}
        self.problems = {name: why for name, why in self.problems.items() if name in there}
        for name, node in there.items():
            life = node.told.life if node.told else ""
            limits = msgspec.structs.replace(wanted, life=life)
            if self._told.get(name) == limits or (wanted == Limits() and name not in self._told):
                continue
            try:
                await ask(
                    self._client,
                    self._ring,
                    node.config.url,
                    LIMITS,
                    limits,
                    kind=dict[str, int],
                    timeout_s=_TIMEOUT_S,
                )
            except EngineError as error:
                self.problems[name] = str(error)
            else:
                self._told[name] = limits
                self.problems.pop(name, None)
