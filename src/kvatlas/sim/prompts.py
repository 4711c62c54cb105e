"""Token ids of a trace's prompts, as cheap as they can be made.

All that a simulated cluster does with tokens is to hash them in chains, so all that counts is that
equal hash ids give equal blocks, and others other ones. `workload.trace.tokens_of` makes ids that
look like a model's; here a block begins with its hash id, and the rest is filler. A test compares
the decisions.
"""

from __future__ import annotations

from kvatlas.workload.prompt_keys import ID_BYTES
from kvatlas.workload.trace import TraceRequest, tokens_of


def prompt_tokens(request: TraceRequest, block_tokens: int) -> bytes:
    """The prompt (uint32 ids, little endian; not below any vocabulary)."""
    filler = bytes(max(block_tokens * 4 - ID_BYTES, 0))
    if not filler:
        return tokens_of(request, block_tokens=block_tokens)
    names = [hash_id.to_bytes(ID_BYTES, "little") for hash_id in request.hash_ids]
    ids, size_bytes = filler.join(names), request.input_tokens * 4
    return ids + bytes(size_bytes - len(ids)) if len(ids) < size_bytes else ids[:size_bytes]
