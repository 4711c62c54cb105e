"""The delta study on made-up KV, its arithmetic, its files, and what it refuses."""

from __future__ import annotations

import math
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvatlas.cli import study_delta
from kvatlas.cli.main import main
from kvatlas.dataplane import codec as codecs
from kvatlas.errors import ConfigError, EngineError, StoreError
from kvatlas.validate import delta_pay as pay
from kvatlas.validate import delta_study as study
from kvatlas.validate.delta_code import Delta, Difference, Predictor

KEPT = Path(__file__).parents[1] / "fixtures" / "validated" / "delta-smollm2.json"
FLOATS, ROWS = 16, 300


def rows(smooth: bool) -> bytes:
    """bf16: walks in steps of one bit, or independent values."""
    chance = random.Random(3)
    now, made = [1.5] * FLOATS, []
    for _ in range(ROWS):
        if smooth:
            now = [min(max(x + chance.choice((-1, 1)) / 128, 1), 1.99) for x in now]
        else:
            now = [chance.gauss(0, 1) for _ in range(FLOATS)]
        made += [struct.pack("<f", x)[2:] for x in now]
    return b"".join(made)


def dumped(component: str, model: str = "trained") -> study.Dumped:
    return study.Dumped(
        model=model,  # type: ignore[arg-type]
        text=0,
        component=component,
        form="bf16",
        file=component,
        layers=2,
        rows=ROWS,
        row_bytes=2 * FLOATS,
    )


def counting() -> Callable[[], float]:
    """A clock by which all that is timed takes a millisecond."""
    now = iter(range(1 << 20))
    return lambda: next(now) / 1000


def test_smooth_rows_gain_noise_loses_and_both_come_back() -> None:
    found, plain, mechanism = study.measured(
        [dumped("smooth"), dumped("noise"), dumped("random", "v4")],
        lambda told: 2 * rows(told.component == "smooth"),
    )
    codings = found.codings()
    assert {c.component for c in codings} == {"smooth", "noise"}, "V4 has no ratios"
    assert {c.units for c in codings} == {4}, "two layers of 256 and 44 tokens"
    assert mechanism == [study.Mechanism("random", "bf16", 4, 4 * ROWS * FLOATS, len(study.WAYS))]
    for component, gains in (("smooth", True), ("noise", False)):
        delta, alone = (
            study_delta.best(codings, component, "bf16", delta=d) for d in (True, False)
        )
        assert (delta.ratio > 1.3 * alone.ratio) == gains
        assert (delta.ratio < alone.ratio) == (not gains)
    assert len(plain["smooth"]) == 2 * FLOATS, "the first unit of both layers, by channel"
    assert {len(channel) for channel in plain["smooth"]} == {256}
    helped = {p.predictor: p.found for p in study.predicted("smooth", plain["smooth"])}
    assert helped[Predictor.PREVIOUS].bits_saved > 1
    hurt = {p.predictor: p.found for p in study.predicted("noise", plain["noise"])}
    assert hurt[Predictor.PREVIOUS].bits_saved < -0.4


def test_speeds_are_the_units_bytes_over_what_the_clock_told() -> None:
    lossless = study.Lossless(counting())
    unit = rows(True)[: 256 * 2 * FLOATS]
    lossless.add("smooth", "bf16", unit, 2 * FLOATS)
    each = {(c.codec, c.delta): c for c in lossless.codings()}
    assert len(each) == 3 * (1 + len(study.WAYS))
    way = Delta(Predictor.BOTH, Difference.XOR, 4)
    assert each["zstd", way].codec_encode_bytes_per_s == pytest.approx(len(unit) / 0.001)
    assert each["zstd", way].encode_bytes_per_s == pytest.approx(len(unit) / 0.002)
    assert each["zstd", way].codec_decode_bytes_per_s == pytest.approx(len(unit) / 0.001)
    assert each["zstd", way].decode_bytes_per_s == pytest.approx(len(unit) / 0.002)


def test_planes_apart_are_read_as_planes_and_smaller() -> None:
    noise = rows(False)
    used, stored = study.packed(study.APART, noise)
    target = bytearray(len(noise))
    codecs.decode(used, memoryview(stored), memoryview(target))
    assert (used, bytes(target)) == ("planes", noise)
    assert len(stored) < len(study.packed("planes", noise)[1]) < len(noise)
    tiny = bytes(range(7)) + b"\xff"
    assert study.packed(study.APART, tiny) == ("", tiny), "what would not shrink is kept as it is"


