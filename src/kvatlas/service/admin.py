"""Who may see and change: by a certificate of the cluster, or by a token of an operator."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvatlas.config_tls import RIGHTS, AdminConfig, AuditConfig, Right, right_of
from kvatlas.dataplane.tls import Trust
from kvatlas.errors import ConfigError, RequestError
from kvatlas.service.audit import Audit
from kvatlas.service.http import Request

log = logging.getLogger(__name__)

TOKEN_HEADER = "x-kvatlas-admin-token"
TOKENS_MAX = 1000
ANYBODY = "anybody"
_LOOK_S = 1.0
_LINE = re.compile(rf"([A-Za-z0-9._-]{{1,128}})\s+({'|'.join(RIGHTS)})\s+([0-9a-f]{{64}})")


class Guard:
    """Of one part's pages. ``closed``: without `[admin]` nobody is let in; else everybody is."""

    def __init__(
        self,
        config: AdminConfig,
        *,
        closed: bool,
        audit: Audit | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError for a file of tokens that cannot be used."""
        self.counts: Counter[str] = Counter()
        self.audit = audit
        self._open = not closed and not config.on
        self._clients: dict[str, Right] = dict(filter(None, map(right_of, config.clients)))
        self._path = Path(config.tokens_file) if config.tokens_file else None
        self._clock = clock
        self._looked_s = clock()
        self._stamp = (0, 0, 0)
        self._tokens: dict[str, tuple[str, Right]] = {}
        self._error = ""  # of a file of tokens that changed and cannot be used
        self._read()

    @property
    def open(self) -> bool:
        """Is everybody let in?"""
        return self._open

    def problem(self) -> str:
        """Why the file of tokens as it is now is not what counts; "" where it is."""
        self._look()
        return self._error

    def admit(self, request: Request, need: Right, *, parts: tuple[str, ...] = ()) -> str:
        """Who asks, where he may: one of ``parts`` by its certificate, or who has the right.
        Raises RequestError. What people read or begin to change is written down; parts are at it
        all the time."""
        if request.who is not None and request.who.part in parts:
            return str(request.who)
        if parts and self._open:
            return ANYBODY
        who = self._admitted(request, need)
        if self.audit is not None and need != "metrics":
            what = f"{request.method} {request.path}"
            if need == "change":
                self.audit.changing(who, what, address=request.address)
            else:
                self.audit.note(who, what, address=request.address)
        return who

    def may(self, request: Request, need: Right) -> bool:
        """The same as a question; nothing of it is written."""
        return self._open or self._knows(self._known(request), need)

    def _admitted(self, request: Request, need: Right) -> str:
        if self._open:
            return ANYBODY
        known = self._known(request)
        if known is not None and self._knows(known, need):
            return known[0]
        self.counts["refused"] += 1
        wanted = (
            f"a token or a certificate with the right {need!r} is wanted ([admin]): kvatlas certs "
            "token makes one, commands send KVATLAS_ADMIN_TOKEN"
        )
        who = (
            f"{known[0]} has the right {known[1]!r}"
            if known is not None
            else str(request.who or "")
        )
        if self.audit is not None:
            what = f"{request.method} {request.path}"
            self.audit.refused(request.address, what, str(request.who or "nobody known"))
        if not who:
            raise RequestError(wanted, status=401, code="not_known")
        raise RequestError(f"{who}: {wanted}", status=403, code="not_allowed")

    def _knows(self, known: tuple[str, Right] | None, need: Right) -> bool:
        return known is not None and RIGHTS.index(known[1]) >= RIGHTS.index(need)

    def _known(self, request: Request) -> tuple[str, Right] | None:
        if request.who is not None and request.who.part == "client":
            right = self._clients.get(request.who.name)
            if right is not None:
                return str(request.who), right
        token = request.header(TOKEN_HEADER)
        if not token:
            kind, _, token = request.header("authorization").partition(" ")
            if kind.lower() != "bearer":
                return None
        self._look()
        digest = hashlib.sha256(token.strip().encode("latin-1")).hexdigest()
        found = self._tokens.get(digest)
        return (f"token {found[0]}", found[1]) if found is not None else None

    def _look(self) -> None:
        """A token whose line is gone is good for nothing a second later."""
        now = self._clock()
        if now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        try:
            self._read()
            self._error = ""
        except ConfigError as error:
            self.counts["reload_failed"] += 1
            if str(error) != self._error:
                log.error("tokens not taken up: %s", error)
            self._error = str(error)

    def _read(self) -> None:
        if self._path is None:
            return
        try:
            told = os.stat(self._path)
            stamp = told.st_mtime_ns, told.st_size, told.st_ino
            if stamp == self._stamp:
                return
            text = self._path.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"admin.tokens_file: {self._path}: {error}") from error
        tokens: dict[str, tuple[str, Right]] = {}
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            found = _LINE.fullmatch(line.strip())
            if found is None or len(tokens) >= TOKENS_MAX:
                raise ConfigError(
                    f"{self._path}:{number}: NAME RIGHT SHA256 is wanted, at most {TOKENS_MAX} "
                    "lines: kvatlas certs token"
                )
            tokens[found[3]] = found[1], msgspec.convert(found[2], Right)
        self._tokens, self._stamp = tokens, stamp


class Safety(msgspec.Struct, frozen=True):
    """What one part proves and believes (None: plain), and who may use its pages."""

    trust: Trust | None = None
    guard: Guard = Guard(AdminConfig(), closed=False)


def safety_of(
    admin: AdminConfig, audit: AuditConfig, trust: Trust | None, part: str, *, closed: bool
) -> Safety:
    """As a part's file says; ``closed``: its pages, where nobody is named. Raises ConfigError."""
    log_of = Audit(audit, part) if audit.file else None
    return Safety(trust, Guard(admin, closed=closed, audit=log_of))
