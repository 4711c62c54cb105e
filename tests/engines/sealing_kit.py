"""Sealers over key directories, and what tests do to them."""

from __future__ import annotations

from pathlib import Path

from kvatlas.dataplane.keystore import FileKeys
from kvatlas.dataplane.sealing import Sealer


def sealer_of(directory: Path) -> Sealer:
    """On the keys in ``directory``; made where there are none."""
    there = (directory / "master.key").exists()
    return Sealer(FileKeys(directory) if there else FileKeys.create(directory))


def flipped(data: bytes, at: int = -1, bit: int = 0) -> bytes:
    """With one bit turned over."""
    made = bytearray(data)
    made[at] ^= 1 << bit
    return bytes(made)
