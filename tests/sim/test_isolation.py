"""Many tenants on the production core: nothing of one reaches another, and each leak is seen."""

from __future__ import annotations

import pytest

from kvatlas.cli.main import main
from kvatlas.sim.planted_bug import Bug
from kvatlas.validate.isolation.marks import CLASSES, RELATIONS, Judge, Mark, Prompt, encode
from kvatlas.validate.isolation.planted import BY_NAME, LEAKS
from kvatlas.validate.isolation.run import catch, play, report, run

#: Leaks that a world shows in no time; the others take thousands of operations.
SOON = ("scope-left-out", "turn-left-out", "boundary-off-by-one", "chain-without-root")


def test_nothing_of_one_tenant_reaches_another() -> None:
    result = report(play(seed, 2500) for seed in range(4))
    assert result.clean, result.first
    assert result.operations >= 10_000
    assert result.inputs > 4 * result.operations
    places = {key.rpartition(" ")[0] for key in result.hits}
    assert places >= {"hbm", "dram", "disk", "object", "peer", "pair", "promise"}
    assert {key.rpartition(" ")[2] for key in result.hits} == set(RELATIONS)
    assert min(result.kinds[kind] for kind in ("forge", "purge", "rotate", "pair", "crowd")) > 2


def test_equal_seeds_give_equal_worlds() -> None:
    assert play(5, 300) == play(5, 300)


@pytest.mark.parametrize("name", SOON)
def test_a_planted_leak_is_seen(name: str) -> None:
    assert catch(name, range(2), 500).operations


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.name)
def test_a_planted_leak_is_tied_to_the_code(leak: Bug) -> None:
    assert leak.changed()
    assert leak.kind in CLASSES


@pytest.mark.long
@pytest.mark.parametrize("name", list(BY_NAME))
def test_every_planted_leak_is_seen(name: str) -> None:
    assert catch(name, range(24)).operations


@pytest.mark.long
def test_a_million_operations() -> None:
    result = report(run(1_000_000, jobs=2))
    assert result.operations >= 1_000_000
    assert result.clean, result.first


def _prompt(**fields: object) -> Prompt:
    given: dict[str, object] = {
        "id": "r",
        "tokens": bytes(range(128)),
        "tenant": 1,
        "session": 2,
        "epoch": 3,
        "apart": False,
        "salt": "",
        "digests": {},
    }
    return Prompt(**(given | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({}, ""),
        ({"session": 9}, ""),
        ({"session": 9, "apart": True}, "cross-scope"),
        ({"tenant": 2}, "cross-scope"),
        ({"epoch": 4}, "cross-scope"),
        ({"adapter": "lora"}, "cross-model"),
        ({"tokens": bytes(128)}, "wrong-bytes"),
        ({"tenant": 2, "public_tokens": 16}, ""),
        ({"tenant": 2, "public_tokens": 15}, "cross-scope"),
        ({"public_tokens": 16}, ""),
    ],
)
def test_the_judge_knows_whose_a_block_is(fields: dict[str, object], wrong: str) -> None:
    """``fields``: in what its owner's prompt differs."""
    judge = Judge()
    owner = _prompt(**fields)
    asker = _prompt(public_tokens=owner.public_tokens)
    assert judge.hit("hbm", asker, "m", 16, owner.mark(16, "m", 0)) is (not wrong)
    assert set(judge.found) == ({wrong} if wrong else set())


def test_bytes_that_nobody_wrote_are_wrong() -> None:
    judge = Judge()
    assert not judge.hit("hbm", _prompt(), "m", 16, b"")
    other = encode(Mark(1, 2, 3, False, False, "other", "", _prompt().digest(16), 0))
    assert not judge.hit("hbm", _prompt(), "m", 16, other)
    assert judge.found == {"wrong-bytes": 1, "cross-model": 1}


def test_the_command_says_what_it_saw(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["validate", "isolation", "--operations", "300", "--jobs", "1", "--quiet"]
    assert main(asked) == 0
    assert "violations: 0" in capsys.readouterr().out
    assert main([*asked, "--leak", "turn-left-out"]) == 0
    assert "not seen" not in capsys.readouterr().out
    assert main([*asked, "--leak", "none-such"]) == 2
