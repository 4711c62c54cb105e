"""The store that nodes share stands still for a while: requests wait no longer than they may, and
are resumed from what the node has, or computed; then it goes on, and so do hits.

    python examples/losses/store_outage.py
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from stage import Losses, until
from stage_nodes import Nodes, Player

PROMPTS = 12
WAIT_S_MAX = 3.0  # --seek-s is 0.5; the machine may be busy


def main() -> int:
    losses = Losses("the store that nodes share stands still")
    with tempfile.TemporaryDirectory() as folder, Nodes(Path(folder)) as cluster:
        first, second = (Player(agent.socket) for agent in cluster.agents)
        tokens = [first.save(prompt) for prompt in range(PROMPTS)]
        losses.check(
            until(lambda: second.load(0) == tokens[0]) < 10, "the other node resumes from it"
        )
        os.kill(cluster.store.pid, signal.SIGSTOP)
        waited_s, found = [], []
        for prompt in range(1, PROMPTS):
            began = time.monotonic()
            found.append(second.load(prompt))
            waited_s.append(time.monotonic() - began)
        losses.check(max(waited_s) < WAIT_S_MAX, f"the longest wait: {max(waited_s):.2f} s")
        quick = sorted(waited_s)[len(waited_s) // 2]
        losses.check(quick < 0.5, f"most do not wait, for it is left alone: {quick:.3f} s")
        losses.check(not any(found), "nothing is resumed from it")
        losses.check(first.load(1) == tokens[1], "what a node has in memory it still has")
        os.kill(cluster.store.pid, signal.SIGCONT)
        back_s = until(lambda: second.load(PROMPTS - 1) == tokens[-1])
        losses.check(True, f"hits again, {back_s:.1f} s after it went on")
        losses.tell(longest_wait_s=max(waited_s), median_wait_s=quick, hits_again_after_s=back_s)
        for player in (first, second):
            player.close()
        return losses.end([])


if __name__ == "__main__":
    sys.exit(main())
