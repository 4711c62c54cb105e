"""By what an agent reads from peers and lets them read: as wanted, or as good as it gets."""

from __future__ import annotations

from typing import Literal, get_args

from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.tiers.nixl import Nixl, missing
from kvatlas.dataplane.tiers.peer import PeerStore
from kvatlas.dataplane.tiers.peer_nixl import Reader

Choice = Literal["auto", "tcp", "nixl"]
CHOICES: tuple[Choice, ...] = get_args(Choice)


def no_nixl(choice: Choice, *, encrypted: bool) -> str:
    """Why NIXL is not even tried; "" where it is."""
    if choice == "tcp":
        return "not_wanted"
    if choice == "auto" and encrypted:
        return "not_encrypted"  # it has no encryption of its own: only who asks for it gets it
    return "not_installed" if choice == "auto" and missing() else ""


def reader(choice: Choice, arena: Arena, *, encrypted: bool = False) -> Reader | str:
    """Of one peer; or why there is none. Raises ConfigError where NIXL is a must and cannot be."""
    if why := no_nixl(choice, encrypted=encrypted):
        return why
    must = choice == "nixl"
    return Reader(arena, _process(arena, must=must), only=must, emulated=must)


def lender(choice: Choice, arena: Arena, *, encrypted: bool = False) -> Nixl | None:
    """For peers that read from here. Raises as `reader`."""
    if no_nixl(choice, encrypted=encrypted):
        return None
    return _process(arena, must=choice == "nixl")


def told(store: PeerStore) -> dict[str, object]:
    """For the status: what went which way, and why not by NIXL."""
    nixl = store.nixl if isinstance(store.nixl, str) else store.nixl.status()
    return store.moved.status() | {"nixl": nixl}


def fault(store: PeerStore) -> str:
    """What is wrong with NIXL there, or here; "" where nothing is, or it is not tried."""
    return "" if isinstance(store.nixl, str) else store.nixl.fault


def _process(arena: Arena, *, must: bool) -> Nixl:
    nixl = Nixl(arena)
    if must:
        nixl.wait()
    return nixl
