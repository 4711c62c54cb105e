"""One cluster while a stage runs: who is asked, who counts, what may be broken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvatlas.errors import ConfigError, EngineError
from kvatlas.service.http_client import HttpClient
from kvatlas.service.load import first_model
from kvatlas.validate.stages.asking import Asker, Prompts
from kvatlas.validate.stages.facts import EngineSeen, Phase
from kvatlas.validate.stages.hooks import Hooks
from kvatlas.validate.stages.identity import look_at
from kvatlas.validate.stages.stagefile import Agent, Engine, StageFile
from kvatlas.validate.stages.values import Missing
from kvatlas.validate.stages.watching import Watcher


class Site:
    """What all stages use of it. Open it first."""

    def __init__(
        self,
        client: HttpClient,
        file: StageFile,
        own: Mapping[str, Callable[[], None]] | None = None,
    ) -> None:
        self.client = client
        self.file = file
        self.model = file.model
        self.prompts = Prompts(file.requests)
        self.asker = Asker(client, self.prompts, self.model)
        self.watcher = Watcher(client, file)
        self.hooks = Hooks(file.hooks | file.read, timeout_s=file.requests.hook_s, own=own)

    async def open(self) -> None:
        """See that all parts answer. Raises EngineError where one does not: nothing is shown."""
        urls = [engine.url for engine in self.file.engine] + [g.url for g in self.file.gateway]
        for url in urls:
            found = await first_model(self.client, url)
            self.model = self.model or found
        self.asker = Asker(self.client, self.prompts, self.model)

    def one(self, stage: str, *roles: str) -> Engine:
        """The first engine of a role. Raises ConfigError where the file has none."""
        found = self.file.engines(*roles)
        if not found:
            raise ConfigError(f"stage {stage} needs an [[engine]] with role {' or '.join(roles)}")
        return found[0]

    def agent_of(self, engine: Engine) -> Agent | None:
        """Of its node."""
        return next((a for a in self.file.agent if a.name == engine.agent), None)

    async def look_at(self, engine: Engine) -> EngineSeen:
        """What it tells of itself; nothing, and why, where it does not answer."""
        try:
            return await look_at(self.client, engine)
        except EngineError as error:
            return EngineSeen(engine.name, engine.role, {}, str(error))

    async def phase(
        self, engines: Sequence[Engine], url: str, indices: Iterable[int], salt: str
    ) -> Phase:
        """Ask, and what was counted meanwhile."""
        before = await self.watcher.snapshot(engines)
        replies = await self.asker.ask(url, indices, salt)
        agents = [a for e in engines if (a := self.agent_of(e)) is not None]
        if agents:  # what is counted when a load ends has been counted by then
            await self.watcher.settle(agents, self.file.requests.settle_s)
        counted, seen = await self.watcher.between(before, engines)
        return Phase(replies, counted, seen)

    async def let_go(self, engine: Engine) -> Missing | None:
        """The engine forgets what it cached; why it could not be brought to it, else None."""
        if "forget" in self.hooks:
            return await self.hooks.run("forget")
        return await self.watcher.forget(engine)

    async def settled(self) -> Missing | None:
        """All agents have saved what there was."""
        return await self.watcher.settle(self.file.agent, self.file.requests.settle_s)
