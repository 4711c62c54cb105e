"""GPU time and room as money. Pure arithmetic; prices are the operator's, defaults are told."""

from __future__ import annotations

import math

import msgspec

from kvatlas.errors import ConfigError

DOLLARS_MAX = 1e4  # an hour of one accelerator
MONTH_S = 730 * 3600.0  # as clouds count it
GB_DOLLARS_MAX = 1e3  # a month of a gigabyte


class Price(msgspec.Struct, frozen=True):
    """What an hour of one accelerator costs, and who says so."""

    dollars_per_gpu_hour: float
    source: str

    def dollars(self, gpu_seconds: float) -> float:
        """What so much time of accelerators costs."""
        return gpu_seconds / 3600 * self.dollars_per_gpu_hour


#: Where the operator names none.
DEFAULT = Price(
    2.0,
    "default: the rental price of an H800 that the DeepSeek-V3 Technical Report counts with "
    "(arXiv 2412.19437, table 1)",
)


class StoragePrice(msgspec.Struct, frozen=True):
    """What a month of a gigabyte (10^9 bytes) costs, and who says so."""

    dollars_per_gb_month: float
    source: str

    def dollars(self, size_bytes: float, held_s: float) -> float:
        """What holding so many bytes for so long costs."""
        return size_bytes / 1e9 * self.dollars_per_gb_month * held_s / MONTH_S


#: Per month and GB where the operator names none. Public list prices; of a node that is rented
#: whole its memory and disks are paid for already: then 0 is right.
STORAGE: dict[str, StoragePrice] = {
    "dram": StoragePrice(
        2.88,
        "default: Google Cloud's list price of memory by itself (N2 custom machines, us-central1): "
        "$0.004237 per GiB and hour",
    ),
    "disk": StoragePrice(
        0.0745, "default: Google Cloud's list price of local SSD (us-central1): $0.080 per GiB"
    ),
    "object": StoragePrice(
        0.0214,
        "default: Amazon S3 Standard's list price (us-east-1): $0.023 per GiB, requests not "
        "counted",
    ),
}


def price(dollars_per_gpu_hour: float | None, default: Price = DEFAULT) -> Price:
    """The operator's price, or the default. Raises ConfigError for one that cannot be."""
    if dollars_per_gpu_hour is None:
        return default
    if not (math.isfinite(dollars_per_gpu_hour) and 0 < dollars_per_gpu_hour <= DOLLARS_MAX):
        raise ConfigError(
            f"{dollars_per_gpu_hour:g} dollars per GPU hour: a price above 0, up to "
            f"{DOLLARS_MAX:,.0f}, is needed"
        )
    return Price(dollars_per_gpu_hour, "as the operator says")


def storage_price(tier: str, dollars_per_gb_month: float | None) -> StoragePrice:
    """The operator's price of "dram", "disk" or "object", or the default. Raises ConfigError for
    one that cannot be."""
    if dollars_per_gb_month is None:
        return STORAGE[tier]
    if not (math.isfinite(dollars_per_gb_month) and 0 <= dollars_per_gb_month <= GB_DOLLARS_MAX):
        raise ConfigError(
            f"{dollars_per_gb_month:g} dollars per GB and month of {tier}: a price from 0 to "
            f"{GB_DOLLARS_MAX:,.0f} is needed"
        )
    return StoragePrice(dollars_per_gb_month, "as the operator says")


def dollars_text(dollars: float) -> str:
    """An amount with as many digits as it needs."""
    if 0 < abs(dollars) < 0.1:
        return f"${dollars:.{2 - math.floor(math.log10(abs(dollars)))}f}"
    return f"${dollars:,.2f}" if abs(dollars) >= 1 else f"${dollars:.4f}"
