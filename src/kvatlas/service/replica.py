"""A gateway as one of several: who else is there, who leads, which agents have come, what all know.

The tenants' file of each gateway is the register's: a change of one is every other's, the first of
two that meet counts, and each gateway starts with what it had last where the register is away.
Floors of purges go the same way. Agents that are members are taken up as if they stood in the file.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import socket
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import msgspec

from kvatlas import __version__
from kvatlas.config import AgentConfig, Config
from kvatlas.config_register import RegisterConfig, trusting
from kvatlas.core import membership as core
from kvatlas.core.forgetting import Floor
from kvatlas.core.keys import Keyring
from kvatlas.core.register_values import AskTenants, Member, ToldTenants
from kvatlas.errors import ConfigError, RegisterError
from kvatlas.lasting import whole_file
from kvatlas.service.http_client import origin_of
from kvatlas.service.membership import Membership
from kvatlas.service.register import RegisterPort, open_register

log = logging.getLogger(__name__)

CONTROLLER = "controller"  # the lease of who orders copies that nobody asked for
START_S = 2.0
_LIFE_BYTES = 8


class AgentTold(msgspec.Struct, frozen=True):
    """What an agent tells of itself as a member: as it would stand in kvatlas.toml."""

    workers: tuple[str, ...]
    store: str = ""


class _Kept(msgspec.Struct, frozen=True):
    """Beside the tenants' file: of which revision it is, and what it was then."""

    revision: int
    digest: str


class Replica:
    """Of one gateway. Lives on the event loop; `start` and `close` it."""

    def __init__(
        self,
        config: Config,
        register: RegisterPort,
        ring: Keyring,
        *,
        met: Callable[[], None],
        learnt: Callable[[tuple[Floor, ...]], None],
        floors: Iterable[Floor] = (),
    ) -> None:
        """``met`` is called when other members are there than before; ``learnt`` is told of floors
        that others raised; ``floors``: those that are known here."""
        self._strays: dict[str, str] = {}
        self._configured: tuple[AgentConfig, ...] = ()
        self._https = config.tls.on
        self._path = Path(config.tenants.file) if config.tenants.on else None
        self._seen = ""  # digest of the tenants' file as it was last looked at
        self._overruled = ""
        self._unwritten = ""
        self._due: core.Tenants | None = None  # what could not be written
        kept = self._kept() if self._path is not None else None
        self.members = Membership(
            config.register,
            register,
            member_of(config),
            ring,
            wants=(CONTROLLER,),
            tenants=kept,
            floors=floors,
        )
        self.members.met = lambda _: met()
        self.members.learnt = learnt
        self.members.tenants = self._told
        self.members.overruled = self._lost

    async def start(self) -> None:
        """Waits a moment for the register: what agents there are is known then, mostly."""
        self.look()
        await self.members.start(START_S)

    async def close(self) -> None:
        await self.members.close()

    @property
    def leads(self) -> bool:
        """Whether copies that nobody asked for are this gateway's to order."""
        return self.members.leads(CONTROLLER)

    def peers(self) -> tuple[str, ...]:
        """URLs of the other gateways."""
        others = self.members.core.others
        return tuple(member.url for member in others if member.kind == "gateway")

    def agents(
        self, configured: tuple[AgentConfig, ...], workers: Collection[str]
    ) -> tuple[AgentConfig, ...]:
        """Those that are ``configured``, and members. A member's word counts for ``workers`` of
        this gateway that are in no other agent's hands."""
        taken = {name for agent in configured for name in agent.workers}
        names = {agent.name for agent in configured}.union(workers)
        found = list(configured)
        self._configured = configured
        self._strays = {}
        for member in self.members.core.others:
            if member.kind != "agent" or member.name in names:
                continue
            try:
                told = agent_told(member, https=self._https)
            except ConfigError as error:
                self._strays[f"agent {member.name}"] = str(error)
                continue
            named = dict.fromkeys(told.workers)
            its = tuple(name for name in named if name in workers and name not in taken)
            if its:
                taken.update(its)
                found.append(AgentConfig(member.name, member.url, its, told.store))
            else:
                self._strays[f"agent {member.name}"] = (
                    "it is a member, but none of its workers is configured here, or another agent "
                    "has them: name its engines as [[worker]]"
                )
        return tuple(found)

    def _apart(self) -> dict[str, str]:
        """Agents whose resume records of a shared store nobody finds who is a member."""
        if self.members.core.standing is not core.Standing.MEMBER:
            return {}
        there = {word for m in self.members.core.others for word in (m.name, m.url)}
        return {
            f"agent {agent.name}": (
                f"it shares the store {agent.store!r} and is no member, so that members and it do "
                "not find what the other saved there, and quotas of object do not hold for it: "
                "start it with a --config that has this [register]"
            )
            for agent in self._configured
            if agent.store and not there & {agent.name, agent.url}
        }

    # -- tenants --------------------------------------------------------------------------------

    def look(self) -> None:
        """After the tenants' file was read, and found good: what was changed here, all get."""
        if self._path is None:
            return
        if self._due is not None:  # else a change of an older file would undo it
            self._told(self._due)
            return
        try:
            text = self._path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return  # whoever reads it says so
        digest = _digest(text)
        if digest != self._seen:
            self._seen = digest
            self.members.edited(text)

    def _kept(self) -> core.Tenants:
        """What this gateway had last."""
        assert self._path is not None
        beside = _beside(self._path)
        try:
            kept = msgspec.json.decode(beside.read_bytes(), type=_Kept)
            text = self._path.read_text("utf-8")
        except FileNotFoundError:
            return core.Tenants(0, "")
        except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{beside}: cannot be read: {error}; take it away") from error
        if _digest(text) == kept.digest:
            self._seen = kept.digest
            return core.Tenants(kept.revision, text)
        return core.Tenants(kept.revision, "")  # it was changed since: `look` says so

    def _told(self, told: core.Tenants) -> None:
        assert self._path is not None
        digest = _digest(told.text)
        try:
            here = self._path.read_text("utf-8", "replace")
        except OSError:
            here = told.text
        changed = _digest(here) not in (self._seen, digest)  # since it was last looked at
        if changed and digest != self._seen:
            self._lost(here)
        try:
            if changed and digest == self._seen:  # it follows on this, as `look` will say
                _write_revision(self._path, told)
            else:
                write_tenants(self._path, told)
        except OSError as error:
            self._unwritten = f"{self._path}: the tenants of all are not written: {error.strerror}"
            log.warning("%s", self._unwritten)
            self._due = told
            return
        self._seen, self._unwritten, self._due = digest, "", None

    def _lost(self, text: str) -> None:
        """Kept beside the file, for whoever made that change."""
        assert self._path is not None
        aside = self._path.with_name(self._path.name + ".overruled")
        try:
            with whole_file(aside) as file:
                file.write(text.encode())
        except OSError as error:
            log.warning("%s: %s", aside, error)
        self._overruled = (
            f"{self._path} was changed here and elsewhere at once; what was changed elsewhere "
            f"counts. Make the change of {aside.name} again, or take that file away"
        )

    # -- for people -----------------------------------------------------------------------------

    def problems(self) -> dict[str, str]:
        """For the health page."""
        found = self.members.problems()
        if self._unwritten:
            found["tenants unwritten"] = self._unwritten
        if self._overruled and self._path is not None:
            if self._path.with_name(self._path.name + ".overruled").exists():
                found["tenants overruled"] = self._overruled
            else:
                self._overruled = ""
        return found | self._strays | self._apart()

    async def page(self, _: str) -> object:
        """GET /kvatlas/members."""
        return self.members.report()


