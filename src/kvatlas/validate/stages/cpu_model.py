"""A tiny Qwen3 with random weights and a tokenizer of bytes, written without any engine's Python:
the same bytes in every process. Enough to exercise caches, never wits."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|end|>", "<|start|>", "<|pad|>")
VOCAB_SIZE = len(SPECIALS) + 256
_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS, _HEAD = 128, 256, 2, 4, 2, 64
_SPREAD = 0.17  # wide enough that greedy answers differ from prompt to prompt
_SEED = 7
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 2,
    "torch_dtype": "bfloat16",
}
_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_model(directory: Path) -> None:
    """Config, tokenizer and weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_bytes(msgspec.json.encode(_CONFIG))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _TEMPLATE,
        "eos_token": SPECIALS[0],
        "pad_token": SPECIALS[2],
    }
    (directory / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
    (directory / "model.safetensors").write_bytes(_weights())


def _weights() -> bytes:
    """In safetensors' form: the length of a header, the header, and the tensors one by one."""
    rng = random.Random(_SEED)
    header: dict[str, object] = {}
    parts: list[bytes] = []
    at = 0
    for name, shape in _tensors():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        raw = _ones(count) if len(shape) == 1 else _spread(rng, count)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + len(raw)]}
        parts.append(raw)
        at += len(raw)
    told = msgspec.json.encode(header)
    told += b" " * (-len(told) % 8)
    return struct.pack("<Q", len(told)) + told + b"".join(parts)


def _tensors() -> list[tuple[str, list[int]]]:
    found = [("model.embed_tokens.weight", [VOCAB_SIZE, _HIDDEN])]
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}."
        found += [
            (f"{at}self_attn.q_proj.weight", [_HEADS * _HEAD, _HIDDEN]),
            (f"{at}self_attn.k_proj.weight", [_KV_HEADS * _HEAD, _HIDDEN]),
            (f"{at}self_attn.v_proj.weight", [_KV_HEADS * _HEAD, _HIDDEN]),
            (f"{at}self_attn.o_proj.weight", [_HIDDEN, _HEADS * _HEAD]),
            (f"{at}self_attn.q_norm.weight", [_HEAD]),
            (f"{at}self_attn.k_norm.weight", [_HEAD]),
            (f"{at}mlp.gate_proj.weight", [_INNER, _HIDDEN]),
            (f"{at}mlp.up_proj.weight", [_INNER, _HIDDEN]),
            (f"{at}mlp.down_proj.weight", [_HIDDEN, _INNER]),
            (f"{at}input_layernorm.weight", [_HIDDEN]),
            (f"{at}post_attention_layernorm.weight", [_HIDDEN]),
        ]
    return [
        *found,
        ("model.norm.weight", [_HIDDEN]),
        ("lm_head.weight", [VOCAB_SIZE, _HIDDEN]),
    ]


def _ones(count: int) -> bytes:
    return b"\x80\x3f" * count  # 1.0 as bfloat16


def _spread(rng: random.Random, count: int) -> bytes:
    """Even between both ends; bfloat16 is the upper half of a float."""
    values = [rng.uniform(-_SPREAD, _SPREAD) for _ in range(count)]
    floats = struct.pack(f"<{count}f", *values)
    out = bytearray(2 * count)
    out[0::2], out[1::2] = floats[2::4], floats[3::4]
    return bytes(out)
