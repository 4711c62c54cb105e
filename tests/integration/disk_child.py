"""Writes, seals and deletes units on a disk until it is killed; says what was reported, in order.

``python disk_child.py DIRECTORY SEED``: lines "put NAME", "seal NAME", "drop NAME" (asked for),
"gone NAME" (done).
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from disk_kit import CAPACITY_BYTES, SEGMENT_BYTES, piece_of, run

from kvatlas.dataplane.tiers.disk import DiskStore


def main() -> None:
    directory, seed = Path(sys.argv[1]), int(sys.argv[2])
    draw = random.Random(seed)
    store = DiskStore(directory, CAPACITY_BYTES, segment_bytes=SEGMENT_BYTES, threads=3)
    held: list[bytes] = [entry.name for entry in store.scan()]
    print("open", flush=True)
    number = 0
    while True:
        number += 1
        names = [b"%d-%d-%d" % (seed, number, n) for n in range(draw.randint(1, 4))]
        lasting = draw.random() < 0.2
        report = run(store.write, *(piece_of(name, lasting=lasting) for name in names))
        for name in names:
            if name not in report.failed:
                held.append(name)
                print("seal" if lasting else "put", name.decode(), flush=True)
        while held and (report.failed or draw.random() < 0.3):
            name = held.pop(draw.randrange(len(held)))
            print("drop", name.decode(), flush=True)
            store.delete([name])
            print("gone", name.decode(), flush=True)
            if draw.random() < 0.4:
                break


main()
