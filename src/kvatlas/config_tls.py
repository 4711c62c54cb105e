"""Tables [tls], [admin] and [audit] of kvatlas.toml: who proves what, sees what, changes what."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]

#: What somebody may do: read figures, read all pages, change what can be changed. Each with those
#: before it.
Right = Literal["metrics", "read", "change"]
RIGHTS: tuple[Right, ...] = get_args(Right)


class TlsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``ca``, ``cert`` and ``key``: PEM files of this part; all three, or none: no TLS.

    ``front_cert`` and ``front_key``: what clients of the API are shown instead; ``clients_ca``: who
    signs the certificates that they must have. ``engines_ca``: who signs those of engines that
    have none of ``ca``. ``plain_engines`` and ``plain_events``: engines on other machines may be
    spoken to over http, and may send their events, in the clear.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    front_cert: str = ""
    front_key: str = ""
    clients_ca: str = ""
    engines_ca: str = ""
    plain_engines: bool = False
    plain_events: bool = False

    @property
    def on(self) -> bool:
        return bool(self.cert)


class AdminConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who may use the pages beside the API: holders of tokens, as ``tokens_file`` lists their
    digests, and of certificates ``kvatlas://client/NAME``, as ``clients`` says: NAME:RIGHT."""

    tokens_file: str = ""
    clients: tuple[str, ...] = ()

    @property
    def on(self) -> bool:
        return bool(self.tokens_file or self.clients)


class AuditConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who did what, as JSON lines in ``file``; ``keep`` older files of ``file_max_bytes`` each.
    ``sync``: whether a change is on the disk before it is made."""

    file: str = ""
    file_max_bytes: Positive = 64 << 20
    keep: Positive = 10
    sync: bool = True


def fault_of(tls: TlsConfig) -> tuple[str, str]:
    """The key that cannot be so, and why; two empty texts where all is well."""
    given = {name: getattr(tls, name) for name in ("ca", "cert", "key")}
    if any(given.values()) and not all(given.values()):
        missing = ", ".join(f"tls.{name}" for name, value in given.items() if not value)
        return "tls", f"TLS needs ca, cert and key of this part: there is no {missing}"
    if bool(tls.front_cert) != bool(tls.front_key):
        return "tls.front_cert", "tls.front_cert and tls.front_key need each other"
    others = [f for f in tls.__struct_fields__ if f not in given and getattr(tls, f)]
    if others and not tls.on:
        return f"tls.{others[0]}", f"tls.{others[0]} says nothing without ca, cert and key"
    return "", ""


def right_of(text: str) -> tuple[str, Right] | None:
    """``NAME:RIGHT``; None for anything else."""
    name, _, right = text.rpartition(":")
    found = next((known for known in RIGHTS if known == right), None)
    return (name, found) if name and found else None


def is_local(url: str) -> bool:
    """Does what is sent there stay on this machine?"""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
