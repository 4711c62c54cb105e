"""Scripts in `examples/` do what they say, by their exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 90.0  # a third of a minute where nothing else runs


def run(name: str, *options: str, limit_s: float = LIMIT_S) -> str:
    """What it prints."""
    command = [sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_tenant_is_purged_under_load(tmp_path: Path) -> None:
    told = run("purge_under_load.py", "--receipt", str(tmp_path / "receipt.json"))
    assert told.endswith("nothing of red is left\n")


def test_a_sealed_disk_tells_nothing_and_a_dropped_key_leaves_nothing() -> None:
    told = run("sealed_at_rest.py")
    assert told.count("ok   ") == 5
    assert told.endswith("all as it should be\n")


def test_tenants_hit_their_own_and_nothing_else() -> None:
    told = run("tenants.py")
    assert told.count("ok   ") == 9
    assert told.endswith("all as it should be\n")


def test_parts_know_each_other_by_certificates_and_refuse_strangers() -> None:
    told = run("mtls.py", limit_s=2 * LIMIT_S)
    assert told.count("ok   ") == 10
    assert told.endswith("all as it should be\n")


@pytest.mark.parametrize(
    ("name", "few"), [("tenant_isolation.py", "1500"), ("timing_probe.py", "4")]
)
def test_no_tenant_gets_or_learns_anothers(name: str, few: str) -> None:
    run(name, few)


LOSSES = sorted(p.name for p in (EXAMPLES / "losses").glob("*.py") if "stage" not in p.name)


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_lost_costs_what_is_said(name: str) -> None:
    told = run(f"losses/{name}", limit_s=2 * LIMIT_S)
    assert told.endswith("all as it should be\n")
