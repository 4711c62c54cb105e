"""Run by SGLang's Python: our storage backend under SGLang's own host pools and cache controller.

Reads in JSON: ``socket``, ``source`` (where kvatlas lies) and ``engines``, one after the other:
``pools`` (mha, mla, v4, swa), ``layout``, ``config`` and ``settings`` of the backend, ``steps``.
Prints one line of JSON per engine (`null`, or why it did not start) and per step. Bytes of a page
follow from its hash and the pool's name, so that another process can judge them. Host pages are
filled and compared by SGLang's own calls, not by addresses.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from queue import Queue
from typing import Any

JOB = json.loads(sys.stdin.read())
sys.path.insert(0, JOB["source"])

import torch  # noqa: E402
from sglang.srt.mem_cache import deepseek_v4_compress_state as states  # noqa: E402
from sglang.srt.mem_cache import memory_pool_host as v4_pools  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller as hybrid  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402

from kvatlas.connectors.agent_client import ask_status  # noqa: E402
from kvatlas.errors import EngineError  # noqa: E402

PAGE, SLOTS = 16, 512
STATES = (PoolName.DEEPSEEK_V4_C4_STATE, PoolName.DEEPSEEK_V4_C4_INDEXER_STATE)
CHAINS = (PoolName.DEEPSEEK_V4_C4, PoolName.DEEPSEEK_V4_C4_INDEXER, PoolName.DEEPSEEK_V4_C128)


def mha(layout: str, layers: int = 3, heads: int = 2) -> Any:
    pool = MHATokenToKVPool(
        SLOTS * PAGE, PAGE, torch.bfloat16, heads, 16, layers, "cpu", enable_memory_saver=False
    )
    kind, given, more = assembler._mha_host_inputs(pool)
    return kind(given, 1.0, 0, PAGE, layout, pin_memory=False, **more)


def mla(layout: str) -> Any:
    pool = MLATokenToKVPool(
        SLOTS * PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    return MLATokenToKVPoolHost(
        pool.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=pool.size,
        start_layer=0,
        end_layer=3,
        target_layer_num=3,
        override_kv_cache_dim=pool.kv_cache_dim,
    )


def paged(name: PoolName, layout: str, layers: int, item_bytes: int) -> Any:
    buffers = [torch.zeros((4, item_bytes), dtype=torch.uint8) for _ in range(layers)]
    return v4_pools.DeepSeekV4PagedHostPool(
        str(name), buffers, item_bytes, SLOTS, PAGE, layout=layout, pin_memory=False
    )


def state(name: PoolName, layout: str, head_dim: int) -> Any:
    made = [
        states.CompressStatePool(
            64, 8, True, head_dim, torch.float32, "cpu", enable_memory_saver=False, ratio=4
        )
        for _ in range(2)
    ]
    return v4_pools.DeepSeekV4StateHostPool(
        str(name), made, SLOTS, PAGE, layout=layout, pin_memory=False
    )


def pools(kind: str, layout: str, heads: int) -> dict[PoolName, Any]:
    """Host pools by name, the anchor first, as the assembler would build them."""
    if kind == "mla":
        return {PoolName.KV: mla(layout)}
    if kind == "mha":
        return {PoolName.KV: mha(layout, heads=heads)}
    if kind == "swa":
        return {PoolName.KV: mha(layout), PoolName.SWA: mha(layout, layers=2)}
    found = {PoolName.KV: v4_pools.LogicalHostPool(SLOTS * PAGE, PAGE, layout)}
    found[PoolName.SWA] = paged(PoolName.SWA, layout, 4, 37440 // 64)
    for name, layers, size in zip(CHAINS, (2, 2, 1), (37440 // 16, 8640 // 16, 1728), strict=True):
        found[name] = paged(name, layout, layers, size)
    for name, head_dim in zip(STATES, (32, 8), strict=True):
        found[name] = state(name, layout, head_dim)
    return found


class Engine:
    """SGLang's own controller, without devices and threads, over one backend."""

    def __init__(self, job: dict[str, Any]) -> None:
        kind, layout = job["pools"], job.get("layout", "page_first")
        self.pools = pools(kind, layout, job.get("heads", 2))
        entries = [
            assembler.PoolEntry(name, pool, None, lambda layer: layer, name == PoolName.KV)
            for name, pool in self.pools.items()
        ]
        group = assembler.HostPoolGroup(entries)
        group.layout_lease = nullcontext
        settings = {
            "backend_name": "kvatlas",
            "module_path": "kvatlas.connectors.sglang_hicache",
            "class_name": "KvatlasHiCache",
            "interface_v1": 1,
            "socket": JOB["socket"],
        } | job.get("settings", {})
        config: dict[str, Any] = {
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            "is_mla_model": kind in ("mla", "v4"),
            "enable_storage_metrics": True,
            "is_page_first_layout": layout == "page_first",
            "model_name": "model",
            "extra_config": settings,
        }
        made = HiCacheStorageConfig(**(config | job.get("config", {})))
        anchor = self.pools[PoolName.KV]
        self.backend = StorageBackendFactory.create_backend("dynamic", made, anchor)
        self.backend.register_mem_pool_host(anchor)
        for name, pool in self.pools.items():
            self.backend.register_mem_host_pool_v2(pool, name)
        self.backend.on_host_pools_registered()
        controller = self.controller = object.__new__(hybrid.HybridCacheController)
        controller.storage_backend = self.backend
        controller.storage_backend_type = "dynamic"
        controller.storage_config = made
        controller.mem_pool_host = group
        controller.storage_host_pool = anchor
        controller.page_size = PAGE
        controller.prefetch_sync_queue = Queue()
        controller.prefetch_hits_sync_groups = []
        controller.page_get_func = controller._page_get_zero_copy
        controller.page_set_func = controller._page_set_zero_copy
        controller.append_host_mem_release = lambda **more: None

    # -- pages ----------------------------------------------------------------------------------

    @staticmethod
    def hashes(prompt: int, count: int) -> list[str]:
        tokens = [prompt * 100_000 + i for i in range(count * PAGE)]
        return get_storage_hash_str(tokens, None, page_size=PAGE)

    def content(self, name: PoolName, page: str) -> torch.Tensor:
        size = self.pools[name].get_data_page(0, flat=True).view(torch.uint8).numel()
        seed = hashlib.sha256(f"{name}{page}".encode()).digest()
        return torch.frombuffer(bytearray((seed * (size // 32 + 1))[:size]), dtype=torch.uint8)

    def fill(self, name: PoolName, slots: Any, pages: list[str], wrong: bool = False) -> None:
        pool = self.pools[name]
        for i, page in enumerate(pages if pool.kv_buffer is not None else ()):
            data = (
                self.content(name, page)
                if not wrong
                else torch.zeros_like(self.content(name, page))
            )
            shape = pool.get_data_page(0, flat=True)
            pool.set_from_flat_data_page(
                int(slots[i * PAGE]), data.view(shape.dtype).view(shape.shape)
            )

    def right(self, name: PoolName, slots: Any, pages: list[str]) -> int:
        """Pages that hold what they should."""
        pool = self.pools[name]
        found = [
            torch.equal(
                pool.get_data_page(int(slots[i * PAGE]), flat=True)
                .contiguous()
                .view(torch.uint8)
                .flatten(),
                self.content(name, page),
            )
            for i, page in enumerate(pages)
        ]
        return sum(found)

    def transfers(
        self, pages: list[str], slots: dict[PoolName, Any], trailing: int
    ) -> list[PoolTransfer]:
        found = []
        for name in self.pools:
            if name == PoolName.KV:
                continue
            tail = name == PoolName.SWA or name in STATES
            if tail and not trailing:
                continue
            source = PoolName.SWA if name in STATES else PoolName.KV if not tail else None
            found.append(
                PoolTransfer(
                    name,
                    host_indices=slots.get(name) if source is None else None,
                    keys=pages[-trailing:] if tail else None,
                    hit_policy=PoolHitPolicy.TRAILING_PAGES if tail else PoolHitPolicy.ALL_PAGES,
                    indices_from_pool=source,
                )
            )
        return found

    @staticmethod
    def slots(pages: int, start: int) -> Any:
        """Host slots in an order of their own."""
        order = [(start + i * 7) % SLOTS for i in range(pages)]
        return (
            torch.cat([torch.arange(p * PAGE, (p + 1) * PAGE) for p in order])
            if order
            else torch.arange(0)
        )

    # -- steps ----------------------------------------------------------------------------------

    def write(self, prompt: int, before: int, count: int, trailing: int = 0, **more: Any) -> Any:
        """A node of the tree is backed up: pages ``before``… of a prompt."""
        chain = self.hashes(prompt, before + count)
        pages = chain[before:]
        slots = {name: self.slots(count, 3) for name in self.pools}
        slots[PoolName.SWA] = self.slots(trailing, 11)
        for name in self.pools:
            tail = name == PoolName.SWA or name in STATES
            mine = pages[len(pages) - trailing :] if tail else pages
            self.fill(name, slots[PoolName.SWA] if tail else slots[name], mine)
        prefix = None if more.get("no_prefix") else chain[:before]
        operation = hybrid.StorageOperation(
            slots[PoolName.KV],
            [0] * (count * PAGE),
            hash_value=pages,
            prefix_keys=prefix,
            pool_transfers=self.transfers(pages, slots, trailing),
        )
        self.controller._page_backup_with_stable_layout(operation)
        return operation.completed_tokens // PAGE

    def query(self, prompt: int, before: int, count: int, trailing: int = 0) -> Any:
        """What a request would find: pages that count, restorable ones, hits by pool."""
        operation = self._prefetch(prompt, before, count, trailing)
        _, tokens = self.controller._storage_hit_query(operation)
        used = self.controller._sync_prefetch_hit_query(operation, tokens) // PAGE
        found = operation.pool_storage_result.restorable_prefix_pages
        hits = {str(n): p for n, p in operation.query_pool_hit_pages.items()}
        return [used, found, hits]

    def _prefetch(self, prompt: int, before: int, count: int, trailing: int) -> Any:
        chain = self.hashes(prompt, before + count)
        tokens = [prompt * 100_000 + i for i in range(before * PAGE, (before + count) * PAGE)]
        return hybrid.PrefetchOperation(
            CacheRequestHandle("r", 0),
            tokens,
            chain[before - 1] if before else None,
            prefix_keys=chain[:before] or None,
            pool_transfers=self.transfers(["?"] * trailing, {}, trailing) or None,
        )

    def read(self, prompt: int, before: int, count: int, trailing: int = 0, **more: Any) -> Any:
        """A request takes what it found: pages that came, and those whose bytes are right."""
        controller = self.controller
        operation = self._prefetch(prompt, before, count, trailing)
        pages, tokens = controller._storage_hit_query(operation)
        used = controller._sync_prefetch_hit_query(operation, tokens) // PAGE
        operation.hash_value = pages[:used]
        operation.host_indices = slots = self.slots(used, 29)
        window = self.slots(min(trailing, used), 41)
        for name in self.pools:
            tail = name == PoolName.SWA or name in STATES
            self.fill(
                name,
                window if tail else slots,
                (["x"] * used)[: len(window) // PAGE if tail else used],
                wrong=True,
            )
        for transfer in operation.pool_transfers or ():
            if transfer.name == PoolName.SWA:
                transfer.host_indices = window
        controller._page_transfer_with_stable_layout(operation)
        acks = []
        while not controller.prefetch_sync_queue.empty():
            acks.append(controller.prefetch_sync_queue.get())
        came = max((a.completed_tokens or 0 for a in acks), default=0) // PAGE
        hits = next((a.pool_hits for a in acks if a.pool_hits is not None), {})
        right = {}
        for name in self.pools:
            if name == PoolName.KV and self.pools[name].kv_buffer is None:
                continue
            tail = name == PoolName.SWA or name in STATES
            mine = (
                operation.hash_value[used - len(window) // PAGE :] if tail else operation.hash_value
            )
            right[str(name)] = self.right(name, window if tail else slots, mine)
        return [came, {str(n): p for n, p in hits.items()}, right]

    def counts(self) -> Any:
        return dict(self.backend.counts)

    def stats(self) -> Any:
        found = self.backend.get_stats()
        return [found.prefetch_pgs, found.backup_pgs, len(found.prefetch_bandwidth)]

    def clear(self) -> Any:
        self.backend.clear()

    def kill_agent(self, process: int) -> Any:
        """It is gone, and does not come back."""
        os.kill(process, signal.SIGKILL)


def run(job: dict[str, Any]) -> None:
    try:
        engine = Engine(job)
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
        return
    say(None)
    for name, *given in job["steps"]:
        more = given.pop() if given and isinstance(given[-1], dict) else {}
        try:
            told = getattr(engine, name)(*given, **more)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        say(told)
    engine.backend.close()
    leave()


def leave() -> None:
    """The agent has seen that this engine is gone, or is gone itself."""
    until = time.monotonic() + 10.0
    while time.monotonic() < until:
        try:
            if not json.loads(ask_status(Path(JOB["socket"])))["engines"]:
                return
        except (OSError, EngineError):
            return
        time.sleep(0.02)
    raise SystemExit("the agent still has this engine")


def say(told: Any) -> None:
    print(json.dumps(told), flush=True)


hybrid.HybridCacheController._all_reduce = lambda self, tensor, op, groups: None
for each in JOB["engines"]:
    run(each)
