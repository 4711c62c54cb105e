"""Runs inside vLLM's environment: its own scheduler with our connector, and ranks without a model.

Reads on stdin a JSON list of engines, one after the other: ``config`` (a model's directory),
``socket`` (the agent's), ``device``, ``ranks``, ``replicated``, ``groups`` (of layers: name → part
as in `PartInfo`), ``minimal`` (by part: the blocks that a resume reads) and ``runs``: ``id``,
``prompt``, ``forget``, ``salt``, ``broken`` (a rank that copies nothing out). Writes one JSON line
per run: tokens of the engine's own hit, tokens loaded, blocks whose content was wrong where they
were read, and counts of the connector.

What a model would compute stands for itself: each token's row of a page is a hash of all tokens up
to it, of the layer, and of the rank where ranks hold different heads.
"""

import dataclasses
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
import xxhash
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvatlas.connectors import vllm_offload
from kvatlas.core.units import Part

BLOCKS = 1200
CHUNK = 512
SPECS = {
    "full_attention": FullAttentionSpec,
    "mla_attention": MLAAttentionSpec,
    "sliding_window": SlidingWindowSpec,
    "sliding_window_mla": SlidingWindowMLASpec,
}


def spec_of(part):
    more = {}
    if part["window_tokens"] is not None:
        more["sliding_window"] = part["window_tokens"]
    return SPECS[part["kind"]](
        block_size=part["block_tokens"],
        num_kv_heads=1,
        head_size=1,
        dtype=torch.uint8,
        page_size_padded=part["page_bytes"],
        **more,
    )


def group_of(layers):
    specs = {layer: spec_of(part) for layer, part in layers.items()}
    first = next(iter(specs.values()))
    if len(set(specs.values())) == 1:
        return KVCacheGroupSpec(list(layers), first)
    return KVCacheGroupSpec(list(layers), UniformTypeKVCacheSpecs(first.block_size, specs))


def hashes_of(tokens):
    """Of all tokens up to each."""
    found, state = [], b""
    for token in tokens:
        state = xxhash.xxh3_64_digest(state + token.to_bytes(4, "little"))
        found.append(state)
    return found


