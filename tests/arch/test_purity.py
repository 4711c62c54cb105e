"""core decides without a clock, I/O, threads or chance: what it is told is all that it knows.

The same holds for the engine model, which runs in virtual time. An allow list, because a ban list
is always one module short.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from house import PACKAGE, modules, parsed, shown

ALLOWED = {
    *("__future__", "abc", "array", "bisect", "collections", "dataclasses", "enum", "functools"),
    *("hashlib", "heapq", "hmac", "itertools", "math", "msgspec", "operator", "re", "struct"),
    *("typing", "unicodedata", "zlib"),
}
#: Built-ins that read the world, or that differ from one process to the next.
BANNED_CALLS = {"open", "input", "print", "exec", "eval", "__import__", "hash", "id"}

PURE_MODELS = (
    *("blocks", "caching", "device", "engine", "holding", "leap", "links", "pool"),
    *("prompt_keys", "protocol", "scheduler", "shape", "spec", "state", "step_time"),
)


def pure_modules() -> list[Path]:
    models = {PACKAGE / "workload" / f"{name}.py" for name in PURE_MODELS}
    return [path for path in modules() if PACKAGE / "core" in path.parents or path in models]


def impurities(tree: ast.AST, ours: tuple[str, ...]) -> list[str]:
    """Imports from outside ``ours`` and the allow list, and calls of banned built-ins."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if not node.level else []
            found += [f"line {node.lineno}: a relative import"] * bool(node.level)
        else:
            names = []
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name) and called.id in BANNED_CALLS:
                found.append(f"line {called.lineno}: calls {called.id}")
        for name in names:
            if name.split(".")[0] not in ALLOWED and not name.startswith(ours):
                found.append(f"line {node.lineno}: imports {name}")
    return found


CORE = ("kvatlas.core", "kvatlas.errors")
MODEL = (*CORE, *(f"kvatlas.workload.{name}" for name in PURE_MODELS))


@pytest.mark.parametrize("path", pure_modules(), ids=shown)
def test_it_is_pure(path: Path) -> None:
    ours = CORE if PACKAGE / "core" in path.parents else MODEL
    assert not impurities(parsed(path), ours)


@pytest.mark.parametrize(
    "planted",
    [
        "import time",
        "from time import monotonic",
        "def f():\n    import random",
        "import os.path",
        "from kvatlas.service import feed",
        "from kvatlas.workload.trace import open_trace",
        "from . import keys",
        "x = open('f')",
        "order = sorted(names, key=lambda n: hash(n))",
    ],
)
def test_a_planted_impurity_is_caught(planted: str) -> None:
    assert len(impurities(ast.parse(planted), MODEL)) == 1


def test_something_is_held_to_it() -> None:
    names = {path.stem for path in pure_modules()}
    assert {"router", "directory", "keys", "sequence", *PURE_MODELS} <= names
