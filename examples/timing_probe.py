"""A tenant cannot tell from latency whether another one holds a prefix.

    python examples/timing_probe.py [TRIALS]

A prober of another tenant asks for prompts that a holder has, or has not; then the same prober
inside of the holder's tenant, which must see. The last one stands before the real gateway, on real
sockets. Exit status 1 where an AUC between tenants is above 0.52, or the control is blind.
"""

from __future__ import annotations

import sys

from kvatlas.validate.isolation.timing import AUC_MAX, BY_NAME, CASES, CONTROL_MIN, Auc, probe
from kvatlas.validate.isolation.timing import simulated as in_simulator
from kvatlas.validate.isolation.timing_served import Probed


def main(trials: int = 12) -> int:
    """The exit status."""
    cases = [(case, in_simulator) for case in CASES]
    failed = 0
    for case, run in [*cases, (BY_NAME["hbm"], Probed())]:
        where = f"{case.name}, {'simulator' if run is in_simulator else 'gateway'}"
        across, inside = probe(case, trials, run=run), probe(case, trials, run=run, inside=True)
        print(f"{where:18} between tenants {_shown(across)}; within one {_shown(inside)}")
        failed += abs(across.auc - 0.5) > AUC_MAX - 0.5 or inside.auc < CONTROL_MIN
    return 1 if failed else 0


def _shown(auc: Auc) -> str:
    span = f"{auc.low:.3f} to {auc.high:.3f}"
    return f"AUC {auc.auc:.3f} ({span}), {auc.equal} of {auc.trials} twins the same"


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2])))
