"""The import contracts of pyproject.toml hold, and they catch what they are for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from house import PACKAGE, ROOT

_RUN = (
    "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
)


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """Runs every contract on the package under ``root``/src."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, 'src'); {_RUN}"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_contracts_hold() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("module", "planted", "contract"),
    [
        ("core/keys.py", "import time", "core is pure"),
        ("core/keys.py", "import kvatlas.service.steer", "imports run down the house"),
        ("service/steer.py", "import kvatlas.connectors.child", "imports run down the house"),
        ("report/table.py", "import kvatlas.workload.trace", "imports run down the house"),
        ("dataplane/arena.py", "import kvatlas.workload.trace", "imports run down the house"),
        ("workload/pool.py", "import random", "workload models are pure"),
    ],
)
def test_a_planted_import_is_caught(
    tmp_path: Path, module: str, planted: str, contract: str
) -> None:
    shutil.copytree(
        PACKAGE, tmp_path / "src" / "kvatlas", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "src" / "kvatlas" / module).open("a") as file:
        file.write(f"\n{planted}\n")
    result = lint(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    broken = [line for line in result.stdout.splitlines() if line.endswith("BROKEN")]
    assert any(line.startswith(contract) for line in broken), result.stdout
