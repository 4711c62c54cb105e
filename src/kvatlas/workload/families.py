"""The four request families by seed: random, shared prompts, multi-turn, agent. Pure, a stream.

They are corners of one model. Sessions start at random moments. A session belongs to a group with
one system prompt, and to one of the group's sets of few-shot examples; then come its own tokens.
Each turn's prompt is the whole conversation so far, answers included, and what is new. So blocks
are shared in three ways: by a group, by a set, by the turns of a session. What differs between the
families, and between the published traces of `presets.py`, is only the `Family` value.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import NormalDist

import msgspec

from kvatlas.errors import ConfigError
from kvatlas.workload.trace import Trace, TraceRequest

LEVELS = 4096  # of each distribution: the rarest of its values is as rare
_GOLDEN = (5**0.5 - 1) / 2
ANSWER_S_PER_TOKEN = 0.02  # what a turn's arrival assumes of the answer before it
REQUESTS_MAX = 1 << 32
GROUPS_MAX = 1 << 20
# Ids are put together from numbers within these limits: no table, and none twice.
_POSITION_BITS, _SYSTEM, _EXAMPLES, _TAIL = 24, 1 << 60, 2 << 60, 3 << 60


class Lengths(msgspec.Struct, frozen=True):
    """A distribution by its quantiles: (share, value) from share 0 to 1, log-normal between.

    It says what published tables say: a p50 and a p99 are two of its points. The ends, 0 and 1,
    stand for one in ten thousand.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if len(self.points) < 2 or self.points[0][0] != 0 or self.points[-1][0] != 1:
            raise ConfigError(f"quantiles must go from 0 to 1: {self.points}")
        if self.points[0][1] < 0 or any(
            a >= b or v > w or not math.isfinite(w) for (a, v), (b, w) in pairwise(self.points)
        ):
            raise ConfigError(f"quantiles must rise and not be negative: {self.points}")

    def table(self) -> tuple[float, ...]:
        """``LEVELS`` values, equally frequent: what is drawn from."""
        return _table(self.points)

    def mean(self) -> float:
        """The mean of that table."""
        return sum(self.table()) / LEVELS


@lru_cache(maxsize=256)
def _table(points: tuple[tuple[float, float], ...]) -> tuple[float, ...]:
    return tuple([_at(points, (level + 0.5) / LEVELS) for level in range(LEVELS)])


def _at(points: tuple[tuple[float, float], ...], share: float) -> float:
    index = bisect_right(points, (share, math.inf)) - 1
    (low, below), (high, above) = points[index], points[index + 1]
    start, end = _normal(low), _normal(high)
    part = min(max((_normal(share) - start) / (end - start), 0.0), 1.0)
    return math.exp(math.log1p(below) * (1 - part) + math.log1p(above) * part) - 1


def always(value: float) -> Lengths:
    """One value."""
    return Lengths(((0.0, value), (1.0, value)))


def spread(p50: float, p99: float, low: float = 0.0, p90: float | None = None) -> Lengths:
    """A distribution by its published quantiles."""
    middle = () if p90 is None else ((0.9, p90),)
    return Lengths(((0.0, low), (0.5, p50), *middle, (0.99, p99), (1.0, p99 * 1.5)))


def _normal(share: float) -> float:
    return NormalDist().inv_cdf(min(max(share, 1e-4), 1 - 1e-4))


class Family(msgspec.Struct, frozen=True):
    """All that a workload depends on, beside the seed. Tokens and seconds.

    ``group_skew`` is the exponent of Zipf's law by which sessions choose among ``groups`` system
    prompts, unless ``group_weights`` says how often each is chosen; ``ungrouped`` is the share of
    sessions that have none. ``pace_sigma`` spreads a session's
    own pace (log-normal): it scales all that it appends after the first turn. A session ends after
    its turns or before a prompt would exceed ``context_max``. ``dealt``: groups, sets and lengths
    are dealt out in turn instead of drawn, so that small workloads have exact sums.
    """

    requests: int
    duration_s: float
    block_tokens: int
    first_tokens: Lengths
    output_tokens: Lengths
    groups: int = 1
    group_skew: float = 0.0
    group_weights: tuple[float, ...] = ()
    ungrouped: float = 0.0
    system_tokens: Lengths = always(0)
    example_sets: int = 1
    example_tokens: Lengths = always(0)
    turns: Lengths = always(1)
    append_tokens: Lengths = always(0)
    pace_sigma: float = 0.0
    think_s: Lengths = always(0)
    context_max: int = 131_072
    dealt: bool = False


class _Session:
    __slots__ = ("examples_end", "examples_id", "index", "left", "pace", "prompt", "system_end",
                 "system_id", "think_s", "turn")  # fmt: skip

    def __init__(self, index: int) -> None:
        self.index = index
        self.system_id = self.system_end = 0  # base of its ids, and where it ends, in tokens
        self.examples_id = self.examples_end = 0
        self.prompt = 0  # tokens of the turn to come
        self.turn = 0
        self.left = 1
        self.pace = 1.0
        self.think_s: float | None = None  # before the turn to come


def resized(family: Family, requests: int) -> Family:
    """With fewer or more requests the time shrinks or grows: the rate stays."""
    duration_s = family.duration_s * requests / family.requests
    return msgspec.structs.replace(family, requests=requests, duration_s=duration_s)


def generate(family: Family, seed: int = 0, name: str = "generated") -> Trace:
    """The workload of a family and a seed, the same everywhere. Raises ConfigError for values that
    cannot be."""
    _check(family)
    return Trace(name, "generated", family.block_tokens, lambda: _requests(family, seed))


