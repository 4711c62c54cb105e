"""Style that a machine can judge. Each rule also catches a planted fault."""

from __future__ import annotations

import ast
import asyncio
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from house import PACKAGE, ROOT, functions, modules, pages, parsed, public, scripts, shown

LINES_MAX = 500
TEST_LINES_MAX = 600  # tables of cases are long and flat
FUNCTION_LINES_MAX = 60
PLAIN_METHOD_LINES = 8  # a shorter method needs no docstring: its class or protocol has one

# A number without its unit is read wrongly sooner or later.
BARE = {
    "bandwidth": "bandwidth_bytes_per_s",
    "deadline": "deadline_s",
    "delay": "delay_s",
    "duration": "duration_s",
    "interval": "interval_s",
    "latency": "latency_s",
    "size": "size_bytes, block_tokens or a count",
    "timeout": "timeout_s",
    "ttl": "ttl_s",
}

# What ties a text to one machine or one desk instead of to the product.
FOREIGN = re.compile(r"/(?:work|home|root|Users)/\w|\blocalhost:\d+/simple\b|\bfile:///")
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")


def tracked_text() -> list[Path]:
    """Files of the repository that hold text, as git lists them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("this is no git checkout: what belongs to the repository is not known")
    names = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    kinds = {".py", ".md", ".toml", ".yml", ".json", ".txt", "", ".sh"}
    return [p for p in names if p.is_file() and p.suffix in kinds]


def long_functions(tree: ast.AST) -> list[str]:
    return [
        f"{f.name} has {length} lines"
        for f in functions(tree)
        if (length := (f.end_lineno or f.lineno) - f.lineno + 1) > FUNCTION_LINES_MAX
    ]


def bare_parameters(tree: ast.AST) -> list[str]:
    return [
        f"{f.name}({a.arg}): say {BARE[a.arg]}"
        for f in functions(tree)
        for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)
        if a.arg in BARE
    ]


@cache
def protocol_methods() -> frozenset[str]:
    """What classes promise when they implement an interface: said there, not again.

    Ours, asyncio's own and the callbacks of httptools' parser.
    """
    foreign = {*dir(asyncio.BufferedProtocol), *dir(asyncio.Protocol)}
    foreign |= {"on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body"}
    foreign |= {"on_message_complete", "on_status", "on_chunk_header", "on_chunk_complete"}
    return frozenset(foreign) | frozenset(
        method.name
        for path in modules()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)
        for method in functions(node)
    )


def undocumented(tree: ast.Module) -> list[str]:
    missing = [] if ast.get_docstring(tree) or not tree.body else ["the module"]
    for name, node in public(tree.body):
        method = "." in name and not isinstance(node, ast.ClassDef)
        short = (node.end_lineno or node.lineno) - node.lineno < PLAIN_METHOD_LINES
        plain = method and (short or name.rpartition(".")[2] in protocol_methods())
        if not ast.get_docstring(node) and not plain:
            missing.append(name)
    return missing


RULES: list[tuple[Callable[[ast.Module], list[str]], str]] = [
    (long_functions, "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX),
    (bare_parameters, "async def fetch(url, *, timeout=1): ..."),
    (undocumented, '"""Doc."""\nclass Thing:\n    x = 1'),
    (undocumented, '"""Doc."""\nclass T:\n    """Doc."""\n    def m(s):\n' + "        s = 1\n" * 9),
    (undocumented, "x = 1"),
]


@pytest.mark.parametrize(("rule", "planted"), RULES)
def test_a_planted_fault_is_caught(rule: Callable[[ast.Module], list[str]], planted: str) -> None:
    assert rule(ast.parse(planted))


@pytest.mark.parametrize("path", modules(), ids=shown)
def test_a_module_is_short_and_documented(path: Path) -> None:
    tree = parsed(path)
    lines = path.read_text("utf-8").count("\n")
    assert lines <= LINES_MAX, f"{lines} lines: split it along a concept, not along a line count"
    assert not long_functions(tree)
    assert not bare_parameters(tree)
    # Commands are documented by their help; what `add_parser` and `run` do is said in cli/main.py.
    expected = {"add_parser", "run"} if path.parent == PACKAGE / "cli" else set()
    assert not set(undocumented(tree)) - expected


@pytest.mark.parametrize("path", scripts(), ids=shown)
def test_tests_and_benchmarks_are_short_too(path: Path) -> None:
    tree = parsed(path)
    assert path.read_text("utf-8").count("\n") <= TEST_LINES_MAX
    assert not long_functions(tree)
    assert ast.get_docstring(tree), "a first line that says what this file shows"


def test_nothing_is_left_unfinished() -> None:
    assert UNFINISHED.search("# TO" + "DO: later")
    itself = Path(__file__)
    left = [
        f"{shown(path)}:{number}"
        for path in tracked_text()
        if path != itself
        for number, line in enumerate(path.read_text("utf-8", "replace").split("\n"), 1)
        if UNFINISHED.search(line)
    ]
    assert not left


def test_nothing_is_tied_to_one_machine() -> None:
    assert FOREIGN.search("see /ho" + "me/me/notes")
    itself = Path(__file__)
    tied = [
        f"{shown(path)}:{number}: {line.strip()}"
        for path in tracked_text()
        if path != itself
        for number, line in enumerate(path.read_text("utf-8", "replace").split("\n"), 1)
        if FOREIGN.search(line)
    ]
    assert not tied


@pytest.mark.parametrize("page", pages(), ids=shown)
def test_a_page_has_one_title(page: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text("utf-8"))
    assert len(re.findall(r"(?m)^# \S", text)) == 1
