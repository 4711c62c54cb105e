"""What one engine counts of itself: its /metrics page read, and the difference of two readings.

Names as in vLLM 0.32 (`v1/metrics/loggers.py`) and SGLang 0.5.23 (`observability/
metrics_collector.py`, served with ``--enable-metrics``). What an engine does not tell is None,
never 0.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from kvatlas.errors import EngineError
from kvatlas.service.http_client import HttpClient, HttpError
from kvatlas.service.probe import ANSWER_BYTES_MAX, figure, samples

# Ranks that work on the same tokens. Each may count them: they are counted once.
_SAME_TOKENS = ("tp_rank", "pp_rank", "moe_ep_rank")
_NAMES = (
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:prompt_tokens_cached_by_source_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "sglang:prompt_tokens_total",
    "sglang:cached_tokens_total",
    "sglang:generation_tokens_total",
    "sglang:num_retracted_requests_total",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "process_start_time_seconds",
)
_SUMS = (
    "prompt_tokens",
    "computed_tokens",
    "local_hit_tokens",
    "external_hit_tokens",
    "generation_tokens",
    "preemptions",
)


class Counters(msgspec.Struct, frozen=True):
    """Over all data-parallel ranks. Counts are since the engine's start, or since another reading;
    ``running``, ``waiting`` and ``kv_usage`` (0 to 1, of the fullest rank) are of now. None: the
    engine does not tell.

    ``local_hit_tokens``: prompt tokens found in the engine's own device memory. Those found
    elsewhere (its host memory, a connector, another engine) are ``external_hit_tokens``;
    ``external_by_source`` has them under the engine's own names: vLLM's host, disk, p2p and
    external_unspecified, SGLang's host and storage. vLLM counts these when it admits a request,
    and the others when its prompt is computed: a request in between is in one and not the other.
    """

    engine: Literal["", "vllm", "sglang"] = ""  # "": the page has no metric of either
    started: str = ""  # the process's start time, as the page has it
    prompt_tokens: int | None = None
    computed_tokens: int | None = None
    local_hit_tokens: int | None = None
    external_hit_tokens: int | None = None
    external_by_source: dict[str, int] | None = None
    generation_tokens: int | None = None
    preemptions: int | None = None
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None

    @property
    def hit_tokens(self) -> int | None:
        """Prompt tokens that were not computed, wherever they were found."""
        if self.prompt_tokens is not None and self.computed_tokens is not None:
            return self.prompt_tokens - self.computed_tokens
        if self.local_hit_tokens is None or self.external_hit_tokens is None:
            return None
        return self.local_hit_tokens + self.external_hit_tokens

    def since(self, before: Counters) -> Counters:
        """What was counted after ``before``, a reading of the same engine. Raises EngineError when
        the engine was started anew in between: then nobody knows."""
        if before.started != self.started and before.started and self.started:
            raise EngineError("the engine was started anew between two readings of its counters")
        changes: dict[str, int | None] = {}
        for name in _SUMS:
            changes[name] = change = _change(getattr(before, name), getattr(self, name))
            if change is not None and change < 0:
                raise EngineError(f"{name} went back: the engine was started anew in between")
        sources = None
        if self.external_by_source is not None and before.external_by_source is not None:
            was = before.external_by_source
            sources = {k: v - was.get(k, 0) for k, v in self.external_by_source.items()}
        return msgspec.structs.replace(self, external_by_source=sources, **changes)


async def read(client: HttpClient, url: str, deadline_s: float) -> Counters:
    """One reading of the engine at ``url``. Raises EngineError where it has no such page, does not
    answer, or the page tells nothing of an engine."""
    page = f"{url.rstrip('/')}/metrics"
    try:
        answer = await client.request("GET", page, timeout_s=deadline_s, size_max=ANSWER_BYTES_MAX)
    except HttpError as error:
        raise EngineError(f"{page}: {error}") from error
    if answer.status != 200:
        mend = "start SGLang with --enable-metrics; vLLM has the page unless told otherwise"
        raise EngineError(f"{page}: status {answer.status}: {mend}")
    found = counters(answer.body.decode("utf-8", "replace"))
    if not found.engine:
        raise EngineError(f"{page}: has no metric of vLLM or SGLang: give the engine's own URL")
    return found


def counters(page: str) -> Counters:
    """What a metrics page tells. A figure that is none takes its whole count with it: None."""
    sums: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    started = ""
    for name, labels, text in samples(page, _NAMES):
        if name == "process_start_time_seconds":
            started = text
            continue
        one = tuple(sorted((k, v) for k, v in labels.items() if k not in _SAME_TOKENS))
        values = sums.setdefault(name, {})
        value = figure(text)
        # NaN stays, whatever else is counted there.
        values[one] = value if math.isnan(value) else max(values.get(one, value), value)
    told = _Told(sums)
    if "sglang:" in page:
        return msgspec.structs.replace(_sglang(told), started=started)
    if "vllm:" in page:
        return msgspec.structs.replace(_vllm(told), started=started)
    return Counters(started=started)


class _Told:
    """A page's figures by name, as sums over ranks."""

    def __init__(self, sums: dict[str, dict[tuple[tuple[str, str], ...], float]]) -> None:
        self._sums = sums

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def total(self, name: str) -> int | None:
        return _whole(sum(self._sums[name].values())) if name in self else None

    def highest(self, name: str) -> float | None:
        values = self._sums.get(name, {}).values()
        return None if not values or any(map(math.isnan, values)) else max(values)

    def by(self, label: str, name: str) -> dict[str, int] | None:
        """Sums by the value of a label; None where one of them is no figure."""
        found: dict[str, float] = {}
        for labels, value in self._sums.get(name, {}).items():
            key = dict(labels).get(label, "")
            found[key] = found.get(key, 0.0) + value
        whole = {key: _whole(value) for key, value in found.items()}
        told = {key: value for key, value in whole.items() if value is not None}
        return told if told and len(told) == len(whole) else None


