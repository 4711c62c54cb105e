"""A KV connector that saves and loads state exactly as told, faults included: a test tool.

Loaded by vLLM 0.32 alone, inside the engine (`vllm_greedy` registers it); nothing else imports it.
A request's ``kv_transfer_params`` say what to do with its state:

* ``{"save": [[record, position], ...]}``: when the request resumes at ``position``, or has
  computed exactly so many tokens, what a resume there needs goes into the file ``record`` of the
  store;
* ``{"load": record, "at": position}``: the request resumes at ``position`` from that file, or
  computes everything where the record lacks a block that is needed. ``"minimal": true`` loads each
  part's ``least_blocks`` and zeroes the rest. ``"fault"`` is ``[part, how, other record]``:
  ``omit``, ``zero`` or ``swap`` (with the same part of the other record) in all layers, ``flip`` of
  one bit in each byte of one block of one layer, or ``leave``: a minimal load that leaves all of
  the part unfilled, as if it were not read.

What a minimal load leaves unfilled belongs to its request alone:

* it is taken out of the engine's prefix cache as soon as it is in there, in the same batch of
  events: nobody finds it, no directory counts it, and no connector shares it;
* no save writes it, and a record without it is not loaded where it is needed;
* a request that is handed over (``do_remote_decode``) loads all, unless the windows that are handed
  over begin behind the last unfilled block.

``"careless": true`` in the wishes does none of that: for tests that must see it matter.

``parts`` in the connector's settings describe the model's state (see `kvatlas.core.layout`). They
are recognised by kind, window, block tokens and page bytes, never by the index of a group; what
fits no part, or two, ends the engine. Before a load all blocks that it is about are
filled with a pattern: a pool in use is never empty, and what a load leaves out must be wrong.

All decisions are the scheduler's side, which knows groups and windows; the worker's side copies
blocks, and knows what layers a group has, with their page sizes. A *place* is a part's blocks in
one group: (part, index of the group).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

PATTERN = 0x3C  # as bf16, fp32 or e4m3 an ordinary number, and no zero
FLIPPED_BIT = 0x08  # in each byte: the lowest bit of an exponent, somewhere in every number


Place = tuple[str, int]


@dataclass
class Copies(KVConnectorMetadata):  # type: ignore[misc]
    """What the worker does in one step, by place and block id, in all layers of the place; flips
    only in its first."""

    fill: list[tuple[Place, int, int]] = field(default_factory=list)  # ..., byte
    load: list[tuple[Place, int, str, int]] = field(default_factory=list)  # ..., record, index
    flip: list[tuple[Place, int]] = field(default_factory=list)
    # Written at the end of the step; it may have been loaded in it.
    save: dict[str, list[tuple[Place, int, int]]] = field(default_factory=dict)  # ..., index


@dataclass
class Part:
    """One component of the layout, and the groups of this model that hold it."""

    name: str
    block_tokens: int
    blocks: int | None
    least_blocks: int | None
    groups: list[int]

    def needed(self, position: int, minimal: bool) -> range:
        """Indexes of the blocks that a resume at ``position`` loads."""
        end = position // self.block_tokens
        blocks = self.least_blocks if minimal else self.blocks
        return range(0 if blocks is None else max(0, end - blocks), end)

    def unfilled(self, position: int) -> range:
        """Those of them that a minimal load leaves out."""
        whole, least = self.needed(position, False), self.needed(position, True)
        return range(whole.start, least.start)

    def handed_over_from(self, tokens: int) -> int:
        """The first block of a window that is sent with a prompt of ``tokens`` (vLLM 0.32,
        `NixlConnector`: the blocks of a window and one more, here another for the first output)."""
        return 0 if self.blocks is None else -(-tokens // self.block_tokens) - self.blocks - 2


@dataclass
class Tracked:
    """A request between its first step and its end."""

    wishes: dict[str, Any]
    ids: list[list[int]]
    unfilled: set[tuple[Place, int]] = field(default_factory=set)


class ProbeConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module. Settings: ``store`` (a directory) and ``parts``."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = self._kv_transfer_config.kv_connector_extra_config
        self._store = Path(settings["store"])
        self._tracked: dict[str, Tracked] = {}
        self._copies = Copies()
        self._caches: dict[str, torch.Tensor] = {}
        groups = kv_cache_config.kv_cache_groups
        if role.name == "SCHEDULER":
            self._parts = parts_of(settings["parts"], groups)
            self._grid = math.lcm(*(p.block_tokens for p in self._parts))
        else:
            self._layers = layers_of(settings["parts"], groups)

    # the scheduler's side

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens up to the wished position; raises ValueError where nobody can resume there."""
        wishes = request.kv_transfer_params or {}
        if "load" not in wishes:
            return 0, False
        position = wishes["at"]
        if position % self._grid or not 0 < position < request.num_tokens:
            raise ValueError(f"cannot resume at {position} of {request.num_tokens} tokens")
        whole = self._holds(wishes["load"], position, self._minimal(request, wishes))
        return (max(0, position - num_computed_tokens) if whole else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plans the load of a request that has just got its blocks, and takes what it will leave
        unfilled out of the prefix cache."""
        wishes = dict(request.kv_transfer_params or {})
        wishes["minimal"] = self._minimal(request, wishes)
        tracked = Tracked(wishes, [list(ids) for ids in blocks.get_block_ids()])
        self._tracked[request.request_id] = tracked
        if num_external_tokens:
            self._plan_load(tracked, num_external_tokens, self._copies)
        if tracked.unfilled and not wishes.get("careless"):
            # They are in the prefix cache since they were allocated, and nobody has looked yet.
            unfilled = {tracked.ids[group][index] for (_, group), index in tracked.unfilled}
            self._kv_cache_manager.evict_blocks(unfilled)

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        """This step's copies: loads of requests that begin, and what reaches a wished position."""
        copies, self._copies = self._copies, Copies()
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            tracked = self._tracked[new.req_id]
            tracked.ids = [list(ids) for ids in new.block_ids]
            self._plan_save(tracked, new.num_computed_tokens, copies)
            self._plan_save(tracked, new.num_computed_tokens + scheduled[new.req_id], copies)
        cached = scheduler_output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            raise RuntimeError("a probed request was preempted: give the engine more blocks")
        for i, request_id in enumerate(cached.req_ids):
            tracked = self._tracked[request_id]
            for ids, more in zip(tracked.ids, cached.new_block_ids[i] or (), strict=False):
                ids.extend(more)
            computed = cached.num_computed_tokens[i] + scheduled[request_id]
            self._plan_save(tracked, computed, copies)
        return copies

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        self._tracked.pop(request.request_id, None)
        return False, None

    def _minimal(self, request: Any, wishes: dict[str, Any]) -> bool:
        """Whether the request may leave blocks unfilled, if it wishes to."""
        if not wishes.get("minimal") or wishes.get("careless"):
            return bool(wishes.get("minimal"))
        return not wishes.get("do_remote_decode") or all(
            part.unfilled(wishes["at"]).stop <= part.handed_over_from(request.num_tokens)
            for part in self._parts
            if part.unfilled(wishes["at"])
        )

    def _holds(self, record: str, position: int, minimal: bool) -> bool:
        """Whether ``record`` has every block that a resume loads."""
        held = {tuple(key) for key in torch.load(self._store / record)["held"]}
        return held >= {
            (part.name, group, index)
            for part in self._parts
            for group in part.groups
            for index in part.needed(position, minimal)
        }

    def _plan_load(self, tracked: Tracked, external: int, copies: Copies) -> None:
        wishes = tracked.wishes
        position = wishes["at"]
        name, how, other = wishes.get("fault") or ("", "", "")
        for part in self._parts:
            first = (position - external) // part.block_tokens
            whole = [i for i in part.needed(position, False) if i >= first]
            wanted = [i for i in part.needed(position, wishes["minimal"]) if i >= first]
            fault = how if part.name == name else ""
            if fault == "leave":
                wanted = []
            record = other if fault == "swap" else wishes["load"]
            for group in part.groups:
                place = (part.name, group)
                blocks = [(i, tracked.ids[group][i]) for i in whole]
                if not all(block for _, block in blocks):
                    raise RuntimeError(f"{place}: the engine gave no block for what it needs")
                copies.fill += [(place, block, PATTERN) for _, block in blocks]
                kept = [(i, block) for i, block in blocks if i in wanted]
                if fault in ("", "swap", "flip"):
                    copies.load += [(place, block, record, i) for i, block in kept]
                elif fault == "zero":
                    copies.fill += [(place, block, 0) for _, block in kept]
                rest = [(i, block) for i, block in blocks if i not in wanted]
                copies.fill += [(place, block, 0) for _, block in rest]
                tracked.unfilled |= {(place, i) for i, _ in rest}
            if fault == "flip" and wanted:
                group = part.groups[0]
                index = wanted[0] if part.blocks is None else wanted[-1]
                copies.flip.append(((part.name, group), tracked.ids[group][index]))

    def _plan_save(self, tracked: Tracked, computed: int, copies: Copies) -> None:
        careless = tracked.wishes.get("careless")
        for record, position in tracked.wishes.get("save", ()):
            if position != computed:
                continue
            copies.save[record] = [
                ((part.name, group), tracked.ids[group][i], i)
                for part in self._parts
                for group in part.groups
                for i in part.needed(position, False)
                if careless or ((part.name, group), i) not in tracked.unfilled
            ]

    # the worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fills, loads and flips, in that order, before the step computes anything."""
        copies: Copies = self._get_connector_metadata()
        for place, block, byte in copies.fill:
            for layer in self._layers[place]:
                self._write(layer, block, torch.full_like(self._read(layer, block), byte))
        records: dict[str, dict[str, Any]] = {}
        for place, block, record, index in copies.load:
            if record not in records:
                records[record] = torch.load(self._store / record)["bytes"]
            for layer in self._layers[place]:
                self._write(layer, block, records[record][f"{layer}/{index}"])
        for place, block in copies.flip:
            layer = self._layers[place][0]
            self._write(layer, block, self._read(layer, block) ^ FLIPPED_BIT)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        """Writes the records whose positions this step has reached."""
        copies: Copies = self._get_connector_metadata()
        for record, blocks in copies.save.items():
            data = {
                f"{layer}/{index}": self._read(layer, block)
                for place, block, index in blocks
                for layer in self._layers[place]
            }
            held = [[*place, index] for place, _, index in blocks]
            torch.save({"held": held, "bytes": data}, self._store / record)

    def _read(self, layer: str, block: int) -> torch.Tensor:
        """A copy of one block of one layer, as bytes."""
        return self._caches[layer][block].clone().contiguous().view(torch.uint8).flatten()

    def _write(self, layer: str, block: int, data: torch.Tensor) -> None:
        target = self._caches[layer][block]
        target.copy_(data.view(target.dtype).view(target.shape))


def parts_of(described: list[dict[str, Any]], groups: Any) -> list[Part]:
    """The parts with the groups that hold them; raises ValueError where they do not fit."""
    parts = []
    for p in described:
        indexes = [
            index
            for index, group in enumerate(groups)
            if _fits(p, group.kv_cache_spec)
            and p["window_tokens"] == get_kv_cache_spec_sliding_window(group.kv_cache_spec)
        ]
        if not indexes:
            raise ValueError(f"no group holds {p}")
        parts.append(Part(p["name"], p["block_tokens"], p["blocks"], p["least_blocks"], indexes))
    missing = set(range(len(groups))) - {index for part in parts for index in part.groups}
    if missing:
        raise ValueError(f"groups {sorted(missing)} hold no part that is described")
    return parts


def layers_of(described: list[dict[str, Any]], groups: Any) -> dict[Place, list[str]]:
    """The layers of each place; raises ValueError where one fits no part, or two."""
    places: dict[Place, list[str]] = {}
    for index, group in enumerate(groups):
        whole = group.kv_cache_spec
        for layer in group.layer_names:
            spec = getattr(whole, "kv_cache_specs", {}).get(layer, whole)
            # The specs of packed groups have lost their windows here; the rest still tells.
            fitting = [
                p["name"]
                for p in described
                if _fits(p, spec) and p["page_bytes"] == spec.page_size_bytes
            ]
            if len(fitting) != 1:
                raise ValueError(f"{layer} fits {fitting or 'no part'}: {spec}")
            places.setdefault((fitting[0], index), []).append(layer)
    return places


def _fits(part: dict[str, Any], spec: Any) -> bool:
    return (
        part["kind"] in (get_kv_cache_spec_kind(spec).value, "*")
        and part["block_tokens"] == spec.block_size
    )
