"""Runs one stage on a running cluster: what it builds on, facts, verdicts, the sealed result."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvatlas import __version__
from kvatlas.errors import ConfigError, EngineError
from kvatlas.service.http_client import HttpClient
from kvatlas.validate.stages.facts import Baseline, Figures, StageA
from kvatlas.validate.stages.gather import stage_a, stage_b, stage_c, stage_e
from kvatlas.validate.stages.gather_d import stage_d
from kvatlas.validate.stages.judge_a import baseline_of
from kvatlas.validate.stages.points import RULES
from kvatlas.validate.stages.result import Previous, Result, Unwritten, built_on, path_of
from kvatlas.validate.stages.site import Site
from kvatlas.validate.stages.stagefile import StageFile
from kvatlas.validate.stages.values import Missing, Stage, Trial, Verdict, hidden, judged

_AFTER: dict[Stage, Callable[[Site, Baseline], Awaitable[tuple[Any, Figures]]]] = {
    "b": stage_b,
    "c": stage_c,
    "d": stage_d,
}


class Order(msgspec.Struct, frozen=True):
    """What to run. ``change``: of stage E, which optimisation; ``against``: a result instead of
    that of the stage before."""

    stage: Stage
    folder: Path
    change: str = ""
    against: Path | None = None


async def run_stage(
    order: Order,
    file: StageFile,
    *,
    own: Mapping[str, Callable[[], None]] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """Run it and write its result into the folder; ``own``: hooks that are functions; ``say``
    hears how far it came where it is cancelled, and then nothing is written.

    Raises ConfigError for what the stage cannot begin with: a file that lacks its parts, a stage
    before it that is missing, did not pass, or asked other requests; Unwritten.
    """
    began, started = datetime.datetime.now(datetime.UTC), time.monotonic()
    before: Result | None = None
    baseline: Baseline | None = None
    if order.stage != "a":
        before, baseline = built_on(order.folder, order.stage, order.against)
    client = HttpClient(idle_timeout_s=file.requests.timeout_s)
    site = Site(client, file, own)
    try:
        verdicts, figures, kept = await _judged(order, site, before, baseline)
    except (asyncio.CancelledError, KeyboardInterrupt):
        say(_cut_short(order.stage, site))
        raise
    finally:
        await client.close()
    result = Result(
        stage=order.stage,
        cluster=file.name,
        kvatlas=__version__,
        began=began.isoformat(timespec="seconds"),
        took_s=round(time.monotonic() - started, 3),
        verdicts=verdicts,
        declared=file.declared,
        figures=figures,
        baseline=kept,
        previous=Previous(before.stage, before.digest, before.change) if before else None,
        change=order.change,
    ).sealed()
    path = path_of(order.folder, order.stage, order.change)
    try:
        order.folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    except OSError as error:
        raise Unwritten(path, error, result) from error
    return result


def _cut_short(stage: Stage, site: Site) -> str:
    hooks = "; ".join(site.hooks.done) or "none"
    return (
        f"stage {stage} was interrupted and has no verdict: nothing was written. Prompts asked one"
        f" by one until then: {site.asker.sent}. Hooks run, all that undo among them: {hooks}"
    )


async def _judged(
    order: Order,
    site: Site,
    before: Result | None,
    baseline: Baseline | None,
) -> tuple[tuple[Verdict, ...], Figures, Baseline | None]:
    try:
        await site.open()
        if baseline is not None:
            _same_requests(site, baseline)
        facts, figures = await _gathered(order, site, before, baseline)
    except EngineError as error:
        return _nothing_shown(order.stage, str(error)), Figures(), None
    trials: dict[str, Trial] = {}
    points = {rule.point.id for rule in RULES[order.stage]}
    for point, command in site.file.trial.items():
        if point in points:
            trials[point] = await site.hooks.try_out(command)
    verdicts = judged(
        RULES[order.stage], facts, not_applicable=site.file.not_applicable, trials=trials
    )
    kept = None
    if isinstance(facts, StageA):
        kept = baseline_of(facts, site.file.requests.concurrency)
    return verdicts, figures, kept


async def _gathered(
    order: Order, site: Site, before: Result | None, baseline: Baseline | None
) -> tuple[Any, Figures]:
    if order.stage == "a":
        return await stage_a(site)
    assert before is not None
    assert baseline is not None
    if order.stage == "e":
        return await stage_e(site, baseline, before.figures, order.change)
    return await _AFTER[order.stage](site, baseline)


def _same_requests(site: Site, baseline: Baseline) -> None:
    """Answers are compared prompt by prompt, loads at one concurrency."""
    found = site.prompts.described()
    if found != baseline.requests or site.file.requests.concurrency != baseline.concurrency:
        raise ConfigError(
            "[requests] are not those of the baseline: use stage a's, or run stage a again"
        )


def _nothing_shown(stage: Stage, reason: str) -> tuple[Verdict, ...]:
    """Nobody answered at all."""
    return judged(
        tuple(msgspec.structs.replace(r, judge=lambda _: hidden(reason)) for r in RULES[stage]),
        Missing(reason),
    )
