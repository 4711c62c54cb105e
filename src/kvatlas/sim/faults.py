"""What goes wrong in one simulated world, and when: everything of it follows from the seed.

A `Scenario` is plain data: engines, requests, faults. `faults_world` plays it, `checkers` judge it.
Each seed draws which kinds of fault it has at all (a run in which everything happens all the time
hides what one kind does alone), so that some worlds are calm but for one kind and others are not.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec

from kvatlas.core import membership, sequence
from kvatlas.core.ahead_copies import Params
from kvatlas.core.directory import Limits
from kvatlas.core.layout import Layout, plain
from kvatlas.sim.links import LinkSpec
from kvatlas.sim.tier_spec import TierSpec
from kvatlas.workload.models import load_layout
from kvatlas.workload.pool import Pool
from kvatlas.workload.spec import EngineSpec

#: kind → what it does; the targets are engines, except for those that say otherwise.
ENGINE_KINDS: dict[str, str] = {
    "crash": "the process ends, connections break; a new one starts later",
    "vanish": "the same, and nobody is told",
    "renumber": "a new process whose batches go on with the old one's numbers",
    "swap": "a new process with another model or layout under the same name",
    "pause": "the engine stands still",
    "stall": "the gateway's event loop stands still",
    "feed_stall": "the engine's events arrive late, in order",
    "partition": "nothing passes between gateway and engine; its events are lost",
    "loss": "event batches and parts of replays are lost",
    "reorder": "event batches and parts of replays overtake each other",
    "duplicate": "event batches and parts of replays come twice",
    "reconnect": "the event connection breaks and comes back: what was under way is lost",
    "clock": "the engine's clock is set forward or back",
    "jump": "the gateway's steady clock jumps forward (its host was suspended)",
    "reset": "the engine drops its prefix cache, when it is idle",
    "sleep": "the engine sleeps: its cache is gone, and it answers nothing",
    "burst": "many requests with one new prefix at once",
    "abort": "clients leave before their answer is complete",
}

#: The same of nodes with tiers (`faults_tiers`).
TIER_KINDS: dict[str, str] = {
    "disk_error": "reads and writes of a node's disk fail",
    "damaged": "bytes of units in a tier turn over",
    "slow_store": "the store, a node's disk, or the way to its engines is slow or stands still",
    "lost_store": "a store, or a tier of a node, is empty and says so",
    "node_restart": "a node's agent ends, and its dram with it; its engines too, or not",
    "agent_stall": "what a node's agent announces arrives late, in order",
    "resize": "a tier of a node has less room",
    "keep": "a part of what a node holds must not leave",
    "forget": "all of a tenant is deleted",
}

#: Of a store that several nodes share (`faults_cluster`).
STORE_KINDS: dict[str, str] = {
    "forgetful_store": "a store is empty and says nothing",
    "store_silent": "a store does not answer",
}

#: Of several gateways (`faults_cluster`).
REPLICA_KINDS: dict[str, str] = {
    "gateway_crash": "a gateway's process is killed; a new one starts later, cold or from a peer",
    "split": "nothing passes between one gateway and an engine, or an agent",
}

#: Of the register, and of those who are members by it (`faults_cluster`).
REGISTER_KINDS: dict[str, str] = {
    "register_late": "the register answers late, after deadlines too",
    "register_silent": "the register is away, and comes back with all that it had",
    "register_cut": "nothing passes between one member and the register",
    "register_empty": "the register is away, and an empty one comes in its place",
    "register_behind": "the register is away, and one comes that lacks the last writes",
    "member_clock": "a member's wall clock is wrong by up to an hour",
    "namesake": "a second process has a member's name",
    "stranger": "a process of another cluster, or format, has this cluster's name",
    "purge": "a member is told that something is to be forgotten: a floor is raised",
}
KINDS = ENGINE_KINDS | TIER_KINDS | STORE_KINDS | REPLICA_KINDS | REGISTER_KINDS

#: Where there are windows no prompt ends with a block: if its end is the only place where it could
#: be resumed it is computed once more, and its events are those of a reported hit. The directory
#: takes them for one, and then may know less than there is (`core.claims`).
GRID_LEAST = 16
_ROOMY = 1_000_000  # block-holders: more than any of these worlds has
_TARGETLESS = ("stall", "jump", "burst", "abort")
_SHARED_MODELS = ("", "", "", "", "lora")
_SCOPES = ("", "", "red", "blue")


class Member(msgspec.Struct, frozen=True):
    """One engine of a scenario. ``other``: what it becomes by a "swap"."""

    name: str
    layout: Layout
    spec: EngineSpec
    identity: bytes
    other: tuple[Layout, EngineSpec, bytes]


class Ask(msgspec.Struct, frozen=True):
    """One request: when it comes, what it says, and when its client gives up (-1: it waits)."""

    id: str
    at: float
    tokens: bytes
    output_tokens: int
    scope: str
    adapter: str
    leave_after_s: float = -1.0


class Fault(msgspec.Struct, frozen=True):
    """``kind`` (of `KINDS`) happens to ``target`` at ``at`` and lasts ``duration_s``.

    ``amount``: a probability, or seconds by which a clock is set. ``strikes_s``: not at once, but
    so long after something was begun on the node that it is about; -1: at once.
    """

    at: float
    kind: str
    target: str
    duration_s: float
    amount: float = 0.0
    strikes_s: float = -1.0

    def text(self) -> str:
        """For people."""
        who = f" {self.target}" if self.target else ""
        lasting = f" for {self.duration_s:.2f} s" if self.duration_s else ""
        by = f", {self.amount:+.2f}" if self.amount else ""
        then = ", once something is under way there" if self.strikes_s >= 0 else ""
        return f"{self.at:8.2f} s  {self.kind}{who}{lasting}{by}{then}"


class NodePlan(msgspec.Struct, frozen=True):
    """One node and its engines."""

    name: str
    engines: tuple[str, ...]

    @property
    def agent(self) -> str:
        """What its agent is called among those who send messages."""
        return f"agent-{self.name}"


class TierPlan(msgspec.Struct, frozen=True):
    """Nodes with tiers, all alike. ``card``: each node's network card; ``ahead``: what the gateway
    has copied from one to another before anybody asks."""

    nodes: tuple[NodePlan, ...]
    spec: TierSpec
    card: LinkSpec
    ahead: Params = Params()


class Scenario(msgspec.Struct, frozen=True):
    """One whole world. ``heal_at``: from then on nothing is wrong any more."""

    seed: int
    members: tuple[Member, ...]
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    heal_at: float
    directory: Limits
    in_flight_max: int
    feed: sequence.Limits
    silence_s: float
    tiers: TierPlan | None = None
    replicas: int = 1
    register: membership.Params | None = None

    @property
    def roomy(self) -> bool:
        """Its directory never comes near a limit."""
        return self.directory.holders_max >= _ROOMY


def happening(plan: Scenario, faults: Iterable[Fault]) -> Scenario:
    """The same world with these faults, healed when the last of them is over."""
    in_order = tuple(sorted(faults, key=lambda fault: fault.at))
    ends = [fault.at + fault.duration_s + 1.0 for fault in in_order]
    return msgspec.structs.replace(plan, faults=in_order, heal_at=max([plan.heal_at, *ends]))


def scenario(seed: int) -> Scenario:
    """Draw the world of this seed."""
    draw = random.Random(f"kvatlas.faults.1/{seed}")
    members, unit = _members(draw)
    kinds = _kinds(draw)
    length_s = draw.uniform(60.0, 150.0)
    faults = sorted(
        (_fault(draw, draw.choice(kinds), members, length_s) for _ in range(draw.randint(2, 14))),
        key=lambda fault: fault.at,
    )
    windowed = any(g.window_tokens for m in members for g in m.layout.groups)
    windowed = windowed or any(g.window_tokens for m in members for g in m.other[0].groups)
    asks = _asks(draw, faults, unit, length_s, leaving="abort" in kinds, windowed=windowed)
    tiny = draw.random() < 0.2
    few = draw.choice((1, 4, 64))
    return Scenario(
        seed=seed,
        members=members,
        asks=tuple(asks),
        faults=tuple(faults),
        heal_at=max([length_s, *(f.at + f.duration_s for f in faults)]) + 1.0,
        directory=Limits(
            holders_max=draw.randint(50, 600) if tiny else _ROOMY,
            holders_per_publisher_max=draw.randint(20, 300) if tiny else _ROOMY,
        ),
        in_flight_max=draw.randint(1, 3) if draw.random() < 0.1 else 100_000,
        feed=sequence.Limits(
            waiting_batches_max=few if draw.random() < 0.2 else 4096,
            orphan_replay_s=5.0,
            orphan_replay_max_s=30.0,
        ),
        silence_s=draw.choice((20.0, 60.0)),
    )


def _kinds(draw: random.Random) -> list[str]:
    share = draw.choice((0.15, 0.35, 0.7))
    kinds = list(ENGINE_KINDS)
    return [kind for kind in kinds if draw.random() < share] or [draw.choice(kinds)]


def _layouts(draw: random.Random) -> list[tuple[Layout, int, int | None]]:
    """(layout, tokens that prompts are counted in, retention) of the models in this world."""
    plain_ = (plain(16, model="gqa", engine="vllm"), 16, 0)
    sliding = (load_layout("gpt-oss-120b", engine="vllm"), 48, draw.choice((None, 0, 64)))
    v4 = (load_layout("deepseek-v4-flash", engine="vllm"), 256, draw.choice((0, 0, None, 512)))
    pick = draw.choice((plain_, plain_, sliding, sliding, v4))
    other = draw.choice((plain_, sliding, v4)) if draw.random() < 0.2 else pick
    return [pick, other]


def _members(draw: random.Random) -> tuple[tuple[Member, ...], int]:
    kinds = _layouts(draw)
    unit = max(kind[1] for kind in kinds)
    members = []
    count = draw.randint(2, 5)
    roomy = draw.uniform(1.0, 4.0)
    waiting = draw.choice((1, 3, 10_000, 10_000))

    def spec(layout: Layout, retention: int | None) -> EngineSpec:
        step = 512
        peak = Pool(layout, 1, retention=retention, step_tokens=step).peak_blocks(unit * 14 + 40)
        return EngineSpec(
            blocks=max(1, int(peak * roomy)),
            max_running=draw.choice((2, 8)),
            max_waiting=waiting,
            step_tokens=step,
            retention_tokens=retention,
            prefill_tokens_per_s=draw.choice((unit * 20.0, unit * 200.0)),
            decode_step_s=draw.choice((0.01, 0.05)),
        )

    for number in range(count):
        layout, _, retention = kinds[0] if number < (count + 1) // 2 else kinds[1]
        changed = draw.choice(kinds)
        identity = b"weights 2" if changed[0] == layout else b"weights 1"
        members.append(
            Member(
                f"e{number}",
                layout,
                spec(layout, retention),
                b"weights 1",
                (changed[0], spec(changed[0], changed[2]), identity),
            )
        )
    return tuple(members), unit


def _fault(draw: random.Random, kind: str, members: tuple[Member, ...], length_s: float) -> Fault:
    at = draw.uniform(0.5, length_s)
    target = "" if kind in _TARGETLESS else draw.choice(members).name
    short = draw.choice((0.05, 0.5, 3.0, 12.0))
    duration = draw.uniform(0.01, short)
    amount = 0.0
    if kind in ("loss", "reorder", "duplicate"):
        duration = draw.uniform(1.0, 40.0)
        amount = draw.choice((0.1, 0.5, 1.0 if kind == "loss" else 0.9))
    elif kind == "clock":
        duration, amount = 0.0, draw.choice((-3600.0, -0.5, -0.01, 0.5, 3600.0))
    elif kind == "jump":
        duration, amount = 0.0, draw.choice((0.3, 5.0, 100.0))
    elif kind in ("reset", "burst", "reconnect", "abort"):
        duration = 0.0
    elif kind == "partition":
        duration = draw.uniform(0.1, draw.choice((2.0, 10.0, 40.0)))
    return Fault(at, kind, target, duration, amount)


def _asks(
    draw: random.Random,
    faults: list[Fault],
    unit: int,
    length_s: float,
    *,
    leaving: bool,
    windowed: bool,
) -> list[Ask]:
    """Sessions over shared beginnings: the same tokens under several scopes and adapters."""
    shared = [draw.randbytes(4 * unit * draw.randint(1, 5)) for _ in range(draw.randint(1, 4))]
    sessions: list[bytes] = []
    asks: list[Ask] = []

    def ask(at: float, tokens: bytes) -> None:
        leave = draw.uniform(0.0, 4.0) if leaving and draw.random() < 0.2 else -1.0
        asks.append(
            Ask(
                f"r{len(asks)}",
                at,
                tokens,
                draw.choice((1, 3, 10, 30)),
                draw.choice(_SCOPES),
                draw.choice(_SHARED_MODELS),
                leave,
            )
        )

    for _ in range(draw.randint(25, 80)):
        at = draw.uniform(0.0, length_s)
        new = draw.randbytes(4 * draw.randint(1, 2 * unit))
        if sessions and draw.random() < 0.5:
            index = draw.randrange(len(sessions))
            if len(sessions[index]) < 4 * unit * 10:
                sessions[index] += new
            tokens = sessions[index]
        else:
            start = draw.choice(shared)
            if draw.random() < 0.2:  # parts with the others inside a block
                start = start[: 4 * draw.randint(1, len(start) // 4)]
            tokens = start + new
            if draw.random() < 0.5:
                sessions.append(tokens)
        if draw.random() < 0.15:  # ends with a block: the last one must be computed all the same
            tokens = tokens[: max(4 * unit, len(tokens) // (4 * unit) * 4 * unit)]
        if windowed and len(tokens) % (4 * GRID_LEAST) == 0:
            tokens = tokens[:-4]  # see `GRID_LEAST`
        ask(at, tokens)
    for fault in faults:
        if fault.kind == "burst":
            prefix = draw.randbytes(4 * unit * draw.randint(1, 6))
            for _ in range(draw.randint(5, 15)):
                ask(fault.at + draw.uniform(0.0, 0.05), prefix + draw.randbytes(40))
    return sorted(asks, key=lambda each: each.at)
