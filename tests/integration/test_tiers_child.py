"""Processes of libraries that may hang or die: what is left of them, and who hears of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from echo_child import Word, word
from stores_kit import nothing_left, wait_until

from kvatlas.dataplane.tiers import child as children
from kvatlas.dataplane.tiers.base import Counts
from kvatlas.dataplane.tiers.child import Child, Kind


class Echo:
    """The child of these tests, and what it is asked."""

    def __init__(self, **more: object) -> None:
        self.starts = True
        self.counts = Counts()
        kind = Kind(
            "echo",
            "echo_child",
            (),
            lambda end: msgspec.json.encode((end, self.starts)),
            word,
            lambda said: True if said == Word(0, "ready") else said,  # type: ignore[return-value,arg-type]
            ready_s=20.0,
        )
        self.child = Child(msgspec.structs.replace(kind, **more), self.counts)

    def ask(self, text: str, seconds: float = 20.0) -> object:
        until = time.monotonic() + seconds
        return self.child.ask(lambda number: Word(number, text), until)

    def ready(self) -> int:
        assert self.child.ready(time.monotonic() + 20.0) or self.child.ready()
        return self.child.pid


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Echo]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "engines"))
    monkeypatch.setattr(children, "RETRY_S", 0.05)
    with nothing_left():
        made = Echo(grace_s=5.0)
        yield made
        made.child.close()


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_it_answers_and_ends_when_it_is_closed(echo: Echo) -> None:
    pid = echo.ready()
    assert echo.ask("one") == Word(1, "one")
    assert echo.ask("two") == Word(2, "two")
    echo.child.close()
    assert gone(pid)
    assert echo.ask("three") is None


def test_a_late_answer_ends_it_and_another_is_started(echo: Echo) -> None:
    pid = echo.ready()
    assert echo.ask("hang", 0.2) is None
    assert gone(pid)
    assert not echo.child.after(lambda: None)  # nothing is waited for
    wait_until(lambda: echo.child.ready() and echo.child.pid != pid)
    assert echo.ask("again") == Word(2, "again")
    assert echo.counts.all()["client_late"] == 1


def test_who_waits_hears_of_its_death_at_once(echo: Echo) -> None:
    echo.ready()
    started = time.monotonic()
    assert echo.ask("end") is None
    assert time.monotonic() - started < 10
    assert "client_late" not in echo.counts.all()


def test_one_that_does_not_die_is_told_of_when_it_does(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = echo.ready()
    process = echo.child._child
    assert process is not None
    echo.child._kind = msgspec.structs.replace(echo.child._kind, grace_s=0.05)
    monkeypatch.setattr(process, "kill", lambda: None)  # as if it hung in the kernel
    os.kill(pid, signal.SIGSTOP)
    assert echo.ask("anything", 0.05) is None
    told: list[bool] = []
    assert echo.child.after(lambda: told.append(gone(pid)))
    assert told == []
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: bool(told))
    assert told == [True]
    assert not echo.child.after(lambda: None)


def test_one_that_never_becomes_ready_is_tried_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    real = children.Child._serve

    def serve(self: Child) -> bool:
        if len(pauses) == 5:
            self._closed.set()
        monkeypatch.setattr(self._closed, "wait", pauses.append)
        return False

    monkeypatch.setattr(children.Child, "_serve", serve)
    echo = Echo(retry_max_s=8.0)
    echo.child._keeper.join(20.0)
    assert pauses == [2.0, 4.0, 8.0, 8.0, 8.0, 8.0]
    monkeypatch.setattr(children.Child, "_serve", real)
    assert not echo.child.ready()


def test_an_impatient_one_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "engines"))
    echo = Echo(patient=False)
    assert echo.ask("too early") is None
    echo.ready()
    assert echo.ask("now") is not None
    echo.child.close()
