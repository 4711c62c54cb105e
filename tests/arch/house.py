"""The source tree as the tests of this directory see it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "kvatlas"
DOCS = ROOT / "docs"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> list[Path]:
    """Every Python file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def scripts() -> list[Path]:
    """Every Python file of tests and benchmarks."""
    return sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])


def pages() -> list[Path]:
    """Every page of documentation."""
    return sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def shown(path: Path) -> str:
    """A path as a message shows it."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text("utf-8"), str(path))


def functions(tree: ast.AST) -> Iterator[Function]:
    """Every function and method, however deep."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Classes, functions and methods whose names do not begin with an underscore."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{prefix}{node.name}.")


def constant_arguments(tree: ast.AST, callee: str, argument: str | int) -> Iterator[str]:
    """Literal text given to calls of ``callee`` by keyword or at a position."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if name != callee:
            continue
        if isinstance(argument, int):
            given = node.args[argument : argument + 1]
        else:
            given = [k.value for k in node.keywords if k.arg == argument]
        for value in given:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value
