"""Who asks: credentials → tenant and session → what its cache salt says.

The file of tenants is read again when it has changed. One that cannot be used changes nothing and
is flagged: who was let in stays in, who was not does not come in by a broken file.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from kvatlas import config_tenants
from kvatlas.config import read
from kvatlas.config_tenants import Tenant, TenantsConfig, TenantsFile, digest_of
from kvatlas.core.keys import Keyring
from kvatlas.core.tenancy import TenantSalt, epoch_at, session_of, tag_of
from kvatlas.errors import ConfigError, RequestError
from kvatlas.service import isolation
from kvatlas.service.http import Headers, Request
from kvatlas.service.tenants_jwt import Tokens

log = logging.getLogger(__name__)

SESSION_HEADER = "x-kvatlas-session"
CREDENTIAL_CHARS_MAX = 8192


class Caller(msgspec.Struct, frozen=True):
    """Who asks, what the salt of its requests says but for what is public of them, and as what
    figures count it."""

    tenant: str
    salt: TenantSalt
    tenant_class: str


class _One(msgspec.Struct, frozen=True):
    """A tenant, and what agents know it by."""

    tenant: Tenant
    tag: str


class _Known(msgspec.Struct, frozen=True):
    """What one reading of the file came to."""

    by_key: Mapping[bytes, _One] = {}
    by_claim: Mapping[str, _One] = {}


class Tenants:
    """The door. Lives on the event loop; `refresh` it now and then, in a thread if need be."""

    def __init__(
        self,
        config: TenantsConfig,
        ring: Keyring,
        *,
        paths: Collection[str] = isolation.PATHS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``paths``: where their requests may go; ``clock``: seconds since 1970. Raises ConfigError
        for files that cannot be used."""
        self.file = TenantsFile()
        self.problem = ""  # why the file as it is now is not what counts
        self.for_engines: Headers = []  # instead of the credentials that clients show us
        #: The tag that a session has now: another, once it was purged.
        self.renew: Callable[[str, str], str] = lambda _, session: session
        self._paths = paths
        self._config = config
        self._ring = ring
        self._clock = clock
        self._path = Path(config.file)
        self._seen: object = None
        self._reading = threading.Lock()
        self._known = _Known()
        self._tokens = Tokens(config) if config.jwt_keys else None
        if config.engine_key_file:
            key = _engine_key(Path(config.engine_key_file))
            self.for_engines = [(b"authorization", b"Bearer " + key)]
        self._read()

    # -- the file ---------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Reads again what has changed, and says whether other tenants count now. One at a time:
        who began with an older file must not end last."""
        with self._reading:
            return self._refresh()

    def _refresh(self) -> bool:
        changed, problems = False, []
        if self._tokens is not None:
            try:
                self._tokens.refresh()
            except ConfigError as error:
                problems.append(str(error))
        try:
            if stamp_of(self._path) != self._seen:
                self._read()
                changed = True
        except ConfigError as error:
            problems.append(str(error))
        problem = "; ".join(problems)
        if problem and problem != self.problem:
            log.warning("tenants: what counted before still does: %s", problem)
        self.problem = problem
        return changed

    def _read(self) -> None:
        seen = stamp_of(self._path)
        file = load(self._path)
        if self._tokens is None and not any(tenant.keys for tenant in file.tenant):
            raise ConfigError(
                f"{self._path}: no tenant has a key, and there is no tenants.jwt_keys: nobody "
                "could come in (kvatlas tenant set NAME --new-key)"
            )
        self.file, self._seen = file, seen
        all_ = [_One(tenant, tag_of(self._ring, tenant.name)) for tenant in file.tenant]
        self._known = _Known(
            {self._place(key): one for one in all_ for key in one.tenant.keys},
            {one.tenant.jwt or one.tenant.name: one for one in all_},
        )

    def tagged(self) -> Iterator[tuple[Tenant, str]]:
        """Each tenant, and the tag by which all other parts know it."""
        return ((one.tenant, one.tag) for one in self._known.by_claim.values())

    # -- requests ---------------------------------------------------------------------------------

    def check(self, request: Request, body: Mapping[str, object]) -> None:
        """Raises RequestError for a request that could reach another tenant's state."""
        isolation.check(request.method, request.path, body, self._paths)

    def admit(self, headers: Headers) -> Caller:
        """Who sends a request with these ``headers``. Raises RequestError 401 for who is not known,
        403 for who is, and may not."""
        shown = [value for name, value in headers if name in isolation.CREDENTIALS]
        if not shown:
            raise _stranger("no credentials: send Authorization: Bearer and an API key or a token")
        if len(shown) > 1:
            raise _stranger("more than one credential was sent: send one")
        name = next(name for name, _ in headers if name in isolation.CREDENTIALS)
        text = shown[0].decode("latin-1").strip()
        if name == b"authorization":
            scheme, _, text = text.partition(" ")
            text = text.strip()
            if scheme.lower() != "bearer" or not text:
                raise _stranger("Authorization is not of the form: Bearer and a key or a token")
        if len(text) > CREDENTIAL_CHARS_MAX or not text.isascii():
            raise _stranger("these credentials are not known here")
        if self._tokens is not None and text.count(".") == 2:
            return self._by_token(self._tokens, text, headers)
        known = self._known.by_key.get(self._place(digest_of(text)))
        if known is None:
            raise _stranger("these credentials are not known here")
        return self._caller(known, self._named_session(headers))

    def _place(self, digest: str) -> bytes:
        """Where a key is looked up: nobody without the secret knows how near another one comes,
        so that the time that a look takes tells nothing of keys."""
        return self._ring.proof(b"api key\0" + digest.encode())

    def _by_token(self, tokens: Tokens, text: str, headers: Headers) -> Caller:
        try:
            claims = tokens.claims(text, self._clock())
        except ValueError as error:
            raise _stranger(f"the token is not taken: {error}") from error
        known = self._known.by_claim.get(claims.tenant)
        if known is None:
            raise RequestError(
                "the token is good, and its tenant is none of this gateway's",
                status=403,
                code="unknown_tenant",
            )
        return self._caller(known, claims.session or self._named_session(headers))

    def _named_session(self, headers: Headers) -> str:
        if not self._config.session_header:
            return ""
        name = SESSION_HEADER.encode()
        values = [value for header, value in headers if header == name]
        try:
            return values[0].decode() if len(values) == 1 else ""
        except UnicodeDecodeError as error:
            raise _bad_session("it is not UTF-8") from error

    def _caller(self, known: _One, session: str) -> Caller:
        tenant, tag = known.tenant, known.tag
        if tenant.share == "session" and not session:
            raise RequestError(
                "this tenant's requests each belong to a session, and none was named",
                status=403,
                code="session_needed",
            )
        try:
            within = session_of(self._ring, tag, session) if tenant.share == "session" else ""
            within = self.renew(tag, within)
        except ValueError as error:
            raise _bad_session(str(error)) from error
        epoch = epoch_at(tenant.epoch, tenant.rotation_s, self._clock())
        return Caller(tenant.name, TenantSalt(tag, epoch, within), tenant.tenant_class)


def load(path: Path) -> TenantsFile:
    """The file of tenants. Raises ConfigError with the line for what cannot be."""
    text, file = read(path, TenantsFile, config_tenants.TABLES)
    return config_tenants.checked(path, text, file)


def stamp_of(path: Path) -> object:
    """What differs once a file was written again. Raises ConfigError where there is none."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    return found.st_mtime_ns, found.st_size, found.st_ino


def _engine_key(path: Path) -> bytes:
    try:
        key = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tenants.engine_key_file: {path}: cannot be read: {error}") from error
    if not key or len(key.split()) != 1:
        raise ConfigError(f"tenants.engine_key_file: {path}: holds no single key")
    return key.encode()


def _stranger(text: str) -> RequestError:
    return RequestError(text, status=401, code="invalid_api_key")


def _bad_session(why: str) -> RequestError:
    return RequestError(f"the session's name: {why}", code="bad_session", param=SESSION_HEADER)
