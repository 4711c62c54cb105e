"""One publisher's claims: from its own block hashes to our keys.

An engine names blocks by a hash of its own, which carries no model identity and sometimes stands
for several groups at once. Here those hashes are turned into our keys, computed from the token
ids in the events, and into "this grid block is complete in this lane". The chain group names the
grid blocks; windowed groups are anchored to those names, because a windowed block that ends on
the grid carries the same engine hash as the chain block that ends there (vLLM 0.32,
`BlockHashListWithBlockSize`).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvatlas.core.events import BlockRemoved, BlockStored
from kvatlas.core.keys import Keyring, salt_scope
from kvatlas.core.layout import Group
from kvatlas.core.native import NameTable
from kvatlas.core.records import Tier
from kvatlas.core.windows import Windows as _Windows

if TYPE_CHECKING:
    from kvatlas.core.directory import Directory, _Slot
    from kvatlas.core.lanes import Pool

RECENT_MAX = 4096  # names of blocks that just left: parents of what is still to be announced
_WALK = 1024
_TIERS = tuple(Tier)  # going through the enum itself takes ten times as long
_TIERS_OF = [tuple(t for t in Tier if bits & 1 << t) for bits in range(1 << len(Tier))]
PENDING_MAX = 65_536  # claims that wait for the event that names their block


class Applied(msgspec.Struct):
    """What became of a batch, in counts. Only `orphans` ask for a replay."""

    stored: int = 0  # block-holders claimed
    removed: int = 0
    cleared: int = 0
    orphans: int = 0  # events whose parent block is unknown: never filed as a root
    unknown_removals: int = 0
    undeclared: int = 0  # events of a group that the layout does not have
    aliases: int = 0  # second names of a block, which no lookup uses
    malformed: int = 0  # hashes and tokens that contradict each other
    refused: int = 0  # a limit was reached
    reannounced: int = 0  # windowed groups announced in full, which the engine does not hold
    unregistered: int = 0

    def add(self, other: Applied) -> None:
        """Sum field by field."""
        for name, count in zip(self.__struct_fields__, msgspec.structs.astuple(other), strict=True):
            if count:
                setattr(self, name, getattr(self, name) + count)


class Claims:
    """Owned by the directory; `stored` and `removed` are its only writers."""

    def __init__(self, directory: Directory, slot: _Slot, keyring: Keyring, pool: Pool) -> None:
        self._directory = directory
        self._slot = slot
        self._keyring = keyring
        self._pool = pool
        self._names = NameTable()
        self._recent: OrderedDict[int, bytes] = OrderedDict()
        # Ordered: a plain dict walks over all that left before it finds its oldest entry.
        self._pending: OrderedDict[tuple[int, int], int] = (
            OrderedDict()
        )  # (lane, hash) → tiers as bits
        self._lane_of_group: dict[int, int] = {}
        self._windows = {
            i: _Windows(lane.units) for i, lane in enumerate(pool.lanes) if lane.units > 1
        }
        self._ahead = [i for i in self._windows if pool.lanes[i].ahead]
        self._beside = [(i, w) for i, w in self._windows.items() if i not in self._ahead]
        self._follows: dict[int, dict[int | None, int]] = {}  # lane → hash → the one after it
        self._twins: dict[tuple[int, int], int] = {}  # (lane, hash) → how often beyond once
        self._counts_twins = pool.layout.engine == "vllm"
        self._report = True  # the request at hand may only repeat a hit: see `_twin`
        self._names_max = directory.limits.holders_per_publisher_max
        self._reports = False  # it was seen to report a hit in full
        self._group = 0  # of the event before: a request announces its groups in their order
        self._full = False  # a limit refused a block: its children are no orphans to repair
        self.touched = False

    def held_keys(self) -> Iterator[bytes]:
        """Keys that this publisher may hold; one that has several names may come again.

        A walk through the table, to be used only while nothing is claimed or given up.
        """
        for start in range(0, self._names.slots(), _WALK):
            yield from self._names.values(start, start + _WALK)

    # -- stored ---------------------------------------------------------------------------------

    def stored(self, event: BlockStored, applied: Applied) -> None:
        """Claim the blocks of one event."""
        lane = self._lane(event, applied)
        if lane is None:
            return
        self.touched = True
        if (event.group or 0) <= self._group:
            self._report = True  # the next request
        self._group = event.group or 0
        if self._pool.lanes[lane].span is not None:
            self._stored_window(lane, event, applied)
        elif not event.tokens:
            for engine_hash in event.hashes:
                self._claim(lane, event.tier, engine_hash, applied)
        else:
            self._stored_chain(lane, event, applied)

    def _stored_chain(self, lane: int, event: BlockStored, applied: Applied) -> None:
        parent = self._parent_key(event)
        if parent is None:
            if self._full:
                applied.refused += 1
            else:
                applied.orphans += 1
            return
        keys = self._keyring.chain(parent, event.tokens, event.block_tokens, event.extras)
        if len(keys) != len(event.hashes):
            applied.malformed += 1
            return
        directory, slot, tier = self._directory, self._slot, event.tier
        report = event.parent is None and self._report
        report = report and all(directory.holds_in(slot, lane, tier, key) for key in keys)
        if report and self._resumable(keys[:-1]):
            self._reported()  # to store it, the engine would have gone on from there
        again = self._again(event, report and self._reports)
        names, held = self._names, None
        if tier is Tier.HBM and len(names) + len(keys) <= self._names_max:
            held = directory.set_all(slot, lane, keys)
        if held is None:
            keys = self._stored_singly(lane, event, keys, again, applied)
        else:
            for place in held if again else ():
                self._twin(lane, event.hashes[place])
            names.add(event.hashes, keys)
            applied.stored += len(keys)
        self._named(event, keys, applied)
        if self._ahead:
            self._looked_ahead(event, keys, applied)

    def _stored_singly(
        self, lane: int, event: BlockStored, keys: list[bytes], again: bool, applied: Applied
    ) -> list[bytes]:
        """Close to a limit, or below hbm: one block after another. Returns the keys, b"" for
        those refused."""
        directory, slot, tier = self._directory, self._slot, event.tier
        stored = []
        for engine_hash, key in zip(event.hashes, keys, strict=True):
            if again and directory.holds_in(slot, lane, tier, key):
                self._twin(lane, engine_hash)
            if not self._has_room(engine_hash) or not directory.set(slot, lane, tier, key):
                applied.refused += 1
                self._full = True
                stored.append(b"")
                continue
            applied.stored += 1
            self._names[engine_hash] = key
            stored.append(key)
        return stored

    def _again(self, event: BlockStored, report: bool) -> bool:
        """May what an event stores be a second block? Not when it may be a ``report``; `_twin`."""
        return self._counts_twins and event.tier is Tier.HBM and not report

    def _twin(self, lane: int, engine_hash: int) -> None:
        """vLLM stored a second block under a hash that it holds: it will remove both.

        Blocks that a request computes although they are cached (beyond its resume position) are
        stored once more, and the older one is evicted first. A hit that is reported in full
        stores nothing: it starts at position 0 and lists every block of every group. So what
        follows a parent counts, and what starts at 0 only where the windows that the same
        request announced just before (the groups come in their order) were listed with gaps.
        """
        place = (lane, engine_hash)
        if place in self._twins or len(self._twins) < PENDING_MAX:
            self._twins[place] = self._twins.get(place, 0) + 1

    def _looked_ahead(self, event: BlockStored, keys: Sequence[bytes], applied: Applied) -> None:
        """Chain blocks got their ``keys``: file the windows that end where one begins under it.

        Only if the same request announced, just before, the window's block that follows: that
        it has the tokens of this chain block is known in no other way (vLLM 0.32 announces a
        request's groups in their order, the windows of V4 before its chain, in each step).
        """
        after: dict[int | None, bytes] = {}  # a hash → the key of the chain block behind it
        for lane in self._ahead:
            follows = self._follows.get(lane)
            if not follows:
                continue
            after = after or dict(zip((event.parent, *event.hashes), keys, strict=False))
            for before in follows if len(follows) < len(after) else after:
                beyond, key = follows.get(before), after.get(before)
                if beyond is not None and key:
                    self._assemble(lane, self._windows[lane], beyond, key, applied)

    def _has_room(self, engine_hash: int) -> bool:
        """May it be named? One block under ever new hashes costs names, but no holders."""
        return len(self._names) < self._names_max or engine_hash in self._names

    def _parent_key(self, event: BlockStored) -> bytes | None:
        if event.parent is None:
            scope = salt_scope(event.salt)
            return self._keyring.root(self._pool.fingerprint, scope, event.adapter)
        return self._names.get(event.parent) or self._recent.get(event.parent)

    def _claim(self, lane: int, tier: Tier, engine_hash: int, applied: Applied) -> None:
        """Claim a whole grid block by its hash; wait for its name if it has none yet."""
        key = self._names.get(engine_hash) or self._recent.get(engine_hash)
        if key is None:
            self._wait(lane, tier, engine_hash, applied)
        elif self._has_room(engine_hash) and self._directory.set(self._slot, lane, tier, key):
            self._names[engine_hash] = key
            applied.stored += 1
        else:
            applied.refused += 1

    def _wait(self, lane: int, tier: Tier, engine_hash: int, applied: Applied) -> None:
        place = (lane, engine_hash)
        self._pending[place] = self._pending.pop(place, 0) | 1 << tier
        if len(self._pending) > PENDING_MAX:
            self._pending.popitem(last=False)
            applied.refused += 1

    def _named(self, event: BlockStored, keys: Sequence[bytes], applied: Applied) -> None:
        """Grid blocks got their names: settle what waited for them."""
        pending = self._pending
        for lane in range(len(self._pool.lanes)) if pending else ():
            for engine_hash, key in zip(event.hashes, keys, strict=True):
                for tier in _TIERS_OF[pending.pop((lane, engine_hash), 0)] if key else ():
                    self._claim(lane, tier, engine_hash, applied)
        for lane, windows in self._beside:
            waiting = windows.before
            if waiting and not waiting.keys().isdisjoint(event.hashes):
                for engine_hash, key in zip(event.hashes, keys, strict=True):
                    if key and engine_hash in waiting:
                        self._assemble(lane, windows, engine_hash, key, applied)

    def _stored_window(self, lane: int, event: BlockStored, applied: Applied) -> None:
        self._follows.pop(lane, None)
        if not event.hashes:
            self._report = self._report and event.parent is not None
            return
        blocks = (event.range_tokens or len(event.tokens) // 4) // event.block_tokens
        contiguous = 0 < blocks == len(event.hashes)
        wanted = self._pool.lanes[lane].group.window_blocks() or 0
        windows = self._windows.get(lane)
        report = contiguous and event.parent is None and self._report
        report = report and self._held(lane, event, wanted) and self._resumed(event)
        if report and blocks > wanted:
            # Nothing was stored: a request computes from position 0 only what it could not resume.
            # The blocks before the window may not exist (vLLM 0.32, `emit_cached_block_events`).
            self._reported()
            applied.reannounced += 1
        if event.parent is None:
            self._report = report
        if report and blocks > wanted:
            return
        again = self._again(event, report and self._reports)
        if windows is None:
            for engine_hash in event.hashes:
                key = self._names.get(engine_hash) if again else None
                if key and self._directory.holds_in(self._slot, lane, event.tier, key):
                    self._twin(lane, engine_hash)
                self._claim(lane, event.tier, engine_hash, applied)
            return
        before = event.parent if contiguous else None
        if lane in self._ahead:
            line = event.hashes if before is None else (before, *event.hashes)
            self._follows[lane] = dict(itertools.pairwise(line))
        for engine_hash in event.hashes:
            if again and windows.holds(engine_hash, event.tier):
                self._twin(lane, engine_hash)
            tiers = windows.before.pop(engine_hash, (None, 0))[1] | 1 << event.tier
            windows.before[engine_hash] = (before, tiers)
            before = engine_hash
        for engine_hash in event.hashes if lane not in self._ahead else ():
            key = self._names.get(engine_hash) or self._recent.get(engine_hash)
            if key is not None:
                self._assemble(lane, windows, engine_hash, key, applied)
        while len(windows.before) > PENDING_MAX:
            windows.before.popitem(last=False)
            applied.refused += 1

    def _held(self, lane: int, event: BlockStored, wanted: int) -> bool:
        """Are the last ``wanted`` blocks of an event of a windowed group held already?"""
        windows = self._windows.get(lane)
        for engine_hash in event.hashes[-wanted:]:
            if windows is not None:
                held = windows.holds(engine_hash, event.tier)
            else:
                key = self._names.get(engine_hash)
                held = key is not None and self._directory.holds_in(
                    self._slot, lane, event.tier, key
                )
            if not held:
                return False
        return True

    def _resumed(self, event: BlockStored) -> bool:
        """Can it report a hit? Not where the chain has left: then all was stored once more."""
        root = self._parent_key(event) or b""
        keys = self._keyring.chain(root, event.tokens, self._pool.layout.grid_tokens)
        return not keys or self._resumable(keys)

    def _resumable(self, keys: Sequence[bytes]) -> bool:
        """Can a prompt be resumed at the end of one of these blocks, all of them held?"""
        if not self._pool.windowed:
            return bool(keys)
        places = self._directory.positions(self._slot.publisher, keys)
        return places is not None and bool(places.hbm)

    def _reported(self) -> None:
        """This engine was asked to report hits in full: what was unsure may have been one."""
        if not self._reports:
            self._reports = True
            self._twins.clear()

    def _assemble(
        self, lane: int, windows: _Windows, anchor: int, key: bytes, applied: Applied
    ) -> None:
        """File the blocks of a window that ends at ``anchor`` under its grid block."""
        engine_hash: int | None = anchor
        for unit in range(windows.full.bit_length()):
            if engine_hash is None or engine_hash not in windows.before:
                return
            if len(windows.place) >= self._names_max * windows.full.bit_length():
                applied.refused += 1
                return
            before, tiers = windows.before[engine_hash]
            if not windows.file(engine_hash, key, unit):
                return
            del windows.before[engine_hash]
            for tier in _TIERS_OF[tiers]:
                masks = windows.masks[tier]
                masks[key] = masks.get(key, 0) | 1 << unit
                if masks[key] == windows.full:
                    self._complete(lane, tier, anchor, key, applied)
            engine_hash = before

    def _complete(self, lane: int, tier: Tier, anchor: int, key: bytes, applied: Applied) -> None:
        if self._has_room(anchor) and self._directory.set(self._slot, lane, tier, key):
            self._names[anchor] = key
            applied.stored += 1
        else:
            applied.refused += 1

    # -- removed --------------------------------------------------------------------------------

    def removed(self, event: BlockRemoved, applied: Applied) -> None:
        """Give up claims; what was never claimed is counted and changes nothing."""
        tiers = _TIERS if event.tier is None else (event.tier,)
        if event.group is not None and event.group in self._lane_of_group:
            lanes: Iterable[int] = (self._lane_of_group[event.group],)
        elif event.group is not None and len(self._pool.lanes) > 1:
            applied.unknown_removals += len(event.hashes)
            return
        else:
            lanes = range(len(self._pool.lanes))
        for engine_hash in event.hashes:
            gone = 0
            for lane in lanes:
                windows = self._windows.get(lane)
                for tier in tiers:
                    if windows is None:
                        gone += self._drop(lane, tier, engine_hash)
                    else:
                        gone += self._drop_unit(lane, tier, windows, engine_hash)
            applied.removed += gone
            applied.unknown_removals += not gone

    def _drop(self, lane: int, tier: Tier, engine_hash: int) -> int:
        waiting = self._pending.get((lane, engine_hash), 0)
        if waiting & 1 << tier:
            waiting &= ~(1 << tier)
            if waiting:
                self._pending[(lane, engine_hash)] = waiting
            else:
                del self._pending[(lane, engine_hash)]
            return 1
        key = self._names.get(engine_hash)
        if key is None:
            return 0
        if tier is Tier.HBM and self._one_less((lane, engine_hash)):
            return 1
        cleared = self._directory.clear(self._slot, lane, tier, key)
        self._forget(engine_hash, key)  # also where it was a second name of what is gone already
        return int(cleared)

    def _one_less(self, place: tuple[int, int]) -> bool:
        """One of several equal blocks is gone, the others are held; False where there is one."""
        if place not in self._twins:
            return False
        self._twins[place] -= 1
        if not self._twins[place]:
            del self._twins[place]
        return True

    def _drop_unit(self, lane: int, tier: Tier, windows: _Windows, engine_hash: int) -> int:
        if tier is Tier.HBM and self._one_less((lane, engine_hash)):
            return 1
        dropped = windows.forget_waiting(engine_hash, tier)
        for key, whole in windows.drop(engine_hash, tier):
            dropped = 1
            if whole:
                self._directory.clear(self._slot, lane, tier, key)
        name = self._names.get(engine_hash) if dropped else None
        if name is not None:
            self._forget(engine_hash, name)
        return dropped

    def _forget(self, engine_hash: int, key: bytes) -> None:
        """Drop a name that nothing uses any more, but remember it for a while as a parent."""
        if self._directory.holds(self._slot, key):
            return
        del self._names[engine_hash]
        self._recent[engine_hash] = key
        if len(self._recent) > RECENT_MAX:
            self._recent.popitem(last=False)

    # -- which lane -----------------------------------------------------------------------------

    def _lane(self, event: BlockStored, applied: Applied) -> int | None:
        """The lane of an event, by (kind, window, block size); copies by the engine's index."""
        group = event.group
        if group is not None and group in self._lane_of_group:
            lane = self._lane_of_group[group]
            if self._pool.lanes[lane].group.block_tokens == event.block_tokens:
                return lane
        taken = set(self._lane_of_group.values()) if group is not None else ()
        for index, lane_record in enumerate(self._pool.lanes):
            wanted = lane_record.group
            if (
                wanted.block_tokens == event.block_tokens
                and (event.kind is None or wanted.kind in ("*", event.kind))
                and (event.kind is None or wanted.window_tokens == event.window_tokens)
                and (group is None or index not in taken)
            ):
                if group is not None:
                    self._lane_of_group[group] = index
                return index
        if any(_is_alias(event, lane.group) for lane in self._pool.lanes):
            applied.aliases += 1
        else:
            applied.undeclared += 1
        return None


def _is_alias(event: BlockStored, group: Group) -> bool:
    """vLLM's second name for the block in which a prompt ends, at its finest block size.

    No lookup of a model with windowed groups can use it (0.32, `_cache_partial_tail_block`).
    """
    return (
        group.window_tokens is None
        and event.window_tokens is None
        and event.kind in (None, group.kind)
        and event.block_tokens < group.block_tokens
        and group.block_tokens % event.block_tokens == 0
        and len(event.hashes) <= 1
    )
