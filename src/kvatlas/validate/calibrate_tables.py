"""Published TTFT and TPOT by model, GPU and concurrency, and what the time model says of them.

A row of such a table is a closed loop: so many clients, each sending its next request when its
last one is answered. The step time gives its steady state without simulating it.
"""

from __future__ import annotations

import csv
import lzma
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import msgspec

from kvatlas.core.layout import Layout
from kvatlas.errors import KvatlasError, TraceError
from kvatlas.workload.device import Device, device
from kvatlas.workload.models import load_config, load_layout
from kvatlas.workload.shape import shape_of, width_bytes
from kvatlas.workload.spec import EngineSpec
from kvatlas.workload.step_time import StepTime

ROWS_MAX = 1_000_000
STEP_TOKENS = 8192  # that one step may compute: the default of all three engines on such GPUs
MEMORY_SHARE = 0.9  # of device memory that engines use (vLLM's and TensorRT-LLM's default)

#: What the tables call it → the config that ships with kvatlas.
MODELS = {
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-v3",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-v3",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "moonshotai/Kimi-K2.5": "kimi-k2",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "flash": "deepseek-v4-flash",
}
SYSTEMS = {
    "b200_sxm": "B200",
    "b300_sxm": "B300",
    "gb200": "GB200",
    "gb300": "GB300",
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "b200": "B200",
    "h200": "H200",
}


class Row(msgspec.Struct, frozen=True):
    """One measured point. ``devices`` share each request, ``ranks`` engine ranks share the experts
    and the ``concurrency``. Times are in seconds."""

    line: int
    model: str
    device: str
    engine: str
    precision: str
    devices: int
    ranks: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    ttft_s: float
    tpot_s: float

    def setting(self) -> tuple[str, int, int, int]:
        """What near-duplicates share. Other dates, versions and ways of splitting the experts
        give nearly the same figures, and neighbouring concurrencies nearly tell each other, so
        all of one setting are fitted, or all are judged."""
        return (self.family(), self.devices * self.ranks, self.prompt_tokens, self.output_tokens)

    def kin(self) -> str:
        """Rows of one model in one engine, on any GPU."""
        return f"{self.model} {self.engine}"

    def family(self) -> str:
        """Rows that run the same kernels: model, device, engine and precision."""
        return f"{self.model} {self.device} {self.engine} {self.precision}"


class Table(msgspec.Struct, frozen=True):
    """The rows of a file that the model can speak of, and why it cannot of the others."""

    rows: tuple[Row, ...]
    left_out: dict[str, int]


class _LeftOut(Exception):
    """A row that is sound but that the model says nothing of."""


def read_table(path: Path) -> Table:
    """A table in aiconfigurator's form (``silicon_ttft_ms``) or SGLang's cookbook's (``ttft_ms``).

    Raises TraceError with the line and the reason for a damaged file or row.
    """
    rows: list[Row] = []
    left_out: Counter[str] = Counter()
    for line, fields in _lines(path):
        try:
            rows.append(_row(line, fields))
        except _LeftOut as reason:
            left_out[str(reason)] += 1
        except (ValueError, KvatlasError) as error:
            raise TraceError(f"{path}:{line}: {error}") from error
    return Table(tuple(rows), dict(sorted(left_out.items())))


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    opened = lzma.open if path.suffix == ".xz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            names = set(reader.fieldnames or ())
            forms = {frozenset(_SILICON), frozenset(_COOKBOOK)}
            if not any(form <= names for form in forms):
                missing = min((sorted(form - names) for form in forms), key=len)
                raise TraceError(f"{path}:1: no column {', '.join(missing)}")
            for fields in reader:
                if reader.line_num > ROWS_MAX:
                    raise TraceError(f"{path}: more than {ROWS_MAX} rows")
                if None in fields or None in fields.values():
                    raise TraceError(
                        f"{path}:{reader.line_num}: not {len(names)} fields like the first line"
                    )
                yield reader.line_num, fields
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


