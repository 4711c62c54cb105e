"""What the studies on a trained model have in common: texts, model, files, tables."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich import box
from rich.table import Table

from kvatlas.connectors.vllm_cpu import MODEL_NAME, MODEL_PACKAGE, VLLM, installed
from kvatlas.errors import ConfigError
from kvatlas.validate.attention_contexts import CHATS, TEXTS, Context, contexts

CONTEXTS_MAX = 32
CONTEXT_TOKENS = (400, 6144)
WEIGHTS = f"weights of {MODEL_PACKAGE} (Q4_1) in fp32"


def add_inputs(parser: argparse.ArgumentParser, context_tokens: int) -> None:
    """The options that say what is read by which model, and where a study lies."""
    add = parser.add_argument
    add("--model-dir", type=Path, default=Path(".demo") / MODEL_NAME, help="(.demo/ of the demo)")
    add("--venv", type=Path, default=Path(".venv-vllm"), help=f"environment with {VLLM}")
    add("--text", type=Path, action="append", help="a document or a module; may be repeated")
    add("--chat", type=Path, action="append", help="told in turns, by section; may be repeated")
    add(
        "--context-tokens",
        type=int,
        default=context_tokens,
        metavar="N",
        help=f"at most, per context ({context_tokens})",
    )
    add("--out", type=Path, metavar="FILE", help="write the study, JSON")
    add("--show", type=Path, metavar="FILE", help="run nothing: print a study written earlier")
    add("--json", action="store_true", help="print JSON instead of tables")


def inputs(args: argparse.Namespace) -> list[Path]:
    """The files that are read: nothing may be written over them."""
    return [*(args.text or ()), *(args.chat or ()), *([args.show] if args.show else ())]


def checked_contexts(args: argparse.Namespace) -> list[Context]:
    """The texts. Raises ConfigError for what the options of `add_inputs` or ``--seed`` say wrong,
    and where no model or engine is there."""
    between(args.context_tokens, *CONTEXT_TOKENS, "--context-tokens")
    between(args.seed, 0, (1 << 32) - 1, "--seed")
    texts, chats = args.text or (), args.chat or ()
    if len(texts) + len(chats) > CONTEXTS_MAX:
        raise ConfigError(f"{len(texts) + len(chats)} texts and chats: {CONTEXTS_MAX} at most")
    wanted = contexts(texts, chats) if texts or chats else contexts(TEXTS, CHATS)
    if not installed(args.venv) or not (args.model_dir / "config.json").is_file():
        raise ConfigError(
            f"{args.venv} has no {VLLM}, or {args.model_dir} no model: run"
            f" python -m kvatlas.connectors.vllm_cpu {args.venv} {args.model_dir}"
        )
    return wanted


def between(value: int, least: int, most: int, option: str) -> None:
    """Raises ConfigError that names the option."""
    if not least <= value <= most:
        raise ConfigError(f"{option} {value}: {least} to {most}")


def study_table(title: str, *names: str) -> Table:
    """The first column is the row's name."""
    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    table.add_column(names[0], no_wrap=True)
    for name in names[1:]:
        table.add_column(name, justify="right")
    return table
