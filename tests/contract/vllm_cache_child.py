"""Runs inside vLLM's environment: random requests against vLLM's own cache manager, as DeepSeek V4.

Reads on stdin a JSON list of {"seed", "requests", "blocks", "chunk", "draft", "retention",
"lengths"}.
``draft``: the window groups are marked as those of an EAGLE or MTP head. ``lengths`` instead of
random prompts: each length is asked twice, then once more with a longer prompt. Writes for each
a JSON line: a list of [tokens of the prompt, tokens that hit, events since the last question].
"""

import json
import random
import sys

import msgspec
from vllm import SamplingParams
from vllm.distributed.kv_events import KVEventBatch
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request
from vllm_manager import manager


class Run:
    """A little scheduler: requests in flight, in chunks, in turn."""

    def __init__(self, manager, draw, chunk):
        init_none_hash(sha256)
        self.manager, self.draw, self.chunk = manager, draw, chunk
        self.hasher = get_request_block_hasher(4, sha256)
        self.encoder = msgspec.msgpack.Encoder()
        self.flying = []
        self.asked = []
        self.count = 0

    def ask(self, prompt, output):
        mode = "full" if self.draw.random() < 0.2 else "incremental"
        request = Request(
            str(self.count),
            list(prompt),
            SamplingParams(max_tokens=max(output, 1), extra_args={"kv_cache_report_mode": mode}),
            None,
            block_hasher=self.hasher,
        )
        self.count += 1
        batch = KVEventBatch(ts=0.0, events=self.manager.take_events(), data_parallel_rank=0)
        held, hit, junction = self.manager.get_computed_blocks(request)
        self.asked.append([list(prompt), hit, self.encoder.encode(batch).hex()])
        request.shared_prefix_boundary = junction
        if self.step(request, output, held, hit):
            self.flying.append((request, output))

    def step(self, request, output, held=None, hit=0):
        """One chunk; False when the request is done or finds no room (it is given up then)."""
        if held is not None:
            request.num_computed_tokens = 0
        done = request.num_computed_tokens + hit
        total = request.num_tokens
        if done >= total:  # decode
            if len(request.output_token_ids) >= output:
                self.manager.free(request)
                return False
            request.append_output_token_ids(self.draw.randrange(50))
            total += 1
        size = min(self.chunk, total - done)
        got = self.manager.allocate_slots(request, size, hit, held)
        if got is None:
            self.manager.free(request)
            return False
        request.num_computed_tokens = done + size
        return True

    def turn(self):
        self.flying = [(r, n) for r, n in self.flying if self.step(r, n)]

    def finish(self):
        while self.flying:
            self.turn()


def _random(run, requests):
    draw = run.draw
    known = []
    for _ in range(requests):
        if known and draw.random() < 0.8:
            old = draw.choice(known[-12:])
            at = draw.choice([len(old), draw.randrange(1, len(old) + 1)])
            at = draw.choice([at, at // 256 * 256 + draw.choice([0, 1, 10, 63, 64, 65, 100])])
            prompt = old[:at]
        else:
            prompt = []
        prompt = prompt + [draw.randrange(50) for _ in range(draw.randrange(1, 1200))]
        prompt = prompt[:3000]
        known.append(prompt)
        run.ask(prompt, draw.choice([0, 3, 80, 300]))
        for _ in range(draw.randrange(0, 30)):
            run.turn()
        if draw.random() < 0.5:
            run.finish()


def main():
    for wish in json.load(sys.stdin):
        draw = random.Random(wish["seed"])
        whole = manager(wish["blocks"], wish["chunk"], wish["retention"], wish["draft"])
        run = Run(whole, draw, wish["chunk"])
        for length in wish["lengths"]:
            prompt = [draw.randrange(50) for _ in range(length)]
            for more in (0, 0, 700):
                run.ask(prompt + [7] * more, 0)
                run.finish()
        _random(run, wish["requests"])
        print(json.dumps(run.asked))


main()
