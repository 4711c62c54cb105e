"""Where a trained model's attention goes, and what that is worth to a cache of its KV.

Seed document 003 (chapter 2) says that the first 64 tokens and the last 128 are always attended
to, that what lies between is cold and safe to give up, and that what is important there depends on
the query. `run` has these measured (`kvatlas.connectors.attention_scores`), `Study` holds what came
of it. The statistics below are of plain numbers: attention *mass*, the share of all attention that
a block gets, by block from the start of the context.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvatlas.connectors import attention_scores
from kvatlas.core.policy.attention import AttentionScores
from kvatlas.errors import ConfigError
from kvatlas.validate.answering import Child, Measured
from kvatlas.validate.attention_contexts import Context

SINK_TOKENS = 64  # both from seed document 003, chapter 2
RECENT_TOKENS = 128
BLOCK_TOKENS = 16
WIDE = 4  # small blocks in one of 64 tokens
SHARES = attention_scores.SHARES
TOP = 0.10  # of the middle blocks: those called hot
PAST_STEPS = (1, 8, 32)
DROPPED = (0.10, 0.25, 0.50)
FROM_START = 4  # wide blocks that have a score of their own

Masses = Sequence[float]
Three = tuple[float, float, float]


class Loss(msgspec.Struct, frozen=True):
    """What giving up ``share`` of the context's blocks in some ``order`` does to one answer.

    The same tokens are forced, so that ``first_other`` (the number of tokens where none differs)
    is also where a free answer begins to differ, and ``agreement`` the share of steps at which the
    greedy token is the same. ``logit_error``: root mean square of the difference, in standard
    deviations of the logits; ``kl_nats``: how far the distribution moved.
    """

    order: Literal["none", "before", "hindsight", "hottest", "oldest", "random"]
    share: float
    blocks: int
    agreement: float
    first_other: int
    logit_error: float
    kl_nats: float


class Answer(msgspec.Struct, frozen=True):
    """One answer as measured; see `attention_scores.reduced` for the shapes."""

    id: str
    context: str
    kind: str
    context_tokens: int
    question_tokens: int
    about: list[int]
    text: str
    mass: list[list[list[float]]]
    edges: list[list[list[float]]]
    needed: list[list[float]]
    noise: list[float]
    losses: list[Loss]
    seconds: float


class Stable(msgspec.Struct, frozen=True):
    """Of the middle's attention at one step, the share that its hot blocks get, when they are
    named by the ``past_steps`` before it; by that step itself (``best``); and by chance."""

    past_steps: int
    caught: float
    caught_by_layer: float
    best: float
    best_by_layer: float
    chance: float


class Told(msgspec.Struct, frozen=True):
    """One answer's statistics. Shares of attention are means over steps, layers and heads.

    ``holding``: the share of blocks of 16 tokens that holds 80, 90 and 95 % of it (mean over layers
    first, ``holding_by_layer``: each layer for itself); ``holding_wide`` the same of 64 tokens;
    ``holding_middle``: of the middle blocks, that of the middle's attention. ``tokens_needed``: of
    the tokens, in one head at one step; ``noise``: of the tokens, those that get under 1 % of what
    the most attended gets. ``about_own`` and ``about_other``: attention of the blocks that the
    question is about, over the mean middle block, under it and under the other questions;
    ``…_layer``: the same in the layer where it is highest.
    ``by_layer``: first token, sink and recent window. ``profile``: blocks of 64 tokens.
    """

    id: str
    kind: str
    digest: str
    context_tokens: int
    question_tokens: int
    first: float
    sink: float
    recent: float
    middle: float
    even_sink: float
    even_recent: float
    holding: Three
    holding_by_layer: Three
    holding_wide: Three
    holding_middle: Three
    tokens_needed: Three
    noise: float
    stable: tuple[Stable, ...]
    about_own: float | None
    about_other: float | None
    about_own_layer: float | None
    about_other_layer: float | None
    by_layer: tuple[tuple[float, ...], ...]
    profile: tuple[float, ...]
    losses: tuple[Loss, ...]
    text: str
    seconds: float


class Pair(msgspec.Struct, frozen=True):
    """Two questions on one context: how alike their attention to the middle is.

    ``common``: of the hot tenth of one, the share that is hot to the other too (``_by_layer``: each
    layer for itself); ``rank``: Spearman's correlation. ``halves_…``: the same of the two halves of
    one answer, the best that could be reached.
    """

    context: str
    common: float
    common_by_layer: float
    rank: float
    halves_common: float
    halves_common_by_layer: float
    halves_rank: float
    chance: float


class Study(Measured, frozen=True, tag="kvatlas.attention-study.1"):
    """The result, as it is kept."""

    tokens: int
    answers: Annotated[tuple[Told, ...], msgspec.Meta(min_length=1)]
    pairs: tuple[Pair, ...]

    def check(self, name: str) -> None:
        """Raises ConfigError where a profile is none of its answer."""
        for each in self.answers:
            held = each.context_tokens + each.question_tokens
            if not BLOCK_TOKENS * WIDE <= held <= BLOCK_TOKENS * WIDE * len(each.profile):
                raise ConfigError(f"{name}: {each.id}: its profile is not of {held} tokens")


# -- statistics -----------------------------------------------------------------------------------


def holding(masses: Masses, share: float) -> float:
    """The smallest share of the blocks that holds ``share`` of the whole; 0 where all is 0."""
    whole, held = sum(masses), 0.0
    if whole <= 0:
        return 0.0
    for count, mass in enumerate(sorted(masses, reverse=True), 1):
        held += mass
        if held >= share * whole * (1 - 1e-12):
            return count / len(masses)
    return 1.0


def hot(masses: Masses, share: float = TOP) -> set[int]:
    """The blocks with the most of it, so large a share of them but at least one."""
    count = max(1, round(share * len(masses)))
    return set(sorted(range(len(masses)), key=lambda b: (-masses[b], b))[:count])


def caught(named: set[int], masses: Masses) -> float:
    """The share of the whole that these blocks hold."""
    whole = sum(masses)
    return sum(masses[b] for b in named) / whole if whole else 0.0


def common(a: Masses, b: Masses) -> float:
    """Of the hot blocks of one, the share that is hot in the other too."""
    left, right = hot(a), hot(b)
    return len(left & right) / len(left)


def rank_correlation(a: Masses, b: Masses) -> float:
    """Spearman's, ties at their mean rank; 0 where one of them is all the same."""
    left, right = _ranks(a), _ranks(b)
    if len(set(left)) < 2 or len(set(right)) < 2:
        return 0.0
    return statistics.correlation(left, right)


