"""Runs in vLLM's environment: the files of its ``fs`` tier, told by lines on stdin what to do.

``vllm_fs_child.py SIZE COUNT DIRECTORY``, lines and answers as in ``lmcache_child.py``. What moves
the bytes is the tier's own: its pool of threads, and its functions that store and load batches.
"""

from __future__ import annotations

import functools
import mmap
import os
import random
import sys
import time
from pathlib import Path

from vllm.v1.kv_offload.tiering.fs.io import batch_load_block, batch_store_block, probe_o_direct
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

JOBS = 8  # in flight
THREADS = 16  # of each kind, the tier's default


class Files:
    """As `FileSystemTierManager.submit_store` and `submit_load` do it."""

    def __init__(self, size, count, directory):
        self.view = memoryview(mmap.mmap(-1, size * count))
        block = random.Random(size).randbytes(1 << 20)
        for at in range(0, size * count, 1 << 20):
            self.view[at : at + (1 << 20)] = block[: size * count - at]
        self.size = size
        self.direct = probe_o_direct(directory)
        paths = [f"{directory}/{n:03x}/{n % 256:02x}_g0/{n:064x}.bin" for n in range(count)]
        step = count // JOBS
        self.jobs = [(paths[i : i + step], range(i, i + step)) for i in range(0, count, step)]
        self.paths = paths
        self.pool = DualQueueThreadPool(THREADS, THREADS, thread_name_prefix="fs")
        self.number = 0

    def _all(self, enqueue, act):
        for paths, numbers in self.jobs:
            self.number += 1
            places = [n * self.size for n in numbers]
            call = functools.partial(act, paths, self.view, places, self.size, self.direct)
            enqueue(self.number, 1, [call])
        self.pool.wait_idle()
        ends = list(self.pool.get_finished())
        assert len(ends) == len(self.jobs)
        assert all(success for _, success, _ in ends)

    def put(self):
        self._all(self.pool.enqueue_store, batch_store_block)

    def get(self):
        self._all(self.pool.enqueue_load, batch_load_block)

    def delete(self):
        for path in self.paths:
            Path(path).unlink()


def main(size, count, directory):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    files = Files(size, count, directory)
    print("ready" if files.direct else "no O_DIRECT", file=answers, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        getattr(files, line.split()[1])()
        print(time.perf_counter() - start, file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
