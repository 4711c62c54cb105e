"""What the RDMA ports of this node have moved, as the kernel counts it.

``/sys/class/infiniband/DEVICE/ports/N/counters/port_rcv_data`` and ``port_xmit_data`` count in
units of four bytes. Files are small and few, so they are read when somebody asks.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import msgspec

INFINIBAND = Path("/sys/class/infiniband")
PORTS_MAX = 64
_UNIT_BYTES = 4
_SATURATED = 0xFFFF_FFFF  # a counter of 32 bits stops there


class RdmaPort(msgspec.Struct, frozen=True):
    """One port, since its driver was loaded."""

    device: str
    port: str
    received_bytes: int
    sent_bytes: int


class RdmaPorts(msgspec.Struct, frozen=True):
    """All of a node. ``error``: why what is here is not all; then sums of it mean nothing."""

    ports: tuple[RdmaPort, ...] = ()
    error: str = ""

    @property
    def received_bytes(self) -> int | None:
        """By all ports together; None where there are none or not all could be read."""
        if self.error or not self.ports:
            return None
        return sum(port.received_bytes for port in self.ports)


def read_ports(root: Path = INFINIBAND) -> RdmaPorts:
    """Of a node without RDMA: none, and no error."""
    found: list[RdmaPort] = []
    errors: list[str] = []
    try:
        folders = sorted(itertools.islice(root.glob("*/ports/*"), PORTS_MAX + 1))
    except OSError as error:
        return RdmaPorts(error=f"{root}: {error.strerror}")
    if len(folders) > PORTS_MAX:
        errors.append(f"{root}: more than {PORTS_MAX} ports")
    for folder in folders[:PORTS_MAX]:
        try:
            received, sent = (_count(folder / "counters" / f"port_{n}_data") for n in _DIRECTIONS)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            errors.append(f"{folder}: {why}")
        else:
            found.append(RdmaPort(folder.parts[-3], folder.name, received, sent))
    return RdmaPorts(tuple(found), "; ".join(errors[:3]))


_DIRECTIONS = ("rcv", "xmit")


def _count(path: Path) -> int:
    """In bytes. Raises ValueError for what is no count, or one that is at its end."""
    text = path.read_text("ascii", "replace").strip()
    if not re.fullmatch(r"[0-9]{1,20}", text):
        raise ValueError(f"{path.name} says {text[:40]!r}")
    if int(text) == _SATURATED:
        raise ValueError(f"{path.name} is at its end: a counter of 32 bits")
    return int(text) * _UNIT_BYTES
