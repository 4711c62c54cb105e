"""The cache salt that engines get with a request: a tenant's own, or what its client chose."""

from __future__ import annotations

import msgspec

from kvatlas.core.dispatch import Dispatcher
from kvatlas.core.keys import Keyring, salt_scope
from kvatlas.core.records import Publisher
from kvatlas.core.tenancy import Sharing, mark_of, salt_of, sharing_of
from kvatlas.service.public_prefixes import PublicPrefixes, of_all
from kvatlas.service.steer import Inbound
from kvatlas.service.tokens import Prompt

SALT_HEADER = "x-kvatlas-cache-salt"


class KeysOf(msgspec.Struct, frozen=True):
    """A prompt's block keys: as an engine is asked for them, and as agents are."""

    engine: list[bytes]
    below: list[bytes]


class Salts:
    """Makes them under the deployment's secret; ``public``: what no tenant has for itself."""

    def __init__(self, ring: Keyring, public: PublicPrefixes | None = None) -> None:
        self._ring = ring
        self._public = public

    def of(self, request: Inbound, prompt: Prompt) -> str:
        """What engines get; "" for none."""
        if request.tenant is None:
            return own_salt(request)
        salt = request.tenant
        if self._public is not None and prompt.tokens and not prompt.reason:
            public = of_all(self._public, (prompt.tokens, *prompt.others))
            if public.tokens:
                mark = mark_of(self._ring, public.digest)
                salt = msgspec.structs.replace(salt, public_tokens=public.tokens, public_mark=mark)
        return salt_of(self._ring, salt)

    def below(self, salt: str) -> Sharing | None:
        """Who shares a prompt in the tiers of agents; None: just who sends the same salt."""
        sharing = sharing_of(self._ring, salt)
        return sharing if sharing.tenant else None

    def keys(
        self,
        dispatcher: Dispatcher,
        publisher: Publisher,
        tokens: bytes,
        salt: str,
        *,
        adapter: str,
    ) -> KeysOf:
        """Of a prompt with that salt."""
        keys = dispatcher.keys(publisher, tokens, salt_scope(salt), adapter)
        below = self.below(salt)
        if below is None:
            return KeysOf(keys, keys)
        return KeysOf(keys, dispatcher.keys_below(publisher, tokens, below, adapter))


def own_salt(request: Inbound) -> str:
    """What its client chose: the header wins over the body."""
    salt = request.headers.get(SALT_HEADER) or request.body.get("cache_salt")
    return salt if isinstance(salt, str) else ""
