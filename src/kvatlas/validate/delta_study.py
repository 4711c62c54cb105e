"""What delta coding along the tokens gains on a trained model's KV, against plain codecs.

Seed document 003 (chapter 11) expects P frames of a quarter and 5 to 13 times in all. `run` has the
KV of real texts written down (`kvatlas.connectors.kv_dump`), codes it in every way of
`kvatlas.validate.delta_code`, checks that every unit comes back bit by bit, and counts. A unit is a
block of tokens in one layer, as a store keeps it: it must be readable alone. Times are CPU seconds
of one thread, so that they say as much on a busy machine.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import zstandard

import kvatlas
from kvatlas.connectors import kv_dump
from kvatlas.dataplane.codec import Codec, decode, encode
from kvatlas.errors import ConfigError, EngineError, StoreError
from kvatlas.validate.answering import Child, Measured
from kvatlas.validate.attention_contexts import Context
from kvatlas.validate.delta_code import Delta, Difference, Predictor, coded, decoded
from kvatlas.validate.delta_loss import (
    Kinship,
    bits_per_value,
    channels,
    errors,
    kinship,
    restored,
)
from kvatlas.validate.delta_pay import Speeds

UNIT_TOKENS = 256
DISTANCES = (4, 16, 64)  # of 1, all rows are I rows: that is the plain codec
WAYS = tuple(Delta(*each) for each in itertools.product(Predictor, Difference, DISTANCES))
WIDTH_BYTES = {"bf16": 2, "fp8": 1}
APART = "planes apart"  # see `packed`
CACHED = ("K", "V")  # what an engine keeps of SmolLM2, half of the bytes each
CODECS = {"bf16": ("zstd", "planes", APART), "fp8": ("zstd",)}  # one byte has no planes
BITS = (2, 3, 4)
LOSS_DISTANCE = 16
PLAIN_LAYERS = 3  # of those written down, for statistics in plain Python
V4_TOKENS = 1024
FILE_BYTES_MAX = 1 << 30

Form = Literal["bf16", "fp8"]


class Dumped(msgspec.Struct, frozen=True):
    """A file of rows, layer after layer."""

    model: Literal["trained", "v4"]
    text: int
    component: str
    form: Form
    file: str
    layers: int
    rows: int
    row_bytes: int


class Text(msgspec.Struct, frozen=True):
    """What was read."""

    id: str
    kind: str
    digest: str
    tokens: int


class Coding(msgspec.Struct, frozen=True):
    """One way to code one component: ``delta`` none is the codec alone. Speeds in bytes of the unit
    per CPU second; ``codec_…`` without the prediction, as if that cost nothing."""

    component: str
    form: Form
    codec: str
    delta: Delta | None
    units: int
    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    codec_encode_bytes_per_s: float
    codec_decode_bytes_per_s: float

    def speeds(self) -> Speeds:
        return Speeds(self.ratio, self.encode_bytes_per_s, self.decode_bytes_per_s)

    def codec_speeds(self) -> Speeds:
        return Speeds(self.ratio, self.codec_encode_bytes_per_s, self.codec_decode_bytes_per_s)


class Predicted(msgspec.Struct, frozen=True):
    """What a prediction is worth, whatever codes its residuals."""

    component: str
    predictor: Predictor
    distance: int
    found: Kinship


class Rounded(msgspec.Struct, frozen=True):
    """Lossy: ``error`` is root mean square, in standard deviations of the values around their
    channel's mean; ``predictor`` none is plain quantisation."""

    component: str
    predictor: Predictor | None
    bits: int
    bits_per_value: float
    error: float


class Mechanism(msgspec.Struct, frozen=True):
    """A component of V4 with random weights: that it comes back, and nothing else."""

    component: str
    form: Form
    units: int
    size_bytes: int
    ways: int


