"""What tenants may hold on each node: told to the agents by gateways, from the operator's file.

The file is what lasts. A gateway tells each agent all of it, once per life of the agent and again
when it has changed; who tells it has the secret, as for all orders (`service.agent_orders`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from kvatlas.config_tenants import TENANTS_MAX, TenantsFile
from kvatlas.core import agent_values as words
from kvatlas.core.forgetting import payer_of
from kvatlas.core.keys import Keyring
from kvatlas.core.records import Tier
from kvatlas.core.retention import Terms
from kvatlas.core.tenancy import tag_of
from kvatlas.service.agent_orders import ordered
from kvatlas.service.http import Request, envelope
from kvatlas.service.http_reply import JSON, Reply

LIMITS = "/kvatlas/limits"


class Limits(msgspec.Struct, frozen=True):
    """All limits of all tenants, by tag (quotas by tier); who is not named has none. ``life``: of
    the agent that is meant."""

    life: str = ""
    quota_bytes: dict[str, dict[str, int]] = {}
    terms: dict[str, Terms] = {}


def limits_of(ring: Keyring, file: TenantsFile) -> Limits:
    """Those of the operator's file, for no agent yet."""
    tags = {tag_of(ring, tenant.name): tenant for tenant in file.tenant}
    quotas = {tag: msgspec.to_builtins(tenant.quota_bytes) for tag, tenant in tags.items()}
    terms = {tag: Terms(tenant.ttl_s, tenant.retention) for tag, tenant in tags.items()}
    return Limits(
        quota_bytes={tag: quota for tag, quota in quotas.items() if quota},
        terms={tag: each for tag, each in terms.items() if each != Terms()},
    )


class Limited:
    """An agent's side: does as it is told. On the event loop."""

    def __init__(self, ring: Keyring, tell: Callable[[words.Input], None], life: str) -> None:
        self.count = 0  # tenants with a limit
        self._ring = ring
        self._tell = tell
        self._life = life
        self.stored: dict[str, int] = {}  # quotas in a store that nodes share, by tag
        self._known: set[tuple[str, Tier]] = set()
        self._terms: dict[str, Terms] = {}

    def ttl_s(self, owner: str) -> float:
        """How long what an owner saves is kept; 0: without end."""
        terms = self._terms.get(payer_of(owner))
        return terms.ttl_s if terms is not None else 0.0

    def answer(self, request: Request, reply: Reply) -> None:
        """One request to `LIMITS`."""
        status, why = self._take(request)
        if why:
            reply.send(status, [JSON], envelope(why, status=status))
        else:
            reply.send_json(200, {"tenants": self.count})

    def _take(self, request: Request) -> tuple[int, str]:
        told = ordered(self._ring, request, Limits, self._life)
        if isinstance(told, tuple):
            return told
        try:
            wanted = _by_tier(told.quota_bytes)
        except KeyError as error:
            return 400, f"not what a gateway of this version says: no tier {error}"
        count = len(told.quota_bytes.keys() | told.terms.keys())
        if count > TENANTS_MAX:
            return 413, f"limits of more than {TENANTS_MAX} tenants"
        # The store's are held where its books are: in the register.
        self.stored = {tag: max(0, n) for (tag, tier), n in wanted.items() if tier is Tier.OBJECT}
        wanted = {place: n for place, n in wanted.items() if place[1] is not Tier.OBJECT}
        for tag, tier in self._known - wanted.keys():
            self._tell(words.Quota(tag, None, tier))
        for (tag, tier), size_bytes in wanted.items():
            self._tell(words.Quota(tag, max(0, size_bytes), tier))
        if told.terms != self._terms:
            self._tell(words.Retain(told.terms))
        self._known, self._terms = set(wanted), told.terms
        self.count = count
        return 200, ""


def _by_tier(quotas: Mapping[str, Mapping[str, int]]) -> dict[tuple[str, Tier], int]:
    """Raises KeyError for what is no tier."""
    return {
        (tag, Tier[name.upper()]): size
        for tag, tiers in quotas.items()
        for name, size in tiers.items()
    }
