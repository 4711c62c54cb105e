"""Copies ahead of need in real time: what `core.ahead` orders is asked of the nodes' agents.

Each copy is one request to the agent that is to have it, and one task here; a copy that is not
wanted any more is called off by leaving. No request of a client waits for any of it, and whatever
fails is counted and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvatlas.core.ahead import Ahead
from kvatlas.core.ahead_copies import Copied, Copy, Effect, Params, Recall
from kvatlas.core.dispatch import Dispatcher, Input
from kvatlas.core.keys import Keyring
from kvatlas.core.router import Decision
from kvatlas.errors import EngineError
from kvatlas.service.agent_orders import ask
from kvatlas.service.agent_pulls import PULL, Brought, Wanted
from kvatlas.service.agents import Agents
from kvatlas.service.http_client import HttpClient

log = logging.getLogger(__name__)


class CopiesAhead:
    """Beside the dispatcher of a gateway. Lives on the event loop; `close` it."""

    def __init__(
        self,
        params: Params,
        dispatcher: Dispatcher,
        keyring: Keyring,
        client: HttpClient,
        clock: Callable[[], float],
    ) -> None:
        """``clock`` is that of the dispatcher's inputs."""
        self.core = Ahead(params, dispatcher)
        self.agents: Agents | None = None  # before they are there, nothing can be asked
        self.error = ""  # of the last copy that failed
        self._dispatcher = dispatcher
        self._keyring = keyring
        self._client = client
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        if params.on:
            dispatcher.listen(self._heard)

    async def close(self) -> None:
        """Calls off what is under way."""
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def look(self, *, leads: bool) -> None:
        """Whether hot prefixes and nodes that drain are this gateway's, and which nodes do."""
        self.core.leads = leads
        if self.agents is not None and self.core.params.move:
            self._perform(self.core.drain(self.agents.draining(), self._clock()))

    def _heard(self, now: float, event: Input, answer: Decision | None) -> None:
        self._perform(self.core.handle(event, now, answer))

    def _perform(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case Copy():
                    task = asyncio.create_task(self._copy(effect), name=f"copy {effect.id}")
                    self._tasks[effect.id] = task
                case Recall(id):
                    task = self._tasks.pop(id)
                    task.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.core.next_deadline()
        if due is not None:
            left_s = max(0.0, due - self._clock())
            self._timer = asyncio.get_running_loop().call_later(left_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._perform(self.core.tick(self._clock()))

    # -- one copy -------------------------------------------------------------------------------

    async def _copy(self, order: Copy) -> None:
        moved_bytes, error = 0, ""
        try:
            brought = await self._ask(order)
            moved_bytes = brought.moved_bytes
            if brought.tokens < order.tokens:
                error = f"{brought.tokens} of {order.tokens} tokens arrived"
        except EngineError as fault:
            error = str(fault)
        except Exception as fault:  # a copy must never fail anything else
            log.exception("copy %s failed", order.id)
            error = f"{type(fault).__name__}: {fault}"
        if error:
            self.error = f"{order.id}: {error}"
            log.info("copy %s to %s failed: %s", order.id, order.agent, error)
        self._tasks.pop(order.id, None)
        told = Copied(order.id, moved_bytes, error)
        self._perform(self.core.handle(told, self._clock()))

    async def _ask(self, order: Copy) -> Brought:
        """Raises EngineError where the agent does not do it."""
        assert self.agents is not None, "who orders copies knows agents"
        facts = self._dispatcher.facts(order.engine)
        root = self._keyring.root(facts[1]).hex() if facts is not None else ""
        url, life, model = self.agents.serving(order.agent, root)
        wanted = Wanted(life, model, order.keys, order.scope.owner)
        left_s = max(0.1, order.until - self._clock())
        return await ask(
            self._client, self._keyring, url, PULL, wanted, kind=Brought, timeout_s=left_s
        )

    # -- for people -----------------------------------------------------------------------------

    async def page(self, _: str) -> object:
        """GET /kvatlas/ahead: what copies came to so far."""
        core = self.core
        return {
            "under_way": core.under_way,
            "watched": core.watched,
            "last_error": self.error,
            "copies": {why.value: tally for why, tally in core.tallies.items()},
        }

    def metrics(self) -> Iterator[Metric]:
        """The same for Prometheus."""
        copies = _counter("copies", "ordered, and how they ended", "outcome")
        denied = _counter("denied", "copies that paid and could not be had now", "reason")
        moved = _counter("moved_bytes", "that copies brought")
        served = _counter("requests", "that went by a copy")
        seconds = GaugeMetricFamily(
            "kvatlas_ahead_saved_seconds",
            "time to first token that copies save, summed over requests: as expected when they "
            "were ordered, as predicted when the requests were sent, as then measured",
            labels=["copy", "figure"],
        )
        for why, tally in self.core.tallies.items():
            unused = {"used": tally.used, "unused": tally.unused}
            for outcome, count in ({"ordered": tally.ordered} | tally.ended | unused).items():
                copies.add_metric([why, outcome], count)
            for reason, count in tally.denied.items():
                denied.add_metric([why, reason], count)
            moved.add_metric([why], tally.moved_bytes)
            served.add_metric([why], tally.served)
            seconds.add_metric([why, "expected"], tally.expected_s)
            seconds.add_metric([why, "predicted"], tally.predicted_s)
            seconds.add_metric([why, "measured"], tally.measured_s)
        yield from (copies, denied, moved, served, seconds)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvatlas_ahead_{name}", text, labels=["copy", *labels])
