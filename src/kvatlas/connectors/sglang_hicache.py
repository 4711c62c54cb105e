"""SGLang's HiCache storage on its node's agent: pages outlive the server and its host pool.

For SGLang 0.5.23, in its processes. It is turned on by::

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvatlas",
      "module_path": "kvatlas.connectors.sglang_hicache", "class_name": "KvatlasHiCache",
      "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
      "socket": "/run/kvatlas/agent.sock"}'

SGLang looks after prefixes itself, names pages by hashes chained over all tokens before them (its
salts included), and can take a promise back: so it is told what is there, takes pages one by one,
and goes on with those that came. What its pools keep of every page is one unit, a body; what they
keep of trailing pages only (windows, states) is another, a point, which counts only when all
bodies before it are there. Both are verified by the agent before they are copied, straight from and
to the host pools.

Settings beside ``socket``: ``load_deadline_s`` (10: for 128 pages at most), ``answer_s`` (5),
``weights_digest``, ``name``.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sglang
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_server_args

from kvatlas.connectors.agent_client import Settings, settings_of
from kvatlas.connectors.page_client import PageClient, Taken
from kvatlas.connectors.sglang_pools import Pool, pools_of, views
from kvatlas.core.units import Part
from kvatlas.errors import EngineError
from kvatlas.service import agent_wire as wire

log = logging.getLogger(__name__)

_KV = "kv"
_SGLANGS = {  # what SGLang itself may have in the extra config
    *("backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size"),
    *("hicache_storage_pass_prefix_keys", "file_storage_path"),
    *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
}
Place = list[tuple[int, int]]  # (address, bytes) of the parts of one page in one pool


@dataclass
class Writing:
    """What side pools have of pages whose keys and values are still to come, by hash. ``chain``:
    all pages of the prompt up to the last one of it."""

    chain: list[str] = field(default_factory=list)
    places: dict[str, dict[str, Place]] = field(default_factory=dict)

    def ends(self, first: int, keys: Sequence[str]) -> int:
        """How many pages come after ``keys``, which follow ``first`` others; -1: these are others'.

        A hash stands for all before it, so the last one says it all.
        """
        after = len(self.chain) - first - len(keys)
        return after if after >= 0 and self.chain[first + len(keys) - 1] == keys[-1] else -1


@dataclass
class Open:
    """Pages that were taken and of which pools are still to be read."""

    keys: tuple[str, ...]
    taken: Taken | None
    used: bool = False


class KvatlasHiCache(HiCacheStorage):  # type: ignore[misc]
    """See the module. SGLang calls it from three threads: one asks, one reads, one writes."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        """Raises EngineError where this engine cannot be served, and says why."""
        self._config = storage_config
        given = dict(storage_config.extra_config or {})
        _check(storage_config, given)
        ours = {name: value for name, value in given.items() if name not in _SGLANGS}
        self._settings = settings_of(ours, answer_s=5.0)
        self.registered_pools: dict[str, Any] = {}
        self._client: PageClient | None = None
        self._pools: dict[str, Pool] = {}
        self._offsets: dict[str, tuple[int, int]] = {}
        self._writing = Writing()
        self._open: Open | None = None
        self._metrics = StorageMetrics()

    # -- the start ------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool whose slots name pages, or all of them as one: then each comes by itself."""
        self.mem_pool_host = mem_pool_host
        self.registered_pools[_KV] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """One more pool. Raises EngineError for one that comes after the start."""
        name = str(host_pool_name)
        if self._client is not None and name not in self.registered_pools:
            raise EngineError(f"pool {name!r} (a draft model's?) came after the start: unsupported")
        self.registered_pools[name] = host_pool

    def on_host_pools_registered(self) -> None:
        """All are known. Raises EngineError where the agent is not there, or refuses."""
        config = self._config
        shard = _shard(config)
        alike = config.is_mla_model and config.tp_size > 1
        pools = pools_of(self.registered_pools, shard=shard, alike=alike)
        self._pools = {pool.name: pool for pool in pools}
        for trailing in (False, True):
            at = 0
            for pool in pools:
                if pool.trailing is trailing:
                    self._offsets[pool.name] = at, pool.page_bytes
                    at += pool.page_bytes
        hello = _hello(config, self._settings, pools, self.registered_pools[_KV], shard)
        self._client = PageClient(
            Path(self._settings.socket),
            hello,
            answer_s=self._settings.answer_s,
            load_s=self._settings.load_deadline_s,
        )

    @property
    def counts(self) -> Counter[str]:
        """What did not happen, by reason."""
        return self._client.counts if self._client is not None else Counter()

    @property
    def _agent(self) -> PageClient:
        if self._client is None:
            raise EngineError("no pools were registered")
        return self._client

    def close(self) -> None:
        """The agent takes back what it held."""
        self._let_go()
        if self._client is not None:
            self._client.close()

    # -- what is there --------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Pages in a row."""
        hashes, first = _hashes(keys, extra_info)
        return min(len(keys), self._agent.look(hashes, first).pages)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """The prefixes that can be restored: all bodies, and the trailing pages that end them."""
        windows: dict[str, int] = {}
        for transfer in pool_transfers or ():
            pool = self._pools.get(str(transfer.name))
            trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
            known = trailing or transfer.hit_policy == PoolHitPolicy.ALL_PAGES
            if pool is None or not known or pool.trailing is not trailing:
                raise EngineError(f"pool {transfer.name}: {transfer.hit_policy} is not expected")
            windows[pool.name] = max(1, len(transfer.keys or ())) if trailing else 0
        hashes, first = _hashes(keys, extra_info)
        found = self._agent.look(hashes, first)
        pages = min(len(keys), found.pages)
        rows = _rows({point - first for point in found.points}, pages)
        hits: dict[Any, int] = {_KV: pages} if pages else {}
        for name, window in windows.items():
            if able := _restorable(rows, window):
                hits[name] = able[-1]
        able = _restorable(rows, max(windows.values(), default=0))
        return PoolTransferResult(able[-1] if able else 0, hits, able)

    # -- reads ----------------------------------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Take these pages, and read keys and values of them; side pools come next."""
        started = time.perf_counter()
        hashes, first = _hashes(keys, extra_info)
        self._let_go()
        taken = self._agent.take(hashes, first, Part.BODY)
        self._open = Open(tuple(keys), taken)
        pool = self._pools.get(_KV)
        if pool is None:  # an anchor without bytes
            found = [taken is not None and taken.has(first + i) for i in range(len(keys))]
        else:
            found = self._read(taken, first, pool, keys, host_indices)
        self._open.used = any(found)
        if not any(p.name != _KV and not p.trailing for p in self._pools.values()):
            self._let_go()
        self._measure(self._metrics.prefetch_pgs, self._metrics.prefetch_bandwidth, found, started)
        return found

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Read side pools: of the pages just taken, or trailing ones."""
        results: dict[Any, list[bool]] = {}
        trailing: dict[tuple[str, ...], list[Any]] = {}
        for transfer in transfers:
            keys = tuple(transfer.keys or ())
            pool = self._pool(transfer)
            if pool.trailing:
                trailing.setdefault(keys, []).append(transfer)
                continue
            hashes, first = _hashes(keys, extra_info)
            if self._open is None or self._open.keys != keys:
                self._let_go()
                self._open = Open(keys, self._agent.take(hashes, first, Part.BODY))
            found = self._read(self._open.taken, first, pool, keys, transfer.host_indices)
            self._open.used |= any(found)
            results[transfer.name] = found
        self._let_go()
        for keys, group in trailing.items():
            hashes, first = _hashes(keys, extra_info)
            self._open = Open(keys, self._agent.take(hashes, first, Part.POINT))
            for transfer in group:
                pool = self._pool(transfer)
                found = self._read(self._open.taken, first, pool, keys, transfer.host_indices)
                self._open.used |= any(found)
                results[transfer.name] = found
            self._let_go()
        return results

    def _read(
        self, taken: Taken | None, first: int, pool: Pool, keys: Sequence[str], indices: Any
    ) -> list[bool]:
        places = self._places(pool, keys, indices)
        if taken is None or places is None:
            return [False] * len(keys)
        at, _ = self._offsets[pool.name]
        return [taken.read(first + i, at, views(place)) for i, place in enumerate(places)]

    def _let_go(self) -> None:
        """Nothing more is read of what was taken."""
        if self._open is not None and self._open.taken is not None:
            self._open.taken.release(used=self._open.used)
        self._open = None

    # -- writes ---------------------------------------------------------------------------------

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Remember where side pools have these pages: SGLang hands over keys and values next, and
        keeps all of it in place until then."""
        results: dict[Any, list[bool]] = {}
        for transfer in transfers:
            keys, name = list(transfer.keys or ()), str(transfer.name)
            places = self._places(self._pool(transfer), keys, transfer.host_indices)
            if keys and places is not None:
                chain = [*_before(extra_info), *keys]
                if self._writing.chain != chain or name in self._writing.places:
                    self._drop_writing()
                self._writing.chain = chain
                self._writing.places[name] = dict(zip(keys, places, strict=True))
            results[transfer.name] = [places is not None] * len(keys)
        return results

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Save these pages, with what side pools have of them."""
        started = time.perf_counter()
        if extra_info is None or extra_info.prefix_keys is None:
            if not self.counts["set_without_prefix"]:
                log.warning(
                    "kvatlas saves nothing: the extra config lacks"
                    ' "hicache_storage_pass_prefix_keys": true'
                )
            self._agent.count("set_without_prefix", len(keys))
            return [False] * len(keys)
        hashes, first = _hashes(keys, extra_info)
        after = self._writing.ends(first, keys)
        if after < 0:
            self._drop_writing()
        places = dict(self._writing.places)
        if not after:
            self._writing = Writing()
        if _KV in self._pools:
            found = self._places(self._pools[_KV], keys, host_indices)
            places[_KV] = dict(zip(keys, found or (), strict=False))
        kept = self._give(keys, hashes, first, places)
        if not all(kept):  # then SGLang gives up the rest of it
            self._agent.count("set_failed", len(keys) - sum(kept))
            self._drop_writing()
        self._measure(self._metrics.backup_pgs, self._metrics.backup_bandwidth, kept, started)
        return kept

    def _give(
        self, keys: Sequence[str], hashes: bytes, first: int, places: dict[str, dict[str, Place]]
    ) -> list[bool]:
        """Bodies, and points where all trailing pools have the page; says which bodies lie there
        now."""
        trailing = [places.get(p.name, {}) for p in self._pools.values() if p.trailing]
        points = tuple(
            first + i + 1
            for i, key in enumerate(keys)
            if trailing and all(key in there for there in trailing)
        )

        def parts_of(part: Part, index: int) -> list[memoryview] | None:
            found: list[memoryview] = []
            for pool in self._pools.values():
                if pool.trailing is (part is Part.POINT):
                    place = places.get(pool.name, {}).get(keys[index - first])
                    if place is None:
                        self._agent.count("set_without_pool")
                        return None
                    found += views(place)
            return found

        self._agent.give(hashes, first, points, parts_of)
        there = self._agent.look(hashes, first)
        if missing := len(set(points) - set(there.points)):
            self._agent.count("set_failed_trailing", missing)
        return [i < there.pages for i in range(len(keys))]

    def _drop_writing(self) -> None:
        """What side pools have is of no use without the rest."""
        if self._writing.chain:
            self._agent.count("set_unfinished")
        self._writing = Writing()

    # -- parts ----------------------------------------------------------------------------------

    def _pool(self, transfer: Any) -> Pool:
        pool = self._pools.get(str(transfer.name))
        if pool is None:
            raise EngineError(f"pool {transfer.name} was not registered at the start")
        return pool

    def _places(self, pool: Pool, keys: Sequence[str], indices: Any) -> list[Place] | None:
        """Where its pages lie; None, counted: these are not as many as there are keys."""
        if indices is None or len(indices) != len(keys) * pool.page_slots:
            self._agent.count("slots_of_another_number")
            return None
        return pool.pages(indices)

    def _measure(
        self, pages: list[int], rates: list[float], found: list[bool], started: float
    ) -> None:
        if self._config.enable_storage_metrics and any(found):
            page_bytes = sum(pool.page_bytes for pool in self._pools.values() if not pool.trailing)
            size_bytes = sum(found) * page_bytes
            pages.append(sum(found))
            rates.append(size_bytes / 2**30 / max(time.perf_counter() - started, 1e-9))

    def get_stats(self) -> StorageMetrics:
        """For SGLang's own histograms, since the last call."""
        metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    def clear(self) -> None:
        """Raises EngineError: others use what the agent holds."""
        raise EngineError(
            "an agent's state belongs to all engines of its node: end the agent, or give the engine"
            " another weights_digest"
        )

    # -- calls of the older interface, which `interface_v1` turns off ----------------------------

    def exists(self, key: str) -> bool:
        """One page."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Raises EngineError."""
        raise EngineError(_OLD)

    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> None:
        """Raises EngineError."""
        raise EngineError(_OLD)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Raises EngineError."""
        raise EngineError(_OLD)

    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Raises EngineError."""
        raise EngineError(_OLD)


