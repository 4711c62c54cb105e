"""``kvatlas validate exactness``: does an engine with cached state answer as one without?"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvatlas.connectors import sglang_cpu
from kvatlas.connectors.vllm_cpu import VLLM, installed
from kvatlas.errors import ConfigError
from kvatlas.validate import exactness_tiers as tiers
from kvatlas.validate import exactness_transformers as transformers
from kvatlas.validate.exactness import FAULTS, Finding, Report, middle_length
from kvatlas.validate.exactness_vllm import cases, run, subject
from kvatlas.validate.tiny import TINY
from kvatlas.workload.proofs import add_proof

SHIM = Path("tests/engines/vllm_v4_shim")

_EPILOG = f"""\
examples:
  kvatlas validate exactness --engine vllm               gqa, swa and v4, one after the other
  kvatlas validate exactness --engine vllm --model gqa
  kvatlas validate exactness --engine vllm --model swa --positions 99,100,101 --json
  kvatlas validate exactness --engine vllm --model v4 --engine-path {SHIM} --record proofs.json
  kvatlas validate exactness --engine vllm --model gqa --tiers dram,disk,object,peer
  kvatlas validate exactness --engine sglang --tiers dram,disk,object,peer --engine-path DIR
  kvatlas validate exactness --engine transformers --model v4        a second opinion
  kvatlas validate exactness --engine vllm --model .demo/SmolLM2-135M-Instruct --positions 200
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``kvatlas validate exactness`` and its options."""
    parser = commands.add_parser(
        "exactness",
        help="tokens and logprobs with and without cached state, and with planted faults",
        description="Computes greedy answers from nothing, and again from cached state: the "
        "engine's own, state loaded by a fresh process, and the minimal resume point. Every bit of "
        "their logprobs must agree. Then each part of the state is left out, zeroed, damaged and "
        "swapped alone, and the answer must differ.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--engine",
        choices=("vllm", "sglang", "transformers"),
        default="vllm",
        help="sglang: with --tiers only, of .venv-sglang (default: vllm)",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="gqa, swa, v4 or a model's directory; with transformers v4 or mla (default: all that"
        " have a name)",
    )
    parser.add_argument(
        "--positions",
        type=_lengths,
        default=(),
        metavar="N,...",
        help="prompt lengths; each resumes at the last grid position before its end (default: every"
        " kind: around blocks, windows and 128, shorter than a block, exactly on the grid)",
    )
    parser.add_argument(
        "--tiers",
        metavar="TIER,...",
        help="instead: resume from the tiers of real `kvatlas agent`s, any of dram, disk, object"
        " and peer, across restarts of engine and agent, in a second engine and on other nodes,"
        " with damage as a control",
    )
    parser.add_argument(
        "--object",
        metavar="URL",
        default="",
        help="with --tiers object: the store, as for `kvatlas agent` (default: a Valkey server of"
        " its own)",
    )
    parser.add_argument("--no-faults", action="store_true", help="only what must be the same")
    parser.add_argument(
        "--one-process",
        action="store_true",
        help="load where it was computed: quicker, proves less, and records nothing",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON, one report after another")
    parser.add_argument("--out", type=Path, help="also write the JSON of one model to this file")
    parser.add_argument(
        "--record", type=Path, help="add what was shown of the minimal resume point to this file"
    )
    add_engine_arguments(parser)
    parser.set_defaults(run=run_exactness, venv=None)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the engine is found: the same for every validation that runs one."""
    parser.add_argument(
        "--venv",
        type=Path,
        default=Path(".venv-vllm"),
        help=f"virtual environment with {VLLM} (default: .venv-vllm)",
    )
    parser.add_argument(
        "--engine-path",
        type=Path,
        action="append",
        default=[],
        help="directory for the engine's PYTHONPATH; may be repeated (default: for v4 the shim of"
        " kvatlas's tests, where they are here)",
    )


def engine_path(args: argparse.Namespace, *, v4: bool) -> list[Path]:
    """What goes onto the engine's PYTHONPATH. Raises ConfigError for V4 without its shim."""
    if args.engine_path or not v4:
        return list(args.engine_path)
    if not SHIM.is_dir():
        raise ConfigError(
            "vLLM's CPU build runs DeepSeek V4 only with the test shim of kvatlas's own tests:"
            f" --engine-path {SHIM}"
        )
    return [SHIM]


def _lengths(text: str) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers with commas are wanted") from None
    if not all(2 <= n <= 1 << 16 for n in found):
        raise argparse.ArgumentTypeError("prompt lengths must be between 2 and 65536")
    return found


def run_exactness(args: argparse.Namespace) -> int:
    """Exit status 0 where every case went as expected, 1 otherwise."""
    args.venv = args.venv or Path(".venv-sglang" if args.engine == "sglang" else ".venv-vllm")
    wanted = tiers.known_tiers(args.tiers) if args.tiers is not None else ()
    if args.object and "object" not in wanted:
        raise ConfigError("--object is the store of --tiers object: without that it is not used")
    if wanted:
        return _run_tiers(args, wanted)
    if args.engine == "sglang":
        raise ConfigError("--engine sglang: say --tiers, without which nothing of it is validated")
    named = [t.name for t in TINY] if args.engine == "vllm" else list(transformers.MODELS)
    models = [args.model] if args.model else named
    if args.out and len(models) > 1:
        raise ConfigError(f"--out is for one report: say --model, one of {', '.join(named)}")
    return max([_run_one(args, model) for model in models])


