"""Room for files: what clients and engines need is asked for, and told where it is less."""

from __future__ import annotations

import resource

import pytest

from kvatlas.cli.files import allow_files


@pytest.mark.parametrize(
    ("engines", "hard", "given"),
    [(0, 100_000, None), (1000, 100_000, 6224), (1000, 5000, 5000)],
)
def test_a_thousand_engines_get_their_files(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engines: int,
    hard: int,
    given: int | None,
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2000, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: asked.append(limit))
    allow_files(100, " or have fewer", engines=engines)
    assert asked == ([] if given is None else [(given, hard)])
    told = capsys.readouterr().err
    assert ("1000 engines need 6224" in told) == (given == 5000)
    assert ("or have fewer" in told) == (given == 5000)