class Study(Measured, frozen=True, tag="kvatlas.delta-study.1"):
    """The result, as it is kept."""

    layers: int
    unit_tokens: int
    texts: tuple[Text, ...]
    codings: Annotated[tuple[Coding, ...], msgspec.Meta(min_length=1)]
    predicted: tuple[Predicted, ...]
    rounded: tuple[Rounded, ...]
    mechanism: tuple[Mechanism, ...]

    def check(self, name: str) -> None:
        """Raises ConfigError where the tables lack a figure, or would have to divide by one."""
        for each in self.codings:
            speeds = (each.encode_bytes_per_s, each.decode_bytes_per_s)
            alone = (each.codec_encode_bytes_per_s, each.codec_decode_bytes_per_s)
            if not all(x > 0 for x in (each.ratio, *speeds, *alone)):
                raise ConfigError(f"{name}: {each.component}: ratios and speeds are above 0")
        told: set[tuple[str, str, str, Delta | None]] = {
            (c.component, c.form, c.codec, c.delta) for c in self.codings
        }
        for component in dict.fromkeys((*CACHED, *(c.component for c in self.codings))):
            for form, codecs in CODECS.items():
                for codec, delta in itertools.product(codecs, (None, *WAYS)):
                    if (component, form, codec, delta) not in told:
                        way = f"{codec}, {delta or 'plain'}"
                        raise ConfigError(f"{name}: no figures of {component} as {form}: {way}")


# -- lossless -------------------------------------------------------------------------------------

Key = tuple[str, Form, str, Delta | None]


def packed(codec: str, made: bytes) -> tuple[str, bytes | memoryview]:
    """The codec that reads it, and what is stored.

    "planes apart" is the data plane's `planes`, each of which has zstd blocks of its own. "planes"
    is one row of both, as the data plane wrote them before: it is read in the same way.
    """
    if codec != Codec.PLANES:
        used, stored = encode(Codec.PLANES if codec == APART else Codec(codec), memoryview(made))
        return str(used), stored
    whole = zstandard.ZstdCompressor(level=1).compress(made[0::2] + made[1::2])
    return (str(Codec.PLANES), whole) if len(whole) < len(made) else (str(Codec.RAW), made)


class _Tally:
    """Of one way to code one component."""

    def __init__(self) -> None:
        self.units = self.before = self.behind = 0
        self.predict_s = self.undo_s = self.encode_s = self.decode_s = 0.0

    def coding(self, key: Key) -> Coding:
        component, form, codec, delta = key

        def speed(spent_s: float) -> float:
            return round(self.before / max(spent_s, 1e-9))

        return Coding(
            component=component,
            form=form,
            codec=codec,
            delta=delta,
            units=self.units,
            ratio=round(self.before / self.behind, 4),
            encode_bytes_per_s=speed(self.predict_s + self.encode_s),
            decode_bytes_per_s=speed(self.undo_s + self.decode_s),
            codec_encode_bytes_per_s=speed(self.encode_s),
            codec_decode_bytes_per_s=speed(self.decode_s),
        )


