"""Writes a tiny Qwen3 with random weights: enough to exercise an engine's cache, never its wits.

Runs with the Python of an engine's own environment: ``python tiny_models.py DIRECTORY``.
Its tokenizer has one token per byte, so the length of a prompt is plain to see. The weights are
spread wide enough that greedy answers differ from prompt to prompt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIALS = ("<|end|>", "<|start|>", "<|pad|>")
SEED = 7


def tokenizer(directory: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *letters])}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<|end|>", pad_token="<|pad|>"
    )
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(directory)
    return wrapped


def main(directory: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    words = tokenizer(directory)
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
