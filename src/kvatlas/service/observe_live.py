"""The production core in shadow: what it would choose in the state that the engines really have.

Engines are listened to as `kvatlas serve` does (events, health, load; nothing is sent to them but
those questions). Each observed request is decided; what then really happened, not the decision, is
what the core learns from. Requests that are split over pairs are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from kvatlas.config import Config
from kvatlas.core.ahead_copies import Params as AheadParams
from kvatlas.core.dispatch import Finished, FirstToken, Question, Sent
from kvatlas.core.records import Publisher
from kvatlas.core.router import Decision
from kvatlas.errors import RequestError
from kvatlas.service.assembly import Assembly
from kvatlas.service.engines import TIMING, Timing
from kvatlas.service.observe_record import Decided
from kvatlas.service.steer import Inbound, endpoint_of
from kvatlas.service.steering import Rank, scope_of
from kvatlas.service.tokens import Prompt, Tokenizer


class Listening(Assembly):
    """What `kvatlas serve` knows of its engines, without asking them for token ids."""

    def _load_tokenizer(self) -> Tokenizer | None:
        return Tokenizer.load(self.config.tokenizer)


class Live:
    """`start` it on a running loop, `close` it."""

    def __init__(
        self,
        config: Config,
        *,
        timing: Timing = TIMING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError as `Assembly`."""
        router = msgspec.structs.replace(
            config.router, policy="price", recording="", decision_log=""
        )
        config = msgspec.structs.replace(config, router=router, ahead=AheadParams())
        self.assembly = Listening(config, timing=timing, clock=clock)
        self._clock = clock
        self._names = _names(config)

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(worker.name for worker in self.assembly.config.worker)

    async def start(self) -> None:
        await self.assembly.start()

    async def close(self) -> None:
        await self.assembly.close()

    def named(self, told: str) -> str:
        """The worker that is meant: by its name, host:port or host; else as it was told."""
        return self._names.get(told, self._names.get(told.removeprefix("http://"), told))

    async def prompt(self, inbound: Inbound) -> tuple[Prompt, list[Rank]]:
        """Its token ids, and the engines that could serve it: none where none is known."""
        tokenizer = self.assembly.tokenizer
        assert tokenizer is not None
        try:
            prompt, serving = await self.assembly.steering.looked_up(inbound)
        except RequestError:
            return await tokenizer.prompt(inbound.path, inbound.body), []
        return prompt, [rank for rank, _ in serving if rank.role == "combined"]

    def decide(self, inbound: Inbound, tokens: bytes, ranks: Sequence[Rank]) -> Decision | None:
        """Its plans; None where there is nothing to decide by."""
        model = inbound.body.get("model")
        name = model if isinstance(model, str) else ""
        among = tuple((rank.publisher, rank.models.get(name, "")) for rank in ranks)
        if not among or not tokens:
            return None
        question = Question(inbound.id, among, tokens, scope_of(inbound), admitted=True)
        decision = self.assembly.dispatcher.handle(question, self._clock())
        if decision is None or decision.unkeyed or not decision.plans:
            return None
        return decision

    def began(self, decision: Decision, engine: str, ttft_s: float) -> Publisher | None:
        """``engine`` gave its first token now; None where that had no plan.

        Only an answer tells where its request went, so the core hears of the sending late, with
        the time at which it was, and of the first token at once after it: nothing is decided in
        between. Until then a request counts in the load that the engine itself reports.
        """
        publisher = next(
            (p.publisher for p in decision.plans if p.publisher.worker == engine), None
        )
        if publisher is not None:
            dispatcher = self.assembly.dispatcher
            dispatcher.handle(Sent(decision.id, publisher), decision.at)
            dispatcher.handle(FirstToken(decision.id, ttft_s), self._clock())
        return publisher

    def served_by(self, decision: Decision) -> str:
        """The one engine that announced all of the prompt since it was decided; "" where none or
        several did. To be asked before `over`."""
        ask = self.assembly.dispatcher.asked(decision.id)
        if ask is None:
            return ""
        directory, gained = self.assembly.directory, set[str]()
        before = {resume.publisher: resume.chain_tokens for resume in ask.resumes}
        for fingerprint, keys in ask.keys.items():
            for resume in directory.peek(list(keys), fingerprint):
                facts = self.assembly.dispatcher.facts(resume.publisher)
                whole = len(keys) * facts[0].grid_tokens if facts is not None else 0
                if resume.chain_tokens >= whole > before.get(resume.publisher, 0):
                    gained.add(resume.publisher.worker)
        return gained.pop() if len(gained) == 1 else ""

    def over(
        self, decision: Decision, publisher: Publisher | None, cached_tokens: int, ttft_s: float
    ) -> None:
        """Free its books, and learn where it is known who served it."""
        ok, first = publisher is not None, decision.plans[0].publisher
        at = publisher if publisher is not None else first
        end = Finished(decision.id, at, ok, cached_tokens, ttft_s)
        self.assembly.dispatcher.handle(end, self._clock())


def decided(decision: Decision, engine: str) -> Decided:
    """What is recorded of it; ``engine``: who really served it, "" where that is not known."""
    first = decision.plans[0]
    there = next((p for p in decision.plans if p.publisher.worker == engine), None)
    # Not on the engine itself: it may have announced some of this very prompt already.
    others = [p.resume_tokens for p in decision.plans if p is not there]
    return Decided(
        engine=first.publisher.worker,
        resume_tokens=first.resume_tokens,
        ttft_s=first.price.ttft_s,
        elsewhere_tokens=-1 if there is None else max(others, default=0),
        there_resume_tokens=-1 if there is None else there.resume_tokens,
        there_ttft_s=-1.0 if there is None else there.price.ttft_s,
    )


def _names(config: Config) -> dict[str, str]:
    names: dict[str, str] = {}
    hosts: dict[str, list[str]] = {}
    for worker in config.worker:
        host, address = endpoint_of(worker.url)
        names[worker.name] = names[address] = names[worker.url.rstrip("/")] = worker.name
        hosts.setdefault(host, []).append(worker.name)
    names |= {host: found[0] for host, found in hosts.items() if len(found) == 1}
    return names
