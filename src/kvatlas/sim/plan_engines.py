"""The engines of a cluster as a plan sees them: kinds, their seconds, their price. Nothing is
played: each figure is the time model's for one step, or for the chunks of one prompt."""

from __future__ import annotations

from functools import cache

import msgspec

from kvatlas.core.layout import Layout
from kvatlas.errors import ConfigError
from kvatlas.report.money import Price, price
from kvatlas.sim.cluster import Cluster, Role
from kvatlas.sim.links import LinkSpec
from kvatlas.workload.device import DEVICES, Device
from kvatlas.workload.holding import unroll
from kvatlas.workload.pool import Pool
from kvatlas.workload.spec import EngineSpec
from kvatlas.workload.step_time import StepTime

#: Profiles whose price no list names (`kvatlas.workload.device`).
DERIVED = {"H20": "derived, 0.7 to 1.3: no list names it"}


class Kind(msgspec.Struct, frozen=True):
    """``count`` equal engines of a cluster."""

    name: str
    role: Role
    count: int
    link: LinkSpec
    layout: Layout
    spec: EngineSpec

    def devices(self) -> int:
        """Accelerators in all."""
        return self.count * self.spec.devices


def kinds(cluster: Cluster) -> list[Kind]:
    """In the order of the file. Raises ConfigError for engines of which no bytes are known."""
    found: dict[str, Kind] = {}
    for member in cluster.members:
        name = member.name.rpartition("-")[0]
        if not member.layout.components:
            raise ConfigError(
                f"engine {name!r}: a plain block size does not tell what a token weighs: name a "
                "model"
            )
        known = found.get(name)
        found[name] = Kind(
            name,
            member.role,
            known.count + 1 if known else 1,
            member.link,
            member.layout,
            member.spec,
        )
    return list(found.values())


def device_price(device: Device, dollars_per_gpu_hour: float | None) -> Price:
    """The operator's price of an hour, or the profile's. Raises ConfigError where neither is
    there, naming the option."""
    if dollars_per_gpu_hour is None and not device.usd_per_hour:
        raise ConfigError(
            f"device {device.name!r} has no list price: give --gpu-hour DOLLARS (or usd_per_hour "
            "in its [[device]])"
        )
    if DEVICES.get(device.name) == device:
        said = DERIVED.get(device.name, "list price of the profile")
    else:
        said = "usd_per_hour of its [[device]], or of the one that it is like"
    listed = Price(device.usd_per_hour, f"default: {said} (docs/hardware.md)")
    return price(dollars_per_gpu_hour, listed)


def resident_blocks(layout: Layout, tokens: int) -> int:
    """Blocks of a request behind so many tokens: of windows those that it reads, and the one that
    is open."""
    total = 0
    for slot in unroll(layout):
        all_of_it = -(-tokens // slot.block_tokens)
        total += all_of_it if slot.need is None else min(slot.need + 1, all_of_it)
    return total


class Engine:
    """One kind with its price: seconds and dollars of what it does."""

    def __init__(self, kind: Kind, price: Price) -> None:
        self.kind, self.price = kind, price
        spec, layout = kind.spec, kind.layout
        self._time = StepTime(spec, layout)
        self._pool = Pool(layout, 1, retention=spec.retention_tokens, step_tokens=spec.step_tokens)
        self._chunks = cache(self._chunks_s)

    def dollars(self, seconds: float) -> float:
        """What so much time of one engine costs."""
        return self.price.dollars(seconds * self.kind.spec.devices)

    def alone_s(self, start: int, end: int) -> float:
        """Seconds to compute tokens start…end-1 of a prompt in steps of its own."""
        step = self.kind.spec.step_tokens
        if start:
            return sum(
                self._time.seconds([(at, min(end, at + step))]) for at in range(start, end, step)
            )
        full = end // step
        rest = [(full * step, end)] if end > full * step else []
        return self._chunks(full) + (self._time.seconds(rest) if rest else 0.0)

    def _chunks_s(self, count: int) -> float:
        """Of the first ``count`` full steps of a prompt."""
        if not count:
            return 0.0
        step, before = self.kind.spec.step_tokens, self._chunks(count - 1)
        return before + self._time.seconds([((count - 1) * step, count * step)])

    def busy_s(self, tokens: int) -> float:
        """Seconds of the engine that a prompt of so many tokens takes where steps are full: what
        does not fill one shares it with others of its kind."""
        step = self.kind.spec.step_tokens
        full, rest = divmod(tokens, step)
        seconds = self._chunks(full)
        if rest:
            alike = step // rest
            work = [(full * step, tokens)] * alike
            seconds += self._time.seconds(work) / alike
        return seconds

    def saved_s(self, position: int) -> float:
        """How much sooner the first token comes where ``position`` tokens need not be computed, a
        block of the resume grid being new."""
        end = position + self.kind.layout.grid_tokens
        return max(0.0, self.alone_s(0, end) - self.alone_s(position, end))

    def step_s(self, context: int, batch: int) -> float:
        """Seconds of a step in which so many requests decode, each behind ``context`` tokens."""
        return self._time.alike(context, batch)

    def batch_max(self, tokens: int) -> int:
        """Requests of so many tokens in all that fit beside each other while they decode; 0: not
        even one. An engine that prefills too keeps room for one prompt in its largest step."""
        blocks, each = self.kind.spec.blocks, resident_blocks(self.kind.layout, tokens)
        if self.kind.role != "decode":
            blocks -= max(0, self._pool.peak_blocks(tokens) - each)
        return max(0, min(blocks // each, self.kind.spec.max_running))

    def batch(self, context: int, tokens: int, tpot_s: float | None) -> int:
        """The largest batch that fits and whose steps take no longer than ``tpot_s``; 0: none."""
        low, high = 0, self.batch_max(tokens)
        if tpot_s is None:
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if self.step_s(context, middle) <= tpot_s:
                low = middle
            else:
                high = middle - 1
        return low

    def copies(self) -> int:
        """In how many devices' memory the state of one request lies as a whole."""
        replicated = self.kind.layout.tensor_parallel == "replicated"
        return self.kind.spec.devices if replicated else 1
