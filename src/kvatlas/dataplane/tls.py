"""Who is at the other end: certificates of the parts of a cluster, and contexts made of them.

A part's certificate names it in one URI: ``kvatlas://gateway/NAME``, agent, engine or client. Its
chain and its host name are checked by OpenSSL; that it is of the right part, here. TLS 1.3 only,
and no session is resumed: every connection proves anew who is there.

Files that change are read again within a second, for connections to come; those that live stay.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from kvatlas.config_tls import TlsConfig
from kvatlas.errors import ConfigError

log = logging.getLogger(__name__)

Part = Literal["gateway", "agent", "engine", "client"]
SCHEME = "kvatlas://"
HANDSHAKE = 0x16  # the first byte of every TLS connection
SPEAKS_S = 1.0  # who comes to speak TLS speaks first
EXPIRES_SHARE = 0.1  # of its life: a certificate with less left is warned of
_LOOK_S = 1.0
_WARN_S = 3600.0
_URI = re.compile(r"kvatlas://(gateway|agent|engine|client)/([A-Za-z0-9._-]{1,128})")
_REASONS = re.compile(r"\[(?:SSL|X509)[^\]]*\]\s*|\s*\(_ssl\.c:\d+\)")


class Identity(msgspec.Struct, frozen=True):
    """Who somebody is, as a certificate of the cluster's CA says."""

    part: str
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.part}/{self.name}"


class WrongPart(ssl.SSLError):
    """The certificate is good, and of somebody else."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text


def identity_of(uris: list[str]) -> Identity | None:
    """The one identity among the URIs of a certificate, or None. Raises WrongPart where there are
    several, or one that is none."""
    ours = [uri for uri in uris if uri.startswith(SCHEME)]
    if not ours:
        return None
    found = _URI.fullmatch(ours[0])
    if len(ours) > 1 or found is None:
        raise WrongPart(f"its certificate names {', '.join(ours)}, which is nobody")
    return Identity(found[1], found[2])


def reason_of(error: BaseException) -> str:
    """What OpenSSL said, without its places in C."""
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_message:
        return f"certificate refused: {error.verify_message}"
    text = _REASONS.sub("", str(error)).strip() or type(error).__name__
    return text.replace("tlsv13 alert", "TLS alert:").replace("sslv3 alert", "TLS alert:")


class Life(msgspec.Struct, frozen=True):
    """From when until when a certificate holds, on time.time, and whom it names."""

    begins_s: float
    ends_s: float
    identity: Identity | None

    def share_left(self, now_s: float) -> float:
        """Of its life; 0 and less: it is over."""
        return (self.ends_s - now_s) / max(self.ends_s - self.begins_s, 1.0)


class _Files(msgspec.Struct, frozen=True):
    """Contexts of one reading of the files."""

    server: ssl.SSLContext  # a certificate is asked for, and looked at where it matters
    strict: ssl.SSLContext  # without one nobody comes in
    client: ssl.SSLContext
    engines: ssl.SSLContext
    issuers: tuple[x509.Certificate, ...]
    life: Life


class Trust:
    """What one part shows, and whom it believes. Usable from any thread."""

    def __init__(
        self,
        config: TlsConfig,
        part: Part,
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError for files that cannot be used, or are another part's."""
        self.config = config
        self.part = part
        self.counts: Counter[str] = Counter()
        self.error = ""  # of files that changed and cannot be used
        self._wall = wall
        self._clock = clock
        self._stamp = self._stamped()
        self._looked_s = clock()
        self._warned_s = -math.inf
        self._files = self._read()
        self._warn(self._looked_s)

    @property
    def server(self) -> ssl.SSLContext:
        """For what listens, where not everybody needs a certificate."""
        return self._fresh().server

    @property
    def strict(self) -> ssl.SSLContext:
        """For what listens to parts alone."""
        return self._fresh().strict

    @property
    def client(self) -> ssl.SSLContext:
        """For connections to other parts."""
        return self._fresh().client

    @property
    def engines(self) -> ssl.SSLContext:
        """For connections to engines."""
        return self._fresh().engines

    @property
    def life(self) -> Life:
        """Of our own certificate."""
        return self._fresh().life

    def who(self, der: bytes | None) -> Identity | None:
        """Whom a certificate names that OpenSSL has found good; None for none, and for one that
        another CA than the cluster's has signed. Raises WrongPart."""
        if not der:
            return None
        told = _parsed(der)
        if self.config.clients_ca and not any(_issued(told, ca) for ca in self._fresh().issuers):
            return None
        return identity_of(_uris(told))

    def _fresh(self) -> _Files:
        now = self._clock()
        if now - self._looked_s < _LOOK_S:
            return self._files
        self._looked_s = now
        try:
            stamp = self._stamped()
            if stamp != self._stamp:
                self._files = self._read()
                self._stamp, self.error = stamp, ""
                self.counts["reloaded"] += 1
        except ConfigError as error:
            if str(error) != self.error:
                log.error("certificates not taken up: %s", error)
                self.counts["reload_failed"] += 1
            self.error = str(error)
        self._warn(now)
        return self._files

    def _warn(self, now: float) -> None:
        if now - self._warned_s < _WARN_S:
            return
        if self._files.life.share_left(self._wall()) < EXPIRES_SHARE:
            self._warned_s = now
            hours = (self._files.life.ends_s - self._wall()) / 3600
            log.warning(
                "%s ends in %.1f h: issue another (kvatlas certs issue)", self.config.cert, hours
            )

    def _paths(self) -> list[str]:
        config = self.config
        named = (config.ca, config.cert, config.key, config.front_cert, config.front_key)
        return [path for path in (*named, config.clients_ca, config.engines_ca) if path]

    def _stamped(self) -> tuple[tuple[int, int, int], ...]:
        try:
            found = [os.stat(path) for path in self._paths()]
        except OSError as error:
            raise ConfigError(f"tls: {error.filename}: {error.strerror}") from error
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in found)

    def _read(self) -> _Files:
        config = self.config
        own = (config.cert, config.key)
        front = (config.front_cert, config.front_key) if config.front_cert else own
        trusted = [config.ca, *([config.clients_ca] if config.clients_ca else [])]
        life = life_of(Path(config.cert))
        if life.identity is None or life.identity.part != self.part:
            raise ConfigError(
                f"tls.cert: {config.cert} is of {life.identity or 'no part of a cluster'}: this "
                f"is {self.part}: kvatlas certs issue --part {self.part}"
            )
        if self._wall() >= life.ends_s:
            raise ConfigError(f"tls.cert: {config.cert} has expired: kvatlas certs issue")
        return _Files(
            _context(front, trusted, server=True),
            _context(own, [config.ca], server=True, strict=True),
            _context(own, [config.ca]),
            _context(own, [config.ca, *([config.engines_ca] if config.engines_ca else [])]),
            tuple(_certificates(Path(config.ca))),
            life,
        )


