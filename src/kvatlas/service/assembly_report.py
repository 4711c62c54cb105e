"""What a gateway knows, for people: its pages, what is wrong with it, and what one should know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvatlas.core.checks_engine import untested
from kvatlas.core.compat import Member, not_shared
from kvatlas.service.inspection import sizes
from kvatlas.service.steering import Problems
from kvatlas.service.tokens import Tokenizer

if TYPE_CHECKING:
    from kvatlas.service.assembly import Assembly


class Report:
    """Of one gateway. Reading never changes it."""

    def __init__(self, of: Assembly) -> None:
        self._of = of

    async def workers(self, _: str) -> object:
        """GET /kvatlas/workers: what is known of each engine."""
        of = self._of
        in_flight = of.steering.in_flight()
        streams = {status.publisher: status for status in of.feed.status()}
        apart = not_shared(of.members)
        rows = []
        for worker in of.engines.workers.values():
            for publisher in worker.publishers():
                stream = streams.get(publisher)
                told = worker.description
                rows.append(
                    {
                        "worker": str(publisher),
                        "url": worker.config.url,
                        "up": worker.up,
                        "draining": worker.name in of.steering.draining,
                        "error": worker.error,
                        "models": list(told.models) if told else [],
                        "engine": f"{told.engine} {told.version}".strip() if told else "",
                        "in_flight": in_flight.get(publisher, 0),
                        "blocks_held": of.directory.holders_of(publisher),
                        "fingerprint": _digest_of(of, worker.name),
                        "not_shared": apart.get(worker.name, ""),
                        "feed": {
                            "connected": stream.connected,
                            "error": stream.error,
                            "behind": not of.feed.idle(publisher),
                            "events": stream.events,
                            "malformed": stream.malformed,
                            "unknown": stream.unknown,
                            "epoch": stream.epoch,
                            "orphans": stream.applied.orphans,
                            "undeclared": stream.applied.undeclared,
                        }
                        if stream
                        else None,
                    }
                )
        return rows

    async def agents(self, _: str) -> object:
        """GET /kvatlas/agents: what is known of each node's agent."""
        return self._of.agents.report(self._of.directory.shelves)

    async def directory(self, _: str) -> object:
        """GET /kvatlas/directory: sizes, and who is not believed."""
        of = self._of
        return {
            "holders": of.directory.holders,
            "publishers": {str(p): of.directory.holders_of(p) for p in of.directory.publishers()},
            "held": sizes(of.directory),
            "muted": [str(p) for p in of.directory.muted()],
            "decisions": of.steering.decisions,
            "fallbacks": dict(of.steering.fallbacks),
            "start": msgspec.to_builtins(of.warm.start),
        }

    def notes(self) -> Problems:
        """Engines that serve one name and may not share what they cache: routed to, each alone.
        Those that drain. Those whose first prices are not the configured device's. And those of a
        version that was not tested."""
        of = self._of
        in_flight = of.steering.in_flight()
        left = {
            str(p): f"{count} requests in flight"
            for p, count in in_flight.items()
            if p.worker in of.steering.draining
        }
        other = "the operations of its model are not known: router.prefill_tokens_per_s counts"
        priced = of.members.items() if of.config.router.device else ()
        return {
            "not_shared": not_shared(of.members),
            "worker_draining": left,
            "device_unused": {name: other for name, m in priced if m.layout.compute is None},
            "version_untested": {
                name: why
                for name, m in of.members.items()
                if (why := untested(m.fingerprint.engine, m.fingerprint.engine_version))
            },
        }

    def problems(self) -> Problems:
        """What is wrong: flag → by whom → what."""
        of = self._of
        workers = of.engines.workers.values()
        problems: Problems = {
            "engine_down": {w.name: w.error for w in workers if not w.up},
            "layout": dict(of.layout_errors),
            "tenants": of.tenancy.problems(),
            "register": of.replica.problems() if of.replica is not None else {},
            "agent_down": of.agents.down(),
            "transport_degraded": of.transports.problems(),
            "agent_apart": of.agents.strangers(_members_up(of), of.dispatcher.keyring),
            "feed": {w.name: w.error for w in workers if w.up and w.error},
            "undeclared_group": {
                str(p): "it announces a group that its layout does not have"
                for p in of.directory.muted()
                if p.worker not in of.layout_errors
            },
        }
        if of.log.error:
            problems["decision_log"] = {"file": of.log.error}
        if of.recorder is not None and of.recorder.error:
            problems["recording"] = {"file": of.recorder.error}
        for status in of.feed.status():
            if status.error:
                problems["feed"][str(status.publisher)] = status.error
            elif status.applied.orphans and not of.directory.holders_of(status.publisher):
                problems["feed"][str(status.publisher)] = (
                    f"{status.applied.orphans} of its events build on blocks of which nothing was "
                    "heard and which it cannot replay: no hit is foreseen there until it caches "
                    "prompts from their start again (a reset of its prefix cache does it at once)"
                )
        if of.tokenizer is not None:
            problems["tokenizer"] = _tokenizer_problems(of.tokenizer)
        return problems


def _digest_of(of: Assembly, name: str) -> str:
    member = of.members.get(name)
    return member.fingerprint.digest().hex()[:16] if member else ""


def _members_up(of: Assembly) -> dict[str, Member]:
    up = {worker.name for worker in of.engines.up()}
    return {name: member for name, member in of.members.items() if name in up}


def _tokenizer_problems(tokenizer: Tokenizer) -> dict[str, str]:
    state = tokenizer.state()
    found = {}
    if state.last_mismatch:
        found["mismatch"] = state.last_mismatch
    if "endpoint" in (state.chat, state.completion) and state.endpoint_failing:
        found["endpoint"] = (
            "the engines' token endpoint fails, so requests are routed by load alone: "
            "set tokenizer.path to the model's directory"
        )
    return found
