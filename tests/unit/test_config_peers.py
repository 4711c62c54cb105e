"""Which peers a configuration may name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvatlas.config import load
from kvatlas.errors import ConfigError

WORKER = '[[worker]]\nname = "a"\nurl = "http://127.0.0.1:8001"\n'
SECRET = '[keys]\nsecret_file = "secret"\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[gateway]\npeers = ["http://b:8000"]\n', "need keys.secret_file"),
        (SECRET + '[gateway]\npeers = ["b:8000"]\n', "http or https://HOST:PORT"),
        (
            SECRET + '[router]\nrecording = "run"\n[gateway]\npeers = ["http://b:8000"]\n',
            "begins with nothing",
        ),
        (
            SECRET + '[tls]\nca = "a"\ncert = "b"\nkey = "c"\n[gateway]\npeers = ["http://b:1"]\n',
            "https://HOST:PORT",
        ),
    ],
)
def test_peers_that_cannot_be_are_told(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "kvatlas.toml"
    file.write_text(text + WORKER)
    with pytest.raises(ConfigError, match=why) as told:
        load(file)
    assert f"kvatlas.toml:{text[: text.index('peers')].count(chr(10)) + 1}" in str(told.value)


def test_peers_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "kvatlas.toml"
    file.write_text(SECRET + '[gateway]\npeers = ["http://b:8000"]\n' + WORKER)
    assert load(file).gateway.peers == ("http://b:8000",)
