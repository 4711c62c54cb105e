"""A gateway with two tenants, their credentials, and what an engine is given under their names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness import COMPLETION, Answer, FakeWorker, Product

from kvatlas.config import KeysConfig, WorkerConfig
from kvatlas.config_tenants import TenantsConfig, digest_of
from kvatlas.core.keys import Keyring
from kvatlas.core.tenancy import TenantSalt, prefix_digest, read_salt, tag_of
from kvatlas.service.http import Request

SECRET = b"the secret of all gateways and agents"
RING = Keyring(SECRET)
NAMES = ("acme", "b. & co")
KEYS = {name: f"kva_key of {tag_of(RING, name)}" for name in NAMES}
PROMPT = list(range(100, 164))


def tenants_file(folder: Path, more: str = "", extra: str = "") -> Path:
    """The file; ``more``: lines of the first tenant."""
    tables = [
        f'[[tenant]]\nname = "{name}"\nkeys = ["{digest_of(KEYS[name])}"]\n{more if not i else ""}'
        for i, name in enumerate(NAMES)
    ]
    path = folder / "tenants.toml"
    path.write_text("\n".join([*tables, extra]))
    return path


def guarded(
    folder: Path, workers: Iterable[WorkerConfig], more: str = "", **tenants: Any
) -> Product:
    """A product with them."""
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    config = TenantsConfig(file=str(tenants_file(folder, more)), **tenants)
    return Product(workers, keys=KeysConfig(secret_file=str(secret)), tenants=config)


def bearer(credential: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {credential}"} | more


async def complete(
    product: Product, credential: str, prompt: object = PROMPT, headers: Any = None, **more: object
) -> Answer:
    body = {"model": "m", "prompt": prompt, "max_tokens": 4} | more
    return await product.post(COMPLETION, body, bearer(credential) | (headers or {}))


def body_of(request: Request) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.body)
    return found


def salt_in(request: Request) -> TenantSalt:
    """What the engine was given, which must be one of ours, and the client's credentials not."""
    headers = dict(request.headers)
    assert headers.get(b"authorization") in (None, b"Bearer for-engines-only")
    assert not headers.keys() & {b"x-api-key", b"x-kvatlas-cache-salt"}
    assert request.body.count(b'"cache_salt"') == 1
    found = read_salt(RING, body_of(request)["cache_salt"])
    assert found is not None
    return found


def packed(ids: Iterable[int]) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in ids)


def public_policy(folder: Path, *prefixes: list[int]) -> str:
    """A policy by digests."""
    path = folder / "public.toml"
    path.write_text(
        "".join(
            f'[[public]]\nname = "p{i}"\ntokens = {len(ids)}\n'
            f'digest = "{prefix_digest(packed(ids)).hex()}"\n'
            for i, ids in enumerate(prefixes)
        )
    )
    return str(path)


def last(worker: FakeWorker) -> TenantSalt:
    return salt_in(worker.got[-1])
