"""What UCX says of itself, and what is made of a choice of transport."""

from __future__ import annotations

import pytest

from kvatlas.dataplane.tiers.nixl_helper import Reached, reached
from kvatlas.service import agent_peers
from kvatlas.service.agent_peers import no_nixl


def table(title: str, *rows: tuple[str, str, str]) -> str:
    """As UCX draws it, without its times."""
    lines = [f"  | {title} from host |", "  +---+", "  | Range | Description | Config |"]
    return "\n".join([*lines, *(f"  | {a} | {b} | {c} |" for a, b, c in rows), "  +---+", ""])


READ = "remote memory read by ucp_get*(multi) into host memory"
OTHER = table("remote memory write by ucp_put*", ("0..inf", "zero-copy", "rc_mlx5/mlx5_0:1"))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([("0..inf", "zero-copy", "cma/memory")], Reached("cma", False)),
        ([("0..inf", "software emulation", "tcp/lo")], Reached("tcp", True)),
        (
            [
                ("0..2047", "short", "dc_mlx5/mlx5_0:1"),
                ("2048..inf", "zero-copy", "rc_mlx5/mlx5_1:1"),
            ],
            Reached("rc_mlx5", False),
        ),
        (
            [("0..inf", "zero-copy", "52% on rc_mlx5/mlx5_0:1 and 48% on dc_mlx5/mlx5_1:1")],
            Reached("rc_mlx5+dc_mlx5", False),
        ),
        ([("0..100", "short", "cma/memory")], None),
        ([], None),
    ],
)
def test_how_another_memory_is_read_is_ucxs_own_word(
    rows: list[tuple[str, str, str]], expected: Reached | None
) -> None:
    assert reached(OTHER + table(READ, *rows)) == expected


def test_the_last_word_counts_and_other_tables_are_none() -> None:
    first = table(READ, ("0..inf", "software emulation", "tcp/lo"))
    last = table(READ, ("0..inf", "zero-copy", "cma/memory"))
    assert reached(first + OTHER + last + OTHER) == Reached("cma", False)
    assert reached(OTHER) is None
    assert reached("") is None


@pytest.mark.parametrize(
    ("choice", "encrypted", "installed", "why"),
    [
        ("auto", False, True, ""),
        ("auto", False, False, "not_installed"),
        ("auto", True, True, "not_encrypted"),
        ("tcp", False, True, "not_wanted"),
        ("nixl", True, True, ""),
        ("nixl", False, False, ""),
    ],
)
def test_when_nixl_is_tried(
    monkeypatch: pytest.MonkeyPatch,
    choice: agent_peers.Choice,
    encrypted: bool,
    installed: bool,
    why: str,
) -> None:
    monkeypatch.setattr(agent_peers, "missing", lambda: "" if installed else "it is not there")
    assert no_nixl(choice, encrypted=encrypted) == why
