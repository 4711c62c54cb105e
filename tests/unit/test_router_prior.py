"""``[router] device``: what a router takes an engine for until it has measured it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvatlas.config import Config, RouterConfig, WorkerConfig
from kvatlas.errors import ConfigError
from kvatlas.service.assembly import Assembly

WORKER = WorkerConfig(name="a", url="http://127.0.0.1:1")
OWN = '[[device]]\nname = "ours"\nlike = "H200"\ncompute_efficiency = 0.5\n'


def prior(**router: object) -> float:
    made = Assembly(Config(worker=(WORKER,), router=RouterConfig(**router)))  # type: ignore[arg-type]
    return made.dispatcher.router.params.prefill_flops_per_s


def test_a_profile_by_name_and_one_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "devices.toml"
    file.write_text(OWN, "utf-8")
    assert prior() == 0
    assert prior(device="H200", devices=8, precision="fp8") == 8 * 1978e12 * 0.45
    assert prior(device="ours", device_file=str(file)) == 989e12 * 0.5


@pytest.mark.parametrize(
    ("router", "why"),
    [
        ({"device": "H21"}, "'H21' is not known: use one of H20, "),
        ({"device": "950PR"}, "has no figure for 'bf16': use fp4 or fp8"),
        ({"device": "H20", "device_file": "/nowhere/d.toml"}, "/nowhere/d.toml"),
        ({"device_file": "d.toml"}, "no router.device of it"),
    ],
)
def test_what_cannot_be_is_told(router: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        prior(**router)
