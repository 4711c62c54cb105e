"""Runs inside vLLM's environment with the V4 shim: its numpy listing of windows against vLLM's own
kernel in Triton's interpreter, on random batches. Prints how many batches agreed, as JSON."""

import json
import random
import sys

import torch
from vllm.v1.attention.backends.mla import sparse_swa

BLOCK, WINDOW = 64, 128


def batch(source):
    """Keyword arguments of the kernel, and its grid: some requests, and some rows of padding."""
    lengths = [source.randint(1, 400) for _ in range(source.randint(1, 3))]
    queries = [source.randint(1, min(n, 20)) for n in lengths]
    starts = [sum(queries[:i]) for i in range(len(queries) + 1)]
    padding = source.randint(0, 3)
    offset = source.randint(0, starts[-1] - 1)
    rows = starts[-1] + padding - offset
    width = WINDOW + source.choice([0, 7])
    replay = [
        source.choice([0, 0, source.randint(0, n - q)])
        for n, q in zip(lengths, queries, strict=True)
    ]
    owners = [i for i, q in enumerate(queries) for _ in range(q)] + [9] * padding
    table = [[source.randint(1, 999) for _ in range(12)] for _ in lengths]

    def ints(values):
        return torch.tensor(values, dtype=torch.int32)

    given = {
        "swa_indices_ptr": torch.full((rows + 2, 1, width), -7, dtype=torch.int32),
        "swa_indices_stride": width,
        "swa_lens_ptr": torch.full((rows + 2,), -7, dtype=torch.int32),
        "window_size": WINDOW,
        "index_width": width,
        "left_visible_ptr": ints([0]),
        "right_visible_ptr": ints([0]),
        "query_start_loc_ptr": ints(starts),
        "seq_lens_ptr": ints(lengths),
        "token_to_req_indices_ptr": ints(owners),
        "is_valid_token_ptr": torch.tensor([True] * starts[-1] + [False] * padding),
        "block_table_ptr": ints(table),
        "block_table_stride": 12,
        "block_size": BLOCK,
        "replay_start_ptr": ints(replay),
        "token_offset": offset,
        "HAS_IMAGE": False,
        "TRITON_BLOCK_SIZE": 1024,
    }
    return rows, given


def main(count):
    own = sparse_swa.ComputeSWAIndicesAndLensKernel.kernel
    theirs = sparse_swa._compute_swa_indices_and_lens_kernel
    assert own is not theirs, "the shim is not on PYTHONPATH"
    agreed = 0
    for seed in range(count):
        rows, given = batch(random.Random(seed))
        results = []
        for kernel in (own, theirs):
            copy = {k: v.clone() if torch.is_tensor(v) else v for k, v in given.items()}
            kernel[(rows,)](**copy)
            results.append((copy["swa_indices_ptr"], copy["swa_lens_ptr"]))
        agreed += all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    print(json.dumps({"agreed": agreed}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
