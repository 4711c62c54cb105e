"""A tenant's prompt is known by one name in an engine and by another below: both are asked."""

from __future__ import annotations

from array import array
from pathlib import Path

import msgspec

from kvatlas.core.admission import Rules
from kvatlas.core.directory import Directory, Limits
from kvatlas.core.dispatch import Apply, Dispatcher, Join, Question, Settle, SetUp
from kvatlas.core.events import BlockStored, UnitsHeld
from kvatlas.core.keys import Keyring, salt_scope
from kvatlas.core.layout import plain
from kvatlas.core.records import Publisher, Tier
from kvatlas.core.router import Params, Router
from kvatlas.core.tenancy import (
    Chain,
    Sharing,
    TenantSalt,
    mark_of,
    prefix_digest,
    salt_of,
    sharing_of,
    tag_of,
)
from kvatlas.service.recording import Recorder
from kvatlas.validate.replay import replay

RING = Keyring(b"a secret for the tests")
FP, BLOCK = b"\1" * 32, 16
ENGINE, AGENT = Publisher("a"), Publisher("node")
TOKENS = array("I", range(20 * BLOCK + 1)).tobytes()
PUBLIC = 8 * BLOCK
MARK = mark_of(RING, prefix_digest(TOKENS[: 4 * PUBLIC]))


def salt(name: str) -> str:
    return salt_of(RING, TenantSalt(tag_of(RING, name), 0, "", PUBLIC, MARK))


def stored(text: str, blocks: int) -> BlockStored:
    """As an engine announces it, which puts the salt into the first block."""
    hashes = tuple(hash((text, n)) & 0xFFFFFFFF for n in range(blocks))
    return BlockStored(hashes, None, TOKENS[: blocks * BLOCK * 4], BLOCK, salt=text)


def held(sharing: Sharing, blocks: int, tier: Tier = Tier.DRAM) -> UnitsHeld:
    """As an agent announces it."""
    chain = Chain(RING, FP, BLOCK, sharing)
    return UnitsHeld(tier, tuple(chain.extend(TOKENS[: blocks * BLOCK * 4])))


class Stand:
    def __init__(self, recorder: Recorder | None = None) -> None:
        params = Params(prefill_tokens_per_s=8000.0)
        directory = Directory(RING, Limits())
        self.core = Dispatcher(directory, Router(params), RING, tap=recorder)
        if recorder is not None:
            recorder.keys_of = self.core.keys_below
        self.core.handle(Join(ENGINE, plain(BLOCK), FP), 0.0)
        self.core.handle(SetUp(ENGINE, True), 0.0)
        self.core.handle(Settle(AGENT, (ENGINE,)), 0.0)
        self.ids = 0

    def resumes(self, name: str) -> tuple[int, ...]:
        """Tokens in all, then those from hbm and dram."""
        self.ids += 1
        text = salt(name)
        scope, below = salt_scope(text), sharing_of(RING, text)
        question = Question(f"r{self.ids}", ((ENGINE, ""),), TOKENS, scope, below=below)
        decision = self.core.handle(question, 1.0)
        assert decision is not None
        (plan,) = decision.plans
        return plan.resume_tokens, *plan.tier_tokens[: Tier.DRAM + 1]

    def apply(self, publisher: Publisher, *events: BlockStored | UnitsHeld) -> None:
        self.core.handle(Apply(publisher, events), 0.5)


def test_below_what_is_public_is_everybodys_and_in_the_engine_nothing_is() -> None:
    stand, mine = Stand(), sharing_of(RING, salt("a"))
    stand.apply(ENGINE, stored(salt("a"), 12))
    assert stand.resumes("a") == (12 * BLOCK, 12 * BLOCK)
    assert stand.resumes("b")[0] == 0
    stand.apply(AGENT, held(mine, 16))
    assert stand.resumes("a") == (16 * BLOCK, 12 * BLOCK, 4 * BLOCK)
    assert stand.resumes("b") == (PUBLIC, 0, PUBLIC)
    stand.apply(ENGINE, stored(salt("b"), 10))  # beyond what is public, b has its own alone
    assert stand.resumes("b") == (10 * BLOCK, 10 * BLOCK)


def test_a_recording_with_tenants_is_decided_again(tmp_path: Path) -> None:
    """Under another secret, which makes no salt good."""
    path = tmp_path / "recording"
    params = Params(prefill_tokens_per_s=8000.0)
    recorder = Recorder(str(path), 1 << 24, params, Limits(), Rules())
    stand = Stand(recorder)
    stand.apply(ENGINE, stored(salt("a"), 12))
    first = [stand.resumes(name) for name in "ab"]
    stand.apply(AGENT, held(sharing_of(RING, salt("a")), 16))
    assert [stand.resumes(name) for name in "ab"] != first
    recorder.close()
    result = replay(path)
    assert (result.decisions, result.different) == (4, 0), msgspec.to_builtins(result.differences)
