"""How many files a command that serves may have open."""

from __future__ import annotations

import resource
import sys

_OTHER_FILES = 1024  # agents, replays, logs
_ENGINE_FILES = 5  # event socket and its monitor: 4; the connection by which it is polled


def allow_files(connections: int, lower: str, *, engines: int = 0) -> None:
    """Raises the process's limit on open files to what so many clients, and engines behind it,
    need, as far as it may.

    Beyond the limit nothing behind us could be connected to, and it would be blamed for that: so a
    limit that stays too low is told, and what else to do: ``lower``, "" where that is all.
    """
    wanted = 2 * connections + _ENGINE_FILES * engines + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        print(
            f"kvatlas: only {allowed} files may be open here, {connections} clients and {engines} "
            f"engines need {wanted}: raise the limit (ulimit -Hn){lower}",
            file=sys.stderr,
        )
