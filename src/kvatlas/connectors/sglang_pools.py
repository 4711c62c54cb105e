"""SGLang's host pools as their bytes lie: which pages there are, and where each of them is."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from kvatlas.errors import EngineError

# What SGLang 0.5.23 keeps of every page, and what of the last pages before a resume position only
# (`SidecarPoolSpec.hit_policy`, and its SWA and Mamba components). Others are not known here.
_EVERY = {
    "kv",
    "indexer",
    "deepseek_v4_c1",
    "deepseek_v4_c1_indexer",
    "deepseek_v4_c1_indexer_scale",
    "deepseek_v4_c2",
    "deepseek_v4_c2_indexer",
    "deepseek_v4_c2_indexer_scale",
    "deepseek_v4_c4",
    "deepseek_v4_c4_indexer",
    "deepseek_v4_c4_indexer_scale",
    "deepseek_v4_c4_rope",
    "deepseek_v4_c128",
    "deepseek_v4_c128_rope",
}
_TRAILING = {
    "swa",
    "mamba",
    "deepseek_v4_c4_state",
    "deepseek_v4_c4_indexer_state",
    "deepseek_v4_c128_state",
}
_SHARDED = {"mamba"}  # each rank has its own, even where keys and values are replicated


class Pool:
    """One of them that holds bytes."""

    def __init__(self, name: str, host: Any, shard: str) -> None:
        """``shard``: whose share of the state it holds. Raises EngineError where pages cannot be
        copied."""
        self.name = name
        self.trailing = name in _TRAILING
        self._host = host
        self.page_slots = int(getattr(host, "page_size", 1) or 1)
        try:
            found = self.pages(torch.arange(self.page_slots, dtype=torch.int64))
        except (AttributeError, AssertionError, ValueError, NotImplementedError) as error:
            layout = getattr(host, "layout", "")
            raise EngineError(
                f"pool {name!r} ({type(host).__name__}, layout {layout!r}) does not say where its"
                f" pages lie: {error}. Try --hicache-mem-layout page_first or page_first_direct"
            ) from error
        (page,) = found
        self.page_bytes = sum(size for _, size in page)
        sizes = "+".join(f"{len(part)}x{part[0]}" for part in _runs([size for _, size in page]))
        self.form = f"{type(host).__name__} {host.layout} {host.dtype} {sizes} {shard}".strip()

    def pages(self, indices: Any) -> list[list[tuple[int, int]]]:
        """For every page of ``indices``, (address, bytes) of its parts, in order."""
        count, rest = divmod(len(indices), self.page_slots)
        if rest:
            raise ValueError(f"{len(indices)} slots are no whole pages of {self.page_slots}")
        if not count:
            return []
        addresses, sizes = self._host.get_page_buffer_meta(indices)
        each = len(addresses) // count
        parts = list(zip(map(int, addresses), map(int, sizes), strict=True))
        return [parts[i * each : (i + 1) * each] for i in range(count)]


def pools_of(registered: dict[str, Any], *, shard: str, alike: bool) -> list[Pool]:
    """All that hold bytes, by name. An anchor without any is passed over.

    ``shard``: "" where one process holds all. ``alike``: there are other ranks that hold the same
    keys and values, and one of them writes. Raises EngineError for what cannot be kept.
    """
    if unknown := sorted(set(registered) - _EVERY - _TRAILING):
        raise EngineError(
            f"pools {', '.join(unknown)} are not supported: kvatlas does not know when their pages"
            " are needed (draft models are among these)"
        )
    if alike and (own := sorted(set(registered) & _SHARDED)):
        raise EngineError(
            f"pool {', '.join(own)} differs from rank to rank beside one that does not: run it with"
            " --tp-size 1"
        )
    with_bytes = {
        name: host for name, host in registered.items() if getattr(host, "kv_buffer", 0) is not None
    }
    return [Pool(name, with_bytes[name], shard) for name in sorted(with_bytes)]


def views(parts: Sequence[tuple[int, int]]) -> list[memoryview]:
    """The memory itself; its owner must live as long."""
    return [memoryview(_bytes(size).from_address(at)).cast("B") for at, size in parts if size]


@functools.lru_cache(256)
def _bytes(size_bytes: int) -> Any:
    return ctypes.c_ubyte * size_bytes


def _runs(values: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1].append(value)
        else:
            runs.append([value])
    return runs
