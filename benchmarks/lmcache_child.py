"""Runs in the peers' environment: LMCache's tiers, told by lines on stdin what to do.

``lmcache_child.py SIZE COUNT DIRECTORY``: values of SIZE bytes, COUNT of them. A line is a tier
(``l1``, ``fs``, ``fs_native``) and ``put``, ``get`` or ``delete``; the answer is how many seconds
that took. Whatever does not arrive whole ends the process.
"""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

TASKS = 8  # in flight
WAIT_S = 120.0


class L1:
    """Its cache in memory: reserve, copy, finish, as its own engines do."""

    def __init__(self, buffer, keys, size):
        memory = L1MemoryManagerConfig(
            size_in_bytes=2 * len(keys) * size, use_lazy=False, shm_name=""
        )
        self.manager = L1Manager(L1ManagerConfig(memory))
        self.keys, self.size = keys, size
        self.values = [buffer[n * size : (n + 1) * size] for n in range(len(keys))]
        self.desc = MemoryLayoutDesc([torch.Size([size])], [torch.uint8])

    def put(self):
        made = self.manager.reserve_write(self.keys, [False] * len(self.keys), self.desc)
        for key, value in zip(self.keys, self.values, strict=True):
            error, obj = made[key]
            assert error is L1Error.SUCCESS, error
            obj.raw_data.view(torch.uint8)[: self.size].copy_(value)
        ends = self.manager.finish_write(self.keys)
        assert set(ends.values()) == {L1Error.SUCCESS}

    def get(self):
        found = self.manager.reserve_read(self.keys)
        for key, value in zip(self.keys, self.values, strict=True):
            error, obj = found[key]
            assert error is L1Error.SUCCESS, error
            value.copy_(obj.raw_data.view(torch.uint8)[: self.size])
        self.manager.finish_read(self.keys)

    def delete(self):
        self.manager.delete(self.keys)


class L2:
    """An adapter to files; ``drop``: the kernel forgets their pages before they are read."""

    def __init__(self, config, buffer, keys, *, drop):
        desc = L1MemoryDesc(buffer.data_ptr(), buffer.numel(), 4096)
        self.adapter = create_l2_adapter(config, l1_memory_desc=desc)
        self.directory, self.drop = config.base_path, drop
        size = buffer.numel() // len(keys)
        step = len(keys) // TASKS
        objects = [_object(buffer, n * size, size) for n in range(len(keys))]
        self.batches = [
            (keys[at : at + step], objects[at : at + step]) for at in range(0, len(keys), step)
        ]
        self.keys = keys

    def put(self):
        tasks = {self.adapter.submit_store_task(*batch) for batch in self.batches}
        while tasks:
            _wait(self.adapter.get_store_event_fd())
            for task, result in self.adapter.pop_completed_store_tasks().items():
                assert result.is_successful(), result
                tasks.discard(task)

    def forget(self):
        if not self.drop:
            return
        os.sync()
        for path in Path(self.directory).rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)

    def get(self):
        tasks = {self.adapter.submit_load_task(*batch): len(batch[0]) for batch in self.batches}
        while tasks:
            _wait(self.adapter.get_load_event_fd())
            for task in list(tasks):
                found = self.adapter.query_load_result(task)
                if found is not None:
                    assert found.popcount() == tasks.pop(task)

    def delete(self):
        self.adapter.delete(self.keys)
        for path in Path(self.directory).rglob("*"):
            if path.is_file():
                path.unlink()


def _wait(fd):
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(WAIT_S * 1000), "LMCache does not answer"
    os.eventfd_read(fd)


def _object(buffer, start, size):
    meta = MemoryObjMetadata(
        shape=torch.Size([size]),
        dtype=torch.uint8,
        address=start,
        phy_size=size,
        fmt=MemoryFormat.KV_2LTD,
        ref_count=1,
    )
    return TensorMemoryObj(
        raw_data=buffer[start : start + size], metadata=meta, parent_allocator=None
    )


def main(size, count, directory):
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    made = torch.randint(0, 255, (count * size + 4096,), dtype=torch.uint8)
    skip = -made.data_ptr() % 4096
    buffer = made[skip : skip + count * size]
    keys = [ObjectKey(n.to_bytes(16, "big"), "bench", n) for n in range(count)]
    folders = {name: str(Path(directory) / name) for name in ("fs", "fs_native")}
    for folder in folders.values():
        Path(folder).mkdir()
    native = FSNativeL2AdapterConfig(folders["fs_native"], num_workers=TASKS, use_odirect=True)
    tiers = {
        "l1": L1(buffer, keys, size),
        "fs": L2(FSL2AdapterConfig(folders["fs"]), buffer, keys, drop=True),
        "fs_native": L2(native, buffer, keys, drop=False),
    }
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        name, what = line.split()
        if what == "get" and name != "l1":
            tiers[name].forget()
        start = time.perf_counter()
        getattr(tiers[name], what)()
        print(time.perf_counter() - start, file=answers, flush=True)
    answers.flush()
    os._exit(0)  # its threads do not end by themselves


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
