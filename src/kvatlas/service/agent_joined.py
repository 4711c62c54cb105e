"""An agent as a member of its cluster: gateways find it, and it knows what was forgotten.

It says which engines of its node it carries and which store it shares; gateways take it up as if it
stood in their file. Floors of purges that it was away for it has from the register, with the first
answer. Resume records of the store lie there too (`service.agent_records`).
"""

from __future__ import annotations

import asyncio
import secrets

import msgspec

from kvatlas import __version__
from kvatlas.config_register import RegisterConfig
from kvatlas.core import agent_values as words
from kvatlas.core.forgetting import Floor
from kvatlas.core.keys import Keyring
from kvatlas.core.records import Tier
from kvatlas.core.register_values import Member
from kvatlas.errors import ConfigError
from kvatlas.service.agent import NodeAgent
from kvatlas.service.agent_records import Records
from kvatlas.service.membership import Membership
from kvatlas.service.register import RegisterPort
from kvatlas.service.replica import AgentTold

START_S = 2.0
_LIFE_BYTES = 8


class Part(msgspec.Struct, frozen=True):
    """What an agent takes part by: the ``name`` that gateways know it by, the ``url`` of its pages
    for them ("": where it listens), the ``workers`` on its node, and the name of the ``store`` that
    it shares with others ("" for none)."""

    name: str
    url: str
    workers: tuple[str, ...]
    store: str = ""


class Joined:
    """Of one agent that runs. `start` and `close` it; ``register`` is closed with it."""

    def __init__(
        self, part: Part, config: RegisterConfig, register: RegisterPort, agent: NodeAgent
    ) -> None:
        """Raises ConfigError for a part that cannot be."""
        if not part.workers:
            raise ConfigError("--engine: a member says which engines are on its node")
        shares = agent.driver.ways.store(Tier.OBJECT) is not None
        if shares != bool(part.store):
            raise ConfigError("--store and --object need each other: the name of what is shared")
        told = msgspec.json.encode(AgentTold(part.workers, part.store))
        life = secrets.token_hex(_LIFE_BYTES)
        url = part.url or agent.front.url
        me = Member(part.name, "agent", life, url, __version__, told=told)
        self._agent = agent
        self._draining: asyncio.Task[None] | None = None
        self.members = Membership(config, register, me, Keyring(agent.settings.secret))
        self.members.learnt = self._learnt
        self.records: Records | None = None
        if part.store:
            self.records = Records(
                register,
                part.store,
                config.deadline_s,
                counts=agent.driver.ways.counts,
                lost=lambda: agent.driver.ways.void((Tier.OBJECT, "")),
                limited=agent.front.limited,
            )
            agent.driver.ways.records = self.records

    async def start(self) -> None:
        """Waits a moment for what was forgotten while it was away."""
        await self.members.start(START_S)
        self._draining = asyncio.create_task(self._tell_drain(), name="draining")
        self._agent.front.joined = self.members.problems

    async def close(self) -> None:
        if self._draining is not None:
            self._draining.cancel()
            await asyncio.gather(self._draining, return_exceptions=True)
        if self.records is not None:
            await self.records.close()
        await self.members.close()

    def _learnt(self, floors: tuple[Floor, ...]) -> None:
        self._agent.driver.tell(words.Forget(floors=floors))

    async def _tell_drain(self) -> None:
        """The others need not count on what it will not have any more."""
        await self._agent.errands.draining.wait()
        self.members.change(msgspec.structs.replace(self.members.core.me, draining=True))