def _ranks(masses: Masses) -> list[float]:
    order = sorted(range(len(masses)), key=masses.__getitem__)
    ranks = [0.0] * len(masses)
    at = 0
    while at < len(order):
        end = at
        while end + 1 < len(order) and masses[order[end + 1]] == masses[order[at]]:
            end += 1
        for each in order[at : end + 1]:
            ranks[each] = (at + end) / 2
        at = end + 1
    return ranks


def wide(masses: Masses, by: int = WIDE) -> list[float]:
    """The same in blocks that are ``by`` times as large; the last may be smaller."""
    return [sum(masses[at : at + by]) for at in range(0, len(masses), by)]


def mean(rows: Sequence[Masses]) -> list[float]:
    """Block by block. Rows may grow: a block that a row has not yet counts 0 there."""
    length = max(len(row) for row in rows)
    return [sum(row[b] for row in rows if b < len(row)) / len(rows) for b in range(length)]


def stable(steps: Sequence[Masses], past_steps: int) -> tuple[float, float]:
    """Of each step's attention, what the hot blocks of the steps before it catch, and its own."""
    found, best = [], []
    for at in range(past_steps, len(steps)):
        now = steps[at]
        found.append(caught(hot(mean(steps[at - past_steps : at])), now))
        best.append(caught(hot(now), now))
    return (statistics.fmean(found), statistics.fmean(best)) if found else (0.0, 0.0)


# -- one answer, and all --------------------------------------------------------------------------


