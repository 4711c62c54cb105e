"""A byte-level BPE tokenizer, trained in a moment on a few lines: every feature, few tokens."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

START, USER, END = "<|start|>", "<|user|>", "<|end|>"
QWEN = (  # the pattern family of Qwen, Llama 3 and GPT-4
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog and runs away from the café",
    "def encode(text: str) -> bytes:\n    return text.encode('utf-8')  # 12345",
    "it's what we'll do: don't worry, they've said so\n\n\tindented   twice",
    "{\"key\": [1, 2.5, null]} <div class='a'>日本語 世界 привет</div>",
] * 5


def train(directory: Path, *, split: bool, start: bool = False) -> Path:
    """A byte-level BPE; ``split``: by a regex of its own, else by GPT-2's; ``start``: plain text
    gets a start token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    levels: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    ]
    if split:
        levels.insert(0, pre_tokenizers.Split(tokenizers.Regex(QWEN), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(levels)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[START, USER, END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>", "</tool>"])
    if start:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{START} $A", special_tokens=[(START, 0)]
        )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
