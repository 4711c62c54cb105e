"""`kvatlas validate exactness`: options that would go unused are told; nothing is started."""

from __future__ import annotations

import pytest

from kvatlas.cli.main import main


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--object", "valkey://h:1"), "--object is the store of --tiers object"),
        (("--tiers", "dram,disk", "--object", "valkey://h:1"), "--object is the store of --tiers"),
        (("--tiers", ""), "one or more of dram, disk, object, peer"),
        (("--tiers", "dram", "--no-faults"), "--tiers goes with"),
        (("--tiers", "dram", "--engine", "transformers"), "--tiers goes with"),
        (("--engine", "sglang"), "--engine sglang: say --tiers"),
        (
            ("--engine", "sglang", "--tiers", "dram", "--venv", "nowhere"),
            "nowhere has no sglang==",
        ),
    ],
)
def test_options_without_a_use_are_refused(
    options: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "exactness", *options]) == 2
    told = capsys.readouterr().err
    assert why in told
    assert told.count("\n") == 1