class Rank:
    """One worker: its pages, filled as a model would, and the connector's side of it."""

    def __init__(self, wish, number, config, cache_config):
        config.parallel_config.rank = number
        self.wish = wish
        self.layers = [dict(group) for group in wish["groups"]]
        self.seed = b"" if wish["replicated"] else bytes([number])
        self.pages = {
            layer: torch.full((BLOCKS, part["page_bytes"]), 0x5A, dtype=torch.uint8)
            for group in self.layers
            for layer, part in group.items()
        }
        self.connector = vllm_offload.KvatlasConnector(
            vllm_config=config, role=KVConnectorRole.WORKER, kv_cache_config=cache_config
        )
        self.connector.register_kv_caches(self.pages)
        self.copy_out = self.connector._copier._copy_out

    def broken(self, now):
        self.connector._copier._copy_out = (lambda *_: None) if now else self.copy_out

    def rows(self, layer, part, hashes):
        """What a block of these tokens holds."""
        count = part["page_bytes"] // part["block_tokens"]
        seed = layer.encode() + self.seed
        data = b"".join(
            (xxhash.xxh3_64_digest(h + seed) * (count // 8 + 1))[:count] for h in hashes
        )
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def each(self, ids, hashes, first, end):
        """Blocks of all layers that hold tokens first…end-1, and those tokens' bytes there."""
        for group, layers in enumerate(self.layers):
            for layer, part in layers.items():
                size = part["block_tokens"]
                count = part["page_bytes"] // size
                for i in range(first // size, -(-end // size)):
                    a, b = max(first, i * size), min(end, (i + 1) * size)
                    block = ids[group][i] if i < len(ids[group]) else 0
                    where = slice((a - i * size) * count, (b - i * size) * count)
                    yield part, i, block, where, (layer, part, hashes[a:b])

    def compute(self, ids, hashes, first, end):
        for _, _, block, where, rows in self.each(ids, hashes, first, end):
            if block:
                self.pages[rows[0]][block][where] = self.rows(*rows)

    def wrong(self, ids, hashes, position, minimal):
        """Blocks that a resume at ``position`` reads and that do not hold what they should."""
        count = 0
        for part, i, block, where, rows in self.each(ids, hashes, 0, position):
            blocks = self.wish["minimal"][part["name"]] if minimal else part["blocks"]
            read = blocks is None or i >= position // part["block_tokens"] - blocks
            if read and not torch.equal(self.pages[rows[0]][block][where], self.rows(*rows)):
                count += 1
        return count

    def step(self, meta, work):
        """As a model runner does it."""
        connector, wrong = self.connector, 0
        connector.bind_connector_metadata(meta)
        connector.start_load_kv(None)
        for ids, hashes, start, end, resumed, minimal in work:
            if resumed and start:
                wrong += self.wrong(ids, hashes, start, minimal)
            self.compute(ids, hashes, start, end)
        connector.wait_for_save()
        told = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return wrong, told


class Engine:
    """vLLM's scheduler over such ranks."""

    def __init__(self, wish):
        sizes = {p["block_tokens"] for g in wish["groups"] for p in g.values()}
        args = EngineArgs(
            model=wish["config"],
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=4096,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=4,
            block_size=max(sizes),
            tensor_parallel_size=wish["ranks"],
            kv_cache_memory_bytes=64 << 20,
            enable_prefix_caching=True,
            kv_transfer_config={
                "kv_connector": "KvatlasConnector",
                "kv_connector_module_path": "kvatlas.connectors.vllm_offload",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"socket": wish["socket"], "answer_s": 5.0},
            },
        )
        config = args.create_engine_config()
        # vLLM's CPU backend switches both off for MLA; what is asked here is a GPU's scheduler.
        config.cache_config.enable_prefix_caching = True
        config.scheduler_config.enable_chunked_prefill = True
        config.scheduler_config.async_scheduling = False
        cache_config = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[group_of(group) for group in wish["groups"]],
            prefix_cache_retention_interval=0,
            kv_tp_replicas=wish["ranks"] if wish["replicated"] else 1,
        )
        config.cache_config.num_gpu_blocks = BLOCKS
        met = threading.Barrier(wish["ranks"])
        group = type("Group", (), {"barrier": staticmethod(met.wait)})
        vllm_offload.get_tp_group = lambda: group
        vllm_offload.about = lambda: {"device": wish["device"]}
        self.ranks = [Rank(wish, n, config, cache_config) for n in range(wish["ranks"])]
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(min(sizes), sha256)
        self.scheduler = Scheduler(
            config,
            _for_the_scheduler(cache_config),
            StructuredOutputManager(config),
            block_size=max(sizes),
            hash_block_size=min(sizes),
        )
        self.threads = ThreadPoolExecutor(wish["ranks"])
        self.together = KVOutputAggregator(wish["ranks"])

    def run(self, run):
        if run["forget"] and not self.scheduler.reset_prefix_cache():
            raise RuntimeError("the engine would not drop its prefix cache")
        for number, rank in enumerate(self.ranks):
            rank.broken(number == run["broken"])
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        request = Request(
            run["id"],
            run["prompt"],
            params,
            None,
            cache_salt=run["salt"] or None,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        answer = {"local": 0, "loaded": 0, "wrong": 0}
        while self.scheduler.has_unfinished_requests():
            told = self.scheduler.schedule()
            work = self._work(told, request, answer)
            outputs = self._step(told.kv_connector_metadata, work)
            answer["wrong"] += sum(wrong for wrong, _ in outputs)
            ids = list(told.num_scheduled_tokens)
            done = request.num_computed_tokens >= request.num_tokens
            made = [
                ModelRunnerOutput(
                    req_ids=ids,
                    req_id_to_index={id: i for i, id in enumerate(ids)},
                    sampled_token_ids=[[7] if done else [] for _ in ids],
                    kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=meta),
                )
                for _, meta in outputs
            ]
            self.scheduler.update_from_output(told, self.together.aggregate(made))
        connector = self.scheduler.connector
        return answer | {"counts": connector.counts + connector._agent.counts}

    def _step(self, meta, work):
        """All ranks at once: they meet in it."""
        return list(self.threads.map(lambda rank: rank.step(meta, work), self.ranks))

    def _work(self, told, request, answer):
        """What of the request is computed in this step, for `Rank.step`."""
        if request.request_id not in told.num_scheduled_tokens:
            return []
        end = request.num_computed_tokens
        start = end - told.num_scheduled_tokens[request.request_id]
        ids = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        first = bool(told.scheduled_new_reqs)
        minimal = False
        if first:
            loads = told.kv_connector_metadata.load.get(request.request_id, ())
            if loads:
                connector = self.scheduler.connector
                bodies = [copy for copy in loads if copy.piece.part == Part.BODY]
                answer["loaded"] = len(bodies) * connector._grid
                minimal = connector._minimal
            answer["local"] = start - answer["loaded"]
        hashes = hashes_of(list(request.all_token_ids)[:end])
        return [(ids, hashes, start, end, first, minimal)]


def _for_the_scheduler(config):
    """As `generate_scheduler_kv_cache_config` makes it: one spec for a group of several."""
    groups = [
        dataclasses.replace(g, kv_cache_spec=next(iter(g.kv_cache_spec.kv_cache_specs.values())))
        if isinstance(g.kv_cache_spec, UniformTypeKVCacheSpecs)
        else g
        for g in config.kv_cache_groups
    ]
    return dataclasses.replace(config, kv_cache_groups=groups)


def main():
    wishes = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for wish in wishes:
        engine = Engine(wish)
        for run in wish["runs"]:
            print(json.dumps(engine.run(run)), file=answers, flush=True)
        engine.scheduler.connector.shutdown()
        for rank in engine.ranks:
            rank.connector.shutdown()


if __name__ == "__main__":
    main()
