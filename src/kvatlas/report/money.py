"""GPU time as money. Pure arithmetic; the price is the operator's, with a default that is told."""

from __future__ import annotations

import math

import msgspec

from kvatlas.errors import ConfigError

DOLLARS_MAX = 1e4  # an hour of one accelerator


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


def price(dollars_per_gpu_hour: float | None) -> Price:
    """The operator's price, or the default. Raises ConfigError for one that cannot be."""
    if dollars_per_gpu_hour is None:
        return DEFAULT
    if not (math.isfinite(dollars_per_gpu_hour) and 0 < dollars_per_gpu_hour <= DOLLARS_MAX):
        raise ConfigError(
            f"{dollars_per_gpu_hour:g} dollars per GPU hour: a price above 0, up to "
            f"{DOLLARS_MAX:,.0f}, is needed"
        )
    return Price(dollars_per_gpu_hour, "as the operator says")


def dollars_text(dollars: float) -> str:
    """An amount with as many digits as it needs."""
    return f"${dollars:,.2f}" if abs(dollars) >= 1 else f"${dollars:.4f}"
