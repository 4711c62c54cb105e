"""Writes docs/cli.md: every command with its options, as the code has them.

python docs/reference.py
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from kvatlas.cli.main import COMMANDS

PAGE = Path(__file__).parent / "cli.md"
_HEAD = """\
# Commands

Made from the code by `python docs/reference.py`; a test compares. `kvatlas COMMAND --help` says the
same, with examples. Exit status: 0 done, 1 done but with failures, 2 the input is at fault, 130
interrupted.
"""


def page() -> str:
    """The whole page."""
    lines = [_HEAD]
    for name in COMMANDS:
        commands = argparse.ArgumentParser(prog="kvatlas").add_subparsers()
        importlib.import_module(f"kvatlas.cli.{name.replace('-', '_')}").add_parser(commands)
        for parser in _all(commands.choices[name]):
            lines += [f"## {parser.prog}", "", *_told(parser)]
    return "\n".join(lines)


def _all(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in dict.fromkeys(action.choices.values()):
                yield from _all(each)


def _told(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield _plain(parser.description or "")
    yield ""
    rows = [action for action in parser._actions if _is_shown(action)]
    if rows:
        yield "| option | meaning |"
        yield "|---|---|"
        yield from (f"| `{_name(a)}` | {_plain(a.help or '', a)} |" for a in rows)
        yield ""


def _is_shown(action: argparse.Action) -> bool:
    hidden = (argparse._HelpAction, argparse._SubParsersAction)
    return not isinstance(action, hidden) and action.help != argparse.SUPPRESS


def _name(action: argparse.Action) -> str:
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    value = " ".join(value) if isinstance(value, tuple) else value
    if not action.option_strings:
        return value
    flags = ", ".join(action.option_strings)
    return flags if action.nargs == 0 else f"{flags} {value}"


def _plain(text: str, action: argparse.Action | None = None) -> str:
    if action is not None:
        text = text % {**vars(action), "prog": "kvatlas"}
    text = re.sub(r"\s+", " ", text).strip()
    return text.replace("|", r"\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