def _vllm(told: _Told) -> Counters:
    name = "vllm:prompt_tokens_by_source_total"
    by_source = told.by("source", name) or {}
    local, external = (by_source.get(s) for s in ("local_cache_hit", "external_kv_transfer"))
    if name not in told:  # before vLLM had it
        local = told.total("vllm:prefix_cache_hits_total")
        external = told.total("vllm:external_prefix_cache_hits_total")
    sources = told.by("source", "vllm:prompt_tokens_cached_by_source_total")
    if sources is not None:
        sources.pop("device", None)
    return Counters(
        engine="vllm",
        prompt_tokens=told.total("vllm:prompt_tokens_total"),
        computed_tokens=by_source.get("local_compute"),
        local_hit_tokens=local,
        external_hit_tokens=external,
        external_by_source=sources,
        generation_tokens=told.total("vllm:generation_tokens_total"),
        preemptions=told.total("vllm:num_preemptions_total"),
        running=told.total("vllm:num_requests_running"),
        waiting=told.total("vllm:num_requests_waiting"),
        kv_usage=told.highest("vllm:kv_cache_usage_perc"),
    )


def _sglang(told: _Told) -> Counters:
    """SGLang names a counter from its first count on (seen on 0.5.23): one that is not there on a
    page with its other metrics counted nothing yet."""

    def total(name: str) -> int | None:
        return told.total(name) if name in told else 0

    prompt = total("sglang:prompt_tokens_total")
    name = "sglang:cached_tokens_total"
    hits = told.by("cache_source", name) if name in told else {}
    local: int | None = None
    external: dict[str, int] | None = None
    computed: int | None = None
    if hits is not None:
        computed = None if prompt is None else prompt - sum(hits.values())
        if "total" not in hits:  # an engine that does not tell its sources from each other
            local = hits.get("device", 0)
            external = {name: count for name, count in hits.items() if name != "device"}
    return Counters(
        engine="sglang",
        prompt_tokens=prompt,
        computed_tokens=computed,
        local_hit_tokens=local,
        external_hit_tokens=None if external is None else sum(external.values()),
        external_by_source=external,
        generation_tokens=total("sglang:generation_tokens_total"),
        preemptions=total("sglang:num_retracted_requests_total"),
        running=told.total("sglang:num_running_reqs"),
        waiting=told.total("sglang:num_queue_reqs"),
        kv_usage=told.highest("sglang:token_usage"),
    )


def _whole(value: float) -> int | None:
    return None if math.isnan(value) else round(value)


def _change(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
