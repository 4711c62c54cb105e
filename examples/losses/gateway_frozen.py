"""The gateway that leads stands still, as a suspended machine does, and goes on: it has stopped
leading by its own clock, before anybody else began, and hears of the other.

    python examples/losses/gateway_frozen.py
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import urllib.request
from pathlib import Path

from stage import TTL_S, Cluster, Losses, until


def main() -> int:
    losses = Losses("the gateway that leads stands still")
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        until(lambda: cluster.leader() >= 0)
        frozen = cluster.leader()
        os.kill(cluster.gateways[frozen].pid, signal.SIGSTOP)
        took_s = until(lambda: cluster.leader(but=frozen) >= 0)
        losses.check(took_s < 3 * TTL_S, f"the other leads, after {took_s:.1f} s")
        os.kill(cluster.gateways[frozen].pid, signal.SIGCONT)
        losses.check(
            not cluster.members(frozen)["leads"], "the first word of the former: it leads no more"
        )
        back_s = until(lambda: cluster.members(frozen)["standing"] == "member")
        losses.check(cluster.leader() != frozen, f"a member again after {back_s:.1f} s, and led")
        body = b'{"model": "stub", "prompt": [1, 2, 3], "max_tokens": 2}'
        url = f"http://127.0.0.1:{cluster.gateway_ports[frozen]}/v1/completions"
        asked = urllib.request.Request(url, body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            losses.check(answer.status == 200, "it serves")
        losses.tell(led_after_s=took_s, member_after_s=back_s)
        return losses.end([])


if __name__ == "__main__":
    sys.exit(main())
