"""What must hold in a world with faults, judged from outside the core.

A checker sees what any observer could: messages that reach the gateway, inputs and answers of the
dispatcher, how requests end. What is true it asks `checkers_truth`. It never reads the core's
private state; the bounds on how long a belief may lag are those that the documentation states.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import msgspec

from kvatlas.core.events import Batch
from kvatlas.core.layout import Layout
from kvatlas.core.records import Publisher
from kvatlas.core.router import Plan
from kvatlas.sim.checkers_truth import Life, Prompt, Witness, answer
from kvatlas.sim.engines import SimEngine
from kvatlas.sim.faults import Ask
from kvatlas.sim.gateway import Outcome
from kvatlas.sim.messages import Answers
from kvatlas.sim.tier_node import SimNode
from kvatlas.workload.protocol import Admitted, Arrive

#: class → what it means. `--canary` plants a bug of one of these.
CLASSES: dict[str, str] = {
    "wrong-bytes": "an answer differs from that of an engine with an empty cache",
    "cross-scope": "a hit, or a promise of one, from another scope, adapter or model",
    "resurrected": "claims come back after their end, or outlive it",
    "over-promise": "more is promised than the events that arrived say",
    "leak": "something is still booked when every request is over",
    "endings": "a request ends never, twice, or with half an answer that counts as whole",
    "unexplained-error": "a request fails though an engine that could serve it was there",
    "convergence": "the directory is not what it should be a stated time after healing",
    "bounds": "more is kept than the limits allow, or more than what is held needs",
    "crash": "production code raised",
    "replicas-differ": "two gateways that heard the same do not say the same",
    "two-leaders": "two members lead at one time, or a lease's token does not rise",
    "membership": "a member that is there is missed, one that is not is known, or one is refused",
    "lost-floor": "what is to be forgotten is not known to a member that could know it",
    "stale-record": "a position counts that is of an older content of its store, or forgotten",
}

#: A batch that arrived, or word of a restart, counts at the latest after this: three replays that
#: get no answer, the waits between them (`core.sequence.Limits`), a look, and a stall of the loop.
LAG_S = 45.0
#: An engine that comes back is taken up again after two good looks.
BACK_S = 6.0
VIOLATIONS_MAX = 20  # of one run
TRACE_MAX = 60


class Violation(msgspec.Struct, frozen=True):
    """``at``: seconds of virtual time. The first few of a run are kept."""

    kind: str
    at: float
    what: str


class Checkers:
    """Watches one world from its first event on: what it has to be told is in the methods. What
    one gateway sees and promises: `checkers_view`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.violations: list[Violation] = []
        self.found: Counter[str] = Counter()
        self.trace: deque[str] = deque(maxlen=TRACE_MAX)
        self.shown: tuple[str, ...] = ()  # what led to the first violation
        self.say: Callable[[str], None] | None = None
        self.promises = 0  # promises above 0 that were compared with the truth
        self.tokens = 0  # tokens of answers that were compared
        self.outcomes: dict[str, Outcome] = {}
        self.spans: dict[str, list[float]] = {}  # request → when it came and ended, in world time
        self.homes: dict[str, tuple[str, str]] = {}  # request → host and name of its gateway
        self.declined: set[tuple[str, str]] = set()  # (request, engine)
        self.witnesses: dict[str, Witness] = {}
        self.clock = clock
        self.asks: dict[str, Ask] = {}
        self._lives: dict[str, list[Life]] = {}
        self.batches: dict[int, tuple[Life, Batch]] = {}  # by identity of the events
        self._prompts: dict[tuple[str, str], Prompt] = {}  # (request, layout) →
        self._answers: dict[tuple[str, str], list[int]] = {}
        self.could_read: Callable[[str, Ask], bool] = lambda engine, ask: False
        self._layouts: dict[str, dict[str, Layout]] = {}  # engine → digest → layout

    def report(self, kind: str, what: str) -> None:
        """A violation."""
        self.found[kind] += 1
        self.note(f"VIOLATION {kind}: {what}")
        self.shown = self.shown or tuple(self.trace)
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(Violation(kind, self.clock(), what))

    def note(self, what: str) -> None:
        """For the trace of a failing seed."""
        line = f"{self.clock():9.3f} s  {what}"
        self.trace.append(line)
        if self.say is not None:
            self.say(line)

    def will_ask(self, ask: Ask) -> None:
        """A request that is going to be sent."""
        self.asks[ask.id] = ask

    def make_model(self, engine: str, layout: Layout, identity: bytes = b"") -> Witness:
        """An engine's memory for one life. ``identity``: of model and weights."""
        self._layouts.setdefault(engine, {})[layout.digest()] = layout
        witness = self.witnesses[engine] = Witness(engine, layout, self.report, identity)
        return witness

    # -- engines --------------------------------------------------------------------------------

    def admitted(
        self, engine: SimEngine, arrive: Arrive, admitted: Admitted, waited_s: float
    ) -> None:
        """See `EngineWatcher`."""
        tokens = len(arrive.tokens) // 4
        self.note(f"{engine.name} admits {arrive.id}: {admitted.cached_tokens} of {tokens} cached")

    def published(self, engine: SimEngine, batch: Batch) -> None:
        """See `EngineWatcher`."""
        self._publish(engine.name, engine.life, engine.layout, batch)

    def announced(self, node: SimNode, batch: Batch) -> None:
        """The same of a node's agent."""
        layout = next(iter(self._layouts[node.engines[0]].values()))
        self._publish(node.publisher.worker, node.life, layout, batch)

    def _publish(self, name: str, number: int, layout: Layout, batch: Batch) -> None:
        lives = self._lives.setdefault(name, [])
        if not lives or lives[-1].number != number:
            lives.append(Life(number, layout))
        lives[-1].publish(batch)
        self.batches[id(batch.events)] = lives[-1], batch

    # -- requests ---------------------------------------------------------------------------------

    def compare(self, source: str, message: Answers) -> None:
        """Tokens of answers arrive from an engine."""
        for produced in message.produced:
            ask = self.asks.get(produced.id)
            if ask is None:
                continue
            at = produced.index + produced.count - 1
            if at >= ask.output_tokens:
                self.report("endings", f"{ask.id}: token {at} of {ask.output_tokens} from {source}")
                continue
            self.tokens += 1
            if not any(
                produced.token == self._answer(ask, layout)[at]
                for layout in self._layouts[source].values()
            ):
                self.report("wrong-bytes", f"{ask.id}: token {at} from {source} is a wrong one")

    def _answer(self, ask: Ask, layout: Layout) -> list[int]:
        place = (ask.id, layout.digest())
        if place not in self._answers:
            self._answers[place] = answer(layout, ask.tokens, ask.adapter, ask.output_tokens)
        return self._answers[place]

    # -- promises ---------------------------------------------------------------------------------

    def prompt(self, ask: Ask, layout: Layout) -> Prompt:
        """The keys of a request in an engine of this layout."""
        place = (ask.id, layout.digest())
        if place not in self._prompts:
            self._prompts[place] = Prompt(layout, ask.tokens, ask.scope, ask.adapter)
        return self._prompts[place]

    def kind_of(self, ask: Ask, publisher: Publisher, promised: int) -> str:
        """Which class a promise belongs to that is not true (any more)."""
        engine, lives = publisher.worker, self._lives.get(publisher.worker, [])
        for life in lives:  # was it true at any time?
            if life.ever.resume(self.prompt(ask, life.layout)) >= promised:
                return "resurrected"
        places = sorted({(each.scope, each.adapter) for each in self.asks.values()})
        for layout in self._layouts[engine].values():
            prompts = [Prompt(layout, ask.tokens, *place) for place in places]
            for each in self._lives.values():
                if any(life.ever.resume(p) >= promised for life in each for p in prompts):
                    return "cross-scope"
        return "over-promise"


def own_tokens(plan: Plan) -> int:
    """What of a promise lies in the engine's own pool."""
    below = any(plan.tier_tokens[1:])
    return plan.tier_tokens[0] if below else plan.resume_tokens
