"""The process in which NIXL lives: it may hang or die, and nothing else with it.

It maps the agent's arena and registers it: others may read from there, and what is read from others
is put there. NIXL 1.5 ends its process with a segmentation fault, and a transfer once begun cannot
be called off for sure: whoever gives one up kills this process, which then writes nothing any more.

UCX, below NIXL, chooses what carries the bytes and tells nobody but its log: the log is read here.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.metadata
import os
import re
import select
import socket
import sys
import time
from typing import Any

import msgspec

from kvatlas.dataplane.arena import Arena, address_of
from kvatlas.dataplane.tiers import child, nixl_wire
from kvatlas.dataplane.tiers.nixl_wire import Ended, Given, Join, Ping, Question, Read, Ready

IDLE_S = 0.005  # so often it does what others' connections wait for
PROBE_BYTES = 4096
LOG_BYTES_MAX = 1 << 20
_BACKEND = "UCX"
_TABLE = re.compile(r"remote memory read by ucp_get\S* into host memory")
_ROW = re.compile(r"\| *\S+\.\.inf *\| *(?P<how>[^|]*?) *\| *(?P<over>[^|]*?) *\|")


class Reached(msgspec.Struct, frozen=True):
    """How UCX reads another's memory."""

    transport: str
    emulated: bool


def reached(log: str) -> Reached | None:
    """By the last of UCX's tables of what it reads by (UCX_PROTO_INFO), for large values."""
    found = None
    for table in _TABLE.split(log)[1:]:
        if (row := _ROW.search(table)) is not None:
            found = row
    if found is None:
        return None
    names = re.findall(r"([\w.]+)/[\w.:]+", found["over"])
    unique = sorted(set(names), key=names.index)
    return Reached("+".join(unique) or found["over"], "emulation" in found["how"])


class _Log:
    """What UCX says: its standard output, in a file without a name."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("kvatlas-ucx", os.MFD_CLOEXEC)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)
        os.dup2(self._fd, 1)

    def text(self) -> str:
        """So far."""
        return os.pread(self._fd, LOG_BYTES_MAX, 0).decode("utf-8", "replace")

    def trim(self) -> None:
        """What nobody asked for, of an owner that many read from."""
        if os.fstat(self._fd).st_size > LOG_BYTES_MAX:
            os.ftruncate(self._fd, 0)


class Helper:
    """One NIXL agent, at work for the other side of a socket."""

    def __init__(self, given: Given, log: _Log) -> None:
        """Raises OSError where NIXL cannot be had."""
        nixl = importlib.import_module("nixl._api")
        self._log = log
        self._socket = socket.socket(fileno=given.socket)
        arena = Arena.open(given.arena)
        self._arena = arena  # as long as this process
        self._address = arena.address
        self._scratch = memoryview(bytearray(PROBE_BYTES))
        self._version = importlib.metadata.version("nixl")
        self._epoch = os.urandom(16)
        self._peer = ""
        self._there: Ready | None = None
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent: Any = nixl.nixl_agent(self._epoch.hex(), config)
        self._agent.create_backend(_BACKEND)
        for place in ((self._address, arena.size_bytes), (self._probe, PROBE_BYTES)):
            self._agent.register_memory([(*place, 0, "")], "DRAM", [_BACKEND])

    @property
    def _probe(self) -> int:
        return address_of(self._scratch)

    def serve(self) -> None:
        """Until the other side ends. Raises OSError then."""
        metadata = self._agent.get_agent_metadata()
        size = self._arena.size_bytes
        child.send(self._socket, Ready(self._epoch, self._version, metadata, self._address, size))
        while True:
            if not select.select([self._socket], [], [], IDLE_S)[0]:
                self._agent.get_new_notifs()  # UCX goes on only in calls
                self._log.trim()
                continue
            question = nixl_wire.question(self._socket)
            try:
                ended = self._done(question)
            except Exception as error:  # NIXL's own kinds: the other side counts them
                ended = Ended(question.number, type(error).__name__)
            child.send(self._socket, ended)

    def _done(self, question: Question) -> Ended:
        match question:
            case Ping(number):
                return Ended(number)
            case Join(number, there):
                return self._join(number, there)
            case Read(number, epoch, places):
                if self._there is None or epoch != self._there.epoch:
                    return Ended(number, "not_joined")
                base = self._there.address
                self._read(
                    [(self._address + ours, size, 0) for ours, _, size in places],
                    [(base + theirs, size, 0) for _, theirs, size in places],
                )
                return Ended(number)

    def _join(self, number: int, there: Ready) -> Ended:
        """Once: UCX says how it reads when that is new to it, so of a second one it may not."""
        if self._there is not None and self._there.epoch != there.epoch:
            return Ended(number, "another")
        if self._there is None:
            name = self._agent.add_remote_agent(there.metadata)
            self._peer = name.decode() if isinstance(name, bytes) else str(name)
            if self._peer != there.epoch.hex():
                raise ValueError("these are another agent's metadata")
            size = min(PROBE_BYTES, there.size_bytes)
            self._read([(self._probe, size, 0)], [(there.address, size, 0)])
            self._there = there
        how = reached(self._log.text())
        if how is None:
            return Ended(number, "transport_unknown")
        return Ended(number, "", how.transport, how.emulated)

    def _read(self, ours: list[tuple[int, int, int]], theirs: list[tuple[int, int, int]]) -> None:
        """Raises what NIXL raises, and ConnectionError."""
        into = self._agent.get_xfer_descs(ours, "DRAM")
        out_of = self._agent.get_xfer_descs(theirs, "DRAM")
        handle = self._agent.initialize_xfer("READ", into, out_of, self._peer)
        state = self._agent.transfer(handle)
        spins = 0
        while state == "PROC":
            spins += 1
            if spins % 64 == 0:
                time.sleep(0)  # the other side may need this core
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise ConnectionError(f"the transfer ended as {state}")


def _work() -> None:
    log = _Log()  # before UCX is loaded
    os.environ |= {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": ""}
    given = msgspec.json.decode(sys.argv[1], type=Given)
    Helper(given, log).serve()


if __name__ == "__main__":
    child.serve(_work)