_SILICON = (
    *("model_path", "system", "backend", "precision", "mode", "isl", "osl", "tp_size"),
    *("attention_dp_size", "moe_tp_size", "moe_ep_size", "batch_size"),
    *("silicon_data_source", "silicon_ttft_ms", "silicon_tpot_ms"),
)
_COOKBOOK = (
    *("hw", "variant", "quant", "strategy", "isl", "osl", "max_concurrency"),
    *("ttft_ms", "tpot_ms"),
)
_COOKBOOK_GPUS = 4  # up to 256 clients the times and the throughput per GPU agree on it


def _row(line: int, fields: Mapping[str, str]) -> Row:
    if "silicon_ttft_ms" in fields:
        return _silicon(line, fields)
    return _cookbook(line, fields)


def _silicon(line: int, fields: Mapping[str, str]) -> Row:
    ttft_s, tpot_s = _seconds(fields, "silicon_ttft_ms"), _seconds(fields, "silicon_tpot_ms")
    name, system = fields["model_path"], fields["system"]
    lengths = _count(fields, "isl"), _count(fields, "osl")
    if name not in MODELS:
        raise _LeftOut(f"{name}: its architecture is not described")
    if system not in SYSTEMS:
        raise ValueError(f"system {system!r} is unknown: use one of {', '.join(SYSTEMS)}")
    precision = fields["precision"] or "bf16"
    width_bytes(precision)
    if fields["mode"] != "agg":
        raise _LeftOut("prefill and decode apart: one engine is modelled")
    devices, ranks = _arrangement(fields)
    if devices * ranks > 8:
        raise _LeftOut("more than 8 GPUs as one engine: how they share the work is not told")
    told = re.search(r"silicon_concurrency=(\d+)", fields["silicon_data_source"])
    concurrency = int(told[1]) if told else _count(fields, "batch_size") * ranks
    return Row(
        line=line,
        model=MODELS[name],
        device=SYSTEMS[system],
        engine=fields["backend"],
        precision=precision,
        devices=devices,
        ranks=ranks,
        prompt_tokens=lengths[0],
        output_tokens=lengths[1],
        concurrency=max(concurrency, 1),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
    )