def _run_tiers(args: argparse.Namespace, wanted: tuple[str, ...]) -> int:
    others = args.out or args.record or args.one_process or args.no_faults
    if args.engine == "transformers" or others:
        raise ConfigError(
            "--tiers goes with --engine vllm or sglang, --model, --positions, --seed, --object,"
            " --json only"
        )
    named = [t.name for t in TINY] if args.engine == "vllm" else ["gqa"]
    models = [args.model] if args.model else named
    good = True
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            what = subject(model, Path(folder))
            if args.engine == "sglang":
                path = list(args.engine_path)
                _require_sglang(args.venv)
            else:
                path = engine_path(args, v4=what.layout.has_minimal())
                require_vllm(args.venv)
            report = tiers.run(
                what,
                args.positions or (middle_length(what.layout), 2 * middle_length(what.layout)),
                wanted,
                engine=args.engine,
                venv=args.venv,
                engine_path=path,
                seed=args.seed,
                scratch=Path(folder),
                object_url=args.object,
            )
        good = good and report.ok()
        if args.json:
            data = msgspec.json.format(msgspec.json.encode(report))
            sys.stdout.write(data.decode() + "\n")
        else:
            show_tiers(report, Console(highlight=False))
    return 0 if good else 1


def show_tiers(report: tiers.TierReport, console: Console) -> None:
    """The same for a reader."""
    runtime = report.runtime
    about = f"{report.model} on {runtime.engine} {runtime.version}, {runtime.device}"
    console.print(Text(f"{about}, seed {report.seed}"))
    for case in report.cases:
        found = ", ".join(f"{n} from {t}" for t, n in case.cached_tokens.items()) or "all computed"
        verdict = "the same" if case.difference is None else f"OTHER from {case.difference.at} on"
        console.print(Text(f"  {report.model}: {case.name} tokens: {found}: {verdict}"))
    for failure in report.failures:
        console.print(Text(f"  WRONG {failure}"))
    console.print(Text(f"{report.damaged} damaged units noticed, none used"))
    console.print(Text("as expected" if report.ok() else "NOT as expected"))


def _run_one(args: argparse.Namespace, model: str) -> int:
    run_with = _with_vllm if args.engine == "vllm" else _with_transformers
    report = run_with(args, model)
    data = msgspec.json.format(msgspec.json.encode(report))
    if args.out:
        args.out.write_bytes(data + b"\n")
    if args.json:
        sys.stdout.write(data.decode() + "\n")
    else:
        show(report, Console(highlight=False))
    if args.record:
        proof = report.proof()
        if proof is None:
            print("nothing recorded: this run proves no minimal resume point", file=sys.stderr)
        else:
            add_proof(args.record, proof)
    return 0 if report.ok() else 1


def _with_vllm(args: argparse.Namespace, model: str) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        what = subject(model, Path(folder))
        path = engine_path(args, v4=what.layout.has_minimal())
        require_vllm(args.venv)
        return run(
            what,
            cases(what, args.positions, faults=not args.no_faults),
            venv=args.venv,
            engine_path=path,
            seed=args.seed,
            scratch=Path(folder),
            fresh=not args.one_process,
        )


def _with_transformers(args: argparse.Namespace, model: str) -> Report:
    wanted = transformers.cases(model, args.positions, faults=not args.no_faults)
    require_vllm(args.venv)
    return transformers.run(model, wanted, venv=args.venv, seed=args.seed)


def require_vllm(venv: Path) -> None:
    """Raises ConfigError, with what to run, where ``venv`` has no vLLM."""
    if not installed(venv):
        raise ConfigError(
            f"{venv} has no {VLLM}: run python -m kvatlas.connectors.vllm_cpu {venv} MODEL_DIR"
        )


def _require_sglang(venv: Path) -> None:
    if not sglang_cpu.installed(venv):
        raise ConfigError(f"{venv} has no {sglang_cpu.SGLANG}: give its environment with --venv")


def show(report: Report, console: Console) -> None:
    """The report for a reader: what was the same, what each fault did, and what went wrong."""
    runtime = report.runtime
    console.print(
        Text(
            f"{report.model} on {runtime.engine} {runtime.version}, {runtime.device}, seed"
            f" {report.seed}: {report.decode_tokens} greedy tokens each, "
            + ("state loaded by a fresh process" if report.fresh else "in one process")
        )
    )
    good = [f for f in report.findings if f.case.fault is None]
    same = Counter(f.case.way for f in good if f.ok)
    tried = Counter(f.case.way for f in good)
    for way, count in tried.items():
        lengths = sorted({f.case.prompt_tokens for f in good if f.case.way == way})
        console.print(
            Text(f"  {way}: {same[way]} of {count} the same (prompts of {_listed(lengths)})")
        )
    if len(good) < len(report.findings):
        console.print(_faults(report.findings))
    for f in report.findings:
        if not f.ok:
            console.print(Text(f"  WRONG {f.case.name()}: {_told(f)}, cached {f.cached_tokens}"))
    console.print(Text("as expected" if report.ok() else "NOT as expected"))


def _faults(findings: list[Finding]) -> Table:
    table = Table(
        title="first token that differs, and how much a logprob changed there",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for heading in ("part", "at", *FAULTS):
        table.add_column(heading, justify="left" if heading == "part" else "right", no_wrap=True)
    seen = {
        (f.case.position, f.case.fault.part, f.case.fault.how): f for f in findings if f.case.fault
    }
    for position, part in dict.fromkeys(key[:2] for key in seen):
        tried = [seen.get((position, part, how)) for how in FAULTS]
        cells = [_told(finding) if finding else "" for finding in tried]
        table.add_row(part, str(position), *cells)
    return table


def _told(finding: Finding) -> str:
    found = finding.difference
    if found is None:
        return "not read" if finding.case.expected == "unread" else "same"
    return f"{found.at}: " + ("other" if found.logprob is None else f"{found.logprob:.2g}")


def _listed(lengths: list[int]) -> str:
    return ", ".join(str(n) for n in lengths)
