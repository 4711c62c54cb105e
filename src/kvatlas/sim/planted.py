"""All planted bugs by name: one per class in `canaries`, and those of the `planted_` modules.

The latter, but for those of `planted_register`, were written by somebody who had not read the
checkers: docs/fault-simulation.md has the score.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

from kvatlas.sim import (
    canaries,
    planted_books,
    planted_feed,
    planted_register,
    planted_routes,
    planted_tiers,
)
from kvatlas.sim.planted_bug import Bug

_MODULES = (planted_feed, planted_books, planted_routes, planted_tiers, planted_register)
BUGS: dict[str, Bug] = {bug.name: bug for module in _MODULES for bug in module.BUGS}


#: In what lies below the engines: only worlds that have tiers can find them.
BELOW = frozenset(bug.name for bug in planted_tiers.BUGS)
#: In what only several gateways have.
BESIDE = frozenset(bug.name for bug in planted_register.BUGS)


def planted(name: str) -> AbstractContextManager[None]:
    """Plant the bug ``name``; "" plants none. Raises KeyError for an unknown name."""
    if not name:
        return contextlib.nullcontext()
    return BUGS[name]() if name in BUGS else canaries.REGISTRY[name]()
