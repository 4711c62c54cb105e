"""vLLM's own NIXL for our processes: links to it, and to nothing else of its environment."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import install
import pytest
from stores_kit import wait_until
from stores_rigs import PeerRig

from kvatlas.dataplane.arena import Arena, Slot, Slots
from kvatlas.dataplane.tiers import peer
from kvatlas.dataplane.tiers.base import Finish, Piece, Report, Store, well_formed
from kvatlas.dataplane.tiers.nixl import Nixl
from kvatlas.dataplane.tiers.peer_nixl import Reader

_WANTED = ("nixl", "nixl_cu12", "nixl_cu12.libs", "nixl_meta_utils.py", "numpy", "numpy.libs")


def use_nixl(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """This process finds NIXL, and all that it starts; skips the test where there is none."""
    if why := install.missing("nixl"):
        pytest.skip(why)
    (packages,) = install.venv_of("nixl").glob("lib/python3*/site-packages")
    links = directory / "nixl-packages"
    links.mkdir()
    for name in (*_WANTED, *(path.name for path in packages.glob("nixl*.dist-info"))):
        (links / name).symlink_to(packages / name)
    monkeypatch.syspath_prepend(str(links))
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{links}:{before}".rstrip(":"))


class NixlRig(PeerRig):
    """An owner with NIXL, and readers with an arena of their own each."""

    def __init__(
        self, directory: Path, size_bytes: int = 16 << 20, *, verify: bool = False
    ) -> None:
        super().__init__(directory, size_bytes, verify=verify)
        self.server.close()
        self.arenas: list[Arena] = []
        self._serve(0)

    def _serve(self, port: int) -> None:
        self.nixl = Nixl(self.arena)  # starts while readers do
        self.server = peer.PeerServer(
            self.dram, token=b"secret", port=port, send_s=1.0, nixl=self.nixl
        )
        self.port = self.server.address[1]

    def reader(
        self, port: int, deadline_s: float = 10.0, *, only: bool = False, emulated: bool = False
    ) -> tuple[peer.PeerStore, Arena, Nixl]:
        """A store that reads by NIXL into that arena, ready to be asked."""
        self.arenas.append(arena := Arena.create(2 * self.arena.size_bytes, directory=None))
        nixl = Nixl(arena)
        nixl.wait()
        self.nixl.wait()
        settings = peer.Settings("127.0.0.1", port, b"secret", deadline_s=deadline_s, queue_max=64)
        reader = Reader(arena, nixl, only=only, emulated=emulated)
        return peer.PeerStore(settings, nixl=reader), arena, nixl

    def store(self, port: int, deadline_s: float = 10.0, lost: list[str] | None = None) -> Store:
        return self.reader(port, deadline_s)[0]

    def restart(self) -> None:
        """Another life, in another arena."""
        self.server.close()
        self.dram.close()
        self.arena.close()
        self.arena = Arena.create(self.arena.size_bytes, directory=None)
        self.dram = type(self.dram)(self.arena, verify=False)
        self._serve(self.port)

    def close(self) -> None:
        super().close()
        for arena in self.arenas:
            arena.close()


def dead(pid: int) -> bool:
    """And collected."""
    return not Path(f"/proc/{pid}").exists()


def ready(nixl: Nixl) -> None:
    """Waits until its process can be asked (again)."""
    wait_until(lambda: nixl.ready() is not None)


class Placed:
    """A reader of an arena, for whoever has views elsewhere: in their place slots are filled."""

    def __init__(self, store: peer.PeerStore, arena: Arena) -> None:
        self.store = store
        self._slots = Slots(arena)
        self._lock = threading.Lock()

    def read(self, pieces: Sequence[Piece], done: Finish) -> None:
        pairs = [(piece, self._placed(piece)) for piece in pieces]

        def ended(report: Report) -> None:
            bad = {*report.failed, *report.damaged}
            for piece, placed in pairs:
                if placed is not piece and not (piece.name in bad or report.error):
                    piece.view[:] = placed.view
                    for field in ("checksum", "index", "tenant", "fingerprint"):
                        setattr(piece, field, getattr(placed, field))
                if placed is not piece and piece.released is not None:
                    piece.released()
            done(report)

        self.store.read([placed for _, placed in pairs], ended)

    def _placed(self, piece: Piece) -> Piece:
        if not well_formed(piece, into=True):
            return piece
        with self._lock:
            slot = self._slots.take(piece.view.nbytes)
        assert slot is not None
        view = self._slots.arena.view(slot)
        released = partial(self._give, slot)
        return Piece(
            piece.name, view, piece.checksum, fingerprint=piece.fingerprint, released=released
        )

    def _give(self, slot: Slot) -> None:
        with self._lock:
            self._slots.give(slot)
