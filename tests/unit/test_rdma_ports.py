"""The kernel's counters of RDMA ports, from a folder that looks like its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvatlas.service.rdma_ports import PORTS_MAX, RdmaPort, read_ports


@dataclasses.dataclass
class Ports:
    """Folders as the kernel has them."""

    root: Path

    def put(self, received: object, sent: object, device: str = "mlx5_0", port: int = 1) -> None:
        folder = self.root / device / "ports" / str(port) / "counters"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "port_rcv_data").write_text(f"{received}\n")
        (folder / "port_xmit_data").write_text(f"{sent}\n")


@pytest.fixture
def ports(tmp_path: Path) -> Ports:
    return Ports(tmp_path)


def test_a_node_without_rdma_has_none(tmp_path: Path) -> None:
    found = read_ports(tmp_path / "nowhere")
    assert (found.ports, found.error, found.received_bytes) == ((), "", None)


def test_they_count_in_units_of_four_bytes(ports: Ports) -> None:
    ports.put(1000, 7)
    ports.put(5, 0, "mlx5_1", 2)
    found = read_ports(ports.root)
    assert found.ports == (RdmaPort("mlx5_0", "1", 4000, 28), RdmaPort("mlx5_1", "2", 20, 0))
    assert found.received_bytes == 4020


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("", "says ''"),
        ("-1", "says '-1'"),
        ("N/A (no PMA)", "says 'N/A"),
        ("9" * 30, "says '9"),
        (0xFFFFFFFF, "is at its end"),
    ],
)
def test_one_that_is_no_count_leaves_the_sum_unknown(ports: Ports, value: object, why: str) -> None:
    ports.put(1000, 7)
    ports.put(value, 0, "mlx5_1")
    found = read_ports(ports.root)
    assert [port.device for port in found.ports] == ["mlx5_0"]
    assert why in found.error
    assert found.received_bytes is None


def test_one_that_cannot_be_read(ports: Ports) -> None:
    ports.put(1000, 7)
    (ports.root / "mlx5_0/ports/1/counters/port_xmit_data").unlink()
    found = read_ports(ports.root)
    assert found.error.endswith("No such file or directory")
    assert found.received_bytes is None


def test_no_more_than_so_many_are_read(ports: Ports) -> None:
    for n in range(PORTS_MAX + 3):
        ports.put(1, 1, f"mlx5_{n}")
    found = read_ports(ports.root)
    assert len(found.ports) == PORTS_MAX
    assert "more than" in found.error
