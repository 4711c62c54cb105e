"""kvatlas.toml: the operator's file, as frozen values. An unknown key is an error with its line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from kvatlas.errors import ConfigError


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where clients connect, and the limits that protect everybody else."""

    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 64 << 20  # a million tokens as JSON numbers are 7 MB; images are larger
    max_connections: int = 4096
    connect_timeout_s: float = 2.0
    # Silence from an engine for this long ends a request: above any real prefill queue.
    engine_idle_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0


class KeysConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``secret_file`` holds at least 16 bytes; without it each start draws a fresh secret."""

    secret_file: str = ""


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``policy``: price (kvatlas), round_robin and least_load (the baselines)."""

    policy: Literal["price", "round_robin", "least_load"] = "price"
    prefill_tokens_per_s: float = 8000.0  # only until the first requests were measured
    decision_log: str = ""  # JSONL path; "" keeps the last decisions in memory only
    explain_max: int = 4096


class DirectoryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of the directory; beyond them the oldest claims go first."""

    blocks_max: int = 20_000_000
    blocks_per_publisher_max: int = 2_000_000


class TokenizerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``path``: a directory with tokenizer.json and its chat template; "" uses the engine's own
    tokenize endpoint. ``verify_every`` samples one request in so many against the engine."""

    path: str = ""
    chat_template: str = ""
    verify_every: int = 500
    cache_bytes: int = 256 << 20
    engine_timeout_s: float = 1.0


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine. ``events`` "auto" asks the engine where its KV events are; "" means none.

    ``layout`` is "auto", a Hugging Face config.json, or a plain block size as text ("32").
    """

    name: str
    url: str
    engine: Literal["vllm", "sglang", "stub"] = "vllm"
    events: str = "auto"
    replay: str = ""
    layout: str = "auto"
    kv_dtype: str = "auto"
    weights_digest: str = ""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    worker: tuple[WorkerConfig, ...]
    gateway: GatewayConfig = GatewayConfig()
    keys: KeysConfig = KeysConfig()
    router: RouterConfig = RouterConfig()
    directory: DirectoryConfig = DirectoryConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()


def load(path: Path) -> Config:
    """Raises ConfigError that names the file, the line and what is wrong with it."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        config = msgspec.toml.decode(text, type=Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}:{_line_at_fault(text, str(error))}: {error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    _check(path, text, config)
    return config


def _check(path: Path, text: str, config: Config) -> None:
    if not config.worker:
        raise ConfigError(f"{path}: no [[worker]]: name at least one engine")
    names = [worker.name for worker in config.worker]
    for name in names:
        if names.count(name) > 1:
            line = _line_of(text, re.escape(name))
            raise ConfigError(f"{path}:{line}: two workers are named {name!r}: names must differ")
    for worker in config.worker:
        if not re.match(r"https?://[^/\s]+", worker.url):
            line = _line_of(text, re.escape(worker.url))
            raise ConfigError(f"{path}:{line}: worker {worker.name!r}: {worker.url!r} is no URL")


def _line_of(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    return text.count("\n", 0, found.start()) + 1 if found else 1


def _line_at_fault(text: str, message: str) -> int:
    """The line that a msgspec message speaks of: the unknown key, or the last key of its path."""
    unknown = re.search(r"unknown field `(\w+)`", message)
    if unknown:
        return _line_of(text, rf"(?m)^\s*{unknown[1]}\s*=|^\s*\[+{unknown[1]}")
    path = re.search(r"`\$((?:\.\w+|\[\S*?\])+)`", message)
    keys = re.findall(r"\.(\w+)", path[1]) if path else []
    return _line_of(text, rf"(?m)^\s*\[*{keys[-1]}\b") if keys else 1
