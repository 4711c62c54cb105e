"""The files of a Hugging Face model directory, as far as tokenizers and chats need them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvatlas.errors import ConfigError

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def special_tokens(model_dir: Path) -> dict[str, str]:
    """bos_token, eos_token … → their text. Raises ConfigError for files that cannot be read."""
    old = read_json(model_dir / "special_tokens_map.json")
    merged = old | read_json(model_dir / "tokenizer_config.json")
    tokens: dict[str, str] = {}
    for name in _NAMED:
        value = merged.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def read_text(path: Path) -> str:
    """Raises ConfigError."""
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """An object; {} where there is no such file. Raises ConfigError."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must be a JSON object")
    return value
