"""The register of a cluster in Valkey or Redis: one question, one answer, by a deadline.

What it keeps and answers is said in `core.register`; here it is asked. Nothing is asked twice
behind the caller's back unless the server said that it did nothing. Whoever has no answer may ask
the same again: that changes nothing more for all questions but three, which may then be refused for
what the first one did. These are PutTenants by its revision (`stale`), Leave and Release
(`not_a_member`); and ForgetOwner goes on where it was, as it is meant to.
"""

from __future__ import annotations

import asyncio
import secrets
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
from valkey.asyncio import Valkey
from valkey.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    TryAgainError,
    ValkeyError,
)

from kvatlas.config_register import EMBEDDED, Place, RegisterConfig, place_of
from kvatlas.core.register_limits import fault_of
from kvatlas.core.register_values import Answer, Commit, No, PutTenants, Question, Refused
from kvatlas.dataplane.tls import asking
from kvatlas.errors import ConfigError, RegisterError
from kvatlas.service.register_calls import Call, Word, answer_of, call_of, library, slot_key
from kvatlas.service.register_embedded import EmbeddedServer
from kvatlas.service.register_servers import Servers, send

ASKED_MAX = 1024  # under way, or waiting for a connection
_HOPS_MAX = 4  # servers that a question may be sent on to
_CANDIDATE_BYTES = 12


class RegisterPort(Protocol):
    """Where a register is asked: Valkey, or its twin in tests."""

    async def ask(self, question: Question, deadline_s: float) -> Answer:
        """Raises RegisterError where there is no answer within ``deadline_s``."""
        ...

    async def close(self) -> None: ...


class ValkeyRegister:
    """The register of the cluster ``name``. Use it in one event loop."""

    def __init__(self, servers: Servers, name: str, embedded: EmbeddedServer | None = None) -> None:
        self.name = name
        self._servers = servers
        self._embedded = embedded
        self._library = library()
        self._asked = 0
        self._closed = False

    async def ask(self, question: Question, deadline_s: float) -> Answer:
        """See `RegisterPort`."""
        return (await self.decided(question, deadline_s))[1]

    async def close(self) -> None:
        """Ends the server, too, where it is this process's own; nothing is asked any more."""
        self._closed = True
        await self._servers.close()
        if self._embedded is not None:
            await self._embedded.close()

    async def decided(self, question: Question, deadline_s: float) -> tuple[int, Answer]:
        """The answer, and when it was decided by the server's clock; 0 where it was not there."""
        if fault := fault_of(question):
            return 0, Refused(No.FULL, fault)
        if self._closed:  # asked again it would connect anew, or start its server
            raise self._error("it is closed here", "gone")
        if self._asked >= ASKED_MAX:
            raise self._error(f"{ASKED_MAX} questions wait for it already", "busy")
        self._asked += 1
        call = call_of(question, self.name, secrets.token_hex(_CANDIDATE_BYTES))
        try:
            async with asyncio.timeout(deadline_s):
                said = await self._called(call)
            return answer_of(question, said)
        except TimeoutError as error:
            raise self._error(f"no answer within {deadline_s:g} s", "late") from error
        except OutOfMemoryError as error:
            if isinstance(question, Commit | PutTenants):
                return 0, Refused(No.FULL, "the register's server is at its maxmemory")
            raise self._error(str(error), "full") from error
        except (ValkeyError, OSError) as error:
            raise self._error(str(error), _reason(error)) from error
        except RegisterError as error:
            raise self._error(str(error), error.reason) from error
        except ConfigError as error:  # files of TLS are read for each connection
            raise self._error(str(error), "unfit") from error
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise self._error(f"an answer that is none: {error}", "wrong") from error
        finally:
            self._asked -= 1

    async def _called(self, call: Call) -> object:
        """Sent on while servers say that it is not theirs."""
        for _ in range(_HOPS_MAX):
            client = await self._servers.client()
            try:
                return await self._on(client, call)
            except MovedError as error:
                await self._servers.drop(client, (error.host, error.port))
            except asyncio.CancelledError:
                # Another of a cluster may have taken over; a single one may only be slow.
                if self._servers.place.cluster:
                    await self._servers.drop(client)
                raise
            except (ValkeyError, OSError) as error:
                if _doubtful(error):
                    await self._servers.drop(client)
                raise
        raise RegisterError(f"sent on {_HOPS_MAX} times, and nobody has it", "moving")

    async def _on(self, client: Valkey, call: Call) -> object:
        name = f"{self._library.name}_{call.function}"
        words: tuple[Word, ...] = ("FCALL", name, len(call.keys), *call.keys, *call.args)
        try:
            return await send(client, *words)
        except ValkeyError as error:
            # A new server, one that took over before it had them, or somebody flushed them.
            if "Function not found" not in str(error):
                raise
        await send(client, "FUNCTION LOAD", "REPLACE", self._library.code)
        return await send(client, *words)

    def _error(self, text: str, reason: str) -> RegisterError:
        return RegisterError(f"register {self.name!r} at {self._servers.place}: {text}", reason)


def open_register(config: RegisterConfig) -> ValkeyRegister:
    """Connects, or starts its server, when it is asked first. Raises ConfigError."""
    if config.url == EMBEDDED:
        server = EmbeddedServer(Path(config.folder))
        place = Place(path=str(server.socket))
        servers = Servers(place, slot_key(config.name), awake=server.awake)
        return ValkeyRegister(servers, config.name, server)
    place = _with_password(place_of(config.url), config.password_file)
    tls = partial(asking, config.ca, config.cert, config.key) if place.tls else None
    if tls is not None:
        tls()  # files that cannot be used are told now
    return ValkeyRegister(Servers(place, slot_key(config.name), tls=tls), config.name)


def _with_password(place: Place, path: str) -> Place:
    if not path:
        return place
    try:
        password = Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"register.password_file: {path}: {error}") from error
    return msgspec.structs.replace(place, password=password)


# What is wrong, by what the library raises; by what the server says, where that is all.
_KINDS: tuple[tuple[tuple[type[Exception], ...], str], ...] = (
    ((AuthenticationError, AuthorizationError, NoPermissionError), "denied"),
    ((BusyLoadingError,), "loading"),
    ((ReadOnlyError,), "read_only"),
    ((AskError, TryAgainError, ClusterDownError), "moving"),
    ((InvalidResponse,), "wrong"),
    ((ConnectionError, OSError), "gone"),
)
_SAID = {
    "NOAUTH": "denied",
    "ACL failure": "denied",
    "NOREPLICAS": "read_only",
    "MISCONF": "full",
    "BUSY": "busy",
    "unknown command": "unfit",
}


def _reason(error: Exception) -> str:
    for kinds, reason in _KINDS:
        if isinstance(error, kinds):
            return reason
    return next((reason for word, reason in _SAID.items() if word in str(error)), "wrong")


def _doubtful(error: BaseException) -> bool:
    """Whether another server, or the same one met anew, may do better."""
    return isinstance(
        error, ConnectionError | OSError | InvalidResponse | ReadOnlyError | ClusterDownError
    )
