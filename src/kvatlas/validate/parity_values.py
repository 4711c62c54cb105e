"""What a parity run is made of: the scenario, and what one side made of it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from kvatlas.config import read
from kvatlas.core.directory import Directory
from kvatlas.core.events import Event
from kvatlas.core.keys import Keyring
from kvatlas.core.layout import Layout
from kvatlas.core.records import Publisher
from kvatlas.core.router import Decision
from kvatlas.errors import ConfigError
from kvatlas.sim.cluster import TABLES, Cluster, ClusterFile, build
from kvatlas.sim.world import Play, fingerprint
from kvatlas.workload.pace import Pace
from kvatlas.workload.spec import EngineSpec
from kvatlas.workload.trace import Trace, TraceRequest

#: Both worlds begin at this time, so that equal spans have equal digits.
START_S = 1024.0
#: Nobody looks after the engines meanwhile: when a poll comes is no part of a scenario.
NEVER_S = 1e9
REQUESTS_MAX = 10_000
SPAN_MAX_S = 1e5  # beyond, so fine a difference between two times has no digits left
SPACE_S = 1e-6  # at least so far apart are two arrivals: one instant has no order over sockets


class Kind(msgspec.Struct, frozen=True):
    """Engines that are alike, as both worlds must be told of them."""

    names: tuple[str, ...]
    model: str
    kv_dtype: str
    layout: Layout
    spec: EngineSpec


class Change(msgspec.Struct, frozen=True):
    """An engine gets slower or faster at a time of both worlds."""

    at_s: float
    engine: str
    pace: Pace


class Scenario(msgspec.Struct, frozen=True):
    """A cluster and its requests, at the times of both worlds."""

    name: str
    cluster: Cluster
    file: ClusterFile
    requests: tuple[TraceRequest, ...]
    block_tokens: int
    closed_loop: bool = False
    changes: tuple[Change, ...] = ()

    def kinds(self) -> Iterator[Kind]:
        """One per ``[[engine]]``."""
        members = iter(self.cluster.members)
        for table in self.file.engine:
            mine = list(itertools.islice(members, table.count))
            names = tuple(member.name for member in mine)
            yield Kind(names, table.model, table.kv_dtype, mine[0].layout, mine[0].spec)


class Request(msgspec.Struct):
    """One request on one side. ``answer`` digests its text; ``fault`` says why there is none."""

    id: str
    decision: Decision
    tried: list[str] = []
    ttft_s: float = -1.0
    ended_at: float = -1.0
    cached_tokens: int = -1
    answer: str = ""
    fault: str = ""


class End(msgspec.Struct, frozen=True):
    """One engine when all is over: the digest of its state, requests that lost their blocks, and
    block-holders that the directory counts of it."""

    engine: str
    preemptions: int
    holders: int


class Side(msgspec.Struct):
    """One world's account. ``requests`` in the order of their decisions; ``events`` per engine, in
    the form that the wire gives them; ``directory`` digests all that is held in the end."""

    requests: dict[str, Request]
    events: dict[str, tuple[Event, ...]]
    ends: dict[str, End]
    directory: str


def directory_digest(scenario: Scenario, events: Mapping[str, Sequence[Event]]) -> str:
    """What a directory holds after these events. Each world keys its blocks under a secret and a
    fingerprint of its own: here both are filed under the same."""
    keyring = Keyring(b"both worlds under one secret")
    directory = Directory(keyring)
    for kind in scenario.kinds():
        for name in kind.names:
            directory.register(Publisher(name), kind.layout, fingerprint(kind.layout))
            directory.apply(Publisher(name), events[name])
    return directory.digest()


def text_digest(text: str) -> str:
    """16 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def scenario(file: ClusterFile, trace: Trace, play: Play, where: str = "cluster") -> Scenario:
    """Raises ConfigError for a cluster that stub engines cannot stand for, or too many requests."""
    cluster = build(file, lambda place: f"{where}, {place}")
    if cluster.tiers is not None or any(m.role != "combined" for m in cluster.members):
        raise ConfigError(f"{where}: stub engines have no tiers and no pairs: leave them out")
    if any(table.engine != "vllm" for table in file.engine):
        raise ConfigError(f'{where}: stub engines keep state as vLLM does: engine = "vllm"')
    requests = tuple(_spaced(itertools.islice(trace, play.limit), play))
    if not requests:
        raise ConfigError(f"{trace.name}: no requests in it")
    if len(requests) > REQUESTS_MAX:
        raise ConfigError(f"{trace.name}: more than {REQUESTS_MAX:,} requests: give --limit")
    return Scenario(trace.name, cluster, file, requests, trace.block_tokens, play.closed_loop)


def _spaced(requests: Iterator[TraceRequest], play: Play) -> Iterator[TraceRequest]:
    """From ``START_S`` on, no two at one instant; nor do the next turns of two sessions come
    together whose answers ended together: each thinks a little longer in a way of its own."""
    last = START_S
    for number, request in enumerate(itertools.islice(requests, REQUESTS_MAX + 1)):
        last = max(START_S + request.arrival_s * play.time_scale, last + SPACE_S)
        if last > START_S + SPAN_MAX_S:
            raise ConfigError(
                f"requests over more than {SPAN_MAX_S:,.0f} s: give --limit, or a --time-scale "
                "that makes them shorter"
            )
        think_s = request.think_s
        if think_s is not None:
            think_s = think_s * play.time_scale + SPACE_S * (number + 0.5) / REQUESTS_MAX
        output = request.output_tokens
        if play.max_output_tokens is not None:
            output = min(output, play.max_output_tokens)
        yield msgspec.structs.replace(
            request, arrival_s=last, output_tokens=output, think_s=think_s
        )


def load_file(path: Path) -> ClusterFile:
    """A cluster.toml. Raises ConfigError."""
    return read(path, ClusterFile, TABLES)[1]
