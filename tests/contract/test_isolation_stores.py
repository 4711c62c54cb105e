"""Many tenants through real stores: what arrives spells its owner, who must be whoever asked."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_tiers import Disk, Dram, Kit, SealedDisk
from test_tiers_remote import S3, Peer, SealedValkey, Valkey

from kvatlas.core.forgetting import Floor
from kvatlas.core.keys import Keyring
from kvatlas.core.tenancy import Chain, sharing_of
from kvatlas.core.units import Part, name_of
from kvatlas.dataplane.tiers.base import Piece, Report, Store, checksum_of
from kvatlas.dataplane.tiers.s3 import S3Store
from kvatlas.sim.planted_bug import Bug
from kvatlas.validate.isolation.cast import Cast
from kvatlas.validate.isolation.marks import Judge, Prompt, decode
from kvatlas.validate.isolation.planted import BY_NAME

GRID = 16
SIZE_BYTES = 4096
WAIT_S = 30.0
FINGERPRINT = b"one model, one layout".ljust(32)
RING = Keyring(b"the secret of all agents")
ANY_FLIGHT = Bug(
    "flight-of-any-name",
    "cross-scope",
    "dataplane.tiers.disk:DiskStore._read",
    "who reads while somebody else does gets what that one asked for",
    "(leader := self._reading.get(piece.name))",
    "(leader := next(iter(self._reading.values()), None))",
)


class Traffic:
    """Operations by seed on one store."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.draw = random.Random(seed)
        self.cast = Cast(self.draw, RING, GRID)
        self.judge = Judge()
        self.arrived = self.purged = 0

    def names(self, prompt: Prompt) -> list[bytes]:
        """As an agent makes them."""
        sharing = sharing_of(RING, prompt.salt).of(RING, prompt.tokens)
        chain = Chain(RING, FINGERPRINT, GRID, sharing, prompt.adapter)
        whole = len(prompt.tokens) // (4 * GRID) * 4 * GRID
        return [name_of(k, Part.BODY) for k in chain.extend(memoryview(prompt.tokens)[:whole])]

    def begin(self, prompt: Prompt, *, write: bool) -> tuple[threading.Event, list[Report], object]:
        """All blocks of a prompt, written or read at once."""
        owner = sharing_of(RING, prompt.salt).scope.owner
        pieces = []
        for index, name in enumerate(self.names(prompt)):
            view = memoryview(mmap.mmap(-1, SIZE_BYTES))
            if write:
                mark = prompt.mark((index + 1) * GRID, "m", self.judge.at)
                view[: len(mark) + 1] = bytes([len(mark)]) + mark
            sums = checksum_of(view) if write else 0
            pieces.append(Piece(name, view, sums, index, owner if write else ""))
        over, reports = threading.Event(), list[Report]()

        def done(report: Report) -> None:
            reports.append(report)
            over.set()

        (self.store.write if write else self.store.read)(pieces, done)
        return over, reports, pieces

    def step(self) -> None:
        """A few at once: some write what they computed, others ask."""
        self.judge.at += 1
        before = self.draw.sample(self.cast.asked, min(2, len(self.cast.asked)))
        asked = [*before, *(self.cast.prompt() for _ in range(4))]
        asked += [forged for forged in (self.cast.forgery(),) if forged is not None]
        under_way = [(p, w, self.begin(p, write=w)) for p in asked for w in (False, True)]
        for prompt, write, (over, reports, pieces) in under_way:
            assert over.wait(WAIT_S)
            bad = {*reports[0].failed, *reports[0].damaged}
            if not write and not reports[0].error:
                self.look(prompt, [p for p in pieces if p.name not in bad])  # type: ignore[attr-defined]
        if self.judge.at % 10 == 0:
            self.purge()

    def look(self, prompt: Prompt, pieces: list[Piece]) -> None:
        for piece in pieces:
            self.arrived += 1
            data = bytes(piece.view[1 : 1 + piece.view[0]])
            self.judge.hit("store", prompt, "m", (piece.index + 1) * GRID, data)

    def purge(self) -> None:
        """All of a tenant, by what the store says of each value; then nothing of it is there."""
        tenant = self.draw.choice(self.cast.tenants)
        self.cast.rotate(tenant)
        floor = Floor(tenant.tag, before=tenant.epoch)
        entries = getattr(self.store, "labels", self.store.scan)
        gone = [entry.name for entry in entries() if floor.covers(entry.tenant)]
        self.store.delete(gone)
        self.purged += len(gone)
        assert not [entry for entry in entries() if floor.covers(entry.tenant)]


@pytest.fixture(
    params=[
        Dram,
        Disk,
        SealedDisk,
        Peer,
        Valkey,
        SealedValkey,
        pytest.param(S3, marks=pytest.mark.engine),
    ],
    ids=lambda kit: kit.__name__.lower(),
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    kit: Kit = request.param(tmp_path)
    opened = kit.open()
    yield opened
    opened.close()
    kit.close()


def played(store: Store) -> Traffic:
    traffic = Traffic(store, 7)
    for _ in range(15 if isinstance(store, S3Store) else 60):  # moto takes its time
        traffic.step()
    return traffic


def test_what_arrives_is_the_asker_s(store: Store) -> None:
    traffic = played(store)
    assert not traffic.judge.found, traffic.judge.violations
    relations = {key.rpartition(" ")[2] for key in traffic.judge.hits}
    assert {"session", "public-other"} <= relations
    assert traffic.arrived > 50
    assert traffic.purged


@pytest.mark.parametrize("leak", [BY_NAME["scope-left-out"], ANY_FLIGHT], ids=lambda x: x.name)
def test_a_planted_leak_is_seen(tmp_path: Path, leak: Bug) -> None:
    kit = Disk(tmp_path)
    opened = kit.open()
    try:
        with leak():
            assert played(opened).judge.found
    finally:
        opened.close()
        kit.close()


def test_bytes_tell_whose_they_are() -> None:
    prompt = Cast(random.Random(1), RING, GRID).prompt()
    assert decode(prompt.mark(GRID, "m", 3)).tenant == prompt.tenant