def _arrangement(fields: Mapping[str, str]) -> tuple[int, int]:
    """(devices that share each request, ranks). Where the same GPUs split the experts both ways
    (``moe_tp`` = ``moe_ep``) the source multiplies the two instead of counting GPUs once: its
    rows of 4 × 4 repeat those of 4."""
    names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    for name in names:  # some rows say 0 or nothing where they mean 1
        if fields[name] and not fields[name].isdecimal():
            raise ValueError(f"{name} is {fields[name]!r}: a whole number is needed")
    tensor, ranks, moe_tensor, moe_expert = (max(int(fields[n] or 1), 1) for n in names)
    gpus = tensor * ranks
    if moe_tensor == moe_expert > 1 and gpus == moe_tensor * moe_expert:
        gpus = moe_tensor
    gpus = max(gpus, 1 if moe_tensor == moe_expert else moe_tensor * moe_expert)
    tensor = min(tensor, gpus)
    if ranks > 1:
        tensor = min(tensor, max(gpus // ranks, 1))
    return tensor, gpus // tensor


def _cookbook(line: int, fields: Mapping[str, str]) -> Row:
    ttft_s, tpot_s = _seconds(fields, "ttft_ms"), _seconds(fields, "tpot_ms")
    prompt, output = _count(fields, "isl"), _count(fields, "osl")
    concurrency = _count(fields, "max_concurrency")
    for name, known in (("hw", SYSTEMS), ("variant", MODELS)):
        if fields[name] not in known:
            raise ValueError(f"{name} {fields[name]!r} is unknown: use one of {', '.join(known)}")
    width_bytes(fields["quant"])
    if fields["strategy"] == "low-latency":
        raise _LeftOut("speculative decoding is not modelled")
    # Attention is data-parallel in the rows that are left.
    return Row(
        line=line,
        model=MODELS[fields["variant"]],
        device=SYSTEMS[fields["hw"]],
        engine="sglang",
        precision=fields["quant"],
        devices=1,
        ranks=_COOKBOOK_GPUS,
        prompt_tokens=prompt,
        output_tokens=output,
        concurrency=concurrency,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
    )


def _seconds(fields: Mapping[str, str], name: str) -> float:
    value = float(fields[name])
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {fields[name]}: above 0 is needed")
    return value / 1e3


def _count(fields: Mapping[str, str], name: str) -> int:
    text = fields[name]
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 24:
        raise ValueError(f"{name} is {text!r}: a whole number from 1 up is needed")
    return int(text)


# The model's side ------------------------------------------------------------------------------


class Loop(msgspec.Struct, frozen=True):
    """What belongs to the way of measuring, not to the engine.

    ``first_token_s``: from the client to the engine and back. ``crowd``: share of the other
    clients' prompts that are ahead of one in the queue, on average halfway (all of them start at
    once, and of n waves the first is such a crowd).
    """

    first_token_s: float
    crowd: float


@cache
def _layout(model: str, engine: str, precision: str) -> Layout:
    kv = "fp8" if precision in ("fp8", "fp4") else "auto"
    return load_layout(model, engine="sglang" if engine == "sglang" else "vllm", kv_dtype=kv)


@cache
def _arithmetic(model: str, name: str, precision: str) -> tuple[str, str]:
    """(precision of arithmetic and dense weights, of the experts): a GPU without units for the
    experts' format computes in bf16; gpt-oss keeps activations in 8 bits where it can."""
    flops = device(name).flops
    if precision == "int4":
        return "bf16", "int4"
    if model == "deepseek-v4-flash":
        return "fp8", precision  # only its experts are in fp4
    if model == "gpt-oss-120b":
        return ("fp8" if "fp4" in flops else "bf16"), "fp4"
    return (precision if precision in flops else "bf16"), precision


def spec_of(row: Row, profile: Device) -> EngineSpec:
    """The engine of a row, as far as the time of its steps goes."""
    arithmetic, experts = _arithmetic(row.model, row.device, row.precision)
    return EngineSpec(
        blocks=1,
        device=profile,
        devices=row.devices,
        expert_ranks=row.ranks,
        precision=arithmetic,
        expert_precision=experts,
        shape=_shape(row.model),
    )


_shape = cache(lambda model: shape_of(load_config(model)))


def estimate(row: Row, profile: Device, loop: Loop) -> tuple[float, float]:
    """(TTFT, TPOT) in seconds of a row's closed loop on a device.

    In the steady state every request decodes behind a context of its prompt and half its output,
    and while it does so each of the others prefills once. What does not fit into memory at its
    full length waits for as long as its turn takes to come.
    """
    layout = _layout(row.model, row.engine, row.precision)
    spec = spec_of(row, profile)
    time = StepTime(spec, layout)
    clients = max(row.concurrency / row.ranks, 1.0)
    prompt, output = row.prompt_tokens, row.output_tokens
    context = prompt + output // 2
    running = max(1, min(round(clients), int(_room_tokens(row, spec, layout) / (prompt + output))))
    decode = time.alike(context, running)
    whole = 0.0  # steps that carry one prompt, those of the others with it
    for start in range(0, prompt, STEP_TOKENS):
        whole += time.alike(context, running - 1, (start, min(prompt, start + STEP_TOKENS)))
    added = whole - decode * -(-prompt // STEP_TOKENS)
    tpot = decode + (running - 1) * max(added, 0.0) / output
    together = max(1, STEP_TOKENS // prompt)
    each = min(whole, time.seconds([(0, min(prompt, STEP_TOKENS))] * together) / together)
    each *= max(1.0, prompt / STEP_TOKENS)
    ttft = loop.first_token_s + decode / 2 + whole + loop.crowd * (running - 1) / 2 * each
    waits = max(clients / running - 1, 0.0) * (whole + output * tpot)
    return ttft + waits, tpot


def _room_tokens(row: Row, spec: EngineSpec, layout: Layout) -> float:
    """Tokens of context that fit beside the weights; at least one request's."""
    shape, profile = _shape(row.model), spec.device
    assert profile is not None
    assert layout.compute is not None
    weights = shape.weight_bytes(layout.compute, spec.precision, spec.expert_precision)
    each = profile.memory_bytes * MEMORY_SHARE - weights / (row.devices * row.ranks)
    if layout.tensor_parallel != "replicated":
        each *= row.devices
    return max(each / layout.page_bytes_per_token(), row.prompt_tokens + row.output_tokens)
