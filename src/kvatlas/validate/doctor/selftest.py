"""Does the doctor see what it should? Each plant on a stub cluster of its own; sound ones between.

``named``: plants whose check said what it must. ``false_alarms``: what was called wrong and is not:
in a cluster with a plant whatever that plant does not cause, in a sound one all that is not right.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvatlas.core.findings import Finding
from kvatlas.service.http_client import HttpClient
from kvatlas.validate.doctor import examine
from kvatlas.validate.doctor.plants import PLANTS, SOUND, Plant
from kvatlas.validate.doctor.stage import PATIENCE, Plan, Stage

_AT_A_TIME = 4  # most of their time is waiting for what does not come


class Score(msgspec.Struct, frozen=True):
    """Of one self-test. ``expected``: what each plant is, in words; ``findings``: by plant, the one
    that named it."""

    planted: tuple[str, ...]
    named: tuple[str, ...]
    false_alarms: tuple[str, ...]
    expected: dict[str, str]
    findings: dict[str, Finding]
    sound: int
    seconds: float

    @property
    def passed(self) -> bool:
        """All were named, and nothing else."""
        return len(self.named) == len(self.planted) and not self.false_alarms


async def self_test(
    say: Callable[[str], None] = lambda text: None,
    plants: Sequence[Plant] = PLANTS,
    cut_short: Callable[[Score], None] = lambda score: None,
) -> Score:
    """Each plant alone in its cluster, a few clusters at a time. ``say`` hears which;
    ``cut_short`` gets the score of those that were examined, where it is cancelled."""
    began_s = time.monotonic()
    seen: dict[str, Sequence[Finding]] = {}
    gate = asyncio.Semaphore(_AT_A_TIME)

    async def one(name: str, plan: Callable[[], Plan]) -> None:
        async with gate:
            say(name)
            seen[name] = await examined(plan())

    try:
        await asyncio.gather(*(one(name, plan) for name, plan in SOUND.items()))
        await asyncio.gather(*(one(plant.name, plant.plan) for plant in plants))
    except asyncio.CancelledError:
        cut_short(_scored(seen, plants, time.monotonic() - began_s))
        raise
    return _scored(seen, plants, time.monotonic() - began_s)


def _scored(
    seen: Mapping[str, Sequence[Finding]], plants: Sequence[Plant], seconds: float
) -> Score:
    """Of those that were examined."""
    found: dict[str, Finding] = {}
    alarms: list[str] = []
    sound = [name for name in SOUND if name in seen]
    plants = [plant for plant in plants if plant.name in seen]
    for name in sound:
        wrong = [finding for finding in seen[name] if finding.status in ("wrong", "not shown")]
        alarms += [f"{name}, sound: {_text(finding)}" for finding in wrong]
    for plant in plants:
        for finding in seen[plant.name]:
            if finding.check == plant.check and finding.status == plant.status:
                found.setdefault(plant.name, finding)
            elif finding.status == "wrong" and finding.check not in (plant.check, *plant.also):
                alarms.append(f"{plant.name}: {_text(finding)}")
    return Score(
        planted=tuple(plant.name for plant in plants),
        named=tuple(plant.name for plant in plants if plant.name in found),
        false_alarms=tuple(alarms),
        expected={plant.name: plant.what for plant in plants},
        findings=found,
        sound=len(sound),
        seconds=round(seconds, 1),
    )


async def examined(plan: Plan) -> Sequence[Finding]:
    """All findings of one stub cluster."""
    client = HttpClient()
    try:
        async with Stage(plan) as stage:
            return (await examine(client, stage.cluster, PATIENCE)).findings
    finally:
        await client.close()


def _text(finding: Finding) -> str:
    return f"{finding.check} {finding.who}: {finding.why}"