def middle(answer: Answer) -> range:
    """The blocks of the context between sink and recent window when the question comes."""
    first = -(-SINK_TOKENS // BLOCK_TOKENS)
    return range(first, max(first, (answer.context_tokens - RECENT_TOKENS) // BLOCK_TOKENS))


def _cut(masses: Masses, blocks: range) -> Masses:
    return masses[blocks.start : blocks.stop]


def _stables(answer: Answer, flat: Sequence[Masses]) -> tuple[Stable, ...]:
    blocks = middle(answer)
    over = [_cut(step, blocks) for step in flat]
    layers = range(len(answer.mass[0]))
    single = [[_cut(step[layer], blocks) for step in answer.mass] for layer in layers]
    told = []
    for past in PAST_STEPS:
        if past >= len(over):
            continue
        each = [stable(layer, past) for layer in single]
        found, best = stable(over, past)
        told.append(
            Stable(
                past_steps=past,
                caught=found,
                caught_by_layer=statistics.fmean(f for f, _ in each),
                best=best,
                best_by_layer=statistics.fmean(b for _, b in each),
                chance=len(hot(over[0])) / len(over[0]),
            )
        )
    return tuple(told)


def layers(steps: Sequence[Sequence[Masses]]) -> list[list[float]]:
    """Steps × layers × blocks as layers × blocks: the mean step."""
    return [mean([step[layer] for step in steps]) for layer in range(len(steps[0]))]


def over_middle(named: Sequence[int], blocks: range, masses: Masses) -> float | None:
    """What these blocks get over the mean middle block; None where none is in the middle."""
    inside = [b for b in named if b in blocks]
    every = statistics.fmean(_cut(masses, blocks))
    return statistics.fmean(masses[b] for b in inside) / every if inside and every else None


def _about(answer: Answer, found: Sequence[Masses]) -> tuple[float | None, float | None]:
    """Over all layers, and in the layer where it is highest."""
    blocks = middle(answer)
    single = [over_middle(answer.about, blocks, layer) for layer in found]
    return over_middle(answer.about, blocks, mean(found)), max(
        (x for x in single if x is not None), default=None
    )


def _mean_known(found: Iterable[float | None]) -> float | None:
    known = [x for x in found if x is not None]
    return statistics.fmean(known) if known else None


def told(answer: Answer, others: Sequence[Sequence[Masses]], digest: str) -> Told:
    """An answer's statistics; ``others`` is attention under other questions, by layer."""
    flat = [mean(step) for step in answer.mass]
    blocks, whole = middle(answer), mean(flat)
    if not blocks:
        raise ConfigError(f"{answer.id}: a context of {answer.context_tokens} tokens has no middle")
    by_layer = tuple(tuple(mean(layer)) for layer in answer.edges)
    first, sink, recent = (statistics.fmean(layer[i] for layer in by_layer) for i in range(3))
    held = answer.context_tokens + answer.question_tokens + len(flat) / 2
    own, elsewhere = _about(answer, layers(answer.mass)), [_about(answer, x) for x in others]

    def held_by(rows: Sequence[Masses]) -> Three:
        eighty, ninety, most = (statistics.fmean(holding(row, x) for row in rows) for x in SHARES)
        return eighty, ninety, most

    eighty, ninety, most = mean(answer.needed)
    return Told(
        id=answer.id,
        kind=answer.kind,
        digest=digest,
        context_tokens=answer.context_tokens,
        question_tokens=answer.question_tokens,
        first=first,
        sink=sink,
        recent=recent,
        middle=1 - sink - recent,
        even_sink=SINK_TOKENS / held,
        even_recent=RECENT_TOKENS / held,
        holding=held_by(flat),
        holding_by_layer=held_by([layer for step in answer.mass for layer in step]),
        holding_wide=held_by([wide(step) for step in flat]),
        holding_middle=held_by([_cut(step, blocks) for step in flat]),
        tokens_needed=(eighty, ninety, most),
        noise=statistics.fmean(answer.noise),
        stable=_stables(answer, flat),
        about_own=own[0],
        about_other=_mean_known(x for x, _ in elsewhere),
        about_own_layer=own[1],
        about_other_layer=_mean_known(x for _, x in elsewhere),
        by_layer=by_layer,
        profile=tuple(wide(whole)),
        losses=tuple(answer.losses),
        text=answer.text,
        seconds=answer.seconds,
    )


def pair(a: Answer, b: Answer) -> Pair:
    """Two answers on one context."""
    blocks = middle(a)

    def seen(answer: Answer, part: slice) -> list[Masses]:
        return [_cut(layer, blocks) for layer in layers(answer.mass[part])]

    def alike(x: list[Masses], y: list[Masses]) -> tuple[float, float, float]:
        each = statistics.fmean(common(p, q) for p, q in zip(x, y, strict=True))
        return common(mean(x), mean(y)), each, rank_correlation(mean(x), mean(y))

    whole, half = slice(None), len(a.mass) // 2
    between = alike(seen(a, whole), seen(b, whole))
    halves = mean([alike(seen(x, slice(half)), seen(x, slice(half, None))) for x in (a, b)])
    return Pair(
        context=a.context,
        common=between[0],
        common_by_layer=between[1],
        rank=between[2],
        halves_common=halves[0],
        halves_common_by_layer=halves[1],
        halves_rank=halves[2],
        chance=len(hot(range(len(blocks)))) / len(blocks),
    )


def study(answers: Sequence[Answer], contexts: Sequence[Context]) -> tuple[list[Told], list[Pair]]:
    """All answers' statistics, and those of every two on one context."""
    digests = {context.id: context.digest() for context in contexts}
    whole = [layers(answer.mass) for answer in answers]
    made, pairs = [], []
    for i, answer in enumerate(answers):
        others = [whole[j] for j, b in enumerate(answers) if j != i and b.context == answer.context]
        made.append(told(answer, others, digests[answer.context]))
        pairs += [pair(answer, b) for b in answers[i + 1 :] if b.context == answer.context]
    return made, pairs


def scores(found: Study) -> AttentionScores:
    """The study as the score file of `kvatlas.core.policy.attention`, in blocks of 64 tokens.

    The last full block of context and question is "the last"; what follows is the answer's own.
    Raises ConfigError where the contexts are too short for a middle.
    """
    size = BLOCK_TOKENS * WIDE
    starts: list[Masses] = []
    lasts: list[float] = []
    rest: list[float] = []
    for each in found.answers:
        full = (each.context_tokens + each.question_tokens) // size
        starts.append(each.profile[:FROM_START])
        lasts.append(each.profile[full - 1])
        rest += each.profile[FROM_START : full - 1]
    if not rest:
        raise ConfigError(
            f"no context of {found.model}'s study has a block of {size} in its middle"
        )
    return AttentionScores(
        format="kvatlas.attention-scores.1",
        model=found.model,
        statistic="attention",
        trained=True,
        source=(
            f"kvatlas study attention: mean attention per decode step, over all layers and heads, "
            f"of {len(found.answers)} answers of {found.tokens} tokens; {found.weights}; "
            f"transformers {found.transformers}, seed {found.seed}, {found.date}"
        ),
        block_tokens=size,
        from_start=tuple(round(x, 6) for x in mean(starts)),
        last=round(statistics.fmean(lasts), 6),
        middle=round(statistics.fmean(rest), 6),
    )


def run(
    model: str,
    directory: Path,
    weights: str,
    contexts: Sequence[Context],
    *,
    venv: Path,
    seed: int,
    tokens: int,
    context_tokens_max: int,
) -> Study:
    """Measure. Raises `EngineError` where the process fails, ConfigError for contexts too short."""
    with tempfile.TemporaryDirectory() as scratch:
        child = Child(attention_scores.__file__, venv, (), Path(scratch))
        lines = child.lines(
            {
                "model": str(directory),
                "tokens": tokens,
                "seed": seed,
                "block_tokens": BLOCK_TOKENS,
                "context_tokens_max": context_tokens_max,
                "sink_tokens": SINK_TOKENS,
                "recent_tokens": RECENT_TOKENS,
                "dropped": DROPPED,
                "contexts": contexts,
            }
        )
    answers = [msgspec.json.decode(line, type=Answer) for line in lines]
    made, pairs = study(answers, contexts)
    return Study(*child.measured(model, weights, seed), tokens, tuple(made), tuple(pairs))
