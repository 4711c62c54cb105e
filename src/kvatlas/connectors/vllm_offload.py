"""vLLM's KV connector to its node's agent: saves what was computed, resumes from what is there.

For vLLM 0.32, in its processes. One option turns it on::

    --kv-transfer-config '{"kv_connector": "KvatlasConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "kvatlas.connectors.vllm_offload",
      "kv_connector_extra_config": {"socket": "/run/kvatlas/agent.sock"}}'

The scheduler's side asks and decides; the worker's side copies blocks from and to the arena. vLLM
cannot take a load back once it was promised, not for models with several groups of blocks. So
nothing is promised before the agent has all of it verified in the arena and holds it there; until
then the request waits outside of the batch, up to ``load_deadline_s``, and is computed after that.
State that the agent wants is copied out in the step that computes it, while its windows are there.

Settings beside ``socket``: ``load_deadline_s`` (10), ``answer_s`` (0.05: how long a step may wait
for the agent), ``weights_digest``, ``name``.
"""

from __future__ import annotations

import json
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm import __version__
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvatlas.connectors.agent_client import AgentClient, Settings, settings_of
from kvatlas.connectors.vllm_copies import Block, Copier, Copies, Copy, Results, Share
from kvatlas.connectors.vllm_greedy import about
from kvatlas.connectors.vllm_identity import check, config_of, name_of, names_served, variant_of
from kvatlas.connectors.vllm_probe import Part, layers_of, parts_of
from kvatlas.core.units import Part as Which
from kvatlas.errors import EngineError
from kvatlas.service import agent_wire as wire

log = init_logger(f"vllm.{__name__}")  # vLLM shows what is below its own name

TELL_S = 60.0
ASKS_MAX = 8  # of one request, each with all of its tokens

_SOURCES = {"dram": CacheHitSource.HOST, "disk": CacheHitSource.DISK, "peer": CacheHitSource.P2P}


@dataclass
class Tracked:
    """A request between its first look at the cache and its end."""

    request: Any  # the engine's own, which has the tokens that it gets
    tokens: array[int] = field(default_factory=lambda: array("I"))
    ids: list[list[int]] = field(default_factory=list)
    resumed: int = 0
    told: int = 0  # grid positions up to which the agent knows of it
    given_up: bool = False
    asks: int = 0
    asked: int | None = None  # what the engine had when we asked how far it can be resumed


class KvatlasConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises EngineError where this engine cannot be served, and says why."""
        super().__init__(vllm_config, role, kv_cache_config)
        _check(vllm_config, kv_cache_config)
        given = self._kv_transfer_config.kv_connector_extra_config
        settings = settings_of(given, answer_s=0.05)
        self._path = Path(settings.socket)
        self._deadline_s = settings.load_deadline_s
        self._groups = kv_cache_config.kv_cache_groups
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        share = _share(vllm_config, kv_cache_config) if role.name == "WORKER" else Share()
        self._copier = Copier(self._path, self._groups, share)  # the rest decides
        self.counts: Counter[str] = Counter()
        self._told: Counter[str] = Counter()
        self._tell_again = 0.0
        self._copies = Copies()
        self._tracked: dict[str, Tracked] = {}
        self._ordered: dict[int, int] = {}  # units of orders that are carried out in this step
        self._client: AgentClient | None = None
        if role.name == "SCHEDULER":
            self._start(vllm_config, settings)

    def _start(self, vllm_config: Any, settings: Settings) -> None:
        cut = 1 if _replicated(self._kv_cache_config, self._ranks) else self._ranks
        hello = _hello(vllm_config, settings, cut)
        client = AgentClient(self._path, hello, answer_s=settings.answer_s)
        welcome = client.welcome
        if welcome is None:
            raise EngineError(f"no agent answers at {self._path}: start `kvatlas agent` first")
        self._client = client
        self._described = [msgspec.structs.asdict(part) for part in welcome.parts]
        self._grid = welcome.grid_tokens
        self._minimal = welcome.minimal
        self._mapped = welcome.arena  # by all workers, else they would have ended the engine
        try:
            layers_of(self._described, self._groups)
            self._parts = parts_of(self._described, self._groups)
        except ValueError as error:
            raise EngineError(f"this engine's blocks are not those described: {error}") from error
        if any(self._grid % part.block_tokens for part in self._parts):
            raise EngineError(f"blocks of this engine do not fit a grid of {self._grid} tokens")

    @property
    def _agent(self) -> AgentClient:
        assert self._client is not None, "the worker's side does not ask"
        return self._client

    # -- the scheduler's side: loads ------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that are verified and held for this request; None: not known yet."""
        id = request.request_id
        tracked = self._tracked.get(id)
        if tracked is None:
            tracked = self._tracked[id] = Tracked(request)
            tracked.given_up = _odd(request)
            if tracked.given_up:
                self.counts["requests_left_alone"] += 1
        if request.num_preemptions and not tracked.given_up:
            tracked.given_up = True  # not shown to be exact yet: it is computed again
            self.counts["preempted"] += 1
            self._agent.end(id)
        if tracked.given_up:
            return 0, False
        if self._agent.life not in ("", self._mapped):
            # A promise takes workers that can read where it lies. It may be saved, though.
            if tracked.asked is None:
                self._ask(tracked, num_computed_tokens)
            self._agent.cancel(id)
            self._agent.release(id, used=False)
            return 0, False
        if tracked.asked is None and not self._ask(tracked, num_computed_tokens):
            return 0, False
        staged = self._agent.staged(id)
        if staged is not None and not self._goes_on_from(staged, num_computed_tokens):
            # Nothing, or the engine has lost, meanwhile, what it had when we asked.
            if num_computed_tokens >= (tracked.asked or 0) or tracked.asks >= ASKS_MAX:
                return 0, False
            self.counts["asked_again"] += 1
            if not self._ask(tracked, num_computed_tokens):
                return 0, False
            staged = self._agent.staged(id)
        if staged is None:
            return (None if self._agent.waits(id) else 0), False
        position = staged.tokens
        if not self._goes_on_from(staged, num_computed_tokens) or position >= request.num_tokens:
            return 0, False
        if self._minimal and not _may_be_minimal(request, position, self._parts):
            self.counts["handed_over"] += 1
            return 0, False
        return max(0, position - num_computed_tokens), False

    def _ask(self, tracked: Tracked, num_computed_tokens: int) -> bool:
        """How far can it be resumed? False: there is nobody to ask."""
        request = tracked.request
        tracked.asked = num_computed_tokens
        tracked.asks += 1
        tracked.tokens = array("I", request.all_token_ids)
        salt, adapter = _names(request)
        return self._agent.want(
            request.request_id,
            tracked.tokens.tobytes(),
            num_computed_tokens,
            self._deadline_s,
            scope=salt,
            adapter=adapter,
        )

    def _goes_on_from(self, staged: wire.Staged, num_computed_tokens: int) -> bool:
        """Whether what is staged follows on what the engine has."""
        bodies = [p.index for p in staged.pieces if p.part == Which.BODY]
        return bool(bodies) and num_computed_tokens >= min(bodies) * self._grid

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its blocks: load, or give back what is held for it."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.given_up:
            return
        staged = self._agent.staged(request.request_id)
        ids = [list(group) for group in blocks.get_block_ids()]
        if not num_external_tokens:
            self._agent.release(request.request_id, used=False)
            return
        welcome = self._agent.welcome
        if staged is None or welcome is None:
            raise RuntimeError("the engine is to resume from what is not there any more")
        local = staged.tokens - num_external_tokens
        copies = []
        for piece in staged.pieces:
            if piece.part == Which.BODY and (piece.index + 1) * self._grid <= local:
                continue
            found = self._blocks(piece.part, piece.index, ids, local)
            if found is None:
                raise RuntimeError("the engine gave no block for what it is to resume from")
            copies.append(Copy(piece, found))
        bodies = sum(copy.piece.part == Which.BODY for copy in copies)
        if bodies * self._grid < num_external_tokens:
            raise RuntimeError("not all that the engine is to resume from is there")
        self._copies.load[request.request_id] = copies
        self._copies.load_arena = welcome.arena
        if self._minimal:
            self._leave_unfilled(staged.tokens, local, ids)

    def _leave_unfilled(self, position: int, local: int, ids: list[list[int]]) -> None:
        """What a minimal load does not fill is zeroed, and nobody finds it in the prefix cache,
        where it is since it was allocated and nobody has looked yet."""
        unfilled = [
            ((part.name, group), ids[group][i])
            for part in self._parts
            for group in part.groups
            for i in part.unfilled(position)
            if (i + 1) * part.block_tokens > local and ids[group][i]
        ]
        self._copies.zero += unfilled
        self._kv_cache_manager.evict_blocks({block for _, block in unfilled})

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """By the tiers that the agent named."""
        staged = self._agent.staged(request.request_id)
        found: Counter[CacheHitSource] = Counter()
        for tier, tokens in staged.tiers if staged is not None else ():
            found[_SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)] += tokens
        if sum(found.values()) != num_external_tokens:
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens}
        return dict(found)

    def _blocks(
        self, which: int, index: int, ids: list[list[int]], local: int = 0
    ) -> list[Block] | None:
        """Blocks of a unit in their order; 0 for those that end before ``local``. None: one of
        them is not there."""
        end = (index + 1) * self._grid
        found: list[Block] = []
        for part in self._parts:
            if (part.blocks is None) != (which == Which.BODY):
                continue
            size = part.block_tokens
            if which == Which.BODY:
                wanted = range(index * self._grid // size, end // size)
            else:
                wanted = part.needed(end, self._minimal)
            for group in part.groups:
                for i in wanted:
                    have = (i + 1) * size <= local
                    block = ids[group][i] if i < len(ids[group]) else 0
                    if not block and not have:
                        return None
                    found.append(((part.name, group), 0 if have else block))
        return found

    # -- the scheduler's side: saves ------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        """This step's copies: loads of requests that begin, and what the agent wants saved."""
        copies, self._copies = self._copies, Copies()
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            tracked = self._tracked.get(new.req_id)
            if tracked is not None:
                tracked.ids = [list(ids) for ids in new.block_ids]
                tracked.resumed = new.num_computed_tokens
                self._fill(new.req_id, tracked, new.num_computed_tokens, scheduled, copies)
        cached = scheduler_output.scheduled_cached_reqs
        for i, id in enumerate(cached.req_ids):
            tracked = self._tracked.get(id)
            if tracked is None or tracked.given_up:
                continue
            more = cached.new_block_ids[i]
            for ids, added in zip(tracked.ids, more or (), strict=False):
                ids.extend(added)
            self._fill(id, tracked, cached.num_computed_tokens[i], scheduled, copies)
        self._tell()
        life = self._agent.life
        if copies.load or copies.save or life not in ("", self._mapped):
            copies.parts = self._described
            copies.arena = life
        return copies

    def _tell(self) -> None:
        """The counts, in the log: nobody sees them otherwise."""
        counts = self.counts + self._agent.counts
        if counts != self._told and time.monotonic() >= self._tell_again:
            log.info("kvatlas, since the start: %s", dict(sorted(counts.items())))
            self._told, self._tell_again = counts, time.monotonic() + TELL_S

    def _fill(
        self, id: str, tracked: Tracked, start: int, scheduled: dict[str, int], copies: Copies
    ) -> None:
        """Tell the agent of grid positions that this step reaches, and take its orders."""
        if tracked.given_up or not tracked.ids:
            return
        known = tracked.request.all_token_ids
        tracked.tokens.extend(known[len(tracked.tokens) :])
        end = min(start + scheduled[id], len(tracked.tokens)) // self._grid
        if end <= tracked.told:
            return
        first = -(-start // self._grid)
        points = [
            position
            for position in range(max(1, first), end + 1)
            if self._blocks(Which.POINT, position - 1, tracked.ids) is not None
        ]
        prompt_tokens = tracked.request.num_prompt_tokens
        orders = self._agent.filled(
            wire.Filled(id, 0, b"", end, tuple(points), tracked.resumed, prompt_tokens),
            memoryview(tracked.tokens).cast("B"),
        )
        tracked.told = end
        for order in orders:
            pieces = []
            for piece in order.pieces:
                found = self._blocks(piece.part, piece.index, tracked.ids)
                if found is not None and (piece.index + 1) <= end:
                    pieces.append(Copy(piece, found))
            copies.save[order.op] = pieces
            self._ordered[order.op] = len(order.pieces)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the worker's side has done goes to the agent."""
        results = connector_output.kv_connector_worker_meta
        if not isinstance(results, Results):
            return
        whole = results.ranks == self._ranks
        if not whole:
            self.counts["ranks_missing"] += 1
        if results.mapped and whole:
            self._mapped = results.mapped
        for id in results.loaded if whole else ():
            self._agent.release(id, used=True)
        for op, sums in results.saved.items():
            there = tuple((name, checksum) for name, checksum in sums.items() if checksum)
            self.counts["not_copied"] += self._ordered.pop(op, 0) - len(there)
            self._agent.saved(op, there if whole else ())

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Its copies were made in its steps: nothing has to wait for them."""
        self._tracked.pop(request.request_id, None)
        self._agent.end(request.request_id)
        return False, None

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, of engines with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def shutdown(self) -> None:
        """The agent takes back what it held for this engine."""
        self._copier.close()
        if self._client is not None:
            self._client.close()

    # -- the worker's side ----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Where the blocks lie."""
        self._copier.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Before the step computes anything."""
        self._copier.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All is loaded before the first layer."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Whole units are saved at the end of the step."""

    def wait_for_save(self) -> None:
        """At the end of the step."""
        self._copier.save(self._get_connector_metadata())

    def build_connector_worker_meta(self) -> Results | None:
        """What was done since the last step."""
        return self._copier.results()


def _check(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises EngineError for what is not supported (yet)."""
    check(vllm_config)
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    if parallel.world_size != ranks:
        raise EngineError("kvatlas: pipeline and context parallel engines are not supported yet")
    if not _replicated(kv_cache_config, ranks) and kv_cache_config.kv_tp_replicas != 1:
        raise EngineError(
            f"kvatlas: {kv_cache_config.kv_tp_replicas} of {ranks} ranks hold the same KV heads:"
            " their number must divide that of the heads"
        )


def _replicated(kv_cache_config: Any, ranks: int) -> bool:
    """Whether every rank holds all of the state."""
    return bool(kv_cache_config.kv_tp_replicas == ranks)


def _share(vllm_config: Any, kv_cache_config: Any) -> Share:
    """What of the state this worker holds."""
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    if ranks == 1:
        return Share()
    by_head = not _replicated(kv_cache_config, ranks)
    return Share(parallel.rank, ranks, by_head, get_tp_group().barrier)


def _hello(vllm_config: Any, settings: Settings, ranks: int) -> wire.Hello:
    """``ranks``: between which the heads are cut."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = config_of(model)
    v4 = json.loads(config).get("model_type") == "deepseek_v4"  # it chooses its blocks by layer
    return wire.Hello(
        wire.VERSION,
        name_of(model),
        names_served(model),
        config,
        "vllm",
        __version__,
        cache.cache_dtype,
        0 if v4 else cache.block_size,
        settings.weights_digest,
        cache.prefix_caching_hash_algo,
        settings.name,
        device=about()["device"],
        ranks=ranks,
        variant=variant_of(model),
    )


def _may_be_minimal(request: Any, position: int, parts: list[Part]) -> bool:
    """Whether nothing that a minimal load leaves unfilled would be handed over to a decoder."""
    wishes = request.kv_transfer_params or {}
    return not wishes.get("do_remote_decode") or all(
        part.unfilled(position).stop <= part.handed_over_from(request.num_tokens)
        for part in parts
        if part.unfilled(position)
    )


def _odd(request: Any) -> bool:
    """State of these is not told by token ids alone, or is not to be looked up."""
    return bool(
        getattr(request, "mm_features", None)
        or getattr(request, "prompt_embeds", None) is not None
        or getattr(request, "skip_reading_prefix_cache", False)
    )


def _names(request: Any) -> tuple[str, str]:
    """What goes into the keys beside tokens: the salt, and the adapter."""
    adapter = request.lora_request
    return request.cache_salt or "", adapter.lora_name if adapter is not None else ""