def test_a_coder_that_gives_other_bytes_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "decoded", lambda made, *_: made)
    with pytest.raises(StoreError, match=r"smooth as bf16: .* gave other bytes back"):
        study.Lossless().add("smooth", "bf16", rows(True), 2 * FLOATS)


def test_a_file_of_another_size_is_refused() -> None:
    with pytest.raises(EngineError, match=r"^a: 7 bytes, not 2 x 9600$"):
        list(study.units(b"7 bytes", dumped("a")))


def test_rounding_counts_all_bits() -> None:
    found = list(study.rounded("x", [[math.sin(t) for t in range(64)]]))
    assert len(found) == len(study.BITS) * 4
    plain = {r.bits: r for r in found if r.predictor is None}
    assert [plain[bits].bits_per_value for bits in study.BITS] == [4, 5, 6]
    assert plain[2].error > plain[3].error > plain[4].error > 0


# -- when it pays ---------------------------------------------------------------------------------


def test_what_it_takes_to_pay() -> None:
    """Halving the bytes, 1 s per GB to decode and 3 to encode."""
    coder = pay.Speeds(2.0, 1e9 / 3, 1e9)
    assert pay.pays_below(coder, encode=False) == pytest.approx(0.5e9)
    assert pay.pays_below(coder, encode=True) == pytest.approx(0.125e9)
    for encode, link in ((False, 0.5e9), (True, 0.125e9)):
        at, below = (pay.seconds(1e9, speed, coder, encode=encode) for speed in (link, link / 2))
        assert at == pytest.approx(1e9 / link)
        assert below < 1e9 / (link / 2)
    assert pay.needed_bytes_per_s(2.0, 0.5e9) == pytest.approx(1e9)
    assert pay.needed_bytes_per_s(1.0, 0.5e9) == math.inf


def test_one_coder_against_another() -> None:
    plain, delta = pay.Speeds(1.25, 1e9, 1e9), pay.Speeds(2.0, 0.5e9, 0.5e9)
    link = pay.pays_below(delta, encode=False, other=plain)
    assert link == pytest.approx(0.3 / (2 - 1) * 1e9)
    each = [pay.seconds(1e9, link, coder, encode=False) for coder in (plain, delta)]
    assert each[0] == pytest.approx(each[1])
    assert pay.pays_below(plain, encode=False, other=delta) == 0
    assert pay.pays_below(pay.Speeds(2.0, 1e9, 1e9), encode=True, other=plain) == math.inf
    assert pay.pays_below(pay.Speeds(0.9, 1e9, 1e9), encode=False) == 0


def test_parts_of_a_state_add_up() -> None:
    half = pay.both([(1.0, pay.Speeds(1.0, 1e9, 1e9)), (1.0, pay.Speeds(3.0, 1e9, 0.5e9))])
    assert half.ratio == pytest.approx(2 / (1 + 1 / 3))
    assert half.decode_bytes_per_s == pytest.approx(2 / 3 * 1e9)


def test_frames_of_a_quarter_never_make_what_the_seed_makes_of_them() -> None:
    assert pay.frames_ratio(1) == 1
    assert pay.frames_ratio(4) == pytest.approx(4 / 1.75)
    assert pay.frames_ratio(1 << 20) < 4 < min(pay.SEED_RATIOS)


# -- files and command ----------------------------------------------------------------------------


def kept() -> study.Study:
    return study.Study.decode(KEPT.read_bytes(), "kept")


def test_the_study_that_is_kept_is_whole() -> None:
    found = kept()
    trained = {"K before RoPE", "K", "V"}
    ways = [None, *study.WAYS]
    for form, names in study.CODECS.items():
        for codec in names:
            for component in trained:
                told = [
                    c.delta
                    for c in found.codings
                    if (c.form, c.codec, c.component) == (form, codec, component)
                ]
                assert told == ways
    assert {p.component for p in found.predicted} == {r.component for r in found.rounded} == trained
    assert {m.component for m in found.mechanism} == {"c4_kv", "c4_index", "c128_kv"}
    assert all(m.ways == len(study.WAYS) for m in found.mechanism)
    assert len(found.texts) == 4


