"""``kvatlas demo``: the same chats round robin and routed by kvatlas, side by side."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from kvatlas.cli.output import json_bytes, write_file
from kvatlas.connectors.child import Child, stop_all
from kvatlas.demo import real, scale
from kvatlas.demo.progress import Waiting
from kvatlas.demo.real import NoEnginesError
from kvatlas.demo.stage import BASELINE, OURS, Engines, Outcome, Stage
from kvatlas.demo.table import saving, side_by_side
from kvatlas.errors import ConfigError
from kvatlas.workload.chats import Shape, generate

DIRECTORY = Path(".demo")
RUNS_KEPT = 8  # directories of logs under .demo/logs

_EPILOG = """\
Without options: two real vLLM engines on this machine's CPU serve SmolLM2-135M-Instruct, kvatlas
in front. The first run installs them into ./.venv-vllm and shows the demo at scale meanwhile.
Everything else is under ./.demo; every process is ended at the end.

examples:
  kvatlas demo                 real engines (first run under five minutes, later under two)
  kvatlas demo --scale         sixteen stub engines with DeepSeek V4's layout, under 20 seconds
  kvatlas demo --keep          leave engines and gateway running, to try by hand

exit status: 0 shown (at scale only, where vLLM cannot be installed), 2 failed, 130 interrupted
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "demo",
        description="The main job with nothing to configure: chats on several engines, first "
        "round robin, then routed by kvatlas.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--scale", action="store_true", help="only the stub engines, no vLLM")
    which.add_argument("--real-only", action="store_true", help="no stub engines meanwhile")
    add = parser.add_argument
    add("--keep", action="store_true", help="leave all running until Ctrl-C and print the URLs")
    add("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    results: dict[str, Outcome] = {}
    with _session() as (logs, children):
        demo = Demo(console, logs, children, keep=args.keep)
        if args.scale:
            results["scale"] = demo.scale(keep=args.keep)
        else:
            results = demo.real(with_scale=not args.real_only)
    if args.json:
        write_file("--json", args.json, json_bytes(results))
    return 0


class Demo:
    """One run of the command. What it starts is in ``children``, ended by whoever made it."""

    def __init__(
        self, console: Console, logs: Path, children: list[Child], *, keep: bool = False
    ) -> None:
        self._console = console
        self._logs = logs
        self._children = children
        self._keep = keep

    def scale(self, *, keep: bool) -> Outcome:
        """The comparison on stub engines; they are ended unless ``keep``."""
        self._console.rule("[bold]sixteen stub engines, DeepSeek V4 layout", align="left")
        self._console.print(scale.STORY)
        others = len(self._children)
        engines = scale.start(self._logs, self._children)
        stage = Stage(engines, self._logs, self._children)
        asyncio.run(stage.measure())
        outcome = self._compare(stage, scale.SHAPE, scale.OUTPUT_TOKENS, keep=keep)
        stop_all(self._children[others:])
        return outcome

    def real(self, *, with_scale: bool) -> dict[str, Outcome]:
        """The comparison on real engines; on stub engines while those are installed, or instead
        of them where they cannot be. Without ``with_scale`` that is an EngineError."""
        results: dict[str, Outcome] = {}
        directory = DIRECTORY.absolute()
        try:
            installation = self._begin_installation(directory)
            if installation and with_scale:
                self._console.print("Meanwhile, the same comparison at scale.")
                results["scale"] = self.scale(keep=False)
            if installation:
                real.await_installation(self._console, installation)
            self._console.rule("[bold]two vLLM engines, SmolLM2-135M-Instruct", align="left")
            self._console.print(real.STORY)
            engines = real.start(self._console, directory, self._logs, self._children)
            stage = Stage(engines, self._logs, self._children)
            pace = self._pace(stage)
        except NoEnginesError as error:
            if not with_scale:
                raise
            stop_all(self._children)
            self._console.print(f"No real engines here: {error}", markup=False, style="bold")
            if "scale" not in results:
                self._console.print("So the comparison at scale, which needs none.")
                results["scale"] = self.scale(keep=self._keep)
            return results
        results["real"] = self._compare(
            stage, real.SHAPE, real.OUTPUT_TOKENS, pace=pace, keep=self._keep
        )
        self._next_steps()
        return results

    def _begin_installation(self, directory: Path) -> Child | None:
        """None when everything is there already."""
        if real.prepared(directory):
            return None
        real.announce(self._console, directory)
        child = real.installation(directory, self._logs / "install.log")
        self._children.append(child)
        child.start()
        return child

    def _pace(self, stage: Stage) -> float:
        with Waiting(self._console, "measure a cold prefill"):
            rate = asyncio.run(stage.measure())
        pace = real.pace(rate)
        slower = f"; the chats are played {pace:.1f} times as slowly" if pace > 1.05 else ""
        self._console.print(f"  Each engine computes {rate:,.0f} prompt tokens/s here{slower}.")
        return pace

    def _compare(
        self,
        stage: Stage,
        shape: Shape,
        output_tokens: int,
        *,
        pace: float = 1.0,
        keep: bool,
    ) -> Outcome:
        chats = generate(shape)
        runs = []
        for policy, name in ((BASELINE, "round robin"), (OURS, "kvatlas")):
            last = policy == OURS
            with Waiting(self._console, f"play, {name}", shape.sessions * shape.turns) as waiting:
                runs.append(
                    asyncio.run(
                        stage.run(
                            policy,
                            chats,
                            output_tokens=output_tokens,
                            pace=pace,
                            tick=waiting.step,
                            keep=keep and last,
                        )
                    )
                )
        before, after = (run.totals for run in runs)
        self._console.print(side_by_side("", before, after))
        self._console.print(saving(before, after), style="bold")
        self._console.print("\nOne request of the second run, explained:")
        self._console.print(runs[-1].explained, markup=False, soft_wrap=True)
        if keep:
            self._linger(stage.engines, runs[-1].url)
        return Outcome(before=before, after=after, explained=runs[-1].explained)

    def _linger(self, engines: Engines, url: str) -> None:
        """Prints where everything is and waits until it is interrupted."""
        lines = [
            "",
            f"kvatlas: {url}/v1, model {engines.model}",
            *(f"{name}: {engine_url}" for name, engine_url in engines.urls.items()),
            f"why the last request went where it went: kvatlas explain last --url {url}",
            f"logs: {self._logs}",
            "Ctrl-C ends it all.",
        ]
        self._console.print("\n".join(lines), markup=False, soft_wrap=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(0.5)
                for child in self._children:
                    if child.pid:
                        child.check()

    def _next_steps(self) -> None:
        self._console.print(
            "\nTry next:\n"
            "  kvatlas demo --keep          talk to the gateway yourself: any OpenAI client\n"
            "  kvatlas demo --scale         sixteen engines with DeepSeek V4's KV layout\n"
            "  kvatlas serve --help         put it in front of your own engines\n"
            f"  logs of this run: {self._logs}",
            markup=False,
            soft_wrap=True,
        )


@contextlib.contextmanager
def _session() -> Iterator[tuple[Path, list[Child]]]:
    """A directory for this run's logs, and the children that end with it, whatever ends it."""
    logs = DIRECTORY.absolute() / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        logs.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{logs}: cannot be made: {error}") from error
    for old in sorted(logs.parent.iterdir())[:-RUNS_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in ends}
    children: list[Child] = []
    try:
        yield logs, children
    finally:
        for number in ends:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave some behind
        stop_all(children)
        for number, handler in handlers.items():
            signal.signal(number, handler)
