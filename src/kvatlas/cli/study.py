"""``kvatlas study``: what trained models do with their KV, measured, where a design rests on it."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvatlas.cli import study_delta
from kvatlas.cli.output import check_output, json_bytes, print_json, read_file, write_file
from kvatlas.cli.study_input import (
    WEIGHTS,
    add_inputs,
    between,
    checked_contexts,
    inputs,
    study_table,
)
from kvatlas.validate.attention_study import DROPPED, TOP, Loss, Study, Told, run, scores

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
    add_inputs(attention, 1400)
    add("--tokens", type=int, default=96, help="of each answer (96)")
    add("--seed", type=int, default=1, help="of the blocks dropped at random (1)")
    add("--scores", type=Path, metavar="FILE", help="write the score file of the policy attention")
    attention.set_defaults(run=run_attention)
    study_delta.add_parser(commands)


def run_attention(args: argparse.Namespace) -> int:
    """Exit status 0; 2 where the input is at fault, as everywhere."""
    check_output("--out", args.out, *inputs(args), args.scores)
    check_output("--scores", args.scores, *inputs(args))
    found = Study.decode(read_file(args.show), str(args.show)) if args.show else _measured(args)
    if args.json:
        print_json(found)
    else:
        show(found, Console(highlight=False))
    if args.out:
        write_file("--out", args.out, json_bytes(found))
    if args.scores:
        write_file("--scores", args.scores, json_bytes(scores(found)))
    return 0


def _measured(args: argparse.Namespace) -> Study:
    between(args.tokens, 8, 1024, "--tokens")
    wanted = checked_contexts(args)
    return run(
        args.model_dir.name,
        args.model_dir,
        WEIGHTS,
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
    table = study_table(
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
    table = study_table(
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
    table = study_table(
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
    table = study_table(
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
