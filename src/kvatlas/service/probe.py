"""What an engine says of itself over HTTP: its description, its load, whether it lives and sleeps.

vLLM 0.32 tells where its KV events are (`GET /kv_event_sources`), SGLang 0.5.23 under
``kv_events`` of `GET /server_info`. The stub engine answers like vLLM.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvatlas.config import WorkerConfig
from kvatlas.core.transports import Moved
from kvatlas.errors import EngineError
from kvatlas.service.feed import Source
from kvatlas.service.http_client import HttpClient, Response

ANSWER_BYTES_MAX = 8 << 20
RANKS_MAX = 1024  # of one engine
_FIGURE_MAX = 1e15  # no gauge or counter of an engine gets there: what is above, or NaN, is noise
_MOVED_MAX = 1e21  # nor do bytes
_WILDCARDS = ("*", "0.0.0.0", "::", "[::]")


class Adapter(msgspec.Struct, frozen=True, order=True):
    """A LoRA adapter that the engine serves under a name of its own."""

    name: str
    base: str
    path: str = ""


class Description(msgspec.Struct, frozen=True):
    """What does not change while an engine lives, but for its adapters. Unknown: "" or 0.

    ``life`` differs between two starts of the engine where it tells us anything of the kind.
    ``facts`` are further texts by name, as the engine reports them (its cache configuration).
    ``draft``: it guesses tokens ahead (EAGLE, MTP, DSpark or otherwise).
    """

    engine: str
    version: str = ""
    models: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    model_path: str = ""
    block_tokens: int = 0
    context_tokens: int = 0
    kv_dtype: str = ""
    sources: tuple[tuple[int, Source], ...] = ()  # by data-parallel rank
    life: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    draft: bool = False
    tensor_parallel: int = 0


class Load(msgspec.Struct, frozen=True):
    """One rank's load, as the engine counts it. -1 where it does not tell."""

    running: int = -1
    waiting: int = -1
    kv_usage: float = -1.0  # 0 to 1, of what running requests use
    used_tokens: int = -1  # the same, uncut: SGLang tells its share in two digits


class Pulse(msgspec.Struct, frozen=True):
    """One look at a living engine. ``moved``: KV that it handed over or took over, as it counts,
    by rank; ``malformed``: figures of its metrics page that are none."""

    loads: dict[int, Load]
    asleep: bool = False
    started: str = ""  # the process's start time
    work: float = -1.0  # tokens processed since it started: never goes back
    moved: dict[int, Moved] = {}
    malformed: int = 0

    def gets_on(self, before: Pulse) -> bool:
        """Whether the engine computed anything since the look ``before``, by the tokens that it
        counts; requests come to one that stands still, too. One that counts none is taken at its
        health."""
        now, then = self._counts(), before._counts()
        return now == (-1.0, {}) or now != then

    def _counts(self) -> tuple[float, dict[int, int]]:
        used = {rank: load.used_tokens for rank, load in self.loads.items()}
        return self.work, {rank: count for rank, count in used.items() if count >= 0}


async def describe(client: HttpClient, worker: WorkerConfig, timeout_s: float) -> Description:
    """Raises EngineError when the engine does not answer or is not what it was said to be."""
    base = worker.url.rstrip("/")
    models, adapters, path, context = _models(
        await _get_json(client, f"{base}/v1/models", timeout_s), base
    )
    if worker.engine == "sglang":
        info = await _optional_json(client, f"{base}/server_info", timeout_s)
        if not isinstance(info, dict):
            info = await _optional_json(client, f"{base}/get_server_info", timeout_s)
        found = _sglang(info if isinstance(info, dict) else {}, worker)
    else:
        version = await _optional_json(client, f"{base}/version", timeout_s)
        told = None
        if worker.events == "auto":
            told = await _optional_json(client, f"{base}/kv_event_sources", timeout_s)
        metrics = await _optional_text(client, f"{base}/metrics", timeout_s)
        found = _vllm(version, told, metrics, worker)
    return msgspec.structs.replace(
        found,
        models=models,
        adapters=adapters,
        model_path=found.model_path or path,
        context_tokens=context,
    )


