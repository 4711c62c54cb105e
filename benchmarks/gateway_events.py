"""KV events for the mock engines: each announces that it holds the warm prompts.

Run as ``python -m benchmarks.gateway_events TOKENIZER_DIRECTORY COUNT``: prints COUNT pairs of
(events, replay) endpoints as JSON, and goes on publishing one block a second until it is stopped.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import zmq.asyncio

from benchmarks.gateway_load import WARM_PROMPTS, Texts
from kvatlas.config import TokenizerConfig
from kvatlas.connectors.stub_wire import EventPublisher
from kvatlas.core.events import BlockStored
from kvatlas.service.tokens import Tokenizer

BLOCK_TOKENS = 256


async def warm_prompts(directory: str) -> list[BlockStored]:
    """The whole blocks of every warm prompt, under hashes of our own."""
    ours = Tokenizer.load(TokenizerConfig(path=directory))
    texts = Texts()
    events = []
    for number in range(WARM_PROMPTS):
        prompt = await ours.prompt("/v1/completions", {"prompt": texts.prompt(number)})
        blocks = len(prompt.tokens) // (4 * BLOCK_TOKENS)
        first = (number + 1) << 16
        tokens = prompt.tokens[: blocks * 4 * BLOCK_TOKENS]
        events.append(BlockStored(tuple(range(first, first + blocks)), None, tokens, BLOCK_TOKENS))
    await ours.close()
    return events


async def main(directory: str, count: int) -> None:
    context = zmq.asyncio.Context()
    publishers = [EventPublisher(context, "127.0.0.1") for _ in range(count)]
    for publisher in publishers:
        publisher.start()
        for event in await warm_prompts(directory):
            publisher.publish([event], time.time())
    print(json.dumps([(p.endpoint, p.replay_endpoint) for p in publishers]), flush=True)
    number = 1
    while True:  # a late subscriber sees the gap, and asks for what it missed
        await asyncio.sleep(1.0)
        number += 1
        block = BlockStored((number,), None, bytes(4 * BLOCK_TOKENS), BLOCK_TOKENS)
        for publisher in publishers:
            publisher.publish([block], time.time())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
