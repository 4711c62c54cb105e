"""The figures of seed document 003 on V4's KV cache, beside what the models' configs give.

The document (in Chinese, dated 2026-08-08, on scheduling V4's KV cache once it is compressed to
7 %) has two faults that run through it: V4's bytes per token lost their *kilo* (6.25 KB, vLLM's
bf16 pages, became 6.3 bytes), and V3.2's likewise. Three of its tables are lost; their rows are
rebuilt from the text around them and marked. Units are decimal, as there.
"""

from __future__ import annotations

import functools

import msgspec

from kvatlas.core.families import layout_from_config
from kvatlas.core.layout import Layout
from kvatlas.workload.models import load_layout

ABOUT = (
    "Figures of seed document 003, and the same computed from the models' configs:\n"
    "logical bytes of the chain parts, fp8 KV and fp8 indexer keys unless it says\n"
    "otherwise. The ratio is computed / seed."
)
NOTES = (
    "* the document's table is lost: rebuilt from its text\n"
    "Its unit slipped: 6.25 kilobytes per token (vLLM's bf16 pages) became 6.3 bytes.\n"
    "It leaves out what each resume point costs: 15.5 MB in vLLM, 8.2 MB in SGLang."
)
_PCIE, _NETWORK = 64e9, 10e9  # bytes per second, the seed's own
_REQUESTS, _CONTEXT = 100, 3200
_HBM_FOR_KV = 356e9  # 8 × 80 GB less 284 GB of weights
_MHA = {  # its example of plain multi-head attention: 96 layers, 64 heads of 128, fp16
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 96,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
}


class Row(msgspec.Struct, frozen=True):
    """One figure: where it stands in the document, in its own unit, and computed."""

    where: str
    what: str
    unit: str
    seed: float
    computed: float
    rebuilt: bool = False

    def ratio(self) -> float:
        """Computed over the seed's."""
        return self.computed / self.seed

    def plain(self) -> dict[str, object]:
        """All of it as plain values."""
        return {**msgspec.structs.asdict(self), "ratio": self.ratio()}


@functools.cache
def rows() -> tuple[Row, ...]:
    """Every figure of the document that a config decides, in the order of its sections."""
    found = [*_sizes(), *_table_of_generations(), *_transfers(), *_prefill(), *_long_contexts()]
    return tuple(sorted(found, key=lambda row: float(row.where) if row.where != "intro" else 0.0))


def shown(value: float, unit: str) -> str:
    """A figure for people: 3.85 KB, 12 ms, 7.3 %."""
    if unit == "%":
        return f"{value:.2g} %" if value < 1 else f"{value:.1f} %"
    if unit == "×":
        return f"{value:,.3g}×" if value < 1000 else f"{value:,.0f}×"
    if unit == "s" and value < 1:
        return f"{value * 1e3:.3g} ms"
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= factor and unit in ("B", "FLOP"):
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:,.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


@functools.cache
def _model(name: str, indexer: str = "fp8") -> Layout:
    return load_layout(name, engine="vllm", kv_dtype="fp8", indexer_dtype=indexer)


def _bytes(name: str, tokens: float = 1, indexer: str = "fp8") -> float:
    return _model(name, indexer).bytes_per_token() * tokens


@functools.cache
def _mha() -> float:
    return layout_from_config(_MHA, engine="vllm", kv_dtype="fp16").bytes_per_token()


FLASH, PRO, V32, V3 = "deepseek-v4-flash", "deepseek-v4-pro", "deepseek-v3.2", "deepseek-v3"
_ALL_AT_ONCE = _REQUESTS * _CONTEXT


def _sizes() -> list[Row]:
    v32 = _bytes(V32)
    flash = _bytes(FLASH)
    return [
        Row("intro", "Flash of V3.2, fp4 indexer", "%", 7, 100 * _bytes(FLASH, 1, "fp4") / v32),
        Row("intro", "Flash of V3.2, fp8 indexer", "%", 7, 100 * flash / v32),
        Row("intro", "Pro of V3.2, fp4 indexer", "%", 10, 100 * _bytes(PRO, 1, "fp4") / v32),
        Row("intro", "Pro of V3.2, fp8 indexer", "%", 10, 100 * _bytes(PRO) / v32),
        Row("intro", "100 requests × 3,200 tokens, Flash", "B", 2e6, flash * _ALL_AT_ONCE),
        Row("1", "one token, Flash", "B", 6.3, flash),
        Row("1", "4K tokens, Flash", "B", 25e3, flash * 4096),
    ]


