"""An agent's side of its NIXL process: whether there can be one, and what it is asked."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable

import msgspec

from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.tiers import nixl_wire
from kvatlas.dataplane.tiers.base import Counts
from kvatlas.dataplane.tiers.child import Child, Kind
from kvatlas.dataplane.tiers.nixl_wire import Ended, Given, Join, Ping, Read, Ready
from kvatlas.errors import ConfigError

READY_S = 300.0  # importing NIXL, mapping and registering an arena, which may be a large one
RETRY_S_MAX = 60.0
GRACE_S = 1.0
PING_S = 1.0
_BACKENDS = ("nixl_cu12", "nixl_cu13", "nixl_rocm")


def missing() -> str:
    """Why NIXL cannot run here, and what to do; "" where it can. Nothing is imported."""
    if not sys.platform.startswith("linux"):
        return "NIXL runs on Linux only"
    if importlib.util.find_spec("nixl") is None:
        return "NIXL is not installed: pip install 'kvatlas[nixl]'"
    if not any(map(importlib.util.find_spec, _BACKENDS)):
        return f"NIXL is installed without any of {', '.join(_BACKENDS)}"
    if importlib.util.find_spec("numpy") is None:
        return "NIXL needs numpy, which is not installed"
    return ""


class Nixl:
    """The process of one arena, started anew whenever it ended; calls end by their deadline."""

    def __init__(self, arena: Arena) -> None:
        """Starts in the background. Raises ConfigError where NIXL is not installed."""
        if why := missing():
            raise ConfigError(f"peer: {why}")
        self.counts = Counts()
        self._ready: Ready | None = None
        fd = arena.fileno()
        kind = Kind(
            "nixl",
            "kvatlas.dataplane.tiers.nixl_helper",
            (fd,),
            lambda end: msgspec.json.encode(Given(fd, end)),
            nixl_wire.answer,
            self._take,
            ready_s=READY_S,
            retry_max_s=RETRY_S_MAX,
            patient=False,
            grace_s=GRACE_S,
        )
        self.child = Child(kind, self.counts)

    def wait(self) -> None:
        """Until it can be used. Raises ConfigError where it cannot."""
        if not self.child.ready(time.monotonic() + READY_S):
            self.close()
            raise ConfigError(
                "peer: NIXL is installed, but its process does not start: try"
                " python -c 'import nixl._api' and look at what UCX says"
            )

    def ready(self) -> Ready | None:
        """What others need to read from here; None: it cannot be used now."""
        return self._ready if self.child.ready() else None

    def alive(self) -> Ready | None:
        """The same, from a process that answers now: one that does not is ended."""
        if self.child.ask(Ping, time.monotonic() + PING_S) is None:
            return None
        return self.ready()

    def join(self, there: Ready, until: float) -> Ended:
        """Get to know another's process: how its memory is reached, or why it is not. A process
        that could not, or that knows another one, makes place for a new one."""
        return self._asked(lambda number: Join(number, there), until)

    def read(self, epoch: bytes, places: list[tuple[int, int, int]], until: float) -> str:
        """From the one that was joined; why not, or "". What was not read to its end is given up:
        the process is killed, and `Child.after` says whether it is dead."""
        return self._asked(lambda number: Read(number, epoch, places), until).why

    def close(self) -> None:
        """The process is gone afterwards."""
        self.child.close()

    def _asked(self, question: Callable[[int], Join | Read], until: float) -> Ended:
        if not self.child.ready():
            return Ended(0, "starting")
        answer = self.child.ask(question, until)
        if isinstance(answer, Ended):
            if answer.why not in ("", "not_joined"):
                self.child.kill()
            return answer
        return Ended(0, "late" if time.monotonic() >= until else "process_ended")

    def _take(self, message: object) -> bool | Ended | None:
        match message:
            case Ready():
                self._ready = message
                return True
            case Ended():
                return message
        return None
