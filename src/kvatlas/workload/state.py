"""The composite state of the stub engine: small bytes that chain as a real model's state does.

Each findable block holds 8 bytes that depend on the whole prefix before its end. What a request
computes depends on the bytes that it resumed from, of every required group:

* a chain group's running value takes in every block's bytes, from the first on;
* a windowed group's takes in the bytes of its last window only, and each new window depends on
  the one before and on the tokens between.

So a resume from correct bytes ends with the same digest as computing everything, and damaged,
swapped or missing bytes of any required group end with another one, however far back they lie.
State advances from one grid position to the next, the only places where a resume can begin. The
bytes of a block depend on no token after its end: an engine may take it from another request.
"""

from __future__ import annotations

from hashlib import blake2b, shake_128

import msgspec

from kvatlas.core.layout import Layout
from kvatlas.workload.holding import TOKEN_BYTES, Slot, resumed_blocks, unroll
from kvatlas.workload.protocol import Admitted, Arrive, BlockRef, Computed

BLOCK_BYTES = 8
_NOTHING = b"\xff" * BLOCK_BYTES  # what reading a block that was never written gives


class _Lane:
    """The running value of one group for one request."""

    __slots__ = ("ends", "length", "read", "slot", "tag", "value")

    def __init__(self, slot: Slot, grid: int, seed: bytes, read: int | None) -> None:
        self.slot = slot
        self.tag = slot.index.to_bytes(2, "little") + seed
        self.ends = _ends(slot, grid)
        self.length = 0 if slot.need is None else slot.need * BLOCK_BYTES
        self.read = 16 if read is None else read * BLOCK_BYTES  # of ``value``, from its end
        self.value = b""

    def take(self, block_bytes: bytes) -> None:
        """Take in the bytes of the blocks of one grid step, in token order."""
        if self.slot.need is None:
            self.value = blake2b(self.value + block_bytes, digest_size=16).digest()
        else:
            self.value = (self.value + block_bytes)[-self.length :]

    def step(self, texts: dict[int, bytes]) -> bytes:
        """Compute one grid step: the bytes of the blocks that count, taken in as well.

        ``texts`` digests the step's tokens up to each end of a block.
        """
        text = b"".join([texts[end] for end in self.ends])
        past = shake_128(self.tag + self.value[-self.read :]).digest(len(text))
        mixed = int.from_bytes(text, "little") ^ int.from_bytes(past, "little")
        new = mixed.to_bytes(len(text), "little")
        self.take(new)
        return new


def _ends(slot: Slot, grid: int) -> tuple[int, ...]:
    """Where, in tokens from the start of a grid step, the blocks end that count for a resume."""
    size = slot.block_tokens
    return tuple(range(grid - (slot.group.units(grid) - 1) * size, grid + 1, size))


class _Sequence:
    __slots__ = ("lanes", "position", "resumed", "tail")

    def __init__(self, lanes: list[_Lane], position: int, resumed: tuple[BlockRef, ...]) -> None:
        self.lanes = lanes
        self.position = position  # grid position up to which the lanes stand
        self.resumed = resumed  # blocks to read before anything is computed
        self.tail = bytearray()  # tokens since ``position``


