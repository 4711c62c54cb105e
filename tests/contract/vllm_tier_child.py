"""Runs inside vLLM's environment: its scheduler and its tiering manager over our tier, no GPU.

Reads wishes on stdin, one JSON line each, and answers each with one:

``engine``: a name, with ``model`` (a directory with config.json), ``connector``, ``tier`` (its
configuration), ``groups`` (``block``, ``window``, ``layers``), ``cpu_chunks``, ``ranks``, ``more``
(engine arguments), ``late`` (fields of its configuration): null, or why it did not start.
``run``: an engine, with ``id``, ``prompt``, ``salt`` and ``forget`` ("gpu": vLLM's prefix cache;
"all": the CPU tier too): what it took from where, and how many blocks that a resume reads held
something else than they should; ``kill``: a process, when the tier is told to ``when``.
``counts``, ``close``: an engine. ``exported``: an engine, what vLLM's exporter says of its last
run, once. ``jobs_max``: of all tiers.

A GPU's memory is one row of bytes per block, and its worker's copies to and from the CPU tier are
made here, through a mapping of its own: all else is vLLM's. What a block holds follows from all
tokens up to its end.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import numpy as np
import torch
from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvatlas.connectors import vllm_tier

BLOCKS = 1200
RUN_S = 60.0
PAGE_BYTES_PER_TOKEN = 16
ROW = 4096
DRAFT = SimpleNamespace(use_eagle_block_drop=lambda: False)


def group_of(number, wish):
    sizes = {
        "block_size": wish["block"],
        "num_kv_heads": 1,
        "head_size": PAGE_BYTES_PER_TOKEN // 2,
        "dtype": torch.uint8,
    }
    if wish["window"]:
        spec = SlidingWindowSpec(sliding_window=wish["window"], **sizes)
    else:
        spec = FullAttentionSpec(**sizes)
    return KVCacheGroupSpec([f"{number}.{layer}" for layer in range(wish["layers"])], spec)


def args_of(wish, block, cpu_bytes):
    return EngineArgs(
        model=wish["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=4096,
        max_num_batched_tokens=512,
        max_num_seqs=4,
        block_size=block,
        tensor_parallel_size=wish["ranks"],
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=True,
        kv_transfer_config={
            "kv_connector": wish["connector"],
            "kv_connector_module_path": "kvatlas.connectors.vllm_tier",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": cpu_bytes,
                "secondary_tiers": [wish["tier"]],
            },
        },
        **wish["more"],
    )


class Engine:
    """vLLM's scheduler with its connector, and what stands for its worker."""

    def __init__(self, wish):
        self.groups = wish["groups"]
        sizes = [group["block"] for group in self.groups]
        chunk = sum(g["block"] * g["layers"] for g in self.groups) * PAGE_BYTES_PER_TOKEN
        row = -(-chunk * wish["ranks"] // ROW) * ROW
        args = args_of(wish, max(sizes), wish["cpu_chunks"] * row)
        config = args.create_engine_config()
        config.scheduler_config.enable_chunked_prefill = True
        config.scheduler_config.async_scheduling = False
        for name, value in wish["late"].items():  # what a GPU's platform would let pass
            *part, field = name.split(".")
            of = getattr(config, part[0]) if part else config
            setattr(of, field, DRAFT if field == "speculative_config" else value)
        cache_config = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[group_of(n, group) for n, group in enumerate(self.groups)],
            prefix_cache_retention_interval=0,
        )
        config.cache_config.num_gpu_blocks = BLOCKS
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(min(sizes), sha256)
        self.scheduler = Scheduler(
            config,
            cache_config,
            StructuredOutputManager(config),
            block_size=max(sizes),
            hash_block_size=min(sizes),
        )
        self.connector = self.scheduler.connector
        worker = type(self.connector)(config, KVConnectorRole.WORKER, cache_config)
        worker.shutdown()  # it has no tier, and needs no agent
        self.manager = self.connector.scheduler.manager
        (self.tier,) = self.manager.secondary_tiers
        region = self.manager.primary_tier._mmap_region
        self.region = SharedOffloadRegion(
            engine_id=config.kv_transfer_config.engine_id,
            num_chunks=region.num_chunks,
            rank=0,
            kv_bytes_per_chunk=row,
            cpu_page_size=chunk,
        )
        self.cpu = np.frombuffer(self.region.mmap_obj, np.uint8).reshape(-1, row)
        self.gpu = np.full((BLOCKS, row), 0x5A, np.uint8)

    def close(self):
        self.connector.shutdown()
        del self.cpu
        self.region.cleanup()

    # -- the worker -----------------------------------------------------------------------------

    def content(self, group, tokens):
        """What a block of this group holds that ends these tokens."""
        seed = hashlib.sha256(repr((group, tokens)).encode()).digest()
        return np.frombuffer((seed * (self.gpu.shape[1] // len(seed))), np.uint8)

    def blocks(self, ids, tokens):
        """Whole blocks of all groups: group, number, block, all tokens up to their end."""
        for group, wish in enumerate(self.groups):
            for number in range(len(tokens) // wish["block"]):
                if number < len(ids[group]) and ids[group][number]:
                    yield group, number, ids[group][number], tokens[: (number + 1) * wish["block"]]

    def compute(self, ids, tokens, since):
        for group, _, block, before in self.blocks(ids, tokens):
            if len(before) > since:
                self.gpu[block] = self.content(group, before)

    def wrong(self, ids, tokens):
        """Of the blocks that a resume after these tokens reads."""
        count, seen = 0, set()
        for group, number, block, before in self.blocks(ids, tokens):
            count += not np.array_equal(self.gpu[block], self.content(group, before))
            seen.add((group, number))
        for group, wish in enumerate(self.groups):
            end = len(tokens) // wish["block"]
            first = end - -(-(wish["window"] - 1) // wish["block"]) if wish["window"] else 0
            count += sum((group, number) not in seen for number in range(max(first, 0), end))
        return count

    def copy(self, meta):
        """All copies that this step asks for, done at once."""
        done, arrived = OffloadingWorkerMetadata(), set()
        for number, job in meta.store_jobs.items():
            self.cpu[job.dst_spec.chunk_ids] = self.gpu[job.src_spec.block_ids]
            done.completed_jobs[number] = self.scheduler.vllm_config.parallel_config.world_size
        for number, job in meta.load_jobs.items():
            self.gpu[job.dst_spec.block_ids] = self.cpu[job.src_spec.chunk_ids]
            done.completed_jobs[number] = self.scheduler.vllm_config.parallel_config.world_size
            arrived.add(job.req_id)
        return KVConnectorOutput(kv_connector_worker_meta=done, finished_recving=arrived)

    # -- runs -----------------------------------------------------------------------------------

    def run(self, wish):
        everything = wish["forget"] == "all"
        if not self.scheduler.reset_prefix_cache(reset_connector=everything):
            raise RuntimeError("the engine would not drop its prefix cache")
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        salt = wish.get("salt")
        request = Request(
            wish["id"], wish["prompt"], params, None, cache_salt=salt, block_hasher=self.hasher
        )
        self.scheduler.add_request(request)
        answer = {"cached": 0, "sources": {}, "wrong": 0}
        slowest, until = 0.0, time.monotonic() + RUN_S
        self.stats = OffloadingConnectorStats()
        if "kill" in wish:
            self.kill(wish["kill"], wish["when"])
        while self.scheduler.has_requests():
            if time.monotonic() > until:
                raise RuntimeError(f"{wish['id']}: it does not end")
            began = time.monotonic()
            told = self.scheduler.schedule()
            slowest = max(slowest, time.monotonic() - began)
            self.step(told, request, answer)
            copied = self.copy(told.kv_connector_metadata)
            if (new := self.manager.get_stats()) is not None:
                self.stats.aggregate(new)
            ids = list(told.num_scheduled_tokens)
            done = request.num_computed_tokens >= request.num_tokens
            made = ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={id: i for i, id in enumerate(ids)},
                sampled_token_ids=[[7] if done else [] for _ in ids],
                kv_connector_output=copied,
            )
            self.scheduler.update_from_output(told, made)
            if not ids:
                time.sleep(0.001)  # the threads of the tier have something to do
        return answer | {"slowest_s": slowest, "jobs": len(self.manager._jobs)}

    def kill(self, pid, when):
        real = getattr(self.tier, when)

        def killed_first(job):
            setattr(self.tier, when, real)
            os.kill(pid, signal.SIGKILL)
            real(job)

        setattr(self.tier, when, killed_first)

    def exported(self):
        """By reason, as vLLM's server would show it."""
        exporter = KVConnectorProm(self.scheduler.vllm_config, ["engine"], {0: ["0"]})
        exporter.observe(self.stats.data)
        return {
            sample.labels["reason"]: sample.value
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name == f"{vllm_tier.NOT_DONE}_total"
        }

    def step(self, told, request, answer):
        if request.request_id not in told.num_scheduled_tokens:
            return
        end = request.num_computed_tokens
        start = end - told.num_scheduled_tokens[request.request_id]
        ids = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        tokens = list(request.all_token_ids)
        if told.scheduled_new_reqs and start:
            answer["cached"] = start
            sources = self.connector.get_external_cache_hit_sources(request, start)
            answer["sources"] = {source.value: count for source, count in sources.items()}
            answer["wrong"] += self.wrong(ids, tokens[:start])
        self.compute(ids, tokens[:end], start)


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engines = {}
    for line in sys.stdin:
        wish = json.loads(line)
        answer = None
        match wish:
            case {"engine": name}:
                try:
                    engines[name] = Engine(wish)
                except Exception as error:  # whatever it is, its text is what a user would see
                    answer = f"{type(error).__name__}: {error}"
            case {"run": name}:
                answer = engines[name].run(wish)
            case {"counts": name}:
                answer = engines[name].tier.counts
            case {"exported": name}:
                answer = engines[name].exported()
            case {"jobs_max": number}:
                vllm_tier.JOBS_MAX = number
            case {"close": name}:
                engines.pop(name).close()
        print(json.dumps(answer), file=answers, flush=True)
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
