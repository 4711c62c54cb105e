"""A tier of its node's agent below vLLM's own CPU tier: chunks outlive it, the engine and the GPU.

For vLLM 0.32, in its scheduler's process. It is turned on by::

    --kv-transfer-config '{"kv_connector": "KvatlasTieringConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "kvatlas.connectors.vllm_tier",
      "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 64000000000,
        "secondary_tiers": [{"type": "KvatlasTier", "module_path": "kvatlas.connectors.vllm_tier",
                             "socket": "/run/kvatlas/agent.sock"}]}}'

vLLM copies between the GPU and its CPU tier, decides what is stored, and asks for each chunk of
each group by a hash of all tokens up to its end (salts, adapters and images included). A chunk is
one row of its CPU tier: what all layers of a group and all ranks keep of it. The agent keeps a row
as one unit, verified as a whole before it is copied back, so it is there or not; vLLM resumes only
where all groups have what it needs.

Settings beside ``socket``: ``load_deadline_s`` (10: for 128 chunks at most), ``answer_s`` (1),
``weights_digest``, ``name``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from vllm import __version__
from vllm.config import set_current_vllm_config
from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingCounterMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvatlas.connectors.agent_client import Settings, settings_of
from kvatlas.connectors.page_client import PageClient
from kvatlas.connectors.vllm_identity import check, config_of, name_of, names_served, variant_of
from kvatlas.core.units import Part
from kvatlas.errors import EngineError
from kvatlas.service import agent_wire as wire

log = logging.getLogger(__name__)

NOT_DONE = "vllm:kv_offload_kvatlas_not_done"
BATCH = 128  # chunks that are given or taken at once
LOOK_BATCH = 1024
JOBS_MAX = 256  # loads, and stores, that wait: what comes beyond is not done
THREADS = 2  # that load, and as many that store

_T = TypeVar("_T")


class KvatlasTieringConnector(OffloadingConnector):  # type: ignore[misc]
    """vLLM's own connector. Its tiers see what the engine serves, which goes into our keys."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises EngineError where the tier cannot serve this engine, and says why."""
        with set_current_vllm_config(vllm_config):
            super().__init__(vllm_config, role, kv_cache_config)


class Lookups(AsyncLookupManager):  # type: ignore[misc]
    """Asks in a thread of its own, all that a step of the scheduler wants to know at once."""

    def __init__(self, tier_type: str, there: Callable[[Sequence[bytes]], list[bool]]) -> None:
        self._there = there
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> list[bool]:
        """Which of them are there."""
        return self._there(keys)