_OLD = 'the extra config lacks "interface_v1": 1, without which pages go through Python objects'


def _check(config: Any, given: dict[str, Any]) -> None:
    """Raises EngineError for what is not supported."""
    if not given.get("interface_v1"):
        raise EngineError(_OLD)
    if config.should_split_heads or config.tp_lcm_size:
        raise EngineError("tp_lcm_size is not supported: each rank keeps its own heads whole")
    if config.attn_cp_size > 1 or config.dcp_size > 1:
        raise EngineError("context parallel engines are not supported: their ranks cut pages up")


def _shard(config: Any) -> str:
    """Which share of the state this process has; "" where that is all of it. Ranks of tensor
    parallelism hold the same where keys and values are not cut by heads."""
    shares = []
    if config.tp_size > 1 and not config.is_mla_model:
        shares.append(f"tp {config.tp_rank}/{config.tp_size}")
    if config.pp_size > 1:
        shares.append(f"pp {config.pp_rank}/{config.pp_size}")
    return " ".join(shares)


def _hello(
    config: Any, settings: Settings, pools: Sequence[Pool], anchor: Any, shard: str
) -> wire.Hello:
    dtypes: list[Any] = [anchor.dtype]
    variant: list[Any] = []
    try:
        args = get_server_args()
        model = " ".join(filter(None, (str(args.model_path), args.revision)))
        path = str(args.model_path)
        # What else makes other bytes of the same model; 8-bit floats of two kinds lie in one dtype.
        variant += [args.json_model_override_args, args.quantization]
        dtypes.append(args.kv_cache_dtype)
    except (ValueError, RuntimeError, AttributeError, AssertionError):
        model = path = config.model_name or ""  # no server, as in tests
    if not model:
        raise EngineError("the engine does not say which model it serves")
    file = Path(path) / "config.json"
    served = config.model_name or model
    return wire.Hello(
        wire.VERSION,
        model,
        (f"{served} {shard}".strip(),),  # ranks with other bytes share with nobody
        file.read_bytes() if file.is_file() else b"{}",
        "sglang",
        sglang.__version__,
        " ".join(map(str, dtypes)),
        int(anchor.page_size),
        settings.weights_digest,
        "sha256 by page",
        settings.name,
        tuple(wire.PoolInfo(p.name, p.form, p.page_bytes, p.trailing) for p in pools),
        variant=" ".join(str(text) for text in variant if text and text != "{}"),
    )


def _hashes(keys: Sequence[str], extra_info: Any) -> tuple[bytes, int]:
    """All of a prompt as far as it is told, and how many pages come before ``keys``."""
    before = _before(extra_info)
    try:
        found = b"".join(map(bytes.fromhex, (*before, *keys)))
    except ValueError as error:
        raise EngineError(f"keys of pages are SHA-256 in hex: {error}") from error
    if len(found) != wire.HASH_BYTES * (len(before) + len(keys)):
        raise EngineError("keys of pages are SHA-256 in hex")
    return found, len(before)


def _before(extra_info: Any) -> list[str]:
    """Pages of the prompt that come before those in a call."""
    return (extra_info.prefix_keys if extra_info is not None else None) or []


def _rows(ends: Set[int], pages: int) -> list[int]:
    """How many trailing pages end in a row at each count of pages from 1 on."""
    rows: list[int] = []
    for count in range(1, pages + 1):
        rows.append((rows[-1] if rows else 0) + 1 if count in ends else 0)
    return rows


def _restorable(rows: Sequence[int], window: int) -> list[int]:
    """Counts of pages after which one can go on, where that reads the last ``window`` of them."""
    return [count for count, row in enumerate(rows, 1) if row >= min(window, count)]
