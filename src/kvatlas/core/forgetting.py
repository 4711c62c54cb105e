"""What must not be used any more: whose units are meant, and the word on it that stays.

Units carry their *owner*: the id of their scope, ``tag.epoch`` of a tenant or ``tag.epoch.session``
(see `core.tenancy`). A *floor* says that nothing of a tenant from before an epoch may be used, or
nothing of one of its sessions. Unlike a deletion it does not end: whatever comes later of what is
meant, from a copy that was under way or a disk that was away, is refused by it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

FLOORS_MAX = 65_536  # of which the oldest goes: by then its salts are long refused elsewhere
TAG_CHARS = 24  # of a tenant's or session's tag: hex digits


class Floor(msgspec.Struct, frozen=True, omit_defaults=True):
    """Nothing of the tenant with this tag from before the epoch ``before``; with a ``session``:
    nothing of that one, of whatever epoch."""

    tenant: str
    before: int = 0
    session: str = ""

    def covers(self, owner: str) -> bool:
        """Whether units of this owner are meant."""
        return Floors((self,)).forgotten(owner)


class Floors:
    """All that one part was told, each the highest of its kind."""

    def __init__(self, floors: Iterable[Floor] = ()) -> None:
        self._floors: OrderedDict[tuple[str, str], Floor] = OrderedDict()
        for floor in floors:
            self.put(floor)

    def __len__(self) -> int:
        return len(self._floors)

    def all(self) -> tuple[Floor, ...]:
        """Them, the oldest first."""
        return tuple(self._floors.values())

    def has(self, floor: Floor) -> bool:
        """Whether as much is known."""
        had = self._floors.get((floor.tenant, floor.session))
        return had is not None and had.before >= floor.before

    def put(self, floor: Floor) -> bool:
        """One more; False: as much was known."""
        if self.has(floor):
            return False
        key = floor.tenant, floor.session
        self._floors[key] = floor
        self._floors.move_to_end(key)
        if len(self._floors) > FLOORS_MAX:
            self._floors.popitem(last=False)
        return True

    def forgotten(self, owner: str) -> bool:
        """Whether nothing of this owner may be used."""
        if not owner or not self._floors:
            return False
        tag, epoch, session = _read(owner)
        if epoch < 0:
            return False
        floor = self._floors.get((tag, ""))
        return (floor is not None and epoch < floor.before) or (
            bool(session) and (tag, session) in self._floors
        )


def payer_of(owner: str) -> str:
    """Whose quota counts for an owner: that of the tenant, over all epochs and sessions."""
    tag, dot, _ = owner.partition(".")
    return tag if dot and len(tag) == TAG_CHARS else owner


def _read(owner: str) -> tuple[str, int, str]:
    """Tag, epoch and session; no epoch (-1) where this is no owner of that form."""
    tag, _, rest = owner.partition(".")
    epoch, _, session = rest.partition(".")
    right = len(tag) == TAG_CHARS and epoch.isascii() and epoch.isdecimal()
    return tag, int(epoch) if right else -1, session