async def pulse(client: HttpClient, worker: WorkerConfig, timeout_s: float) -> Pulse:
    """Raises EngineError when the engine is not healthy."""
    base = worker.url.rstrip("/")
    health = await _get(client, f"{base}/health", timeout_s)
    if health.status != 200:
        raise EngineError(f"{base}/health: status {health.status}")
    metrics = await _optional_text(client, f"{base}/metrics", timeout_s)
    seen = _pulse(metrics)
    if worker.engine == "sglang":
        loads = _sglang_loads(await _optional_json(client, f"{base}/v1/loads", timeout_s))
        if loads:
            seen = msgspec.structs.replace(seen, loads=loads)
    return seen


# -- addresses ------------------------------------------------------------------------------------


def source_of(url: str, endpoint: str, replay: str, rank: int = 0) -> Source:
    """The stream of an engine at ``url`` that reports ``endpoint`` and ``replay``.

    Wildcard hosts mean the engine's own host; it binds those and Unix sockets, and connects to
    every other address (vLLM `ZmqEventPublisher._is_bind_endpoint`), unless it had bound it
    before it reported it. ``rank`` is added to TCP ports.
    """
    bind = None if _concrete(endpoint) else False
    return Source(_at(endpoint, url, rank), _at(replay, url, rank) if replay else "", bind)


def configured_source(worker: WorkerConfig, rank: int) -> Source:
    """The operator's own ``events`` and ``replay``: a wildcard host is an address of ours, to
    which the engine connects; everything else is one that we connect to."""
    ours = worker.events.startswith("tcp://") and not _concrete(worker.events)
    endpoint = _shift(worker.events, rank) if ours else _at(worker.events, worker.url, rank)
    return Source(endpoint, _at(worker.replay, worker.url, rank) if worker.replay else "", ours)


def _concrete(endpoint: str) -> bool:
    return endpoint.startswith("tcp://") and _host_port(endpoint)[0] not in _WILDCARDS


def _host_port(endpoint: str) -> tuple[str, str]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, port


def _at(endpoint: str, url: str, rank: int) -> str:
    endpoint = _shift(endpoint, rank)
    if not endpoint.startswith("tcp://"):
        return endpoint
    host, port = _host_port(endpoint)
    if host in _WILDCARDS:
        host = urlsplit(url).hostname or "127.0.0.1"
        host = f"[{host}]" if ":" in host else host
    return f"tcp://{host}:{port}"


def _shift(endpoint: str, rank: int) -> str:
    host, port = _host_port(endpoint)
    if not rank or not endpoint.startswith("tcp://") or _count(port) < 0:
        return endpoint
    return f"tcp://{host}:{int(port) + rank}"


# -- answers --------------------------------------------------------------------------------------


def _models(answer: Any, base: str) -> tuple[tuple[str, ...], tuple[Adapter, ...], str, int]:
    names: list[str] = []
    adapters: list[Adapter] = []
    path, context = "", 0
    cards = answer.get("data") if isinstance(answer, dict) else None
    for card in cards if isinstance(cards, list) else []:
        if not isinstance(card, dict) or not isinstance(card.get("id"), str):
            continue
        parent, root = card.get("parent"), card.get("root")
        root = root if isinstance(root, str) else ""
        if isinstance(parent, str) and parent:
            adapters.append(Adapter(card["id"], parent, root))
            continue
        names.append(card["id"])
        path = path or root
        length = card.get("max_model_len")
        context = context or (length if isinstance(length, int) and length > 0 else 0)
    if not names:
        raise EngineError(f"{base}/v1/models names no model")
    return tuple(names), tuple(sorted(adapters)), path, context


def _vllm(version: Any, told: Any, metrics: str, worker: WorkerConfig) -> Description:
    facts = _labels(metrics, "vllm:cache_config_info")
    number = facts.get("block_size", "")
    sources: list[tuple[int, Source]] = []
    for rank, config in told.items() if isinstance(told, dict) else ():
        endpoint = config.get("endpoint") if isinstance(config, dict) else None
        if isinstance(endpoint, str) and 0 <= _count(str(rank)) < RANKS_MAX:
            replay = config.get("replay_endpoint")
            replay = replay if isinstance(replay, str) else ""
            sources.append((int(rank), source_of(worker.url, endpoint, replay)))
    text = version.get("version") if isinstance(version, dict) else None
    return Description(
        engine=worker.engine,
        version=text if isinstance(text, str) else "",
        block_tokens=max(0, _count(number)),
        kv_dtype=facts.get("cache_dtype", ""),
        sources=_sources(worker, sources),
        facts=tuple(sorted(facts.items())),
        draft="vllm:spec_decode_num_drafts" in metrics,  # registered only where it is configured
    )