def _check(family: Family) -> None:
    for what, value, low, high in (
        ("requests", family.requests, 1, REQUESTS_MAX),
        ("duration_s", family.duration_s, 0, 1e9),
        ("block_tokens", family.block_tokens, 1, 1 << 20),
        ("groups", family.groups, 1, GROUPS_MAX),
        ("example_sets", family.example_sets, 1, GROUPS_MAX),
        ("group_skew", family.group_skew, 0, 10),
        ("ungrouped", family.ungrouped, 0, 1),
        ("pace_sigma", family.pace_sigma, 0, 3),
        ("context_max", family.context_max, 1, 1 << _POSITION_BITS),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{what} {value:g}: {low:g} to {high:g} is possible")
    weights = family.group_weights
    if weights and (len(weights) != family.groups or not min(weights) > 0):
        raise ConfigError(f"{len(weights)} weights for {family.groups} groups: one each, above 0")


def _requests(family: Family, seed: int) -> Iterator[TraceRequest]:
    """Sessions under way wait in a heap for their next turn: memory is theirs alone."""
    rng = random.Random(seed)
    drawn = _Drawn(family, rng)
    gap_s = family.duration_s * family.turns.mean() / family.requests
    under_way: list[tuple[float, int, _Session]] = []
    start_s, started = 0.0, 0
    for index in range(family.requests):
        while not under_way or under_way[0][0] > start_s:
            heapq.heappush(under_way, (start_s, started, drawn.session(started)))
            started += 1
            start_s += rng.expovariate(1 / gap_s) if gap_s else 0.0
        now, number, session = heapq.heappop(under_way)
        output = drawn.output(number)
        ids = _ids(session, family.block_tokens)
        name = str(number)
        yield TraceRequest(index, now, session.prompt, output, ids, name, session.think_s)
        if drawn.goes_on(session, output):
            assert session.think_s is not None
            at_s = now + output * ANSWER_S_PER_TOKEN + session.think_s
            heapq.heappush(under_way, (at_s, number, session))


def _ids(session: _Session, block_tokens: int) -> tuple[int, ...]:
    """A block is as shared as its last token is; one that is cut short nobody else has."""
    blocks = session.prompt // block_tokens
    system = min(session.system_end // block_tokens, blocks)
    examples = max(system, min(session.examples_end // block_tokens, blocks))
    own = session.index << _POSITION_BITS
    tail = (_TAIL | own | session.turn,) if session.prompt % block_tokens else ()
    return (
        *range(session.system_id, session.system_id + system),
        *range(session.examples_id + system, session.examples_id + examples),
        *range(own + examples, own + blocks),
        *tail,
    )


class _Drawn:
    """All that chance decides."""

    def __init__(self, family: Family, rng: random.Random) -> None:
        self._family = family
        self._rng = rng
        zipf = [(group + 1.0) ** -family.group_skew for group in range(family.groups)]
        weights = family.group_weights or zipf
        self._groups = range(family.groups)
        self._weights = list(accumulate(weights))
        # Lengths of prompts that many share are dealt by the golden ratio, not drawn: neighbours in
        # popularity get far-off lengths, and no seed decides how much the whole trace shares.
        deal = [(group + 1) * _GOLDEN % 1 for group in self._groups]
        systems, self._examples = family.system_tokens.table(), family.example_tokens.table()
        self._systems = [round(systems[int(share * LEVELS)]) for share in deal]
        self._first = family.first_tokens.table()
        self._append = family.append_tokens.table()
        self._turns = family.turns.table()
        self._output = family.output_tokens.table()
        self._think = family.think_s.table()

    def output(self, session: int) -> int:
        """Tokens of an answer."""
        return max(1, round(self._value(self._output, session)))

    def _value(self, table: Sequence[float], session: int) -> float:
        family = self._family
        if not family.dealt:
            return self._rng.choice(table)
        hands = family.groups * family.example_sets
        rounds = -(-family.requests // hands)
        return _dealt(table, session // hands % rounds, rounds)

    def session(self, index: int) -> _Session:
        """A new one, before its first turn."""
        family, rng = self._family, self._rng
        session = _Session(index)
        if family.dealt:
            group = index % family.groups
            examples = index // family.groups % family.example_sets
        else:
            group = rng.choices(self._groups, cum_weights=self._weights)[0]
            examples = rng.randrange(family.example_sets)
        if rng.random() >= family.ungrouped:
            example_set = group * family.example_sets + examples
            session.system_id = _SYSTEM | group << _POSITION_BITS
            session.system_end = self._systems[group]
            session.examples_id = _EXAMPLES | example_set << _POSITION_BITS
            tokens = _dealt(self._examples, examples, family.example_sets)
            session.examples_end = session.system_end + round(tokens)
        own = round(self._value(self._first, index))
        session.prompt = max(1, min(session.examples_end + own, family.context_max))
        session.left = max(1, round(self._value(self._turns, index)))
        if family.pace_sigma:
            session.pace = rng.lognormvariate(0.0, family.pace_sigma)
        return session

    def goes_on(self, session: _Session, output: int) -> bool:
        """Prepares the next turn; False where there is none."""
        family = self._family
        session.turn += 1
        session.left -= 1
        appended = max(1, round(self._value(self._append, session.index) * session.pace))
        session.prompt += output + appended
        session.think_s = self._value(self._think, session.index)
        return session.left > 0 and session.prompt <= family.context_max


def _dealt(table: Sequence[float], index: int, count: int) -> float:
    """Value ``index`` of ``count`` that stand for the whole table."""
    return table[int((index + 0.5) / count * len(table))]
