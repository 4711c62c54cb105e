"""How commands are told what devices and room cost, and what is said where nobody told them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from kvatlas.cli.output import Assumption
from kvatlas.errors import ConfigError
from kvatlas.report.money import STORAGE, Price, StoragePrice, storage_price
from kvatlas.sim.plan_engines import device_price
from kvatlas.workload.device import Device

_ROOM = {"dram": "--dram-gb-month", "disk": "--disk-gb-month", "object": "--store-gb-month"}


def add_price_options(parser: argparse.ArgumentParser, tiers: Sequence[str]) -> None:
    """``--gpu-hour``, and the option of each of these tiers."""
    add = parser.add_argument
    add("--gpu-hour", type=float, metavar="DOLLARS", help="an hour of one device (list price)")
    for tier in tiers:
        add(_ROOM[tier], type=float, metavar="DOLLARS",
            help=f"a month of a GB of {tier} ({STORAGE[tier].dollars_per_gb_month:g})")  # fmt: skip


def device_prices(
    devices: Iterable[Device], dollars_per_gpu_hour: float | None
) -> tuple[dict[str, Price], list[Assumption]]:
    """By the device's name, and those that nobody gave. Raises ConfigError where neither the
    operator nor a list has one."""
    prices: dict[str, Price] = {}
    assumed = []
    for device in devices:
        if device.name in prices:
            continue
        try:
            price = device_price(device, dollars_per_gpu_hour)
        except ConfigError as error:
            option = "" if dollars_per_gpu_hour is None else "--gpu-hour: "
            raise ConfigError(f"{option}{error}") from error
        prices[device.name] = price
        if price.source.startswith("default"):
            dollars = f"${price.dollars_per_gpu_hour:g} for {device.name}"
            assumed.append(Assumption("--gpu-hour", dollars, price.source))
    return prices, assumed


def room_prices(
    args: argparse.Namespace, tiers: Sequence[str]
) -> tuple[dict[str, StoragePrice], list[Assumption]]:
    """By tier, and those that nobody gave. Raises ConfigError for one that cannot be."""
    prices: dict[str, StoragePrice] = {}
    assumed = []
    for tier in tiers:
        option = _ROOM[tier]
        try:
            prices[tier] = storage_price(tier, getattr(args, option[2:].replace("-", "_")))
        except ConfigError as error:
            raise ConfigError(f"{option}: {error}") from error
        if prices[tier] == STORAGE[tier]:
            dollars = f"${prices[tier].dollars_per_gb_month:g}"
            assumed.append(Assumption(option, dollars, prices[tier].source))
    return prices, assumed
