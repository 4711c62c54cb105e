"""No tenant is served what is another's: seeded operations on the production core, each hit
attributed to whoever had it computed; and leaks planted in the product, which must be seen.

    python examples/tenant_isolation.py [OPERATIONS]

Exit status 1 where something of one tenant reached another, or a planted leak was not seen.
"""

from __future__ import annotations

import sys

from rich.console import Console

from kvatlas.cli.isolation import show
from kvatlas.validate.isolation.run import catch, report, run

_LEAKS = ("scope-left-out", "turn-left-out", "boundary-off-by-one", "session-is-tenant")


def main(operations: int = 8000) -> int:
    """The exit status."""
    result = report(run(operations))
    show(result, Console())
    missed = 0
    for name in _LEAKS:
        caught = catch(name)
        seen = f"seen after {caught.operations} operations, as {caught.by}"
        print(f"planted: {caught.what}: {seen if caught.operations else 'NOT SEEN'}")
        missed += not caught.operations
    return 0 if result.clean and not missed else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2])))