def _sglang(info: Mapping[str, Any], worker: WorkerConfig) -> Description:
    told = info.get("kv_events")
    sources: list[tuple[int, Source]] = []
    block = info.get("page_size")
    if isinstance(told, dict) and worker.events == "auto":
        block = told.get("block_size", block)
        host, port = told.get("endpoint_host"), told.get("endpoint_port_base")
        replay_port = told.get("replay_endpoint_port_base")
        ranks = told.get("dp_size", 1)
        if isinstance(port, int) and isinstance(ranks, int) and 0 < ranks <= RANKS_MAX:
            replay = f"tcp://*:{replay_port}" if isinstance(replay_port, int) else ""
            endpoint = f"tcp://{host}:{port}"
            sources = [(r, source_of(worker.url, endpoint, replay, r)) for r in range(ranks)]
    texts = {name: info.get(name) for name in ("version", "kv_cache_dtype", "model_path")}
    known = {name: value for name, value in texts.items() if isinstance(value, str)}
    # Neither stays the same over a restart: seconds that each phase took, and a random seed.
    life = [info.get("startup_time"), info.get("random_seed")] if info else ""
    return Description(
        engine=worker.engine,
        version=known.get("version", ""),
        model_path=known.get("model_path", ""),
        block_tokens=block if isinstance(block, int) and block > 0 else 0,
        kv_dtype=known.get("kv_cache_dtype", ""),
        sources=_sources(worker, sources),
        life=msgspec.json.encode(life).decode() if life else "",
        draft=bool(info.get("speculative_algorithm")),
        tensor_parallel=_positive(info.get("tp_size")),
    )


def _positive(value: object) -> int:
    """A count as told, 0 where it is none."""
    return value if isinstance(value, int) and value > 0 else 0


def _sources(
    worker: WorkerConfig, told: Iterable[tuple[int, Source]]
) -> tuple[tuple[int, Source], ...]:
    if worker.events == "auto":
        return tuple(sorted(told, key=lambda item: item[0]))
    if not worker.events:
        return ()
    return tuple((rank, configured_source(worker, rank)) for rank in range(worker.dp_ranks))


def _sglang_loads(answer: Any) -> dict[int, Load]:
    loads: dict[int, Load] = {}
    rows = answer.get("loads") if isinstance(answer, dict) else None
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict):
            values = [row.get(name, -1) for name in ("dp_rank", "num_running_reqs")]
            values += [row.get(name, -1) for name in ("num_waiting_reqs", "token_usage")]
            values.append(row.get("num_used_tokens", -1))
            if all(isinstance(v, int | float) and abs(v) <= _FIGURE_MAX for v in values):
                rank, running, waiting, usage, used = values
                loads[int(rank)] = Load(int(running), int(waiting), float(usage), int(used))
    return loads


# -- metrics --------------------------------------------------------------------------------------

_PULSE = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:engine_sleep_state",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "sglang:num_used_tokens",
    "sglang:prompt_tokens_total",
    "sglang:generation_tokens_total",
    "process_start_time_seconds",
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def samples(metrics: str, names: Iterable[str]) -> Iterator[tuple[str, dict[str, str], str]]:
    """The lines of a Prometheus page that have one of these names: name, labels, the figure as it
    stands there (`figure` reads it)."""
    either = "|".join(map(re.escape, names))
    # By the newline before it: where a line begins (?m) is asked at every character of the page.
    lines = re.findall(rf"\n({either})(?:\{{(.*)\}})? (\S+)", "\n" + metrics)
    for name, labels, text in lines:
        yield name, dict(_LABEL.findall(labels)), text


