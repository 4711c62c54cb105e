"""Links and media as cost models see them: what the data sheet says, and what is reached. Pure.

Bytes per second in one direction. Where nobody measured what is reached, ``source`` says that it
is an assumption; your own measurement goes before all of it.
"""

from __future__ import annotations

import msgspec


class LinkProfile(msgspec.Struct, frozen=True):
    """One kind of link: nominal and reached bytes/s one way, seconds per transfer, and who says
    so."""

    name: str
    nominal_bytes_per_s: float
    bytes_per_s: float
    latency_s: float
    source: str


def _link(name: str, nominal_gb: float, reached_gb: float, us: float, source: str) -> LinkProfile:
    return LinkProfile(name, nominal_gb * 1e9, reached_gb * 1e9, us * 1e-6, source)


_NVLINK = "data sheet, half of both ways; 80 % reached and the latency: assumptions"
_RDMA = "line rate; 90 % reached: an assumption; about 10 µs"
_DRIVE = "PCIe lanes; what drives of the day read; latency: an assumption"

LINKS: dict[str, LinkProfile] = {
    link.name: link
    for link in (
        _link("NVLink-4", 450, 360, 5, f"H20, H100, H200 {_NVLINK}"),
        _link("NVLink-5", 900, 720, 5, f"B200, GB200 {_NVLINK}"),
        _link("PCIe-5-x16", 64, 52.5, 10, "32 GT/s x 16; pinned copies reach 50 to 55"),
        _link("PCIe-4-x16", 32, 26, 10, "16 GT/s x 16; the same share as PCIe 5: an assumption"),
        _link("RDMA-400G", 50, 45, 10, _RDMA),
        _link("RDMA-800G", 100, 90, 10, _RDMA),
        _link("Mooncake-4x200G", 100, 87, 10, "Mooncake (FAST'25): 87 GB/s between two nodes"),
        _link("Mooncake-8x400G", 400, 190, 10, "Mooncake (FAST'25): 190 GB/s between two nodes"),
        _link("3FS-400G", 50, 42.9, 100, "3FS: 40 GiB/s per client; latency: an assumption"),
        _link("storage-NIC", 50, 45, 100, f"DualPath (arXiv 2602.21548): one per node; {_RDMA}"),
        _link("NVMe-Gen5-x4", 15.75, 14, 100, _DRIVE),
        _link("NVMe-Gen4-x4", 7.88, 7, 100, f"{_DRIVE}; 7 GB/s too"),
        _link("TCP-100G", 12.5, 2.4, 100, "Mooncake Transfer Engine 0.3.13 over TCP: 2.0 to 2.9"),
    )
}
