"""The demo at scale: sixteen stub engines with DeepSeek V4's KV layout, in one process."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from kvatlas.connectors.child import Child
from kvatlas.demo.stage import Engines
from kvatlas.demo.vocabulary import write_tokenizer
from kvatlas.errors import EngineError
from kvatlas.workload.chats import Shape, generate

ENGINES = 16
MODEL = "deepseek-v4-flash"
DEVICE = "H20"
TIME_SCALE = 0.25
OUTPUT_TOKENS = 8
SHAPE = Shape(
    sessions=48,
    groups=12,
    turns=4,
    system_words=4500,
    turn_words=300,
    arrival_s=2.0,
    think_s=0.3,
)
STORY = (
    f"{ENGINES} stub engines with the KV layout of DeepSeek V4 Flash and the speed of an {DEVICE}, "
    f"{1 / TIME_SCALE:.0f} times as fast; {SHAPE.sessions} chats of {SHAPE.turns} turns in "
    f"{SHAPE.groups} groups, each group with its own system prompt of 4,500 tokens."
)
START_DEADLINE_S = 30.0


def start(directory: Path, children: list[Child]) -> Engines:
    """Starts the engines and waits until they listen. Raises EngineError."""
    chats = generate(SHAPE)
    tokenizer = directory / "tokenizer"
    write_tokenizer(tokenizer, [text for c in chats for text in (c.system, c.turns[0].text)])
    ports_file = directory / "stub-engines.json"
    options = {
        "count": ENGINES,
        "layout": MODEL,
        "device": DEVICE,
        "time-scale": TIME_SCALE,
        "tokenizer": tokenizer,
        "ports-file": ports_file,
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    child = Child(
        "stub engines",
        [sys.executable, "-m", "kvatlas", "stub-engine", *arguments],
        log=directory / "stub-engines.log",
    )
    children.append(child)
    child.start()
    deadline = time.monotonic() + START_DEADLINE_S
    while not ports_file.exists():
        child.check()
        if time.monotonic() > deadline:
            raise EngineError(f"stub engines: not there after {START_DEADLINE_S:.0f} s")
        time.sleep(0.05)
    ports = msgspec.json.decode(ports_file.read_bytes(), type=_Ports)
    return Engines(
        kind="stub",
        model=MODEL,
        urls={e.name: e.url for e in ports.engines},
        layout=MODEL,
        tokenizer=str(tokenizer),
    )


class _Address(msgspec.Struct):
    name: str
    url: str


class _Ports(msgspec.Struct):
    engines: list[_Address]
