"""One gateway is cut off from the register under load, the other is not: both serve, the one that
can be heard leads, and the other hears of it when it is back.

    python examples/losses/partition.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from stage import TTL_S, Clients, Cluster, Cut, Losses, hits, until

ANSWERS = 60


class Parted(Cluster):
    """Each gateway has a way of its own to the register, which can be cut."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.cuts = [Cut(self.register_port) for _ in self.numbers]
        self.gateways = [
            self.gateway(port, url=f"valkey://127.0.0.1:{cut.port}")
            for port, cut in zip(self.gateway_ports, self.cuts, strict=True)
        ]


def main() -> int:
    losses = Losses("a gateway is cut off from the register")
    with tempfile.TemporaryDirectory() as folder, Parted(Path(folder)) as cluster:
        until(lambda: cluster.leader() >= 0)
        with Clients(cluster) as clients:
            clients.more(ANSWERS)
            before = hits(clients.more(ANSWERS))
            cut = cluster.leader()
            cluster.cuts[cut].shut()
            took_s = until(lambda: cluster.leader(but=cut) >= 0)
            losses.check(took_s < 3 * TTL_S, f"the other leads, after {took_s:.1f} s")
            losses.check(not cluster.members(cut)["leads"], "and the one that is cut off does not")
            without = hits(clients.more(ANSWERS))
            losses.check("register" in str(cluster.flags(cut)), "it says so")
            cluster.cuts[cut].open()
            back_s = until(lambda: cluster.members(cut)["standing"] == "member")
            losses.check(cluster.leader() != cut, f"a member again after {back_s:.1f} s, and led")
            after = hits(clients.more(ANSWERS))
        losses.chats(before, without, after, "cut off")
        losses.tell(led_after_s=took_s, member_after_s=back_s)
        for way in cluster.cuts:
            way.close()
        return losses.end(clients.answers)


if __name__ == "__main__":
    sys.exit(main())
