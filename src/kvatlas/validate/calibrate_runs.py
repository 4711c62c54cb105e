"""A recorded run of one engine, request by request, and the same run in the engine model.

The recorded arrivals, prompts and output lengths go in; the model's time to first token and time
per output token come out, to be compared with the recorded ones one by one.
"""

from __future__ import annotations

import lzma
import math
import re
from array import array
from codecs import BOM_UTF8
from pathlib import Path

import msgspec

from kvatlas.core.layout import Layout
from kvatlas.errors import ConfigError, LayoutError, TraceError
from kvatlas.workload.device import DEVICES, Device
from kvatlas.workload.engine import Engine
from kvatlas.workload.models import known_models, load_config, load_layout
from kvatlas.workload.pool import pool_blocks
from kvatlas.workload.protocol import Arrive, Produced, Rejected
from kvatlas.workload.shape import Shape, shape_of
from kvatlas.workload.spec import EngineSpec
from kvatlas.workload.step_time import StepTime

REQUESTS_MAX = 100_000
TOKENS_MAX = 1 << 22  # of one request
SECONDS_MAX = 1e7  # from the first arrival to any time that is told
LINE_MAX = 16 << 20
_WORKSPACE_BYTES = 2 << 30  # activations and CUDA graphs, where a run does not tell its blocks


class Recorded(msgspec.Struct, frozen=True):
    """One request as it was: seconds from the first one's arrival, and what was measured."""

    id: str
    arrival_s: float
    tokens: bytes
    output_tokens: int
    ttft_s: float
    tpot_s: float


class Run(msgspec.Struct, frozen=True):
    """All requests of one run, in order of arrival, and the engine that served them."""

    device: str
    model: str
    layout: Layout
    shape: Shape
    precision: str
    blocks: int
    max_running: int
    step_tokens: int
    context_tokens: int
    requests: tuple[Recorded, ...]


class _Line(msgspec.Struct):
    request_id: str
    input_toks: int
    output_toks: int
    queued_ts: float
    first_token_ts: float
    last_token_ts: float


class _Prompt(msgspec.Struct):
    input_toks: int
    output_toks: int
    input_tok_ids: list[int]


class _Kwargs(msgspec.Struct):
    model: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None = None
    dtype: str = "bfloat16"
    tensor_parallel_size: int = 1


class _Cache(msgspec.Struct):
    num_gpu_blocks: int | None = None
    block_size: int = 16


class _Meta(msgspec.Struct):
    engine_kwargs: _Kwargs
    kv_cache: _Cache | None = None