class KvatlasTier(SecondaryTierManager):  # type: ignore[misc]
    """See the module. vLLM calls it from its scheduler's thread, which waits for nothing here:
    other threads ask the agent and copy."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **given: Any,
    ) -> None:
        """Raises EngineError where this engine cannot be served, and says why."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        vllm_config = _checked(get_current_vllm_config_or_none())
        settings = settings_of(given, answer_s=1.0)
        self._rows = primary_kv_view.cast("B")
        self._client = PageClient(
            Path(settings.socket),
            _hello(vllm_config, offloading_spec, settings, self.block_size_bytes),
            answer_s=settings.answer_s,
            load_s=settings.load_deadline_s,
        )
        self._told: Counter[str] = Counter()
        self._lookups = Lookups(tier_type, self._there)
        self._threads = {
            loads: ThreadPoolExecutor(THREADS, f"kvatlas_{'load' if loads else 'store'}")
            for loads in (True, False)
        }
        self._running: dict[int, tuple[Any, Future[JobResult]]] = {}
        self._waiting: Counter[bool] = Counter()
        self._not_taken: list[Any] = []

    @property
    def counts(self) -> Counter[str]:
        """What did not happen, by reason."""
        return self._client.counts

    # -- from the scheduler's thread ------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """vLLM's own way: chunks come once, when they are computed."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """What is known of a chunk; what is not will be asked at the end of the step."""
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        """Ask for what this step wanted to know."""
        self._lookups.flush()

    def on_request_finished(self, req_context: Any) -> None:
        """What was known for this request is forgotten."""
        self._lookups.cleanup(req_context.req_id)

    def submit_store(self, job_metadata: Any) -> None:
        """Save rows of the CPU tier, soon or never."""
        self._submit(job_metadata, self._store)

    def submit_load(self, job_metadata: Any) -> None:
        """Fill rows of the CPU tier."""
        self._submit(job_metadata, self._load)

    def _submit(self, job: Any, do: Callable[[Any], JobResult]) -> None:
        if self._waiting[job.is_promotion] >= JOBS_MAX:
            self._count(job, "busy", len(job.keys))
            self._not_taken.append(job)
            return
        self._waiting[job.is_promotion] += 1
        future = self._threads[job.is_promotion].submit(self._done, job, do)
        self._running[job.job_id] = job, future

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Of all that ended since. Chunks that could not be loaded are misses from now on: vLLM
        would ask for them again and again."""
        over = [(job, JobResult(job.job_id, False)) for job in self._not_taken]
        self._not_taken = []
        for job, future in [pair for pair in self._running.values() if pair[1].done()]:
            del self._running[job.job_id]
            self._waiting[job.is_promotion] -= 1
            over.append((job, future.result()))
        for job, result in over:
            if job.is_promotion and not result.success:
                came = set(result.successful_keys or ())
                self._lookups.mark_miss([key for key in job.keys if key not in came])
        return [result for _, result in over]

    def drain_jobs(self) -> None:
        """Until nothing touches the CPU tier any more: all jobs end by their deadlines."""
        wait([future for _, future in self._running.values()])

    def shutdown(self) -> None:
        """The agent takes back what it held."""
        self._client.close()  # what still waits for an answer gets none
        self._lookups.shutdown()
        for threads in self._threads.values():
            threads.shutdown(cancel_futures=True)
        self._rows.release()

    # -- metrics --------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """In vLLM's own exporter."""
        text = "What kvatlas's tier did not do, by reason: chunks, and ends of its connection."
        return {NOT_DONE: OffloadingCounterMetadata(text, labelnames=("reason",))}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call."""
        now = Counter(dict(self.counts))
        new = now - self._told
        self._told = now
        if not new:
            return None
        stats = OffloadingConnectorStats()
        for reason, number in new.items():
            stats.increase_counter(NOT_DONE, number, (reason,))
        return stats

    # -- from other threads ---------------------------------------------------------------------

    def _there(self, keys: Sequence[bytes]) -> list[bool]:
        found: list[bool] = []
        for batch in _batches(keys, LOOK_BATCH):
            there = set(self._client.look(_names(batch), 0, each=True).points)
            found += [i + 1 in there for i in range(len(batch))]
        return found

    def _done(self, job: Any, do: Callable[[Any], JobResult]) -> JobResult:
        try:
            return do(job)
        except Exception:  # the engine must not end of it
            log.exception("kvatlas: a job of %d chunks failed", len(job.keys))
            self._count(job, "failed", len(job.keys))
            return JobResult(job.job_id, False)

    def _store(self, job: Any) -> JobResult:
        started, saved = time.monotonic(), 0
        rows = list(zip(job.keys, job.chunk_ids, strict=True))
        for batch in _batches(rows, BATCH):
            keys = [key for key, _ in batch]
            parts_of = partial(self._parts_of, batch)
            self._client.give(_names(keys), 0, (), parts_of)
            saved += sum(self._there(keys))
        if missing := len(rows) - saved:
            self._count(job, "failed", missing)
        return self._result(job, saved, None, started)

    def _load(self, job: Any) -> JobResult:
        started = time.monotonic()
        came: list[bytes] = []
        rows = list(zip(job.keys, job.chunk_ids, strict=True))
        for batch in _batches(rows, BATCH):
            names = _names(key for key, _ in batch)
            taken = self._client.take(names, 0, Part.BODY)
            if taken is None:
                continue
            here = [key for i, (key, row) in enumerate(batch) if taken.read(i, 0, [self._row(row)])]
            taken.release(used=bool(here))
            came += here
        if missing := len(rows) - len(came):
            self._count(job, "failed", missing)
        return self._result(job, len(came), came, started)

    def _parts_of(self, rows: Sequence[Any], part: Part, index: int) -> list[memoryview]:
        return [self._row(rows[index][1])]

    def _row(self, chunk_id: int) -> memoryview:
        begin = int(chunk_id) * self.block_size_bytes
        return self._rows[begin : begin + self.block_size_bytes]

    def _result(
        self, job: Any, count: int, came: Collection[bytes] | None, started: float
    ) -> JobResult:
        return JobResult(
            job.job_id,
            count == len(job.keys),
            came or None,
            time.monotonic() - started,
            count * self.block_size_bytes,
        )

    def _count(self, job: Any, what: str, chunks: int) -> None:
        self._client.count(f"{'load' if job.is_promotion else 'store'}_{what}", chunks)


def _batches(things: Sequence[_T], count: int) -> Iterator[Sequence[_T]]:
    return (things[at : at + count] for at in range(0, len(things), count))


def _names(keys: Iterable[bytes]) -> bytes:
    """A chunk's key is a hash of tokens and the number of its group: both go into its name."""
    return b"".join(hashlib.sha256(key).digest() for key in keys)


def _checked(vllm_config: Any) -> Any:
    """The engine's configuration. Raises EngineError for what is not supported."""
    if vllm_config is None:
        raise EngineError(
            "kvatlas: vLLM's own OffloadingConnector does not tell a tier the revision and"
            ' overrides of what it serves: give "kv_connector": "KvatlasTieringConnector" and'
            ' "kv_connector_module_path": "kvatlas.connectors.vllm_tier"'
        )
    check(vllm_config)
    names = vllm_config.cache_config.prefix_caching_hash_algo
    if not names.startswith("sha256"):
        raise EngineError(
            f"kvatlas: {names} may give two prompts one name: give"
            " --prefix-caching-hash-algo sha256"
        )
    return vllm_config


def _hello(vllm_config: Any, spec: Any, settings: Settings, row_bytes: int) -> wire.Hello:
    model = vllm_config.model_config
    return wire.Hello(
        wire.VERSION,
        name_of(model),
        names_served(model),
        config_of(model),
        "vllm",
        __version__,
        f"{spec.config.model.dtype} {model.dtype}",
        max(spec.tokens_per_block) * spec.blocks_per_chunk,
        settings.weights_digest,
        vllm_config.cache_config.prefix_caching_hash_algo,
        settings.name,
        (wire.PoolInfo("chunk", _form(spec.config), row_bytes, trailing=False),),
        variant=variant_of(model),
    )


def _form(config: Any) -> str:
    """How the bytes of a row lie."""
    ranks = config.parallel
    told = {
        "groups": [
            [g.group_id, g.tokens_per_block, len(g.layer_names), _digest(g.layer_names)]
            for g in config.groups
        ],
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "bytes_per_block": config.worker_kv_bytes_per_block,
        "ranks": [ranks.world_size, ranks.tp_size, ranks.pp_size, ranks.pcp_size, ranks.dcp_size],
        "replicated": config.replicated_layout,
        "canonical": config.canonical_layout,
        "layout": config.kv_cache_layout,
    }
    return json.dumps(told, sort_keys=True, default=str)


def _digest(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
