"""One of two gateways is killed under load: the other serves all, and leads; then it comes back.

python examples/losses/gateway_killed.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from stage import TTL_S, Clients, Cluster, Losses, hits, kill, until

ANSWERS = 60


def main() -> int:
    losses = Losses("a gateway is killed")
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        until(lambda: cluster.leader() >= 0)
        with Clients(cluster) as clients:
            clients.more(ANSWERS)
            before = hits(clients.more(ANSWERS))
            dead = cluster.leader()
            kill(cluster.gateways[dead])
            took_s = until(lambda: cluster.leader(but=dead) >= 0)
            without = hits(clients.more(ANSWERS))
            other = cluster.leader(but=dead)
            losses.check(
                not cluster.members(other)["others"], f"it is none any more, after {took_s:.1f} s"
            )
            losses.check(took_s < 3 * TTL_S, f"the other leads within {3 * TTL_S:g} s")
            cluster.gateways[dead].start()
            cluster.gateways[dead].wait_ready(60.0)
            until(lambda: cluster.members(dead)["standing"] == "member")
            losses.check(cluster.leader() == other, "who led meanwhile still does")
            after = hits(clients.more(ANSWERS))
        losses.chats(before, without, after)
        losses.tell(led_after_s=took_s)
        return losses.end(clients.answers)


if __name__ == "__main__":
    sys.exit(main())
