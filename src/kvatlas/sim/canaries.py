"""Planted bugs: each patches production code so that one class of checker must find it.

`REGISTRY` maps a class of `checkers.CLASSES` to context managers, each a bug of its own; `planted`
plants one. They exist so that a checker which cannot fail is found out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from kvatlas.core.claims import Applied, Claims
from kvatlas.core.events import BlockRemoved

Canary = Callable[[], AbstractContextManager[None]]


@contextlib.contextmanager
def patched(owner: object, name: str, new: object) -> Iterator[None]:
    """``owner.name`` is ``new`` meanwhile."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


@contextlib.contextmanager
def removals_are_ignored() -> Iterator[None]:
    """Claims outlive the blocks."""

    def removed(self: Claims, event: BlockRemoved, applied: Applied) -> None:
        pass

    with patched(Claims, "removed", removed):
        yield


REGISTRY: dict[str, tuple[Canary, ...]] = {"resurrected": (removals_are_ignored,)}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant the bug ``name``; "" plants none."""
    if not name:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(REGISTRY[name][0]())
        yield
