"""Text that others wrote, as it may be shown to people: it steers no terminal. Pure."""

from __future__ import annotations

import re

# Control characters but for tab and line feed; marks that change the direction of what follows;
# lone surrogates, which no encoding has.
_FORBIDDEN = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def harmless(text: str) -> str:
    """What a terminal or page must not get, replaced. Tabs and line feeds stay."""
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)


def one_line(text: str) -> str:
    """The same in one line."""
    return harmless(" ".join(text.split(None)))