class Memory:
    """The bytes of one engine's blocks, by block id, and the requests that work on them.

    Implements `kvatlas.workload.protocol.Model`. At most one entry per block of the pool and one
    sequence per running request. ``vocabulary`` bounds the ids that `token` makes. ``minimal``: a
    model that reads of each window only what `Component.least_blocks` says.
    """

    def __init__(self, layout: Layout, *, vocabulary: int = 32000, minimal: bool = False) -> None:
        self._grid = layout.grid_tokens
        self._slots = [s for s in unroll(layout) if s.group.required]
        self._read_blocks = [resumed_blocks(layout, s, minimal=minimal) for s in self._slots]
        self._ends = sorted({end for slot in self._slots for end in _ends(slot, self._grid)})
        self._vocabulary = vocabulary
        self._bytes: dict[int, bytes] = {}
        self._sequences: dict[str, _Sequence] = {}

    # Model -------------------------------------------------------------------------------------

    def resume(self, request: Arrive, admitted: Admitted) -> None:
        """Start (again) on what the engine found. The blocks are read at the first `compute`."""
        seed = msgspec.json.encode(request.adapter)
        lanes = [
            _Lane(slot, self._grid, seed, read)
            for slot, read in zip(self._slots, self._read_blocks, strict=True)
        ]
        self._sequences[request.id] = _Sequence(lanes, admitted.cached_tokens, admitted.resumed)

    def compute(self, computed: Computed, tokens: bytes) -> None:
        """Advance over ``tokens`` and write the blocks that became findable."""
        sequence = self._sequences[computed.id]
        self._read(sequence)
        size = self._grid * TOKEN_BYTES
        if len(sequence.tail) + len(tokens) < size:
            sequence.tail += tokens
            return
        filled = {(ref.group, ref.index): ref.block_id for ref in computed.filled}
        data = bytes(sequence.tail) + tokens
        whole = len(data) // size * size
        for start in range(0, whole, size):
            self._step(sequence, data[start : start + size], filled)
        sequence.tail = bytearray(data[whole:])

    def token(self, id: str, index: int) -> int:
        """An id from the request's state: any difference in it changes the output."""
        digest = blake2b(self.digest(id) + index.to_bytes(4, "little"), digest_size=8).digest()
        return int.from_bytes(digest, "little") % self._vocabulary

    def release(self, id: str) -> None:
        """Forget the request; its blocks keep their bytes until they are written anew."""
        self._sequences.pop(id, None)

    # Reading and breaking ------------------------------------------------------------------------

    def read(self, block_id: int) -> bytes:
        """A block's bytes. Raises KeyError when nothing was written there."""
        return self._bytes[block_id]

    def write(self, block_id: int, data: bytes) -> None:
        """Fill a block from outside."""
        self._bytes[block_id] = data

    def digest(self, id: str) -> bytes:
        """16 bytes over every required group's state and the tokens since: the stub's answer.

        Raises KeyError for a request that is not running.
        """
        sequence = self._sequences[id]
        self._read(sequence)
        digest = blake2b(bytes(sequence.tail), digest_size=16)
        for lane in sequence.lanes:
            digest.update(lane.tag + lane.value[-lane.read :])
        return digest.digest()

    def damage(self, block_id: int) -> None:
        """Turn over every bit of a block. Raises KeyError when nothing was written there."""
        self._bytes[block_id] = bytes(b ^ 0xFF for b in self._bytes[block_id])

    def __len__(self) -> int:
        """Blocks that hold bytes."""
        return len(self._bytes)

    def _read(self, sequence: _Sequence) -> None:
        if not sequence.resumed:
            return
        by_slot: dict[int, list[bytes]] = {}
        for ref in sequence.resumed:
            held = self._bytes.get(ref.block_id, _NOTHING)
            by_slot.setdefault(ref.group, []).append(held)
        sequence.resumed = ()
        for lane in sequence.lanes:
            blocks = by_slot.get(lane.slot.index, [])
            units = len(lane.ends)
            for start in range(0, len(blocks), units):
                lane.take(b"".join(blocks[start : start + units]))

    def _step(self, sequence: _Sequence, tokens: bytes, filled: dict[tuple[int, int], int]) -> None:
        sequence.position += self._grid
        texts: dict[int, bytes] = {}
        digest = blake2b(digest_size=BLOCK_BYTES)
        done = 0
        for end in self._ends:
            digest.update(tokens[done * TOKEN_BYTES : end * TOKEN_BYTES])
            texts[end] = digest.digest()
            done = end
        for lane in sequence.lanes:
            new = lane.step(texts)
            slot = lane.slot
            first = sequence.position // slot.block_tokens - len(lane.ends)
            for unit in range(len(lane.ends)):
                block = filled.get((slot.index, first + unit))
                if block is not None:
                    self._bytes[block] = new[unit * BLOCK_BYTES : (unit + 1) * BLOCK_BYTES]