class Lossless:
    """Codes units in every way, checks that they come back, and counts."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        """``clock`` tells CPU seconds."""
        self._clock = clock
        self._tallies: dict[Key, _Tally] = {}

    def add(self, component: str, form: Form, unit: bytes, row_bytes: int) -> None:
        """Raises StoreError where any way gives other bytes back."""
        width, clock = WIDTH_BYTES[form], self._clock
        for delta in (None, *WAYS):
            began = clock()
            made = coded(unit, width, row_bytes, delta) if delta else unit
            predict_s = clock() - began
            began = clock()
            back = decoded(made, width, row_bytes, delta) if delta else made
            undo_s = clock() - began
            if back != unit:
                raise StoreError(f"{component} as {form}: {delta} gave other bytes back")
            for codec in CODECS[form]:
                tally = self._tallies.setdefault((component, form, codec, delta), _Tally())
                began = clock()
                used, stored = packed(codec, made)
                tally.encode_s += clock() - began
                target = bytearray(len(made))
                began = clock()
                decode(used, memoryview(stored), memoryview(target))
                tally.decode_s += clock() - began
                if target != made:
                    raise StoreError(f"{component} as {form}: {codec} gave other bytes back")
                tally.predict_s += predict_s
                tally.undo_s += undo_s
                tally.units += 1
                tally.before += len(unit)
                tally.behind += len(stored)

    def codings(self) -> tuple[Coding, ...]:
        return tuple(tally.coding(key) for key, tally in self._tallies.items())


# -- statistics and loss --------------------------------------------------------------------------


def predicted(component: str, every: Sequence[Sequence[float]]) -> Iterator[Predicted]:
    """By predictor and distance; P does not depend on it but for the rows that are I rows."""
    for predictor, distance in itertools.product(Predictor, DISTANCES):
        found = kinship(every, Delta(predictor, Difference.ARITHMETIC, distance))
        short = Kinship(*(round(x, 4) for x in msgspec.structs.astuple(found)))
        yield Predicted(component, predictor, distance, short)


def rounded(component: str, every: Sequence[Sequence[float]]) -> Iterator[Rounded]:
    """Plain quantisation first, at each number of bits."""
    for bits, predictor in itertools.product(BITS, (None, *Predictor)):
        how = Delta(predictor, Difference.ARITHMETIC, LOSS_DISTANCE) if predictor else None
        wrong = own = 0.0
        for values in every:
            each = errors(values, restored(values, how, LOSS_DISTANCE, bits))
            wrong, own = wrong + each[0], own + each[1]
        yield Rounded(
            component=component,
            predictor=predictor,
            bits=bits,
            bits_per_value=bits_per_value(predictor, LOSS_DISTANCE, bits),
            error=round(math.sqrt(wrong / own) if own else 0.0, 5),
        )


# -- the run --------------------------------------------------------------------------------------


def units(data: bytes, told: Dumped) -> Iterator[tuple[int, bytes]]:
    """Layer and bytes of each unit of a file. Raises EngineError for a file of another size."""
    layer_bytes = told.rows * told.row_bytes
    if len(data) != told.layers * layer_bytes or not data:
        raise EngineError(f"{told.file}: {len(data)} bytes, not {told.layers} x {layer_bytes}")
    step = UNIT_TOKENS * told.row_bytes
    for layer in range(told.layers):
        end = (layer + 1) * layer_bytes
        for at in range(layer * layer_bytes, end, step):
            yield layer, data[at : min(at + step, end)]


def measured(
    files: Sequence[Dumped], read: Callable[[Dumped], bytes]
) -> tuple[Lossless, dict[str, list[list[float]]], list[Mechanism]]:
    """All files coded; of some layers the first unit of each text, as channels of floats."""
    trained, proof = Lossless(), Lossless()
    plain: dict[str, list[list[float]]] = {}
    mechanism = []
    for told in files:
        data, count = read(told), 0
        chosen = {i * told.layers // PLAIN_LAYERS for i in range(PLAIN_LAYERS)}
        seen: set[int] = set()
        for layer, unit in units(data, told):
            into = trained if told.model == "trained" else proof
            into.add(told.component, told.form, unit, told.row_bytes)
            count += 1
            if told.model == "trained" and told.form == "bf16" and layer in chosen - seen:
                seen.add(layer)
                plain.setdefault(told.component, []).extend(channels(unit, told.row_bytes))
        if told.model == "v4":
            mechanism.append(Mechanism(told.component, told.form, count, len(data), len(WAYS)))
    return trained, plain, mechanism


def _read(directory: Path, told: Dumped) -> bytes:
    path = directory / Path(told.file).name
    if path.stat().st_size > FILE_BYTES_MAX:
        raise EngineError(f"{told.file}: larger than {FILE_BYTES_MAX} bytes")
    return path.read_bytes()


def run(
    model: str,
    directory: Path,
    weights: str,
    contexts: Sequence[Context],
    *,
    venv: Path,
    seed: int,
    layers: int,
    context_tokens_max: int,
) -> Study:
    """Measure. Raises `EngineError` where the process fails."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        out.mkdir()
        source = Path(kvatlas.__file__).parents[1]
        child = Child(kv_dump.__file__, venv, (source,), Path(scratch))
        job: Mapping[str, object] = {
            "model": str(directory),
            "layers": layers,
            "seed": seed,
            "context_tokens_max": context_tokens_max,
            "contexts": contexts,
            "v4_tokens": V4_TOKENS,
            "out": str(out),
        }
        files = [msgspec.json.decode(line, type=Dumped) for line in child.lines(job)]
        lossless, plain, mechanism = measured(files, lambda told: _read(out, told))
    trained = [told for told in files if told.model == "trained"]
    tokens = {told.text: told.rows for told in trained}
    return Study(
        *child.measured(model, weights, seed),
        layers=max(told.layers for told in trained),
        unit_tokens=UNIT_TOKENS,
        texts=tuple(Text(c.id, c.kind, c.digest(), tokens[i]) for i, c in enumerate(contexts)),
        codings=lossless.codings(),
        predicted=tuple(p for name, every in plain.items() for p in predicted(name, every)),
        rounded=tuple(r for name, every in plain.items() for r in rounded(name, every)),
        mechanism=tuple(mechanism),
    )
