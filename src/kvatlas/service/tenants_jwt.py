"""Clients' tokens (JWT): signed by a key pair of the operator's identity provider, or not taken.

What was verified is remembered until it expires, so that a signature is checked once per token and
not once per request. A key set that changes ends that.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.config_tenants import TenantsConfig
from kvatlas.errors import ConfigError

REMEMBERED_MAX = 16_384
KEYS_MAX = 256
KEYS_BYTES_MAX = 1 << 20
_RSA_CHARS_MIN = 340  # of a modulus in base64: 2,048 bits are 342
_NEVER = 1e11  # seconds since 1970
_PRIVATE = ("d", "p", "q", "k")


class Claims(msgspec.Struct, frozen=True):
    """What a good token says; ``until``: seconds since 1970."""

    tenant: str
    session: str
    until: float


class Tokens:
    """Checks tokens, on the event loop. `refresh` may run in another thread."""

    def __init__(self, config: TenantsConfig) -> None:
        """Raises ConfigError for a key set that cannot be used, or where joserfc is not there."""
        self._config = config
        self._path = Path(config.jwt_keys)
        self._raw = b""
        self._keys: Any = None
        self._good: OrderedDict[bytes, Claims] = OrderedDict()
        self.refresh()

    def refresh(self) -> None:
        """Reads the key set again where it has changed. Raises ConfigError as at first, and what
        counted before still does."""
        try:
            with self._path.open("rb") as file:
                raw = file.read(KEYS_BYTES_MAX + 1)
        except OSError as error:
            raise ConfigError(
                f"tenants.jwt_keys: {self._path}: cannot be read: {error.strerror or error}"
            ) from error
        if raw != self._raw:
            self._keys = _key_set(self._path, raw)
            self._raw = raw
            self._good = OrderedDict()  # after the keys: what is remembered here is by these

    def claims(self, text: str, now: float) -> Claims:
        """What a token says. Raises ValueError that says why it is not taken."""
        name = hashlib.sha256(text.encode()).digest()
        good = self._good  # another one while this one is checked: other keys count by then
        known = good.get(name)
        if known is not None and now < known.until + self._config.jwt_leeway_s:
            good.move_to_end(name)
            return known
        good.pop(name, None)
        claims = good[name] = self._checked(text, now)
        if len(good) > REMEMBERED_MAX:
            good.popitem(last=False)
        return claims

    def _checked(self, text: str, now: float) -> Claims:
        from joserfc import jwt  # noqa: PLC0415 - an optional extra
        from joserfc.errors import ClaimError, JoseError  # noqa: PLC0415

        config = self._config
        registry = jwt.JWTClaimsRegistry(
            now=lambda: int(now),
            leeway=int(config.jwt_leeway_s),
            iss={"essential": True, "value": config.jwt_issuer},
            aud={"essential": True, "value": config.jwt_audience},
            exp={"essential": True},
        )
        try:
            token = jwt.decode(text, self._keys, algorithms=list(config.jwt_algorithms))
            registry.validate(token.claims)
        except ClaimError as error:
            raise ValueError(f"{error.error}: {error.claim}") from error
        except (JoseError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(getattr(error, "error", "") or "it cannot be verified") from error
        tenant = token.claims.get(config.jwt_tenant_claim)
        if not isinstance(tenant, str) or not tenant:
            raise ValueError(f"it names no tenant ({config.jwt_tenant_claim})")
        session = ""
        if config.jwt_session_claim:
            session = token.claims.get(config.jwt_session_claim, "")
            if not isinstance(session, str):
                raise ValueError(f"{config.jwt_session_claim} is no text")
        until = token.claims["exp"]
        if isinstance(until, bool) or not isinstance(until, int | float) or not 0 < until < _NEVER:
            raise ValueError("it does not expire")
        return Claims(tenant, session, float(until))


def _key_set(path: Path, raw: bytes) -> Any:
    """The keys of a JWKS file: public ones of key pairs alone."""
    try:
        from joserfc.errors import JoseError  # noqa: PLC0415 - an optional extra
        from joserfc.jwk import KeySet  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("tenants.jwt_keys needs a package: pip install 'kvatlas[jwt]'") from error
    at = f"tenants.jwt_keys: {path}"
    try:
        told = msgspec.json.decode(raw, type=dict[str, Any])
        keys = msgspec.convert(told.get("keys"), list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{at}: is no JSON Web Key Set: {error}") from error
    if len(raw) > KEYS_BYTES_MAX or not 0 < len(keys) <= KEYS_MAX:
        raise ConfigError(f"{at}: has {len(keys)} keys: 1 to {KEYS_MAX} can be held")
    for number, key in enumerate(keys, 1):
        why = _unfit(key)
        if why:
            raise ConfigError(f"{at}: key {number}: {why}")
    try:
        return KeySet.import_key_set({"keys": keys})
    except (JoseError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{at}: cannot be read: {error}") from error


def _unfit(key: Mapping[str, Any]) -> str:
    if key.get("kty") == "oct":
        return "a shared secret: whoever can check tokens with it could make them"
    if any(name in key for name in _PRIVATE):
        return "a private key: only its public half belongs here"
    if key.get("kty") == "RSA" and len(str(key.get("n", ""))) < _RSA_CHARS_MIN:
        return "an RSA key of less than 2,048 bits"
    return ""
