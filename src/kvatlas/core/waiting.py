"""Batches of one publisher that wait for what is missing before them."""

from __future__ import annotations

from kvatlas.core.events import Batch


class WaitingRoom:
    """By number, bounded in batches and in bytes of token ids."""

    def __init__(self, batches_max: int, bytes_max: int) -> None:
        self.size_bytes = 0  # of token ids
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self._batches: dict[int, Batch] = {}

    def __len__(self) -> int:
        return len(self._batches)

    def __contains__(self, seq: int) -> bool:
        return seq in self._batches

    def all(self) -> list[Batch]:
        """In the order of their numbers."""
        return [self._batches[seq] for seq in sorted(self._batches)]

    def get(self, seq: int) -> Batch | None:
        """The one with that number."""
        return self._batches.get(seq)

    def put(self, batch: Batch) -> bool:
        """One more, of a number that does not wait yet; False where there is no room."""
        size = _size(batch)
        if len(self) >= self._batches_max or self.size_bytes + size > self._bytes_max:
            return False
        self._batches[batch.seq] = batch
        self.size_bytes += size
        return True

    def take(self, seq: int) -> Batch | None:
        """It waits no more."""
        batch = self._batches.pop(seq, None)
        if batch is not None:
            self.size_bytes -= _size(batch)
        return batch

    def clear(self) -> None:
        """Nothing waits any more."""
        self._batches.clear()
        self.size_bytes = 0


def _size(batch: Batch) -> int:
    return sum(len(getattr(event, "tokens", b"")) for event in batch.events)