def read_run(folder: Path, prompts: Path | None, *, device: str = "") -> Run:
    """A run as LLMServingSim records it: ``requests.jsonl`` and ``meta.json`` in one folder.

    ``prompts`` has the token ids, one request a line; without it no two prompts share a prefix.
    ``device`` is a profile's name; "" finds it in the folder's path. Raises TraceError with file,
    line and reason for damaged data, ConfigError for an unknown model or device.
    """
    meta = _meta(folder / "meta.json")
    kwargs = meta.engine_kwargs
    if kwargs.tensor_parallel_size != 1:
        raise ConfigError(f"{folder}: tensor_parallel_size must be 1 to calibrate one device")
    if kwargs.max_num_seqs < 1 or kwargs.max_num_batched_tokens < 1:
        raise ConfigError(f"{folder / 'meta.json'}: max_num_seqs and max_num_batched_tokens: >= 1")
    name = _model(kwargs.model)
    profile = DEVICES[_device(device, folder)]
    cache = meta.kv_cache or _Cache()
    layout = load_layout(name, engine="vllm", block_tokens=cache.block_size)
    shape = shape_of(load_config(name))
    blocks = cache.num_gpu_blocks or _blocks(layout, shape, profile)
    return Run(
        device=profile.name,
        model=name,
        layout=layout,
        shape=shape,
        precision="bf16",
        blocks=blocks,
        max_running=kwargs.max_num_seqs,
        step_tokens=kwargs.max_num_batched_tokens,
        context_tokens=kwargs.max_model_len or 131_072,
        requests=_requests(folder / "requests.jsonl", prompts),
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _device(wanted: str, folder: Path) -> str:
    parts = [wanted] if wanted else list(folder.resolve().parts)
    for part in reversed(parts):
        for name in DEVICES:
            if _plain(name) == _plain(part):
                return name
    known = ", ".join(DEVICES)
    if wanted:
        raise ConfigError(f"unknown device {wanted!r}: use one of {known}")
    raise ConfigError(f"{folder}: no part of the path names a device: give --device ({known})")


def _model(path: str) -> str:
    plain = _plain(path.rsplit("/", 1)[-1]).removesuffix("instruct")
    for name in known_models():
        if _plain(name) == plain:
            return name
    raise LayoutError(f"model {path!r} is not one of {', '.join(known_models())}")


def _blocks(layout: Layout, shape: Shape, profile: Device) -> int:
    """What vLLM's default share of the memory leaves for KV."""
    assert layout.compute is not None
    weights = shape.weight_bytes(layout.compute, "bf16")
    room = profile.memory_bytes * 0.9 - weights - _WORKSPACE_BYTES
    if room <= 0:
        raise ConfigError(f"{layout.model} does not fit into the memory of a {profile.name}")
    return pool_blocks(layout, int(room))


# Reading ---------------------------------------------------------------------------------------


def _read(path: Path) -> list[bytes]:
    opened = lzma.open if path.suffix == ".xz" else open
    lines: list[bytes] = []
    try:
        with opened(path, "rb") as file:
            while line := file.readline(LINE_MAX + 1):
                if len(line) > LINE_MAX:
                    raise TraceError(f"{path}:{len(lines) + 1}: longer than {LINE_MAX} bytes")
                if len(lines) == REQUESTS_MAX:
                    raise TraceError(f"{path}: more than {REQUESTS_MAX} requests")
                lines.append(line if lines else line.removeprefix(BOM_UTF8))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (EOFError, lzma.LZMAError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    return lines


def _meta(path: Path) -> _Meta:
    try:
        return msgspec.json.decode(path.read_bytes().removeprefix(BOM_UTF8), type=_Meta)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from error


def _requests(path: Path, prompts: Path | None) -> tuple[Recorded, ...]:
    lines = _read(path)
    ids = _read(prompts) if prompts else [b""] * len(lines)
    if not lines:
        raise TraceError(f"{path}: no requests")
    if len(ids) < len(lines):
        raise TraceError(f"{prompts}: {len(ids)} prompts for {len(lines)} requests")
    found: list[Recorded] = []
    names: set[str] = set()
    first = -math.inf
    for number, (line, prompt) in enumerate(zip(lines, ids, strict=False), 1):
        try:
            told = msgspec.json.decode(line, type=_Line)
            first = told.queued_ts if number == 1 else first
            arrival_s = told.queued_ts - first
            if found and not arrival_s >= found[-1].arrival_s:
                raise ValueError("queued_ts is before the line above: sort by it")
            if told.request_id in names:
                raise ValueError(f"request_id {told.request_id!r} is there twice")
            names.add(told.request_id)
            found.append(_recorded(told, arrival_s, prompt, number))
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise TraceError(f"{path}:{number}: {error}") from error
    return tuple(found)


def _recorded(told: _Line, arrival_s: float, prompt: bytes, number: int) -> Recorded:
    if told.input_toks < 1 or told.output_toks < 2:
        raise ValueError("at least 1 input and 2 output tokens are needed for a time per token")
    if told.input_toks + told.output_toks > TOKENS_MAX:
        raise ValueError(f"more than {TOKENS_MAX} tokens")
    ttft_s = told.first_token_ts - told.queued_ts
    rest_s = told.last_token_ts - told.first_token_ts
    if not (ttft_s > 0 and rest_s > 0):
        raise ValueError("times must go up: queued_ts, first_token_ts, last_token_ts")
    if not arrival_s + ttft_s + rest_s < SECONDS_MAX:
        raise ValueError(f"times lie more than {SECONDS_MAX:g} s apart")
    if prompt:
        ids = msgspec.json.decode(prompt, type=_Prompt)
        if (ids.input_toks, ids.output_toks) != (told.input_toks, told.output_toks):
            raise ValueError("the prompt of this line has other lengths: not the same workload")
        if len(ids.input_tok_ids) != told.input_toks:
            raise ValueError(f"{len(ids.input_tok_ids)} token ids, input_toks {told.input_toks}")
        if not all(0 <= token < 1 << 32 for token in ids.input_tok_ids):
            raise ValueError("a token id is not a uint32")
        tokens = array("I", ids.input_tok_ids).tobytes()
    else:
        tokens = array("I", [number, *range(1, told.input_toks)]).tobytes()
    return Recorded(
        id=told.request_id,
        arrival_s=arrival_s,
        tokens=tokens,
        output_tokens=told.output_toks,
        ttft_s=ttft_s,
        tpot_s=rest_s / (told.output_toks - 1),
    )


# The same in the engine model ------------------------------------------------------------------


def replay(run: Run, profile: Device, *, upto: int | None = None) -> list[tuple[float, float]]:
    """(TTFT, TPOT) in seconds of the first ``upto`` requests (all), when the engine model serves
    the whole run. The later ones arrive too: they are load, whether they are looked at or not."""
    spec = EngineSpec(
        blocks=run.blocks,
        max_running=run.max_running,
        max_waiting=len(run.requests),
        step_tokens=run.step_tokens,
        context_tokens=run.context_tokens,
        device=profile,
        precision=run.precision,
        shape=run.shape,
    )
    StepTime(spec, run.layout)  # says what is wrong before anything runs
    watched = [r.id for r in run.requests[:upto]]
    first, last = _drive(Engine(run.layout, spec, publish=False), run, set(watched))
    return [
        (first[r.id] - r.arrival_s, (last[r.id] - first[r.id]) / (r.output_tokens - 1))
        for r in run.requests[:upto]
    ]


def _drive(engine: Engine, run: Run, open_: set[str]) -> tuple[dict[str, float], dict[str, float]]:
    """When the first and the last token of each request came, until all of ``open_`` are done."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    arrivals = iter(run.requests)
    coming = next(arrivals, None)
    while open_:
        due = engine.next_deadline()
        if coming is not None and (due is None or coming.arrival_s <= due):
            arrive = Arrive(coming.id, coming.tokens, coming.output_tokens)
            effects = engine.handle(arrive, coming.arrival_s)
            coming = next(arrivals, None)
        else:
            assert due is not None, "requests wait and nothing runs"
            effects = engine.tick(due)
        for effect in effects:
            if type(effect) is Produced:
                assert due is not None
                first.setdefault(effect.id, due)
                if effect.finished:
                    last[effect.id] = due
                    open_.discard(effect.id)
            elif type(effect) is Rejected:
                raise TraceError(f"request {effect.id!r} cannot run here: {effect.reason}")
    return first, last
