"""The state of an agent as plain values."""

from __future__ import annotations

import msgspec

from kvatlas.core.agent_ends import Ends, Later
from kvatlas.core.agent_saves import Saves, Wish
from kvatlas.core.agent_values import Attach, Kind
from kvatlas.core.forgetting import Floor
from kvatlas.core.node import Node
from kvatlas.core.operations import Operation
from kvatlas.core.records import Tier
from kvatlas.errors import LedgerError


class State(msgspec.Struct, frozen=True):
    """What `Agent.snapshot` holds. Sets are sorted, so that equal states are equal bytes."""

    ledgers: dict[Tier, bytes]
    sealed: dict[Tier, list[bytes]]
    known: dict[Tier, list[tuple[bytes, str]]]
    lost: list[bytes]
    operations: list[Operation]
    number: int
    wishes: list[Wish]
    left_at: list[tuple[str, str, int]]
    later: list[Later]
    workers: list[Attach]
    counts: list[tuple[str, int]]
    moved: list[tuple[Kind, Tier, int]]
    now: float
    draining: bool = False
    owners: list[tuple[bytes, str]] = []
    floors: tuple[Floor, ...] = ()


def encoded(node: Node, saves: Saves, ends: Ends) -> bytes:
    """The whole state."""
    inventory = node.inventory
    return msgspec.msgpack.encode(
        State(
            ledgers={tier: ledger.snapshot() for tier, ledger in inventory.ledgers.items()},
            sealed={tier: sorted(names) for tier, names in inventory.sealed.items()},
            known={tier: list(known.items()) for tier, known in inventory.known.items()},
            lost=sorted(inventory.lost),
            operations=list(node.operations),
            number=node.operations.number,
            wishes=list(saves.wishes()),
            left_at=[(*name, tokens) for name, tokens in saves.left_at.items()],
            later=ends.waiting(),
            workers=[worker.attach for worker in node.workers.values()],
            counts=sorted(node.counts.items()),
            moved=sorted((kind, tier, size) for (kind, tier), size in node.moved.items()),
            now=node.now,
            draining=node.draining,
            owners=sorted(inventory.owners.items()),
            floors=node.floors.all(),
        )
    )


def decoded(data: bytes) -> State:
    """Raises LedgerError when this is no snapshot of an agent."""
    try:
        return msgspec.msgpack.decode(data, type=State)
    except msgspec.MsgspecError as error:
        raise LedgerError(f"not a snapshot of an agent: {error}") from error


def fill(node: Node, saves: Saves, ends: Ends, state: State) -> None:
    """Put a state into a fresh agent whose ledgers and engines are there already."""
    inventory = node.inventory
    for tier, names in state.sealed.items():
        inventory.sealed[tier] = set(names)
    for tier, known in state.known.items():
        inventory.known[tier].update(known)
    inventory.lost = set(state.lost)
    for operation in state.operations:
        alone = operation.alone
        node.begin(operation)
        operation.alone = alone
    node.operations.number = state.number
    for wish in state.wishes:
        saves.put(wish)
    for worker, request, tokens in state.left_at:
        saves.left_at[worker, request] = tokens
    for later in state.later:
        ends.wait(later)
    node.counts.update(dict(state.counts))
    for kind, tier, size_bytes in state.moved:
        node.moved[kind, tier] = size_bytes
    node.now = state.now
    node.draining = state.draining
    inventory.owners = dict(state.owners)
    for floor in state.floors:
        node.floors.put(floor)
