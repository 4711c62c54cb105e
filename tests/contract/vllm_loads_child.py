"""Runs inside vLLM's environment: its own cache manager through the calls that its scheduler makes
when state comes from a connector.

Reads on stdin a JSON list of {"blocks", "chunk", "retention", "requests": [prompt], "calls":
[[name, request, argument, reserved]]}. Writes for each a JSON line: per call [done, tokens that
hit, free blocks, events].
"""

import json
import sys

import msgspec
from vllm import SamplingParams
from vllm.distributed.kv_events import KVEventBatch
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request
from vllm_manager import manager


class Life:
    """The calls on one manager."""

    def __init__(self, wish):
        init_none_hash(sha256)
        blocks = wish["blocks"] + 1  # one is vLLM's null block
        self.manager = manager(blocks, wish["chunk"], wish["retention"])
        self.chunk = wish["chunk"]
        hasher = get_request_block_hasher(4, sha256)
        self.requests = [
            Request(str(i), prompt, SamplingParams(max_tokens=999), None, block_hasher=hasher)
            for i, prompt in enumerate(wish["requests"])
        ]

    def begin(self, request, external, reserved):
        """Admit: a load up to ``external``, or where that is no more than the hit, a chunk."""
        held, hit, junction = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = junction
        loads = external > hit
        new = 0 if loads else min(self.chunk, request.num_tokens - hit)
        got = self.manager.allocate_slots(
            request,
            new,
            num_new_computed_tokens=hit,
            new_computed_blocks=held,
            num_external_computed_tokens=external - hit if loads else 0,
            delay_cache_blocks=loads,
            full_sequence_must_fit=True,
            reserved_blocks=reserved if loads else 0,
        )
        if got is not None:
            request.num_computed_tokens = external if loads else hit + new
        return got is not None, hit

    def land(self, request, arrived, _):
        """The load is over: nothing of it came, or all."""
        if arrived:
            self.manager.cache_blocks(request, request.num_computed_tokens)
            if request.num_computed_tokens == request.num_tokens:
                request.num_computed_tokens -= 1
        else:
            request.num_computed_tokens = 0
            self.manager.free(request)
        return True, 0

    def step(self, request, first, _):
        """A chunk or a token more; ``first``: the one after a load."""
        if request.num_computed_tokens >= request.num_tokens:
            request.append_output_token_ids(7)
        new = min(self.chunk, request.num_tokens - request.num_computed_tokens)
        got = self.manager.allocate_slots(request, new, full_sequence_must_fit=bool(first))
        if got is not None:
            request.num_computed_tokens += new
        return got is not None, 0

    def end(self, request, *_):
        self.manager.free(request)
        return True, 0


def main():
    encoder = msgspec.msgpack.Encoder()
    for wish in json.load(sys.stdin):
        life = Life(wish)
        told = []
        for name, number, argument, reserved in wish["calls"]:
            done, hit = getattr(life, name)(life.requests[number], argument, reserved)
            batch = KVEventBatch(ts=0.0, events=life.manager.take_events(), data_parallel_rank=0)
            free = life.manager.block_pool.get_num_free_blocks()
            told.append([done, hit, free, encoder.encode(batch).hex()])
            if not done:
                break  # what was asked for next took it for granted
        print(json.dumps(told))


main()
