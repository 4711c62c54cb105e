"""How a node forgets: all that is meant is dropped at once, and nothing of it arrives any more."""

from __future__ import annotations

import functools
from collections.abc import Callable

from kvatlas.core.agent_ends import Ends
from kvatlas.core.agent_saves import Saves
from kvatlas.core.agent_values import Forget
from kvatlas.core.forgetting import Floors, payer_of
from kvatlas.core.inventory import name_in
from kvatlas.core.node import Node
from kvatlas.core.records import Tier


def forget(node: Node, saves: Saves, ends: Ends, event: Forget) -> None:
    """Books first, so that nobody finds it; its bytes go when the last who read them are done,
    which reads of engines, peers and copies are asked to be now."""
    meant = meant_by(event)
    for floor in event.floors:
        node.floors.put(floor)
    saves.forget_owners(meant)
    ends.forget_owners(meant)
    inventory, names = node.inventory, set(event.names)
    for tier, ledger in inventory.ledgers.items():
        entries = [e for e in ledger.entries() if meant(e.tenant) or e.key in event.names]
        found = {name_in(entry) for entry in entries}
        for name in sorted(found):
            node.drop(tier, name)
        node.freed(tier, ledger.revoke(found))
        names |= found
    for operation in list(node.operations):
        if meant(operation.tenant) or any(u.name in names for _, u in operation.units()):
            operation.void = True
            node.stop(operation)
    for name in sorted(stored(node, event) | event.names):
        for tier, known in inventory.known.items():
            if (at := known.get(name)) is not None:
                inventory.unknow(tier, name, at, ours=tier is Tier.OBJECT)


def stored(node: Node, event: Forget) -> frozenset[bytes]:
    """What is meant of all that this node put into the store since its agent began."""
    owners, known = node.inventory.owners, node.inventory.known[Tier.OBJECT]
    meant = meant_by(event)
    theirs = {name for name, owner in owners.items() if meant(owner)}
    return frozenset(theirs.union(event.names.intersection(known)))


def under_way(node: Node, event: Forget) -> int:
    """Operations that touch what is meant, and have not ended; others whose outcome is not wanted
    either may be among them."""
    meant = meant_by(event)
    return sum(one.void or meant(one.tenant) for one in node.operations)


def meant_by(event: Forget) -> Callable[[str], bool]:
    """Whether units of an owner are meant. Owners are few: each is looked at once, however many
    units it has."""
    floors = Floors(event.floors)

    @functools.cache
    def meant(owner: str) -> bool:
        whole = bool(event.tenant) and event.tenant in (owner, payer_of(owner))
        return whole or floors.forgotten(owner)

    return meant
