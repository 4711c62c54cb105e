"""Hardware profiles: plausible figures, sources, and those of one's own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.cli import stub_engine
from kvatlas.cli.main import build_parser, main
from kvatlas.errors import ConfigError
from kvatlas.workload.device import DEVICES, Device
from kvatlas.workload.links import LINKS
from kvatlas.workload.models import load_layout
from kvatlas.workload.profiles import profile_text, read_profiles

WANTED = {"H20", "H100", "H200", "B200", "GB200", "950PR", "Atlas-350", "RTX-4090", "RTX-PRO-6000"}


def test_the_devices_that_people_ask_for_are_there() -> None:
    assert set(DEVICES) >= WANTED


@pytest.mark.parametrize("profile", DEVICES.values(), ids=list(DEVICES))
def test_precision_halves_and_doubles(profile: Device) -> None:
    """fp8 is twice bf16 and fp4 at least twice fp8 on every data sheet of this list."""
    flops = profile.flops
    if "bf16" in flops and "fp8" in flops:
        assert flops["fp8"] / flops["bf16"] == pytest.approx(2, rel=0.03)
    if "fp8" in flops and "fp4" in flops:
        assert flops["fp4"] / flops["fp8"] >= 2


def test_memory_is_what_the_driver_shows() -> None:
    """81,559 MiB of an H100 and 183,359 of a B200, a few of them kept by the driver."""
    for name, mib in (("H100", 81_559), ("H200", 143_771), ("B200", 183_359)):
        assert DEVICES[name].memory_bytes / (mib << 20) == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize(
    "change",
    [
        {"flops": {}},
        {"flops": {"bf16": 0.0}},
        {"flops": {"bf16": math.nan}},
        {"flops": {"bf16": 1e15, "fp99": 1e15}},
        {"memory_bytes": 0},
        {"memory_bytes_per_s": math.inf},
        {"memory_bytes_per_s": -1.0},
        {"compute_efficiency": 0.0},
        {"memory_efficiency": 1.1},
        {"attention_efficiency": math.nan},
        {"unhidden": -0.1},
        {"unhidden": 1.5},
        {"step_s": -1e-9},
        {"layer_s": math.inf},
        {"request_s": math.nan},
        {"link_bytes_per_s": 0.0},
        {"link_latency_s": -1.0},
        {"usd_per_hour": -1.0},
    ],
    ids=str,
)
def test_a_figure_that_cannot_be_is_refused_by_name(change: dict[str, Any]) -> None:
    (field,) = change
    with pytest.raises(ConfigError, match=f"'H200': {field}"):
        msgspec.structs.replace(DEVICES["H200"], **change).__post_init__()
    with pytest.raises(ConfigError, match=field):
        Device(**{**msgspec.structs.asdict(DEVICES["H200"]), **change})


@pytest.mark.parametrize("profile", LINKS.values(), ids=list(LINKS))
def test_a_link_reaches_less_than_its_nominal_rate_and_says_who_measured(profile: Any) -> None:
    assert 0 < profile.bytes_per_s <= profile.nominal_bytes_per_s
    assert 1e-6 <= profile.latency_s <= 1e-3
    assert len(profile.source) > 10


def test_the_nominal_rate_is_that_of_the_standard() -> None:
    assert LINKS["PCIe-5-x16"].nominal_bytes_per_s == 64e9


# Of one's own ----------------------------------------------------------------------------------


def test_a_profile_is_written_and_read_again(tmp_path: Path) -> None:
    figures = {"compute_efficiency": 0.512345, "step_s": 1.234e-5, "request_s": 1e-7, "layer_s": 0}
    path = tmp_path / "mine.toml"
    path.write_text(profile_text("mine", "H200", figures, comment="why\nand how"))
    mine = read_profiles(path)["mine"]
    assert mine.compute_efficiency == 0.5123
    assert (mine.step_s, mine.request_s, mine.layer_s) == (1.234e-5, 1e-7, 0.0)
    assert mine.memory_bytes == DEVICES["H200"].memory_bytes


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            '[[device]]\nname = "x"\n',
            r":1: device 'x': flops, memory_bytes, memory_bytes_per_s mis",
        ),
        ('[[device]]\nname = "x"\nlike = "H300"\n', r":1: .*unknown device 'H300'"),
        ('[[device]]\nname = "H200"\n', r":2: there is a device 'H200' already"),
        ('[[device]]\nname = "x"\nlike = "H200"\nstep_s = -1.0\n', r":1: .*step_s is -1.0"),
        ('[[device]]\nname = "x"\nlike = "H200"\nstep_s = nan\n', r":1: .*step_s is nan"),
        ('[[device]]\nname = "x"\nspeed = 3\n', r":3: .*speed"),
        ('[[device]]\nname = "x"\nstep_s = "fast"\n', r":3: .*float"),
        ("[[device]\n", r":1: not valid TOML"),
        ('[[device]]\nname = "x"\nlike = "H200"\n' * 2, r":5: there is a device 'x' already"),
    ],
)
def test_a_bad_file_is_told_with_line_and_reason(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_profiles(path)


def test_the_command_lists_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(profile_text("mine", "H200", {"step_s": 0.002}))
    assert main(["devices", "--device-file", str(path)]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*DEVICES, *LINKS, "mine"))
    assert main(["devices", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {d["name"] for d in told["devices"]} == set(DEVICES)
    assert {entry["name"] for entry in told["links"]} == set(LINKS)
    assert main(["devices", "--device-file", str(tmp_path / "absent.toml")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_stub_engine_takes_a_profile_and_refuses_an_unknown_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stub-engine", "--device", "H300"]) == 2
    assert "'H300' is unknown: use one of H20" in capsys.readouterr().err
    assert main(["stub-engine", "--device-file", str(tmp_path / "absent.toml")]) == 2
    assert "absent.toml: cannot be read" in capsys.readouterr().err


def test_the_stub_engine_takes_a_speed_of_zero_at_its_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["stub-engine", "--layout", "16", "--prefill-tokens-per-s", "1e6"]
    layout = load_layout("16", engine="vllm")
    args = build_parser().parse_args([*asked, "--decode-step-s", "0"])
    assert stub_engine._spec(args, layout).decode_step_s == 0
    assert stub_engine._spec(build_parser().parse_args(asked), layout).decode_step_s == 0.02
    assert main(["stub-engine", "--layout", "16", "--prefill-tokens-per-s", "0"]) == 2
    assert "prefill_tokens_per_s is 0.0: give a number above 0" in capsys.readouterr().err
