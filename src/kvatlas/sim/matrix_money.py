"""What a run of the matrix costs: devices for as long as it takes, and the room that it filled."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvatlas.report.economics import per_million
from kvatlas.report.money import StoragePrice
from kvatlas.sim.report import SimReport


class Prices(msgspec.Struct, frozen=True):
    """``engine_hour``: dollars per hour of each engine with all its devices, in the cluster's
    order; ``room``: of "dram", "disk" and "object"."""

    engine_hour: tuple[float, ...]
    room: dict[str, StoragePrice]


def dollars(
    prices: Prices, report: SimReport, held_bytes: Mapping[str, int]
) -> dict[str, float | None]:
    """Dollars per million tokens, prompt and output together.

    Of all that were served, with the whole cluster; with nothing but the time in which engines had
    work in hand (as if others paid for the rest); and of requests that met the objectives, with the
    whole cluster. ``held_bytes`` is paid for from start to end.
    """
    good, hours = report.tokens.good, report.latency.duration_s / 3600
    room = sum(
        price.dollars(held_bytes.get(tier, 0), report.latency.duration_s)
        for tier, price in prices.room.items()
    )
    whole = sum(prices.engine_hour) * hours + room
    loads = zip(report.engines, prices.engine_hour, strict=True)
    busy = sum(load.busy * hour for load, hour in loads) * hours + room
    served = report.tokens.prompt - report.tokens.unserved + report.tokens.output
    return {
        "dollars_per_million": per_million(whole, served) if served else None,
        "busy_dollars_per_million": per_million(busy, served) if served else None,
        "good_dollars_per_million": per_million(whole, good) if good else None,
    }
