"""From a model's Hugging Face config to its `Layout`: one module per family of models.

A family is chosen by ``model_type`` alone. What is not listed here is refused by name and never
guessed: a layout that is nearly right promises resume positions that are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvatlas.core.families import deepseek_v4, gqa, mla
from kvatlas.core.families.fields import Fields, Wanted
from kvatlas.core.layout import Layout
from kvatlas.errors import LayoutError

ENGINES = ("vllm", "sglang")

_FAMILIES: dict[str, Callable[[Fields, Wanted], Layout]] = {
    **dict.fromkeys(gqa.MODEL_TYPES, gqa.layout),
    **dict.fromkeys(mla.MODEL_TYPES, mla.layout),
    **dict.fromkeys(deepseek_v4.MODEL_TYPES, deepseek_v4.layout),
}

_RECURRENT = "its recurrent state is not made of blocks of tokens"
_NOT_YET = {
    "deepseek_v41": "V4.1 rebuilds its window by replay and shares KV between layers",
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "falcon_mamba": _RECURRENT,
    "jamba": _RECURRENT,
    "bamba": _RECURRENT,
    "zamba2": _RECURRENT,
    "nemotron_h": _RECURRENT,
    "qwen3_next": _RECURRENT,
    "rwkv": _RECURRENT,
    "gemma3n": "its layers share KV",
    "gemma3n_text": "its layers share KV",
    "llama4": "its chunked attention is not described yet",
    "llama4_text": "its chunked attention is not described yet",
}


def layout_from_config(
    config: Mapping[str, object],
    *,
    engine: str,
    kv_dtype: str = "auto",
    indexer_dtype: str = "fp8",
    block_tokens: int | None = None,
    draft: bool = False,
    model: str = "",
) -> Layout:
    """The layout of the model that ``config`` (a parsed config.json) describes, in ``engine``.

    ``engine`` is "vllm" or "sglang". ``kv_dtype`` is "auto", "bf16", "fp16", "fp8" (DeepSeek V4
    and V3.2: the packed ``fp8_ds_mla`` rows) or, where a family has it, "fp8_ds_mla" and
    "fp8_plain" (rows of bare e4m3); ``indexer_dtype`` is "fp8" or "fp4". ``block_tokens``
    is the engine's block (vLLM ``--block-size``) or page (SGLang ``--page-size``); None takes the
    engine's own default. ``draft`` adds the state of the draft layers (MTP, DSpark) that the
    engine was told to run. ``model`` names the layout; without it the model type does.

    Raises `LayoutError` for an architecture that we do not know, and for a config or a wish whose
    fields are missing, contradictory or absurd; the text names the field.
    """
    if engine not in ENGINES:
        raise LayoutError(f"engine {engine!r} is unknown: use one of {', '.join(ENGINES)}")
    fields = Fields(config)
    kind = fields.model_type
    family = _FAMILIES.get(kind)
    if family is None:
        why = _NOT_YET.get(kind, "we do not know what its KV state consists of")
        raise LayoutError(
            f"model_type {kind!r} is not supported: {why}. Route it by load alone, or give the"
            " plain block size as its layout"
        )
    if block_tokens is not None and not 1 <= block_tokens <= 1 << 16:
        raise LayoutError(f"block_tokens must be between 1 and 65536, got {block_tokens}")
    return family(
        fields,
        Wanted(
            engine=engine,
            kv_dtype=_DTYPE_NAMES.get(kv_dtype, kv_dtype),
            indexer_dtype=_DTYPE_NAMES.get(indexer_dtype, indexer_dtype),
            block_tokens=block_tokens,
            draft=draft,
            model=model or kind,
        ),
    )


_DTYPE_NAMES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "fp8_e4m3": "fp8",
    "mxfp4": "fp4",
}
