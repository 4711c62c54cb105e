"""The table [tenants] of kvatlas.toml, and the file of tenants that it names.

The file is the operator's: who the tenants are, by which keys they are known, and what they may
hold. Keys stand in it as digests alone. What would let two tenants share is refused when it is
read, with the line.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvatlas.core.retention import Retention, TtlSeconds
from kvatlas.core.tenancy import checked_name, epoch_at
from kvatlas.errors import ConfigError

TENANTS_MAX = 10_000
KEYS_MAX = 64
CLASSES_MAX = 16  # each is a series of metrics; tenants are too many for that
_DIGEST = re.compile(r"[0-9a-f]{64}")

#: Signatures by a key pair. With a shared secret, who can check tokens could make them.
ALGORITHMS = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "Ed25519"),
)
Bytes = Annotated[int, msgspec.Meta(ge=0)]
RotationSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Epoch = Annotated[int, msgspec.Meta(ge=0, lt=1 << 21)]


class TenantsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``file`` names the tenants; "" means that there are none, and nobody must say who he is.

    ``public``: a policy file with prompts that all tenants may share. ``session_header``: clients
    may name their session themselves (x-kvatlas-session). ``engine_key_file``: what engines are
    shown instead of what clients show us. ``receipts``: a folder for receipts of purges, without
    which there are none.

    ``jwt_keys``: a key set file (JWKS) with public keys, by which tokens of clients are checked;
    ``jwt_tenant_claim`` holds the tenant's name, or what its ``jwt`` says instead,
    ``jwt_session_claim`` the session. ``jwt_algorithms``: of `ALGORITHMS`.
    """

    file: str = ""
    public: str = ""
    session_header: bool = False
    receipts: str = ""
    engine_key_file: str = ""
    jwt_keys: str = ""
    jwt_issuer: str = ""
    jwt_audience: str = ""
    jwt_tenant_claim: str = "tenant"
    jwt_session_claim: str = ""
    jwt_algorithms: tuple[str, ...] = ("RS256", "ES256")
    jwt_leeway_s: Annotated[float, msgspec.Meta(ge=0, le=300)] = 5.0

    @property
    def on(self) -> bool:
        return bool(self.file)


class Quotas(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Bytes by tier of a node, and in each store that nodes share (by what a register knows of it);
    None: no limit of its own."""

    dram: Bytes | None = None
    disk: Bytes | None = None
    object: Bytes | None = None


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the file. ``keys``: SHA-256 of each of its API keys, in hex.

    ``jwt``: what the tenant claim of its tokens says ("": its name). ``epoch`` and ``rotation_s``:
    what it cached before `epoch` was raised, or in an earlier period, is not found any more.
    ``share``: what is not public is shared within the tenant, or within a session alone.
    ``quota_bytes``: what it may hold on each node and in shared stores. ``ttl_s``: how long what it
    saved is kept there (0: without end); ``retention``: what a full tier lets go first.
    ``tenant_class``: as what metrics count it, of at most `CLASSES_MAX`.
    """

    name: str
    keys: tuple[str, ...] = ()
    jwt: str = ""
    epoch: Epoch = 0
    rotation_s: RotationSeconds = 0.0
    share: Literal["tenant", "session"] = "tenant"
    quota_bytes: Quotas = Quotas()
    ttl_s: TtlSeconds = 0.0
    retention: Retention = Retention.NORMAL
    tenant_class: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_-]{1,32}$")] = "default"


class TenantsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    tenant: tuple[Tenant, ...] = ()


TABLES: dict[str, type[msgspec.Struct]] = {"": TenantsFile, "tenant": Tenant}


def digest_of(key: str) -> str:
    """How an API key stands in the file."""
    return hashlib.sha256(key.encode()).hexdigest()


