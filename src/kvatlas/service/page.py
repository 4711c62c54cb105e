"""The page for people at /kvatlas/: its files, a stream of what it shows, requests explained.

The files say nothing of the cluster and are open to all, so that a browser can show its token; the
stream and the explanations are behind [admin] as all pages are. While nobody looks nothing is kept
and nothing is computed. One state is made for all who look; who reads too slowly misses some, and
who reads nothing is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING

import msgspec

from kvatlas.errors import RequestError
from kvatlas.service.decision_log import Entry, explain
from kvatlas.service.http import Headers
from kvatlas.service.http_reply import Reply
from kvatlas.service.page_history import History
from kvatlas.service.page_state import explained, state_of
from kvatlas.service.pages import Writer

if TYPE_CHECKING:
    from kvatlas.service.assembly import Assembly

log = logging.getLogger(__name__)

VIEWERS_MAX = 16
SEED_MAX = 2048  # entries of the log that are taken in when somebody begins to look
_SLICE = 128  # of them in one go: requests pass in between

_KINDS = {
    ".html": b"text/html",
    ".css": b"text/css",
    ".js": b"text/javascript",
    ".svg": b"image/svg+xml",
}
#: Nothing but the page's own files, no markup from text, and in nobody's frame.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"
)
_SAFE: Headers = [
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_INDEX = "index.html"


class LivePage:
    """On the event loop. ``period_s``: how often who looks is told."""

    def __init__(self, here: Assembly, clock: Callable[[], float]) -> None:
        """``clock``: the one that times the decisions of ``here``."""
        self.period_s = 2.0
        self.stall_s = 10.0  # who reads nothing for so long is dropped
        self.dropped = 0
        self._here = here
        self._clock = clock
        self._viewers: set[Reply] = set()
        self._history: History | None = None
        self._since: tuple[float, float | None] = (0.0, None)
        self._state = b""
        self._made_at = 0.0

    @property
    def viewers(self) -> int:
        """Browsers that look now."""
        return len(self._viewers)

    # -- files ----------------------------------------------------------------------------------

    async def moved(self, _: str) -> Writer:
        """GET /kvatlas: relative, because a proxy may have put something before it."""

        async def write(reply: Reply, _: Callable[[], bool]) -> None:
            reply.send(308, [(b"location", b"kvatlas/"), *_SAFE])

        return write

    async def document(self, rest: str) -> Writer:
        """GET /kvatlas/: to a stranger it is refused by its status, and asks him for a token."""
        if rest:
            text = f"there is no '/kvatlas/{rest}' here; the page is /kvatlas/"
            raise RequestError(text, status=404, code="not_found")

        async def write(reply: Reply, may: Callable[[], bool]) -> None:
            if may():
                _send(reply, _INDEX)
            else:
                _send(reply, _INDEX, status=401, more=[(b"www-authenticate", b"Bearer")])

        return write

    async def file(self, name: str) -> Writer:
        """GET /kvatlas/page/files/ + name."""
        if name not in _files():
            raise RequestError(f"the page has no file {name!r}", status=404, code="not_found")

        async def write(reply: Reply, _: Callable[[], bool]) -> None:
            _send(reply, name)

        return write

    # -- what it shows --------------------------------------------------------------------------

    async def explain(self, request_id: str) -> object:
        """GET /kvatlas/explain/<request-id>, or "last": as text."""
        return explain(self._entry(request_id)) + "\n"

    async def explain_picture(self, request_id: str) -> object:
        """GET /kvatlas/page/explain/<request-id>, or "last": as values."""
        return explained(self._entry(request_id), self._offset_s())

    def _entry(self, request_id: str) -> Entry:
        kept = self._here.log
        entry = kept.last() if request_id == "last" else kept.get(request_id)
        if entry is None:
            most = self._here.config.router.explain_max
            raise RequestError(
                f"no decision is kept for {request_id!r}: the last {most} are (router.explain_max)",
                status=404,
                code="not_found",
            )
        return entry

    async def stream(self, _: str) -> Writer:
        """GET /kvatlas/page/stream: states as server-sent events, for as long as it is read."""
        if len(self._viewers) >= VIEWERS_MAX:
            raise RequestError(
                f"{VIEWERS_MAX} browsers look at this page already: close one of them",
                status=503,
                code="too_many_viewers",
                retry_after_s=10,
            )
        return self._stream

    async def _stream(self, reply: Reply, may: Callable[[], bool]) -> None:
        kind = (b"content-type", b"text/event-stream; charset=utf-8")
        reply.start(200, [kind, (b"cache-control", b"no-store"), *_SAFE])
        if reply.request.method == "HEAD":
            reply.end()
            return
        self._viewers.add(reply)
        try:
            await self._tell(reply, may)
        finally:
            self._viewers.discard(reply)
            if not self._viewers:
                self._leave()

    async def _tell(self, reply: Reply, may: Callable[[], bool]) -> None:
        if self._history is None:
            await self._begin()
        read_at = self._clock()
        while may():  # a token may end while somebody looks
            if not reply.paused:
                reply.write(b"data: " + self._states() + b"\n\n")
                read_at = self._clock()
            elif self._clock() - read_at > self.stall_s:
                self.dropped += 1
                reply.abort()
                return
            await asyncio.sleep(self.period_s)
        reply.end()

    def _states(self) -> bytes:
        """The state, no older than half a period: one for all who look."""
        now = self._clock()
        if not self._state or now - self._made_at > self.period_s / 2:
            assert self._history is not None, "somebody looks"
            state = state_of(
                self._here,
                self._history,
                now,
                viewers=(len(self._viewers), VIEWERS_MAX),
                period_s=self.period_s,
                since=self._since,
                offset_s=self._offset_s(),
            )
            self._state, self._made_at = msgspec.json.encode(state), now
        return self._state

    def _offset_s(self) -> float:
        return time.time() - self._clock()

    # -- what is kept while somebody looks ------------------------------------------------------

    async def _begin(self) -> None:
        """The first one looks: what the log still knows of is taken in, a little at a time."""
        history = self._history = History()
        newest = self._here.log.newest(SEED_MAX)
        self._since = self._clock(), newest[-1].decision.at if newest else None
        over = [e for e in newest if e.outcome is not None or e.decision.refusal is not None]
        self._here.log.watcher = self
        for start in range(0, len(over), _SLICE):
            for entry in over[start : start + _SLICE]:
                if entry.decision.refusal is not None:
                    history.refused(entry.decision.at)
                history.ended(entry)
            await asyncio.sleep(0)

    def _leave(self) -> None:
        """The last one is gone."""
        self._here.log.watcher = None
        self._history, self._state = None, b""

    # service.decision_log.Watcher: a page must never fail a request

    def decided(self, entry: Entry) -> None:
        """Where it is to resume, by the keys that it was routed by."""
        try:
            self._decided(entry)
        except Exception:
            log.exception("the page could not take in request %s", entry.decision.id)

    def _decided(self, entry: Entry) -> None:
        decision, dispatcher = entry.decision, self._here.dispatcher
        if self._history is None:
            return
        if decision.refusal is not None:
            self._history.refused(decision.at)
            return
        ask = dispatcher.asked(decision.id)
        if ask is None or not decision.plans:
            return
        best = decision.plans[0]
        facts = dispatcher.facts(best.publisher)
        if facts is not None:
            layout, fingerprint = facts
            blocks = best.expected_tokens // layout.grid_tokens
            chain = ask.keys.get(fingerprint, ())[:blocks]
            self._history.resumes(str(best.publisher), best.expected_tokens, chain)

    def ended(self, entry: Entry) -> None:
        """What came of it."""
        try:
            if self._history is not None:
                self._history.ended(entry)
        except Exception:
            log.exception("the page could not take in request %s", entry.decision.id)

    def purged(self) -> None:
        """Whose it was is not kept, so all begins anew."""
        if self._history is not None:
            self._history.forget()


_read: dict[str, bytes] = {}


def _files() -> dict[str, bytes]:
    """All of them, read once."""
    if not _read:
        folder = resources.files("kvatlas").joinpath("page")
        _read.update({file.name: file.read_bytes() for file in folder.iterdir()})
    return _read


def _send(reply: Reply, name: str, *, status: int = 200, more: Headers | None = None) -> None:
    kind = _KINDS["." + name.rpartition(".")[2]] + b"; charset=utf-8"
    headers = [(b"content-type", kind), (b"cache-control", b"no-cache"), *_SAFE, *(more or [])]
    reply.send(status, headers, _files()[name])
