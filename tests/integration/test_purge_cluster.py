"""A purge while a node is away, by real processes: it is said to be missing, and purged on return,
also where the gateway began anew meanwhile."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "purge_under_load.py"
WAIT_S = 40.0


def example() -> Any:
    spec = importlib.util.spec_from_file_location("purge_under_load", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ordered(script: Any, cluster: Any, *options: str) -> tuple[int, dict[str, Any]]:
    """The status of ``kvatlas tenant purge red``, and the receipt."""
    where = "--config", str(cluster.config), "--url", cluster.url, "--json"
    done = subprocess.run(
        [*script.KVATLAS, "tenant", "purge", "red", *where, *options],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env=os.environ | {"KVATLAS_ADMIN_TOKEN": script.TOKEN},
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_node_that_was_away_is_purged_when_it_is_back(tmp_path: Path) -> None:
    script = example()
    with script.Cluster(tmp_path) as cluster:
        for number, node in enumerate(cluster.nodes):
            player = script.Player(node / "sock")
            for prompt in range(4):
                player.play("red", 100 * number + prompt)  # else it comes from the peer
                player.play("blue", 100 * number + 10 + prompt)
            player.client.close()
        away, gateway = cluster.children[3], cluster.children[-1]
        away.stop()
        status, receipt = ordered(script, cluster)
        assert status == 1
        missing = [a["who"] for a in receipt["answers"] if a.get("error")]
        assert missing == ["agent two"]
        left = cluster.found(f"{script.TAGS['red']}.0")
        assert left
        assert all(name.startswith("two/") for name in left), left
        gateway.stop()
        (tmp_path / "recording").unlink(missing_ok=True)  # which none begins anew
        gateway.start()
        gateway.wait_ready(WAIT_S)
        cluster.wait_for(1)
        again, same = ordered(script, cluster, "--id", receipt["id"])
        assert (again, same["id"]) == (1, receipt["id"])
        away.start()
        away.wait_ready(WAIT_S)
        until = time.monotonic() + WAIT_S
        while ordered(script, cluster, "--id", receipt["id"])[0]:
            assert time.monotonic() < until, "it was never purged"
        assert cluster.found(f"{script.TAGS['red']}.0") == {}
        assert cluster.found(f"{script.TAGS['blue']}.0")
