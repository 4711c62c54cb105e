"""Shared stores by their URL: which kind, where, and any of its settings as the query.

``valkey://host:port``, with TLS ``valkeys://`` or ``rediss://``, ``valkey:///path/of.sock``,
``mooncake://host:port``, ``s3://bucket``. No secret stands in a URL: a command line is read by
others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, urlsplit

import msgspec

from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.codec import Codec
from kvatlas.dataplane.sealing import Sealer
from kvatlas.dataplane.tiers import mooncake, s3, valkey
from kvatlas.dataplane.tiers.base import Shared
from kvatlas.dataplane.tiers.sockets import Address
from kvatlas.errors import ConfigError

KINDS = ("valkey", "valkeys", "rediss", "mooncake", "s3")
DEADLINE_S = 5.0  # a load waits no longer for a store
_SECRETS = {"password", "access_key", "secret_key"}
T = TypeVar("T")


def open_object(
    url: str, arena: Arena, lost: Callable[[str], None], sealer: Sealer | None = None
) -> Shared:
    """A store for the `object` tier; ``lost`` is told when all that was in it is gone. With a
    ``sealer`` nothing goes there in the clear. Raises ConfigError for what is no such URL, or
    cannot work here."""
    try:
        parts = urlsplit(url)
        port = parts.port or 0
        strict = bool(parts.query)
        given = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=strict))
    except ValueError as error:
        raise ConfigError(f"--object {url!r}: {error}") from error
    if parts.username or parts.password:
        raise ConfigError("--object: no user or password in a URL: see password_file")
    given.setdefault("deadline_s", str(DEADLINE_S))
    if given.get("codec") == "raw":
        given["codec"] = Codec.RAW
    if secret := _SECRETS & set(given):
        raise ConfigError(f"--object: {min(secret)} must not stand in a URL: others can read it")
    match parts.scheme:
        case "valkey" | "valkeys" | "rediss":
            given["tls"] = str(parts.scheme != "valkey").lower()
            return valkey.ValkeyStore(_valkey(parts, port, given), lost, sealer)
        case "mooncake":
            given["master"] = f"{parts.hostname or ''}:{port}"
            if not parts.hostname or not port:
                raise ConfigError(f"--object {url!r}: mooncake://HOST:PORT is that of the master")
            settings = _settings(mooncake.Settings, given)
            return mooncake.MooncakeStore(settings, arena, lost, sealer)
        case "s3":
            return s3.S3Store(_settings(s3.Settings, given | {"bucket": parts.netloc}), sealer)
    kinds = ", ".join(f"{kind}://" for kind in KINDS)
    raise ConfigError(f"--object {url!r}: one of {kinds} is wanted")


def _valkey(parts: SplitResult, port: int, given: dict[str, str]) -> valkey.Settings:
    if parts.hostname:
        given |= {"host": parts.hostname} | ({"port": str(port)} if port else {})
    else:
        given |= {"host": parts.path, "port": "0"}
    if path := given.pop("password_file", ""):
        try:
            given["password"] = Path(path).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--object: password_file {path}: {error}") from error
    return _settings(valkey.Settings, given)


def _settings(kind: type[T], given: dict[str, str]) -> T:
    known = {field.name for field in msgspec.structs.fields(kind)}  # type: ignore[arg-type]
    if strange := set(given) - known:
        raise ConfigError(f"--object: {min(strange)!r} is no setting of this kind of store")
    values: dict[str, Any] = dict(given)
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--object: {error}") from error


def address_of(text: str) -> Address:
    """``HOST:PORT``, or ``[HOST]:PORT``. Raises ConfigError for anything else."""
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError:
        port = None
    if port is None or not parts.hostname or parts.netloc != text or "@" in text:
        raise ConfigError(f"{text!r}: HOST:PORT is wanted")
    return Address(parts.hostname, port)
