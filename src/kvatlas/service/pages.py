"""Pages beside the API: what one is, and what it takes to ask for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from kvatlas.config_tls import Right
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply
from kvatlas.service.steer import Inbound

#: Writes an answer by itself; the question is whether who asked may still read.
Writer = Callable[[Reply, Callable[[], bool]], Awaitable[None]]

#: A page of the service's own: gets what follows its path, returns text, anything JSON can hold, or
#: a `Writer`.
Page = Callable[[str], Awaitable[object]]

#: A question to the service itself: gets a request as the API would, by POST; answers as a page.
Question = Callable[[Inbound], Awaitable[object]]

#: What only other gateways ask: it answers as it likes. Raises RequestError.
Talk = Callable[[Request, Reply], Awaitable[None]]

PROBES = ("/health", "/ready")  # anybody may ask them
_SHELLS = ("/kvatlas", "/kvatlas/")  # and for these, which hold nothing of the cluster
_FILES = "/kvatlas/page/files/"
_FIGURES = ("/metrics", "/version")
_ASKED_ONLY = ("/kvatlas/inspect",)  # by POST, and nothing is changed


class Status(msgspec.Struct, frozen=True):
    """A page's answer with a status other than 200."""

    status: int
    body: object


def is_open(path: str) -> bool:
    """May anybody ask for it?"""
    return path in PROBES or path in _SHELLS or path.startswith(_FILES)


def right_for(path: str, *, asks: bool) -> Right:
    """What it takes to use a page; ``asks``: it takes a body, and changes things unless known."""
    if path in _FIGURES:
        return "metrics"
    return "change" if asks and path not in _ASKED_ONLY else "read"


def barely(answer: object) -> object:
    """For probes: whether, and not why."""
    inner = answer.body if isinstance(answer, Status) else answer
    assert isinstance(inner, dict)
    bare = {name: inner[name] for name in ("status", "ready")}
    return Status(answer.status, bare) if isinstance(answer, Status) else bare