def figure(text: str, most: float = _FIGURE_MAX) -> float:
    """A figure of such a page; NaN for what is none, or beyond what an engine can count."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if abs(value) <= most else math.nan


def _pulse(metrics: str) -> Pulse:
    running: dict[int, float] = {}
    waiting: dict[int, float] = {}
    usage: dict[int, float] = {}
    used: dict[int, float] = {}
    started, work, asleep = "", -1.0, False
    moved, malformed = _moved(metrics)
    for name, told, text in samples(metrics, _PULSE):
        value = figure(text)
        if math.isnan(value):
            malformed += 1
            continue
        rank = _rank(told)
        kind = name.partition(":")[2]
        if kind in ("num_requests_running", "num_running_reqs"):
            running[rank] = max(running.get(rank, 0.0), value)
        elif kind in ("num_requests_waiting", "num_queue_reqs"):
            waiting[rank] = max(waiting.get(rank, 0.0), value)
        elif kind in ("kv_cache_usage_perc", "token_usage"):
            usage[rank] = max(usage.get(rank, 0.0), value)
        elif kind == "num_used_tokens":
            used[rank] = max(used.get(rank, 0.0), value)
        elif kind == "engine_sleep_state":
            asleep = asleep or (told.get("sleep_state") != "awake" and value > 0)
        elif name == "process_start_time_seconds":
            started = text
        else:
            work = max(work, 0.0) + value
    loads = {
        rank: Load(
            int(running.get(rank, -1)),
            int(waiting.get(rank, -1)),
            usage.get(rank, -1.0),
            int(used.get(rank, -1)),
        )
        for rank in sorted({*running, *waiting, *usage})
    }
    counts = {r: moved.get(r, Moved()) for r in {*loads, *moved}}
    told_of = {rank: count for rank, count in counts.items() if count is not None}
    return Pulse(loads, asleep, started, work, told_of, malformed)


# What becomes of an engine's count in `Moved`, and its unit. vLLM's NixlConnector counts where the
# state is taken over, SGLang where it is handed over. vLLM's Mooncake connector exports nothing.
_MOVED = {
    "vllm:nixl_bytes_transferred_sum": ("size_bytes", 1.0),
    "vllm:nixl_bytes_transferred_count": ("transfers", 1.0),
    "vllm:nixl_xfer_time_seconds_sum": ("seconds", 1.0),
    "vllm:nixl_num_failed_transfers_total": ("failures", 1.0),
    "sglang:kv_transfer_total_mb_sum": ("size_bytes", float(1 << 20)),
    "sglang:kv_transfer_total_mb_count": ("transfers", 1.0),
    "sglang:kv_transfer_latency_ms_sum": ("seconds", 1e-3),
    "sglang:num_transfer_failed_reqs_total": ("failures", 1.0),
}


def _moved(metrics: str) -> tuple[dict[int, Moved | None], int]:
    """By rank, and how many of the figures are none; None for their ranks: half a count would say
    something else."""
    found: dict[int, dict[str, float]] = {}
    wrong: dict[int, None] = {}
    malformed = 0
    for name, labels, text in samples(metrics, _MOVED):
        rank = _rank(labels)
        field, unit = _MOVED[name]
        value = figure(text, _MOVED_MAX) * unit
        if not 0 <= value <= _MOVED_MAX:
            wrong[rank] = None
            malformed += 1
            continue
        counts = found.setdefault(rank, {})
        counts[field] = counts.get(field, 0.0) + value
    return {rank: Moved(**counts) for rank, counts in found.items()} | wrong, malformed


def _rank(labels: Mapping[str, str]) -> int:
    return max(0, _count(labels.get("engine") or labels.get("dp_rank") or "0"))


def _count(text: str) -> int:
    """A whole number as engines write them; -1 for anything else."""
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else -1


def _labels(metrics: str, name: str) -> dict[str, str]:
    found = re.search(rf"^{re.escape(name)}\{{(.*)\}} ", metrics, re.MULTILINE)
    return dict(_LABEL.findall(found[1])) if found else {}


# -- HTTP -----------------------------------------------------------------------------------------


async def _get(client: HttpClient, url: str, timeout_s: float) -> Response:
    return await client.request("GET", url, timeout_s=timeout_s, size_max=ANSWER_BYTES_MAX)


async def _get_json(client: HttpClient, url: str, timeout_s: float) -> Any:
    answer = await _get(client, url, timeout_s)
    if answer.status != 200:
        raise EngineError(f"{url}: status {answer.status}")
    return _json(answer.body, url)


async def _optional_json(client: HttpClient, url: str, timeout_s: float) -> Any:
    """None where the engine has no such page."""
    answer = await _get(client, url, timeout_s)
    return _json(answer.body, url) if answer.status == 200 else None


async def _optional_text(client: HttpClient, url: str, timeout_s: float) -> str:
    answer = await _get(client, url, timeout_s)
    return answer.body.decode("utf-8", "replace") if answer.status == 200 else ""


def _json(body: bytes, url: str) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(f"{url}: the answer is no JSON: {error}") from error
