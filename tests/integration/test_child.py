"""Child processes: ready when they say so, gone with all that they started, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvatlas.connectors.child import Child, free_ports, stop_all
from kvatlas.errors import EngineError

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# Starts a grandchild that ignores SIGTERM, and tells its pid.
PARENT = """
import subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
code += "; print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    """Whether no live process has this id (a zombie is none)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_ready_when_healthy_and_free_after_stop(tmp_path: Path):
    (port,) = free_ports(1)
    child = Child(
        "server",
        [sys.executable, "-c", SERVER, str(port)],
        log=tmp_path / "log",
        url=f"http://127.0.0.1:{port}",
    )
    child.start()
    try:
        assert child.wait_ready(deadline_s=30.0) < 30.0
        pid = child.pid
    finally:
        child.stop()
        child.stop()  # twice does no harm
    assert not child.alive
    assert gone(pid)


def test_one_that_dies_is_reported_with_the_end_of_its_log(tmp_path: Path):
    code = "import sys; print('no such model: x'); sys.exit(3)"
    child = Child(
        "server", [sys.executable, "-c", code], log=tmp_path / "log", url="http://127.0.0.1:1"
    )
    child.start()
    try:
        with pytest.raises(EngineError, match=r"status 3[\s\S]*no such model: x"):
            child.wait_ready(deadline_s=30.0)
    finally:
        child.stop()


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path):
    child = Child("server", [str(tmp_path / "none")], log=tmp_path / "log")
    with pytest.raises(EngineError, match="cannot be started"):
        child.start()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_grandchildren_that_will_not_end_are_killed(tmp_path: Path):
    log = tmp_path / "log"
    child = Child("parent", [sys.executable, "-c", PARENT], log=log)
    child.start()
    try:
        assert within(30.0, lambda: log.read_text().strip().isdecimal())
        grandchild = int(log.read_text())
    finally:
        stop_all([child], grace_s=0.3)
    assert within(5.0, lambda: gone(grandchild))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_a_killed_parent_takes_its_children_with_it(tmp_path: Path):
    code = (
        "import sys, time; from pathlib import Path; from kvatlas.connectors.child import Child\n"
        "child = Child('x', [sys.executable, '-c', 'import time; time.sleep(600)'],"
        " log=Path(sys.argv[1]))\n"
        "child.start(); print(child.pid, flush=True); time.sleep(600)"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "log")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        os.kill(parent.pid, signal.SIGKILL)
    assert within(10.0, lambda: gone(pid))


def test_free_ports_differ():
    ports = free_ports(20)
    assert len(set(ports)) == 20