def _table_of_generations() -> list[Row]:
    """Section 6: the rows of its lost table that stand in the text below it."""
    tokens = [
        ("one token, plain heads", 320e3, _mha(), False),
        ("one token, V3", 31e3, _bytes(V3), False),  # section 11.4
        ("one token, V3.2", 350e3 / 4096, _bytes(V32), True),
        ("one token, Pro", 36e3 / 4096, _bytes(PRO), True),
    ]
    contexts = [
        ("4K tokens, plain heads", 1.3e9, _mha() * 4096),
        ("4K tokens, V3", 121e6, _bytes(V3, 4096)),
        ("4K tokens, V3.2", 350e3, _bytes(V32, 4096)),
        ("4K tokens, Pro", 36e3, _bytes(PRO, 4096)),
        ("block of 16, plain heads", 5.1e3, _mha() * 16),
        ("block of 16, V3", 496.0, _bytes(V3, 16)),
        ("block of 16, V3.2", 1.4e3, _bytes(V32, 16)),
        ("block of 16, Flash", 101.0, _bytes(FLASH, 16)),
        ("block of 16, Pro", 144.0, _bytes(PRO, 16)),
    ]
    steps = [
        ("plain heads to V3", 10.0, _mha() / _bytes(V3)),
        ("V3 to V3.2", 340.0, _bytes(V3) / _bytes(V32)),
        ("V3.2 to Flash", 14.0, _bytes(V32) / _bytes(FLASH)),
        ("plain heads to Flash", 50e3, _mha() / _bytes(FLASH)),
    ]
    room = 1.3e6 * 25e3  # the bytes that its own count of requests fills
    return [
        *(Row("6", what, "B", seed, computed, rebuilt) for what, seed, computed, rebuilt in tokens),
        *(Row("6", what, "B", seed, computed, True) for what, seed, computed in contexts),
        Row("6", "4K requests in one GPU, Flash", "", 1.3e6, room / _bytes(FLASH, 4096), True),
        *(Row("6", what, "×", seed, computed) for what, seed, computed in steps),
        Row("6", "block of 256, Flash", "B", 1.6e3, _bytes(FLASH, 256)),
    ]


def _transfers() -> list[Row]:
    once, every = _bytes(FLASH, _CONTEXT), _bytes(FLASH, _ALL_AT_ONCE)
    old = _bytes(V3, _ALL_AT_ONCE)
    return [
        Row("7", "3,200 tokens to decode, Flash", "B", 20.2e3, once),
        Row("7", "the same with its resume point", "B", 20.2e3, _model(FLASH).resume_bytes(3200)),
        Row("7", "100 of them over PCIe", "s", 0.03e-3, every / _PCIE),
        Row("7", "100 of them over 10 GB/s", "s", 0.2e-3, every / _NETWORK),
        Row("7", "100 requests of V3", "B", 9.9e9, old),
        Row("7", "100 requests of V3 over PCIe", "s", 0.15, old / _PCIE),
        Row("7", "Flash before V3", "×", 5000, old / every),
        # V4's KV has one head: every rank of tensor parallelism holds all of it
        Row("7", "100 requests in each of 8 GPUs", "B", 0.25e6, every),
        Row("8.3", "100 requests in their HBM", "%", 0.0006, 100 * every / _HBM_FOR_KV),
    ]


def _prefill() -> list[Row]:
    """Section 8: 100 requests share 1,500 tokens, five groups of 20 share 500 more."""
    compute = _model(FLASH).compute
    assert compute is not None
    flops = compute.prefill_flops
    alone = 20 * flops(0, 8000) + 80 * flops(0, 2000)
    saved = 99 * flops(0, 1500) + 5 * 19 * flops(1500, 2000)
    return [
        Row("4", "prefill of one token, Flash", "FLOP", 26e9, flops(0, 1500) / 1500),
        Row("4", "1,500 tokens shared 99 times", "FLOP", 3.86e15, 99 * flops(0, 1500)),
        Row("4", "KV of these 1,500 tokens", "B", 9.5e3, _bytes(FLASH, 1500)),
        Row("8.3", "prefill of all, nothing shared", "FLOP", 8.32e15, alone),
        Row("8.4", "prefill of all, prefixes shared", "FLOP", 3.22e15, alone - saved),
        Row("8.4", "KV of five times 500 tokens", "B", 15.8e3, _bytes(FLASH, 2500)),
        Row("8.4", "KV of all shared prefixes", "B", 25.3e3, _bytes(FLASH, 4000)),
    ]


def _long_contexts() -> list[Row]:
    million = _bytes(FLASH, 1e6)
    compute = _model(FLASH).compute
    assert compute is not None
    return [
        Row("10", "1M tokens, Flash", "B", 6.3e6, million),
        Row("11.4", "100 requests of 1M tokens", "B", 630e6, 100 * million),
        Row(
            "10",
            "prefill of the millionth token",
            "FLOP",
            26e9,
            compute.prefill_flops(999_999, 1_000_000),
        ),
    ]
