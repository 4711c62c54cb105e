"""Draws v4-state.svg beside itself: where DeepSeek V4 Flash's state lies along a prompt.

Bytes and rules are those of `kvatlas layout`. After a change: ``python docs/pictures/v4_state.py``.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from kvatlas.core.layout import Component, Rule
from kvatlas.workload.models import load_layout

TOKENS, POSITION = 1000, 768  # a prompt, and where it can be resumed
LEFT, RIGHT, TOP, ROW, BAR = 190, 150, 76, 34, 18
SCALE = 0.56  # pixels per token
WIDTH = LEFT + int(TOKENS * SCALE) + RIGHT
INK, FAINT, CHAIN, WINDOW, GONE = "#24292f", "#8c959f", "#2f6fb3", "#c2671d", "#eaeef2"
CAPTIONS = {
    "c4_kv": "one entry per 4 tokens",
    "c4_index": "a search key per entry",
    "c128_kv": "one entry per 128 tokens",
    "swa": "raw KV, last 128 tokens",
    "c4_state": "rows for the next entry",
    "c4_index_state": "the same for its key",
    "c128_state": "rows of an open entry",
}


def x(tokens: float) -> float:
    return round(LEFT + tokens * SCALE, 1)


def text(
    at: float, y: float, words: str, *, size: int = 12, fill: str = INK, anchor: str = "start"
) -> str:
    return (
        f'<text x="{at}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


def bar(start: float, end: float, y: float, fill: str) -> str:
    width = round((end - start) * SCALE, 1)
    return f'<rect x="{x(start)}" y="{y}" width="{width}" height="{BAR}" fill="{fill}"/>'


def row(part: Component, y: float) -> list[str]:
    """One component: its name, what is needed of it at the position, and what that weighs."""
    layers = f"{part.layers} layers"
    lines = [
        text(8, y + 9, part.name, size=13),
        text(8, y + 22, f"{layers}, {CAPTIONS[part.name]}", size=9, fill=FAINT),
        bar(0, TOKENS, y, GONE),
    ]
    if part.rule is Rule.CHAIN:
        size = part.stored_block_bytes * POSITION // part.block_tokens
        lines.append(bar(0, POSITION, y, CHAIN))
        step = {"c128_kv": 128}.get(part.name, 32)
        for at in range(step, POSITION, step):
            lines.append(bar(at - 0.8, at + 0.8, y, "#ffffff"))
    else:
        blocks = part.window_blocks() or 0
        size = blocks * part.stored_block_bytes
        start = POSITION - blocks * part.block_tokens
        lines.append(bar(min(start, POSITION - 8), POSITION, y, WINDOW))
    lines.append(text(x(TOKENS) + 10, y + 13, f"{size / 1e6:.2f} MB"))
    return lines


def draw() -> str:
    layout = load_layout("deepseek-v4-flash", engine="vllm", kv_dtype="fp8")
    bottom = TOP + ROW * len(layout.components)
    total = layout.resume_bytes(POSITION) / 1e6
    height = bottom + 74
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" role="img">',
        "<title>The state of DeepSeek V4 Flash along a prompt of 1,000 tokens</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        text(8, 20, "DeepSeek V4 Flash: what must exist to resume at token 768", size=15),
        text(
            8,
            38,
            "blue: everything before it · orange: only what ends at it · grey: not needed",
            fill=FAINT,
            size=11,
        ),
        text(x(TOKENS) + 10, TOP - 28, "as vLLM keeps it", size=10, fill=FAINT),
    ]
    for number, part in enumerate(layout.components):
        lines += row(part, TOP + ROW * number)
    for at in (0, 256, 512, 768, TOKENS):
        lines.append(text(x(at), TOP - 10, f"{at:,}", size=11, fill=FAINT, anchor="middle"))
        if 0 < at < TOKENS:
            ink = INK if at == POSITION else FAINT
            lines.append(
                f'<line x1="{x(at)}" y1="{TOP - 5}" x2="{x(at)}" y2="{bottom}" stroke="{ink}" '
                'stroke-dasharray="3 3"/>'
            )
    for at, words in ((256, "blocks match,"), (512, "blocks match,")):
        lines.append(text(x(at), bottom + 14, words, size=11, fill=FAINT, anchor="middle"))
        lines.append(text(x(at), bottom + 28, "no window:", size=11, fill=FAINT, anchor="middle"))
        lines.append(text(x(at), bottom + 42, "no resume", size=11, fill=FAINT, anchor="middle"))
    lines.append(text(x(POSITION), bottom + 14, "resume", size=13, anchor="middle"))
    lines.append(text(x(TOKENS) + 10, bottom + 14, f"{total:.2f} MB in all"))
    lines.append(
        text(
            8,
            bottom + 64,
            "The prompt ends at 1,000; 768 is the last multiple of 256 "
            "before its end, and the windows that end there are kept.",
            size=11,
        )
    )
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("v4-state.svg").write_text(draw(), "utf-8")