def test_the_page_says_what_the_study_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Every ratio in the page's table of the best is in the study."""
    page = (Path(__file__).parents[2] / "docs" / "understanding" / "delta-coding.md").read_text()
    found = kept()
    for form in ("bf16", "fp8"):
        for component in ("K before RoPE", "K", "V"):
            plain, delta = (
                study_delta.best(found.codings, component, form, delta=d).ratio
                for d in (False, True)
            )
            row = rf"\| {component}, {form} \|[^\n]* {plain:.3f} \|[^\n]* {delta:.3f} \|"
            assert re.search(row, page), (component, form, plain, delta)
    for p in found.predicted:
        if p.distance == 16:
            cells = f"| {p.found.variance_ratio:.2f} | {p.found.bits_saved:+.2f} |"
            assert f"| {p.component} | {p.predictor} {cells}" in page
    for name, form, options in (
        ("bf16, plain (planes apart)", "bf16", {"delta": False}),
        ("bf16, delta", "bf16", {"delta": True}),
        ("bf16, delta, if prediction cost nothing", "bf16", {"delta": True, "free": True}),
        ("fp8, plain (zstd)", "fp8", {"delta": False}),
        ("fp8, delta", "fp8", {"delta": True}),
        ("fp8, delta, if prediction cost nothing", "fp8", {"delta": True, "free": True}),
    ):
        coder = study_delta.whole(found, form, **options)
        load, hand_off = (pay.pays_below(coder, encode=e) / 1e6 for e in (False, True))
        cells = f"| {name} | {coder.ratio:.3f} | {load:.0f} MB/s | {hand_off:.0f} MB/s |"
        assert cells in page
    assert "not known" in page
    assert main(["study", "delta", "--show", str(KEPT), "--json"]) == 0
    assert study.Study.decode(capsys.readouterr().out.encode(), "shown") == found


def test_an_earlier_run_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "delta", "--show", str(KEPT)]) == 0
    said = capsys.readouterr().out
    for words in ("K before RoPE", "never", "hand-off", "RDMA-400G", "3850 bytes", "not known"):
        assert words in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--layers", "0"], "--layers 0: 1 to 64"),
        (["--context-tokens", "10"], "--context-tokens 10: 400 to 6144"),
        (["--seed", "-1"], "--seed -1: 0 to 4294967295"),
        (["--text", "nowhere.md"], "no text that can be read"),
        (["--show", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--venv", "nowhere"], "run python -m kvatlas.connectors.vllm_cpu"),
        (["--out", "no/where/study.json"], "study.json: cannot be written: there is no no/where"),
        (["--out", "."], "--out .: cannot be written: it is a directory"),
        (["--show", str(KEPT), "--out", str(KEPT)], "the command reads or writes that file"),
        (
            ["--text", str(KEPT), "--out", str(KEPT), "--venv", "nowhere"],
            "the command reads or writes that file",
        ),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", "delta", *options]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_a_study_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"x\.json: no kvatlas\.delta-study\.1"):
        study.Study.decode(b"{}", "x.json")
    found = kept()
    zero = msgspec.structs.replace(found.codings[0], ratio=0.0)
    broken = msgspec.json.encode(msgspec.structs.replace(found, codings=(zero,)))
    with pytest.raises(ConfigError, match="are above 0"):
        study.Study.decode(broken, "x.json")
    slow = msgspec.structs.replace(found.codings[0], codec_encode_bytes_per_s=0.0)
    broken = msgspec.json.encode(msgspec.structs.replace(found, codings=(slow,)))
    with pytest.raises(ConfigError, match="are above 0"):
        study.Study.decode(broken, "x.json")


@pytest.mark.parametrize(
    ("left", "says"),
    [
        (lambda c: c.component != "V", "x.json: no figures of V as bf16: zstd, plain"),
        (lambda c: c.form != "fp8", "as fp8: zstd, plain"),
        (lambda c: c.delta is None, "no figures of K as bf16: zstd, Delta"),
    ],
)
def test_a_study_in_part_is_none(left: Callable[[study.Coding], bool], says: str) -> None:
    """Its tables could not be made."""
    found = kept()
    some = msgspec.structs.replace(found, codings=tuple(filter(left, found.codings)))
    with pytest.raises(ConfigError, match=re.escape(says)):
        study.Study.decode(msgspec.json.encode(some), "x.json")