def _context(
    own: tuple[str, str] | None, trusted: list[str], *, server: bool = False, strict: bool = False
) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    if server:
        made.num_tickets = 0
        made.options |= ssl.OP_NO_TICKET
        made.verify_mode = ssl.CERT_REQUIRED if strict else ssl.CERT_OPTIONAL
    try:
        if own is not None:
            made.load_cert_chain(*own)
        for path in trusted:
            made.load_verify_locations(path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"tls: {', '.join((*(own or ()), *trusted))}: {reason_of(error)}"
        ) from error
    if not trusted:
        made.load_default_certs()
    return made


def asking(ca: str = "", cert: str = "", key: str = "") -> ssl.SSLContext:
    """A context for connections from outside a cluster's parts: by ``ca``, else by those that this
    machine trusts; with a certificate of one's own or none. Raises ConfigError."""
    return _context((cert, key or cert) if cert else None, [ca] if ca else [])


def check(der: bytes | None, parts: tuple[str, ...], *, foreign: bool = False) -> None:
    """A certificate that OpenSSL has found good is of one of ``parts``. ``foreign``: or of nobody
    in the cluster. Raises WrongPart."""
    told = identity_of(_uris(_parsed(der))) if der else None
    if told is None and foreign:
        return
    if told is None or told.part not in parts:
        raise WrongPart(
            f"its certificate is of {told or 'no part of a cluster'}: "
            f"{' or '.join(parts)} is wanted"
        )


class PlainPeer(ConnectionError):
    """Who came in speaks no TLS."""


def joined(
    context: ssl.SSLContext,
    sock: socket.socket,
    host: str,
    until: float,
    parts: tuple[str, ...] = (),
) -> ssl.SSLSocket:
    """A connected socket with TLS on it, and one of ``parts`` at the other end (none: whoever the
    host name is). ``until`` on time.monotonic. Raises OSError."""
    made = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    return _shaken(made, until, parts)


def taken(
    context: ssl.SSLContext, sock: socket.socket, until: float, parts: tuple[str, ...]
) -> ssl.SSLSocket:
    """The same of a socket that came in. Raises PlainPeer where it says something else, or nothing
    for `SPEAKS_S`; OSError."""
    try:
        sock.settimeout(min(SPEAKS_S, left_s(until)))
        first = sock.recv(1, socket.MSG_PEEK)
    except TimeoutError as error:
        raise PlainPeer("it said nothing") from error
    if first and first[0] != HANDSHAKE:
        raise PlainPeer("it speaks no TLS")
    made = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    return _shaken(made, until, parts)


def _shaken(made: ssl.SSLSocket, until: float, parts: tuple[str, ...]) -> ssl.SSLSocket:
    try:
        made.settimeout(left_s(until))
        made.do_handshake()
        if parts:
            check(made.getpeercert(True), parts)
    except ssl.SSLError as error:
        made.close()
        raise ConnectionError(reason_of(error)) from error
    except BaseException:
        made.close()
        raise
    return made


def left_s(until: float) -> float:
    """Seconds to go. Raises TimeoutError when there are none."""
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the deadline has passed")
    return seconds


def life_of(path: Path) -> Life:
    """Of the first certificate in a file. Raises ConfigError."""
    found = _certificates(path)[0]
    try:
        identity = identity_of(_uris(found))
    except WrongPart as error:
        raise ConfigError(f"{path}: {error}") from error
    begins, ends = found.not_valid_before_utc, found.not_valid_after_utc
    return Life(begins.timestamp(), ends.timestamp(), identity)


def _certificates(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"tls: {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"tls: {path}: no certificate in PEM form: {error}") from error


def _parsed(der: bytes) -> x509.Certificate:
    """Raises WrongPart where OpenSSL took what others cannot read."""
    try:
        return x509.load_der_x509_certificate(der)
    except ValueError as error:
        raise WrongPart(f"its certificate cannot be read: {error}") from error


def _issued(told: x509.Certificate, ca: x509.Certificate) -> bool:
    try:
        told.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _uris(told: x509.Certificate) -> list[str]:
    try:
        names = told.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)
