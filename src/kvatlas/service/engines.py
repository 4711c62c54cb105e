"""The workers: who is there, what they serve, how busy they are, and whose cache is gone.

One task per worker asks its engine over HTTP, forever and with a deadline on every question. An
engine that is not there, or dies, is asked again: that is never an error of ours. Claims about a
cache are given up when the engine is known to have lost it without an event that says so: it
started anew, or sleeps (an idle engine sends no events).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from kvatlas.config import WorkerConfig
from kvatlas.core.records import Publisher
from kvatlas.core.transports import Moved
from kvatlas.errors import ConfigError, EngineError
from kvatlas.service import probe
from kvatlas.service.feed import Feed
from kvatlas.service.http_client import HttpClient
from kvatlas.service.probe import Description, Load, Pulse

log = logging.getLogger(__name__)


LOOKS_PER_S = 256  # at all engines together: beyond as many, each is looked at less often


class Timing(msgspec.Struct, frozen=True):
    """How often engines are asked, and how long a doubt lasts."""

    poll_s: float = 1.0
    timeout_s: float = 2.0
    down_after: int = 3  # failed looks in a row
    up_after: int = 2  # good looks in a row, once it was down
    describe_every_s: float = 15.0
    retry_max_s: float = 5.0  # between looks at an engine that is down


TIMING = Timing()


class Worker(msgspec.Struct):
    """What is known of one engine. Kept up to date in place; ``up`` decides about routing."""

    config: WorkerConfig
    up: bool = False
    error: str = "not asked yet"  # why it is not up, or what is wrong with its feed
    description: Description | None = None
    loads: dict[int, Load] = msgspec.field(default_factory=dict)
    moved: dict[int, Moved] = msgspec.field(default_factory=dict)  # by rank
    malformed: int = 0  # figures of its metrics page that were none, over all looks
    asleep: bool = False
    restarts: int = 0
    polled_s: float = -1.0  # last good look, on the event loop's clock
    asked_s: float = -1.0  # when that look began
    got_on_s: float = -math.inf  # the last one by which it had done anything
    failures: int = 0  # looks in a row
    successes: int = 0

    @property
    def name(self) -> str:
        return self.config.name

    def publishers(self) -> list[Publisher]:
        """One per rank that publishes events; rank 0 where none does."""
        sources = self.description.sources if self.description else ()
        return [Publisher(self.name, rank) for rank, _ in sources] or [Publisher(self.name)]


class Listener(Protocol):
    """Who must know: it registers publishers with the directory and forgets them again.

    Neither may raise for a reason of its own.
    """

    def described(self, worker: Worker) -> None:
        """The engine told what it is, for the first time or otherwise than before. Called before
        its events are followed."""
        ...

    def gone(self, worker: Worker, publishers: Iterable[Publisher]) -> None:
        """These publishers are no more: the worker was removed, or has fewer ranks."""
        ...


class Engines:
    """The registry. ``workers`` may be read at any time; `add` and `remove` change it."""

    def __init__(
        self, feed: Feed, listener: Listener, client: HttpClient, timing: Timing = TIMING
    ) -> None:
        self.workers: dict[str, Worker] = {}
        self._feed = feed
        self._listener = listener
        self._client = client
        self._timing = timing
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watches: dict[str, _Watch] = {}

    def add(self, config: WorkerConfig) -> Worker:
        """Start to watch an engine. Raises ConfigError when the name is taken."""
        if config.name in self.workers:
            raise ConfigError(f"worker {config.name!r} is there already: names must differ")
        worker = self.workers[config.name] = Worker(config)
        watch = _Watch(
            worker, self._feed, self._listener, self._client, self._timing, pause_s=self._pause_s
        )
        self._watches[config.name] = watch
        self._tasks[config.name] = asyncio.create_task(watch.run(), name=f"watch {config.name}")
        return worker

    def _pause_s(self) -> float:
        """Between two looks at one that is well."""
        return max(self._timing.poll_s, len(self.workers) / LOOKS_PER_S)

    async def remove(self, name: str) -> None:
        """Stop watching an engine and forget what it holds. Raises KeyError when unknown."""
        worker = self.workers.pop(name)
        watch = self._watches.pop(name)
        await _cancel(self._tasks.pop(name))
        watch.forget(worker.publishers())

    async def first_look(self, deadline_s: float) -> bool:
        """Wait until every engine was asked once; False when that took too long."""
        waits = [asyncio.create_task(w.looked.wait()) for w in self._watches.values()]
        if not waits:
            return True
        _, pending = await asyncio.wait(waits, timeout=deadline_s)
        for task in pending:
            await _cancel(task)
        return not pending

    def up(self) -> list[Worker]:
        """Engines that may get requests, in order of configuration."""
        return [worker for worker in self.workers.values() if worker.up]

    def quiet_s(self, name: str) -> float:
        """For how long an engine was not seen to do anything; inf where it never was."""
        worker = self.workers.get(name)
        return asyncio.get_running_loop().time() - worker.got_on_s if worker else math.inf

    async def close(self) -> None:
        """Stops asking. Claims and streams are left as they are."""
        for task in list(self._tasks.values()):
            await _cancel(task)
        self._tasks.clear()
        self._watches.clear()


class _Watch:
    """The task of one worker."""

    def __init__(
        self,
        worker: Worker,
        feed: Feed,
        listener: Listener,
        client: HttpClient,
        timing: Timing,
        *,
        pause_s: Callable[[], float],
    ) -> None:
        """``pause_s``: between two looks, where all is well."""
        self._pause_s = pause_s
        self.looked = asyncio.Event()
        self._worker = worker
        self._feed = feed
        self._listener = listener
        self._client = client
        self._timing = timing
        self._loop = asyncio.get_running_loop()
        self._describe_at = 0.0
        self._last: Pulse | None = None

    async def run(self) -> None:
        """Ask, wait, ask again. Ends only when it is cancelled."""
        while True:
            try:
                await self._look()
            except EngineError as error:
                self._failed(str(error))
            except Exception:
                log.exception("%s: asking it failed", self._worker.name)
                self._failed("asking it failed; see the log")
            self.looked.set()
            await asyncio.sleep(self._pause())

    async def _look(self) -> None:
        timing, worker = self._timing, self._worker
        asked_s = self._loop.time()
        pulse = await probe.pulse(self._client, worker.config, timing.timeout_s)
        self._compare(pulse)
        now = self._loop.time()
        if worker.description is None or now >= self._describe_at:
            described = await probe.describe(self._client, worker.config, timing.timeout_s)
            self._describe_at = now + timing.describe_every_s
            self._told(described)
        worker.loads = pulse.loads
        worker.moved = pulse.moved
        worker.malformed += pulse.malformed
        worker.asleep = pulse.asleep
        worker.polled_s, worker.asked_s = now, asked_s
        if self._last is None or pulse.gets_on(self._last):
            worker.got_on_s = now
        worker.failures = 0
        worker.successes += 1
        # At the very start one good look is enough; after a failure it takes more.
        if not worker.up and (self._last is None or worker.successes >= timing.up_after):
            worker.up = True
            log.info("%s: up", worker.name)
        self._last = pulse
        worker.error = self._complaint()

    def _failed(self, error: str) -> None:
        worker = self._worker
        worker.failures += 1
        worker.successes = 0
        worker.error = error
        self._describe_at = 0.0
        if worker.up and worker.failures >= self._timing.down_after:
            worker.up = False
            worker.loads = {}
            log.warning("%s: down: %s", worker.name, error)

    def _pause(self) -> float:
        timing, failures = self._timing, self._worker.failures
        if not failures or self._worker.up:
            return self._pause_s()
        return min(timing.poll_s * 2.0 ** min(failures - 1, 16), timing.retry_max_s)

    # -- what changed ---------------------------------------------------------------------------

    def _compare(self, pulse: Pulse) -> None:
        """Is this still the process that we knew, and is it awake?"""
        last = self._last
        if last is None:
            return
        reason = ""
        if pulse.started and last.started and pulse.started != last.started:
            reason = "its process started anew"
        elif 0 <= pulse.work < last.work:
            reason = "its counters went back"
        if reason:
            self._describe_at = 0.0  # ports and models may be other ones
            self._restarted(reason)
        elif pulse.asleep != last.asleep:
            # Asleep it drops its cache; what it has to say about that comes after it woke up.
            self._dropped("it sleeps" if pulse.asleep else "it slept", awake=not pulse.asleep)

    def _restarted(self, reason: str) -> None:
        self._worker.restarts += 1
        for publisher in self._worker.publishers():
            self._feed.restarted(publisher, reason)

    def _dropped(self, reason: str, *, awake: bool = False) -> None:
        for publisher in self._worker.publishers():
            self._feed.dropped(publisher, reason, awake=awake)

    def _told(self, told: Description) -> None:
        worker = self._worker
        before = worker.description
        if told == before:
            return
        old = worker.publishers() if before else []
        worker.description = told
        try:
            self._listener.described(worker)
        except Exception:
            self.forget([p for p in worker.publishers() if p not in old])
            worker.description = before  # so that it is told again at the next look
            raise
        self.forget([publisher for publisher in old if publisher not in worker.publishers()])
        if before is not None and before.life != told.life:
            self._restarted("its own account of its start changed")
        elif before is not None and _lost_cache(before, told):
            self._dropped("what it serves is not what it was")
        followed = {Publisher(worker.name, rank): source for rank, source in told.sources}
        for publisher in old:
            if publisher not in followed:
                self._feed.dropped(publisher, "it publishes no events any more")
                self._feed.remove(publisher)
        for publisher, source in followed.items():
            self._feed.add(publisher, source)

    def forget(self, publishers: list[Publisher]) -> None:
        """Give up publishers and their claims."""
        for publisher in publishers:
            self._feed.remove(publisher)
        if publishers:
            self._listener.gone(self._worker, publishers)

    def _complaint(self) -> str:
        """What keeps a healthy engine from being routed by its cache."""
        worker = self._worker
        told = worker.description
        if told is not None and worker.config.events and not told.sources:
            return "it publishes no KV events: start it with --kv-events-config"
        return ""


def _lost_cache(before: Description, told: Description) -> bool:
    """Whether this change means that claims made before it are worth nothing.

    New adapters do not; a known name that now stands for other weights does.
    """
    paths = {adapter.name: adapter for adapter in before.adapters}
    if any(paths.get(adapter.name, adapter) != adapter for adapter in told.adapters):
        return True
    same = msgspec.structs.replace(
        told, adapters=before.adapters, facts=before.facts, sources=before.sources
    )
    return same != before


async def _cancel(task: asyncio.Task[object] | asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
