"""What agents hold no longer is promised to nobody; planted bugs showed this was not tested."""

from __future__ import annotations

import array

from agent_kit import FP, GRID, window_layout

from kvatlas.core.directory import Directory
from kvatlas.core.events import UnitsGone, UnitsHeld
from kvatlas.core.keys import Keyring
from kvatlas.core.records import Publisher, Tier

RING = Keyring(b"a secret for the tests")
ENGINE, AGENT = Publisher("a"), Publisher("node")
TOKENS = array.array("I", range(6 * GRID)).tobytes()
KEYS = RING.chain(RING.root(FP), TOKENS, GRID)


def _with(tier: Tier) -> Directory:
    made = Directory(RING)
    made.register(ENGINE, window_layout(), FP)
    made.settle(AGENT, (ENGINE,))
    made.apply(AGENT, [UnitsHeld(tier, tuple(KEYS), (KEYS[1], KEYS[3]))])
    assert _promised(made) == 4 * GRID
    return made


def _promised(directory: Directory) -> int:
    return max((resume.tokens for resume in directory.peek(KEYS, FP)), default=0)


def test_a_point_that_is_gone_is_no_position() -> None:
    directory = _with(Tier.DRAM)
    directory.apply(AGENT, [UnitsGone(Tier.DRAM, points=(KEYS[3],))])
    assert _promised(directory) == 2 * GRID
    directory.apply(AGENT, [UnitsGone(Tier.DRAM, points=(KEYS[1],))])
    assert _promised(directory) == 0


def test_an_agent_that_starts_anew_has_nothing_in_any_own_tier() -> None:
    for tier in (Tier.DRAM, Tier.DISK):
        directory = _with(tier)
        directory.reset(AGENT)
        assert _promised(directory) == 0, tier
