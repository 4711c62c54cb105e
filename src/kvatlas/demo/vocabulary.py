"""A small tokenizer of the demo's own, so that kvatlas and stub engines share a real one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2000  # all words of the demo's texts fit as single tokens

_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
_END = "<|end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(directory: Path, texts: Iterable[str]) -> None:
    """Trains byte-level BPE on ``texts`` and writes it, with a chat template, as a model would."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*_ROLES, _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _CHAT_TEMPLATE,
        "eos_token": _END,
    }
    (directory / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
