"""Block keys of a prompt, as a gateway told them: which of them an agent is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from kvatlas.cli.directory import block_keys
from kvatlas.errors import ConfigError


def _answer(unkeyed: str = "", **keys: list[str]) -> dict[str, Any]:
    workers = {name: {"keys": told} for name, told in keys.items()}
    return {"prompt_tokens": 3, "unkeyed": unkeyed, "workers": workers}


def test_engines_that_make_the_same_keys_are_as_one() -> None:
    assert block_keys(_answer(a=["1", "2"], b=["1", "2"])) == ["1", "2"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (_answer("images", a=[]), "this prompt cannot be keyed: images"),
        (_answer(), "no such engine there"),
        (_answer(a=["1", "2"], b=["1", "3"]), "say --model or --worker, of a, b"),
    ],
)
def test_keys_that_are_nobodys_or_not_one_engines_are_refused(
    answer: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        block_keys(answer)
