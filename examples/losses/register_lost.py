"""The register's Valkey is killed under load, and comes back empty: no request fails, no hit is
lost, nobody leads meanwhile, and all are members again.

    python examples/losses/register_lost.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from stage import TTL_S, Clients, Cluster, Losses, hits, kill, until

ANSWERS = 60


def main() -> int:
    losses = Losses("the register is lost, and comes back empty")
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        until(lambda: cluster.leader() >= 0)
        with Clients(cluster) as clients:
            clients.more(ANSWERS)
            before = hits(clients.more(ANSWERS))
            kill(cluster.register)
            stopped_s = until(lambda: cluster.leader() < 0)
            losses.check(stopped_s < 2 * TTL_S, f"nobody leads, after {stopped_s:.1f} s")
            said = [any(flag.startswith("register") for flag in cluster.flags(i)) for i in (0, 1)]
            losses.check(all(said), "each gateway says that it does not answer")
            without = hits(clients.more(ANSWERS))
            cluster.register.start()
            back_s = until(lambda: all(known(cluster, i) for i in cluster.numbers))
            losses.check(True, f"both are members again and know each other, after {back_s:.1f} s")
            led_s = until(lambda: cluster.leader() >= 0)
            after = hits(clients.more(ANSWERS))
        losses.chats(before, without, after)
        losses.tell(members_after_s=back_s, led_after_s=back_s + led_s)
        return losses.end(clients.answers)


def known(cluster: Cluster, gateway: int) -> bool:
    told = cluster.members(gateway)
    return told["standing"] == "member" and len(told["others"]) == 1 and told["emptied"] == 1


if __name__ == "__main__":
    sys.exit(main())
