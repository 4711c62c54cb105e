"""Requests as token ids, JSON lines: ``input_tok_ids``, ``output_toks``, ``arrival_time_ns``.

The form of LLMServingSim's ShareGPT sets (MIT). The ids of blocks are our keyed hash, chained over
the whole prompt, so equal leading ids mean an equal prefix; the token ids themselves are not kept.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvatlas.core.keys import Keyring, Scope, salt_scope
from kvatlas.workload.trace_lines import Options, Row, fault, lines

NAME = "token-ids"
USUAL_BLOCK_TOKENS = 16


class _Line(msgspec.Struct):
    arrival_time_ns: int
    input_tok_ids: list[int]
    output_toks: int
    input_toks: int | None = None
    session_id: str | int = ""


def recognises(line: bytes) -> bool:
    """By the name of its list of ids."""
    return b'"input_tok_ids"' in line


def block_tokens_of(path: Path, options: Options) -> int:
    """Whatever is asked for: the ids of blocks are made here."""
    return options.block_tokens or USUAL_BLOCK_TOKENS


def read(path: Path, block_tokens: int, options: Options) -> Iterator[Row]:
    """Rows with chained ids. Raises TraceError for lines not of this form."""
    decode = msgspec.json.Decoder(_Line).decode
    hashed = Hashed(block_tokens, options.secret)
    for number, line in lines(path):
        try:
            raw = decode(line)
            tokens = array("I", raw.input_tok_ids)
            arrival_s = raw.arrival_time_ns / 1e9
        except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError) as error:
            raise fault(path, number, str(error)) from error
        if raw.input_toks not in (None, len(tokens)):
            raise fault(path, number, f"{len(tokens)} ids, but input_toks {raw.input_toks}")
        if sys.byteorder == "big":
            tokens.byteswap()
        ids = hashed.ids(tokens.tobytes())
        yield Row(number, arrival_s, len(tokens), raw.output_toks, ids, str(raw.session_id))


class Hashed:
    """Token ids → ids of blocks, by `core.keys` under a secret: no way back to the tokens.

    Without a secret the ids are the same everywhere, and whoever guesses a prompt can tell that it
    was there; with one nobody else can.
    """

    def __init__(self, block_tokens: int, secret: bytes) -> None:
        self._block_tokens = block_tokens
        self._keyring = Keyring(secret or b"kvatlas.trace.unkeyed")

    def ids(self, tokens: bytes, scope: str = "") -> tuple[int, ...]:
        """One id below 2**63 per block, the last one cut short where the prompt is."""
        root = self._keyring.root(b"trace", salt_scope(scope))
        keys = self._keyring.chain(root, tokens, self._block_tokens)
        rest = tokens[len(keys) * self._block_tokens * 4 :]
        if rest:
            keys += self._keyring.chain(keys[-1] if keys else root, rest, len(rest) // 4)
        return tuple([int.from_bytes(key[:8], "big") >> 1 for key in keys])

    def name(self, text: str) -> str:
        """A name that stands for a session or a tenant; "" stays ""."""
        if not text:
            return ""
        return self._keyring.root(b"name", Scope("name", text)).hex()[:12]
