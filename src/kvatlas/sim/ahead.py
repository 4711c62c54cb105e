"""Copies ahead of need in virtual time: what `core.ahead` orders is asked of the nodes' agents.

It does what `service.ahead` does over HTTP: the gateway asks the agent that is to have a prompt,
which brings it up over the modelled links, and tells when it is over.
"""

from __future__ import annotations

from collections.abc import Callable

from kvatlas.core.ahead import Ahead
from kvatlas.core.ahead_copies import Copied, Copy, Effect, Params, Recall
from kvatlas.core.dispatch import Dispatcher, Input
from kvatlas.core.router import Decision
from kvatlas.sim.engines import GATEWAY
from kvatlas.sim.messages import CallOff, Pull, Pulled
from kvatlas.sim.network import Network
from kvatlas.sim.timeline import Timeline, Timer


class SimAhead:
    """Beside the dispatcher of a simulated gateway. ``leads``: whether it may order what only one
    gateway of a cluster orders."""

    def __init__(
        self,
        params: Params,
        dispatcher: Dispatcher,
        timeline: Timeline,
        network: Network,
        gateway: str = GATEWAY,
    ) -> None:
        self.core = Ahead(params, dispatcher)
        self.leads: Callable[[], bool] = lambda: True
        self._gateway = gateway
        self._timeline = timeline
        self._network = network
        self._timer: Timer | None = None
        dispatcher.listen(self._heard)

    def pulled(self, message: Pulled) -> None:
        """An agent's answer."""
        told = Copied(message.id, message.moved_bytes, message.error)
        self._perform(self.core.handle(told, self._timeline.now))

    def _heard(self, now: float, event: Input, answer: Decision | None) -> None:
        self.core.leads = self.leads()
        self._perform(self.core.handle(event, now, answer))

    def _perform(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            agent = effect.agent.worker
            match effect:
                case Copy(id, engine=engine, keys=keys, tokens=tokens, scope=scope):
                    pull = Pull(id, engine.worker, keys, tokens, scope.owner)
                    self._network.send(self._gateway, agent, pull)
                case Recall(id):
                    self._network.send(self._gateway, agent, CallOff(id))
        due = self.core.next_deadline()
        self._timer = self._timeline.rearm(self._timer, due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._perform(self.core.tick(self._timeline.now))
