"""Table [tracing] of kvatlas.toml: where spans of requests go."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from kvatlas.config_tls import is_local

_URL = r"https?://[^/\s?#@]+(/[^\s?#]*)?"


class TracingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``otlp``: a collector's base URL; "" keeps no spans. ``sample_ratio``: of the requests whose
    callers do not say themselves whether they are kept."""

    otlp: str = ""
    sample_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    service_name: str = "kvatlas"


def fault_of(config: TracingConfig, *, tls: bool) -> tuple[str, str]:
    """The key that cannot be used, and why; "" for none. ``tls``: nothing goes in the clear."""
    otlp = config.otlp
    if otlp and not re.fullmatch(_URL, otlp):
        return "tracing.otlp", f"tracing.otlp: {otlp!r} is not of the form http://host:port"
    if tls and otlp.startswith("http:") and not is_local(otlp):
        return "tracing.otlp", "tracing.otlp: with [tls] spans go by https"
    return "", ""
