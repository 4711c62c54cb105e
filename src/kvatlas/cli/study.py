"""``kvatlas study``: what trained models do with their KV, measured, where a design rests on it."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from kvatlas.connectors.vllm_cpu import MODEL_NAME, MODEL_PACKAGE, VLLM, installed
from kvatlas.errors import ConfigError
from kvatlas.validate.attention_contexts import CHATS, TEXTS, contexts
from kvatlas.validate.attention_study import DROPPED, TOP, Loss, Study, Told, run, scores

STUDY_BYTES_MAX = 64 << 20
CONTEXTS_MAX = 32
_WEIGHTS = f"weights of {MODEL_PACKAGE} (Q4_1) in fp32"

_EPILOG = """\
Attention is of the model that it was measured on. It says nothing of another model, and for
DeepSeek V4, which selects what it reads, the entry stays "not known".

examples:
  kvatlas study attention --out study.json --scores scores.json     some ten minutes on one core
  kvatlas study attention --text a.md --text b.py --chat c.md --tokens 40
  kvatlas study attention --show study.json                         the tables of an earlier run
  kvatlas trace compare chats.jsonl --model smollm2-135m-instruct --scores scores.json
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "study",
        description="Studies on a trained model.",
    )
    commands = parser.add_subparsers(title="studies", metavar="STUDY", required=True)
    attention = commands.add_parser(
        "attention",
        help="where attention goes, by block, and what giving up the coldest blocks changes",
        description="Runs SmolLM2-135M-Instruct over real text, records attention while it "
        "answers, and then drops blocks: the claims of seed document 003's chapter 2, measured.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = attention.add_argument
    add("--model-dir", type=Path, default=Path(".demo") / MODEL_NAME, help="(.demo/ of the demo)")
    add("--venv", type=Path, default=Path(".venv-vllm"), help=f"environment with {VLLM}")
    add("--text", type=Path, action="append", help="a document or a module; may be repeated")
    add("--chat", type=Path, action="append", help="told in turns, by section; may be repeated")
    add("--tokens", type=int, default=96, help="of each answer (96)")
    add("--context-tokens", type=int, default=1400, metavar="N", help="at most, per context (1400)")
    add("--seed", type=int, default=1, help="of the blocks dropped at random (1)")
    add("--out", type=Path, metavar="FILE", help="write the study, JSON")
    add("--scores", type=Path, metavar="FILE", help="write the score file of the policy attention")
    add("--show", type=Path, metavar="FILE", help="run nothing: print a study written earlier")
    add("--json", action="store_true", help="print JSON instead of tables")
    attention.set_defaults(run=run_attention)


def run_attention(args: argparse.Namespace) -> int:
    """Exit status 0; 2 where the input is at fault, as everywhere."""
    found = _read(args.show) if args.show else _measured(args)
    data = msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"
    if args.out:
        _write(args.out, data)
    if args.scores:
        told = msgspec.json.format(msgspec.json.encode(scores(found)), indent=2)
        _write(args.scores, told + b"\n")
    if args.json:
        sys.stdout.write(data.decode())
    else:
        show(found, Console(highlight=False))
    return 0


def _read(path: Path) -> Study:
    try:
        with path.open("rb") as file:
            data = file.read(STUDY_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > STUDY_BYTES_MAX:
        raise ConfigError(f"{path}: larger than {STUDY_BYTES_MAX} bytes: this is no study")
    return Study.decode(data, str(path))


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error


def _measured(args: argparse.Namespace) -> Study:
    if not 8 <= args.tokens <= 1024:
        raise ConfigError(f"--tokens {args.tokens}: 8 to 1024")
    if not 400 <= args.context_tokens <= 6144:
        raise ConfigError(f"--context-tokens {args.context_tokens}: 400 to 6144")
    if not 0 <= args.seed < 1 << 32:
        raise ConfigError(f"--seed {args.seed}: 0 to {(1 << 32) - 1}")
    given = args.text is not None or args.chat is not None
    wanted = contexts(args.text or (), args.chat or ()) if given else contexts(TEXTS, CHATS)
    if len(wanted) > CONTEXTS_MAX:
        raise ConfigError(f"{len(wanted)} texts and chats: {CONTEXTS_MAX} at most")
    for path in (args.out, args.scores):
        if path and not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no directory {path.parent} to write it in")
    if not installed(args.venv) or not (args.model_dir / "config.json").is_file():
        raise ConfigError(
            f"{args.venv} has no {VLLM}, or {args.model_dir} no model: run"
            f" python -m kvatlas.connectors.vllm_cpu {args.venv} {args.model_dir}"
        )
    return run(
        args.model_dir.name,
        args.model_dir,
        _WEIGHTS,
        wanted,
        venv=args.venv,
        seed=args.seed,
        tokens=args.tokens,
        context_tokens_max=args.context_tokens,
    )


def show(found: Study, console: Console) -> None:
    """The study as tables: one row per answer, and the means of all."""
    console.print(
        f"{found.model} ({found.weights}; transformers {found.transformers}, {found.device}), seed "
        f"{found.seed}: {len(found.answers)} answers of {found.tokens} tokens"
    )
    console.print(_where(found.answers))
    console.print(_stability(found.answers))
    if found.pairs:
        console.print(_queries(found))
    console.print(_losses(found.answers))


def _table(title: str, *names: str) -> Table:
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


#: Of one answer, in per cent: the columns of the first table.
_WHERE: tuple[tuple[str, Callable[[Told], float]], ...] = (
    ("first", lambda t: t.first),
    ("sink", lambda t: t.sink),
    ("mid", lambda t: t.middle),
    ("recent", lambda t: t.recent),
    ("95%", lambda t: t.holding[2]),
    ("layer", lambda t: t.holding_by_layer[2]),
    ("token", lambda t: t.tokens_needed[2]),
    ("<1%", lambda t: t.noise),
)


def _where(answers: Sequence[Told]) -> Table:
    table = _table(
        "where attention goes (%); the share of blocks that holds 95 % of it, and in one layer; "
        "the share of tokens that holds 95 % in one head, and that gets < 1 % of the most",
        "answer",
        *(name for name, _ in _WHERE),
    )
    for name, each in [*((t.id, [t]) for t in answers), ("all", list(answers))]:
        cells = [100 * statistics.fmean(take(t) for t in each) for _, take in _WHERE]
        table.add_row(name, *(f"{cell:.1f}" for cell in cells))
    return table


def _stability(answers: Sequence[Told]) -> Table:
    table = _table(
        f"of the middle's attention at one step, what its hot {TOP:.0%} of blocks get (%)",
        *("named by", "caught", "best", "1 layer: caught", "best", "chance"),
    )
    for past in dict.fromkeys(s.past_steps for t in answers for s in t.stable):
        each = [s for t in answers for s in t.stable if s.past_steps == past]
        fields = ("caught", "best", "caught_by_layer", "best_by_layer", "chance")
        cells = [100 * statistics.fmean(getattr(s, name) for s in each) for name in fields]
        table.add_row(f"{past} steps before", *(f"{cell:.1f}" for cell in cells))
    return table


def _queries(found: Study) -> Table:
    table = _table(
        "two questions on one context: the share of hot blocks that both have (%), Spearman's rank "
        "correlation; halves: the same of the two halves of one answer",
        *("context", "both", "halves", "in a layer", "halves", "chance", "rank", "halves"),
    )
    for p in found.pairs:
        cells = (p.common, p.halves_common, p.common_by_layer, p.halves_common_by_layer, p.chance)
        ranks = (p.rank, p.halves_rank)
        table.add_row(p.context, *(f"{100 * x:.0f}" for x in cells), *(f"{x:.2f}" for x in ranks))
    told = [t for t in found.answers if t.about_own is not None and t.about_other is not None]
    if told:
        means = [
            statistics.fmean(getattr(t, f"about_{name}") for t in told)
            for name in ("own", "other", "own_layer", "other_layer")
        ]
        table.caption = (
            "the part asked about gets {:.2f} times the mean middle block under its own question, "
            "{:.2f} under another; in the layer where it is most {:.1f} and {:.1f}".format(*means)
        )
    return table


def _losses(answers: Sequence[Told]) -> Table:
    table = _table(
        "blocks given up, sink and recent window kept",
        *("order", "share %", "same token %", "first other", "unchanged", "logit error", "KL nats"),
    )
    every = [loss for told in answers for loss in told.losses]
    for order in dict.fromkeys(loss.order for loss in every):
        for share in (0.0,) if order == "none" else DROPPED:
            each = [x for x in every if x.order == order and x.share == share]
            if each:
                table.add_row(order, f"{100 * share:.0f}", *_loss_cells(each))
    return table


def _loss_cells(each: Iterable[Loss]) -> list[str]:
    losses = list(each)
    mean = {
        name: statistics.fmean(getattr(x, name) for x in losses)
        for name in ("agreement", "first_other", "logit_error", "kl_nats")
    }
    whole = sum(x.agreement == 1 for x in losses)
    return [
        f"{100 * mean['agreement']:.1f}",
        f"{mean['first_other']:.0f}",
        f"{whole} of {len(losses)}",
        f"{mean['logit_error']:.3f}",
        f"{mean['kl_nats']:.4f}",
    ]