def checked(path: Path, text: str, file: TenantsFile) -> TenantsFile:
    """The file with all names in their one form. Raises ConfigError with the line for what could
    let two tenants share, or could not be meant."""
    if len(file.tenant) > TENANTS_MAX:
        raise ConfigError(f"{path}: {len(file.tenant)} tenants: at most {TENANTS_MAX} can be held")
    classes = {tenant.tenant_class for tenant in file.tenant}
    if len(classes) > CLASSES_MAX:
        text = f"{len(classes)} values of tenant_class: metrics know at most {CLASSES_MAX}"
        raise ConfigError(f"{path}: {text}")
    names: dict[str, int] = {}
    claims: dict[str, int] = {}
    keys: dict[str, int] = {}
    found = []
    lines = [n for n, line in enumerate(text.split("\n"), 1) if re.match(r"\s*\[\[", line)]
    for index, tenant in enumerate(file.tenant):
        line = lines[index] if index < len(lines) else 1
        at = f"{path}:{line}: tenant {tenant.name!r}"
        try:
            name = checked_name(tenant.name)
        except ValueError as error:
            raise ConfigError(f"{at}: {error}") from error
        _once(names, name, index, f"{at}: two tenants have that name, in one form of it")
        claim = tenant.jwt or name
        _once(claims, claim, index, f"{at}: two tenants have {claim!r} in their tokens")
        _check_keys(at, tenant, index, keys)
        try:
            epoch_at(tenant.epoch, tenant.rotation_s, 4e9)
        except ValueError as error:
            raise ConfigError(f"{at}: rotation_s {tenant.rotation_s:g} is too short") from error
        found.append(msgspec.structs.replace(tenant, name=name))
    return TenantsFile(tuple(found))


def _check_keys(at: str, tenant: Tenant, index: int, keys: dict[str, int]) -> None:
    if len(tenant.keys) > KEYS_MAX:
        raise ConfigError(f"{at}: {len(tenant.keys)} keys: at most {KEYS_MAX} can be held")
    for digest in tenant.keys:
        if not _DIGEST.fullmatch(digest):
            raise ConfigError(
                f"{at}: a key stands here as 64 lower hex digits, its SHA-256, never as itself: "
                "kvatlas tenant set NAME --new-key makes one"
            )
        if digest in (digest_of(""), digest_of(tenant.name)):
            raise ConfigError(f"{at}: a key that is empty, or the name itself, is no key")
        _once(keys, digest, index, f"{at}: two tenants have one key: {digest[:8]}…")


def _once(seen: dict[str, int], what: str, index: int, fault: str) -> None:
    other = seen.setdefault(what, index)
    if other != index:
        raise ConfigError(fault)


def fault_of(tenants: TenantsConfig, *, secret: bool, blind: bool) -> tuple[str, str]:
    """The key that cannot be so, and why; two empty texts where all is well. ``secret``: there is
    a keys.secret_file; ``blind``: the router's policy looks at no prompt."""
    given = [f for f in msgspec.structs.fields(tenants) if getattr(tenants, f.name) != f.default]
    for field in given:
        key = f"tenants.{field.name}"
        if not tenants.on:
            return key, f"{key} says nothing without tenants.file"
        if field.name.startswith("jwt_") and not tenants.jwt_keys:
            return key, f"{key} says nothing without tenants.jwt_keys"
    if tenants.on and not secret:
        return "tenants.file", (
            "tenants need keys.secret_file: their salts are made with it, and gateways and agents "
            "that have not the same secret would take them for strangers"
        )
    for name in ("issuer", "audience", "tenant_claim", "algorithms") if tenants.jwt_keys else ():
        if not getattr(tenants, f"jwt_{name}"):
            return f"tenants.jwt_{name}", (
                f"tenants.jwt_keys needs jwt_{name}: a token that was made for somebody else "
                "would open this door too"
            )
    for name in tenants.jwt_algorithms:
        if name not in ALGORITHMS:
            return "tenants.jwt_algorithms", (
                f"tenants.jwt_algorithms: {name!r} is not signed by a key pair that we know: use "
                f"some of {', '.join(ALGORITHMS)}"
            )
    if tenants.public and blind:
        return "tenants.public", (
            "router.policy looks at no prompt: what is public of it could not be told"
        )
    return "", ""
