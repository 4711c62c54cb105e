"""The store that nodes share loses all, by a restart that leaves it empty: nothing is promised of
it any more, nothing of before is resumed, and what is saved from then on is.

Two agents that are members of one cluster, with memory of their own; resume records lie in the
register. Gateways take the agents up by themselves: no file names them.

    python examples/losses/store_forgot.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from stage import TTL_S, Losses, until
from stage_nodes import Nodes, Player

PROMPTS = 6
LOOKS_S = 5.0  # so often an agent asks a store whether it is what it was


def main() -> int:
    losses = Losses("the store that nodes share forgets everything")
    with tempfile.TemporaryDirectory() as folder, Nodes(Path(folder)) as cluster:
        first, second = (Player(agent.socket) for agent in cluster.agents)
        tokens = [first.save(prompt) for prompt in range(PROMPTS)]
        until(lambda: promised(cluster) > 0)
        losses.check(True, f"{promised(cluster)} units in the store are known to both gateways")
        found = second.load(0)
        losses.check(found == tokens[0], f"the other node resumes at {found}, from the store")
        cluster.store.stop()
        cluster.store.start()
        gone_s = until(lambda: promised(cluster) == 0)
        losses.check(
            gone_s < LOOKS_S + 2 * TTL_S, f"nothing is promised of it, after {gone_s:.1f} s"
        )
        losses.check(second.load(1) == 0, "nothing of before is resumed from it")
        losses.check(first.load(1) == tokens[1], "what a node has in memory it still has")
        again_s = until(lambda: first.save(100) > 0 and second.load(100) > 0)
        losses.check(True, f"what is saved now counts, after {again_s:.1f} s")
        losses.tell(promises_gone_after_s=gone_s, hits_again_after_s=again_s)
        for player in (first, second):
            player.close()
        return losses.end([])


def promised(cluster: Nodes) -> int:
    """Units of the store, as the gateway that knows most has it."""
    held: list[dict[str, Any]] = []
    for number in cluster.numbers:
        agents = cluster.page(number, "/kvatlas/agents").values()
        held += [agent["held"].get("object", {}) for agent in agents]
    return max((sum(each.values()) for each in held), default=0)


if __name__ == "__main__":
    sys.exit(main())