def member_of(config: Config) -> Member:
    """This gateway, at this start."""
    gateway = config.gateway
    here = f"{socket.gethostname()}:{gateway.port}"
    scheme = "https" if config.tls.on else "http"
    url = config.register.advertise or f"{scheme}://{here}"
    return Member(
        url.partition("://")[2], "gateway", secrets.token_hex(_LIFE_BYTES), url, __version__
    )


def agent_told(member: Member, *, https: bool) -> AgentTold:
    """What an agent tells of itself. Raises ConfigError for what cannot be used, and where it would
    have to be asked in the clear with ``https``."""
    try:
        origin_of(member.url)
        told = msgspec.json.decode(member.told, type=AgentTold)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"what it tells of itself cannot be used: {error}") from error
    if https and not member.url.startswith("https:"):
        raise ConfigError(f"it is at {member.url}, and with [tls] agents are asked by https")
    return told


def registered(config: Config) -> RegisterConfig:
    """Its [register], with the files of [tls] where it names none."""
    tls = config.tls
    return trusting(config.register, tls.ca, tls.cert, tls.key)


async def fetch_tenants(config: Config, port: RegisterPort | None = None) -> None:
    """A gateway that has no tenants' file yet gets that of the others, by ``port`` or the register
    that is configured. Raises ConfigError."""
    path = Path(config.tenants.file)
    if not config.tenants.on or await asyncio.to_thread(path.exists):
        return
    register = port or open_register(registered(config))
    try:
        told = await register.ask(AskTenants(), config.register.deadline_s)
    except RegisterError as error:
        raise ConfigError(f"{path}: there is none here, and {error}") from error
    finally:
        await register.close()
    if not isinstance(told, ToldTenants) or not told.text:
        raise ConfigError(f"{path}: there is none, neither here nor in the register")
    try:
        write_tenants(path, core.Tenants(told.revision, told.text))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def write_tenants(path: Path, told: core.Tenants) -> None:
    """The file, then what it is. Raises OSError."""
    with whole_file(path) as file:
        file.write(told.text.encode())
    _write_revision(path, told)


def _write_revision(path: Path, told: core.Tenants) -> None:
    with whole_file(_beside(path)) as file:
        file.write(msgspec.json.encode(_Kept(told.revision, _digest(told.text))))


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".register")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
