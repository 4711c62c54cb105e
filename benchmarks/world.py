"""What the decision benchmark's directories hold: the same for kvatlas and for its peer.

64 workers in clusters of 8 and 999,424 worker-blocks of 256 tokens: one system prompt that every
worker holds, per cluster 65 contexts that its 8 workers hold, and per worker and context three
conversations of its own. Every prompt made of the three is 128 blocks long: 32,768 tokens.
Only the standard library, because the peer's process has none of ours.
"""

from __future__ import annotations

import array
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

BLOCK_TOKENS = 256
WORKERS = 64
CLUSTER = 8
CONTEXTS = 65
TAILS = 3
SYSTEM_BLOCKS, CONTEXT_BLOCKS, TAIL_BLOCKS = 16, 48, 64
PROMPT_TOKENS = (SYSTEM_BLOCKS + CONTEXT_BLOCKS + TAIL_BLOCKS) * BLOCK_TOKENS
HOLDERS = WORKERS * (SYSTEM_BLOCKS + CONTEXTS * (CONTEXT_BLOCKS + TAILS * TAIL_BLOCKS))
PROMPTS = 64
IN_FLIGHT = 4 * WORKERS  # requests under way while decisions are measured

_SYSTEM, _CONTEXT, _TAIL, _UNSEEN = range(4)
_LOW_BIT = bytes(i & 1 for i in range(256))


class Node(NamedTuple):
    """A run of blocks: their hashes at the engines, their tokens (uint32), who holds them."""

    hashes: list[int]
    parent: int | None
    tokens: bytes
    workers: range


def random_tokens(seed: int, count: int) -> bytes:
    """``count`` token ids below 131,072 as uint32, little endian; the same for equal seeds."""
    source = random.Random(seed)
    tokens = bytearray(4 * count)
    tokens[0::4] = source.randbytes(count)
    tokens[1::4] = source.randbytes(count)
    tokens[2::4] = source.randbytes(count).translate(_LOW_BIT)
    return bytes(tokens)


def _seed(kind: int, owner: int, context: int = 0, tail: int = 0) -> int:
    return ((owner * 1024 + context) * 16 + tail) * 4 + kind


def _hashes(seed: int, blocks: int) -> list[int]:
    return [(seed << 12 | i) * 0x9E3779B97F4A7C15 % 2**64 for i in range(1, blocks + 1)]


def outline(contexts: int = CONTEXTS) -> Iterator[tuple[int, Node]]:
    """All runs of blocks, parents first, still without the tokens, which the seed beside gives."""

    def run(seed: int, blocks: int, parent: int | None, workers: range) -> tuple[int, Node]:
        return seed, Node(_hashes(seed, blocks), parent, b"", workers)

    system = run(_seed(_SYSTEM, 0), SYSTEM_BLOCKS, None, range(WORKERS))
    yield system
    for first in range(0, WORKERS, CLUSTER):
        workers = range(first, first + CLUSTER)
        for c in range(contexts):
            seed = _seed(_CONTEXT, first, c)
            context = run(seed, CONTEXT_BLOCKS, system[1].hashes[-1], workers)
            yield context
            for worker in workers:
                for t in range(TAILS):
                    seed, own = _seed(_TAIL, worker, c, t), range(worker, worker + 1)
                    yield run(seed, TAIL_BLOCKS, context[1].hashes[-1], own)


def nodes() -> Iterator[Node]:
    """The same with their tokens."""
    for seed, node in outline():
        yield node._replace(tokens=random_tokens(seed, len(node.hashes) * BLOCK_TOKENS))


def prompt(number: int, match: str = "full") -> bytes:
    """32,768 tokens of which worker ``number % 64`` holds everything ("full"), half or nothing.

    "half": its cluster holds one half of it, every other worker an eighth.
    """
    if match == "miss":
        return random_tokens(_seed(_UNSEEN, number), PROMPT_TOKENS)
    worker, context, tail = number % WORKERS, number % CONTEXTS, number % TAILS
    seed = _seed(_TAIL, worker, context, tail)
    if match == "half":
        seed = _seed(_UNSEEN, number)
    return b"".join(
        (
            random_tokens(_seed(_SYSTEM, 0), SYSTEM_BLOCKS * BLOCK_TOKENS),
            random_tokens(
                _seed(_CONTEXT, worker - worker % CLUSTER, context), CONTEXT_BLOCKS * BLOCK_TOKENS
            ),
            random_tokens(seed, TAIL_BLOCKS * BLOCK_TOKENS),
        )
    )


def messages(
    seed: int, blocks: int, per_event: int, chain: int, encode: Callable[[object], bytes]
) -> tuple[list[bytes], list[int]]:
    """``blocks`` of 256 tokens in chains, as vLLM 0.32 sends them: a batch of one event for each
    ``per_event``, its token ids in full. And the token ids of the last chain."""
    source, made = random.Random(seed), []
    for number in range(blocks // chain):
        ids, parent = ints(random_tokens(seed << 20 | number, chain * BLOCK_TOKENS)), None
        for at in range(0, chain, per_event):
            hashes = [source.getrandbits(63) for _ in range(per_event)]
            part = ids[at * BLOCK_TOKENS : (at + per_event) * BLOCK_TOKENS]
            event = {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": part,
                "block_size": BLOCK_TOKENS,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            }
            made.append(encode([1.0, [event], 0]))
            parent = hashes[-1]
    return made, ids


def ints(tokens: bytes) -> list[int]:
    """The ids as a list, each an object of its own as a JSON decoder would make them."""
    return array.array("I", tokens).tolist()
