"""Text → token ids, exactly as the Hugging Face tokenizer of the model, as fast as can be had.

Two libraries read the same tokenizer.json. `fastokens` (a backend that vLLM itself offers) takes
about 1 % of the time of `tokenizers` and keeps the segments of earlier turns; it is used where it
gives the same ids over `samples` below, `tokenizers` else. `Encoder.name` says which it is.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from kvatlas.errors import ConfigError
from kvatlas.service.model_files import read_text, special_tokens

try:
    import fastokens
except ImportError:  # no build for this platform: the slower library serves, and `note` says so
    fastokens = None

assert array("I").itemsize == 4  # token ids are uint32 everywhere


class Backend(Protocol):
    """What both libraries are reduced to. Safe to call from several threads."""

    name: str

    def encode(self, text: str, add_special_tokens: bool) -> bytes: ...

    def quick(self, text: str) -> bool:
        """Whether `encode` takes about a millisecond at most: no need of another thread."""
        ...

    def forget(self) -> None:
        """Texts that are kept for the next turn are gone."""
        ...


class Encoder:
    """The tokenizer of one model. ``note``: why the fast library is not used ("" when it is)."""

    def __init__(self, backend: Backend, note: str, added_tokens: tuple[str, ...]) -> None:
        self._backend = backend
        self.name = backend.name
        self.note = note
        self.added_tokens = added_tokens

    @classmethod
    def load(cls, model_dir: Path, cache_bytes: int) -> Encoder:
        """``cache_bytes`` bounds the segments that are kept for reuse.

        Raises ConfigError when tokenizer.json is missing or cannot be understood.
        """
        path = model_dir / "tokenizer.json"
        try:
            definition = read_text(path)
            reference = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # tokenizers raises plain Exception
            raise ConfigError(f"{path}: cannot be used as a tokenizer: {error}") from error
        named = special_tokens(model_dir).values()
        known = {token.content for token in reference.get_added_tokens_decoder().values()}
        # transformers adds the special tokens of the config that tokenizer.json does not have.
        reference.add_special_tokens([token for token in named if token not in known])
        added = json.loads(reference.to_str())["added_tokens"]
        reference.no_truncation()
        reference.no_padding()
        contents = tuple(token["content"] for token in added)
        fast, note = _try_fastokens(reference, contents, cache_bytes)
        return cls(fast or _Tokenizers(reference, added, cache_bytes), note, contents)

    def encode(self, text: str, add_special_tokens: bool) -> bytes:
        """Token ids, uint32 little endian. Raises UnicodeError for half surrogate pairs."""
        return self._backend.encode(text, add_special_tokens)

    def quick(self, text: str) -> bool:
        """Whether `encode` takes about a millisecond at most: no need of another thread."""
        return self._backend.quick(text)

    def forget(self) -> None:
        """Texts that are kept for the next turn are gone: whose they are is not known."""
        self._backend.forget()


class _Fastokens:
    """Reuses segments between added tokens by itself, within its own byte budget."""

    name = "fastokens"

    def __init__(self, definition: str, cache_bytes: int) -> None:
        self._tokenizer = fastokens.Tokenizer.from_json_str(definition)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._cache_bytes = cache_bytes
        self._tokenizer.enable_segment_cache(cache_bytes)

    def encode(self, text: str, add_special_tokens: bool) -> bytes:
        ids, _ = self._tokenizer.encode_batch_flat([text], add_special_tokens=add_special_tokens)
        return bytes(ids)

    def forget(self) -> None:
        self._tokenizer.enable_segment_cache(self._cache_bytes)  # a new one

    def quick(self, text: str) -> bool:
        # Measured: 300 to 600 characters per µs; 28 where no word was ever seen. A thread costs
        # 50 µs, and milliseconds on a busy machine.
        return len(text) <= 1 << 18


def _try_fastokens(
    reference: tokenizers.Tokenizer, added: tuple[str, ...], cache_bytes: int
) -> tuple[_Fastokens | None, str]:
    if fastokens is None:
        return None, "fastokens is not installed"
    try:
        fast = _Fastokens(reference.to_str(), cache_bytes)
    except Exception as error:  # whatever this library says, the other one serves
        return None, f"fastokens cannot read this tokenizer: {error}"
    for text in samples(added):
        for special in (False, True):
            expected = _ids(reference, text, special)
            try:
                same = fast.encode(text, special) == expected
            except Exception as error:
                return None, f"fastokens fails on {text[:40]!r}: {error}"
            if not same:
                return None, f"fastokens differs from tokenizers on {text[:40]!r}"
    return fast, ""


_SLOW_QUICK_CHARS = 2500  # measured: 1 to 3 characters per µs


class _Tokenizers:
    """Reuse for `tokenizers`: text is cut before and after added tokens, which the library splits
    out before anything else, and each piece is kept. Only where a test shows that pieces give the
    same ids as the whole."""

    name = "tokenizers"

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, added: list[dict[str, Any]], cache_bytes: int
    ) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._max_bytes = cache_bytes
        self._lock = threading.Lock()
        self._prefix, self._suffix = _start_and_end(tokenizer)
        self._cut = _cut_pattern(added)
        if self._cut and not self._pieces_are_exact(added):
            self._cut = None

    def encode(self, text: str, add_special_tokens: bool) -> bytes:
        if self._cut is None:
            return _ids(self._tokenizer, text, add_special_tokens)
        ids = b"".join(self._piece(piece) for piece in self._cut.split(text) if piece)
        return self._prefix + ids + self._suffix if add_special_tokens else ids

    def forget(self) -> None:
        with self._lock:
            self._kept.clear()
            self._kept_bytes = 0

    def quick(self, text: str) -> bool:
        if self._cut is None or len(text) <= _SLOW_QUICK_CHARS:
            return len(text) <= _SLOW_QUICK_CHARS
        pieces = self._cut.split(text)
        with self._lock:
            fresh = sum(len(piece) for piece in pieces if piece not in self._kept)
        return fresh <= _SLOW_QUICK_CHARS

    def _piece(self, piece: str) -> bytes:
        with self._lock:
            ids = self._kept.get(piece)
            if ids is not None:
                self._kept.move_to_end(piece)
                return ids
        ids = _ids(self._tokenizer, piece, False)
        with self._lock:
            if piece not in self._kept:
                self._kept[piece] = ids
                self._kept_bytes += _cost(piece, ids)
            while self._kept_bytes > self._max_bytes:
                old, old_ids = self._kept.popitem(last=False)
                self._kept_bytes -= _cost(old, old_ids)
        return ids

    def _pieces_are_exact(self, added: list[dict[str, Any]]) -> bool:
        texts = samples(tuple(token["content"] for token in added))
        return all(
            self.encode(text, special) == _ids(self._tokenizer, text, special)
            for text in texts
            for special in (False, True)
        )


def _cost(piece: str, ids: bytes) -> int:
    return sys.getsizeof(piece) + sys.getsizeof(ids) + 128  # 128: the entry itself


def _cut_pattern(added: list[dict[str, Any]]) -> re.Pattern[str] | None:
    """Matches the added tokens that are found in the raw text, the longest first."""
    plain = [t["content"] for t in added if t["content"] and not t.get("normalized")]
    reaching = any(t.get(side) for t in added for side in ("lstrip", "rstrip", "single_word"))
    if not plain or reaching:
        return None
    return re.compile("(" + "|".join(re.escape(t) for t in sorted(plain, key=len)[::-1]) + ")")


def _ids(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> bytes:
    try:
        encoded = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except TypeError as error:  # what the library makes of text that cannot be UTF-8
        raise UnicodeError(str(error)) from error
    ids = array("I", encoded[0].ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _start_and_end(tokenizer: tokenizers.Tokenizer) -> tuple[bytes, bytes]:
    """What add_special_tokens puts around a text."""
    bare = _ids(tokenizer, "x", False)
    framed = _ids(tokenizer, "x", True)
    at = framed.find(bare)
    return framed[:at], framed[at + len(bare) :]


_TRICKY = (
    "",
    " ",
    "\n",
    "Hello, world! It's the 3rd of May, 2024; don't panic.",
    "  leading and trailing  ",
    "tabs\tand\r\nlines\n\n\n   indented\n\t\tmore  \n",
    "def f(x: int) -> str:\n    return f'{x:>10}'  # 0xDEADBEEF 1234567890 3.14159\n",
    "你好，世界。これはテストです。한국어 문장입니다. Привет, мир! Γειά σου. שלום مرحبا",
    "naïve café e\u0301 ﬁ Å ½ ² \u00a0nbsp\u3000ideographic\u200bzero\ufeffbom",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪 ☃️ \U0001f9ea",
    "a" * 300 + " " * 40 + "!" * 60 + "\n" * 25 + "-" * 80 + "=+*&^%$#@~`|\\/<>[]{}()",
    "MiXeD CamelCaseWords snake_case_words KEBAB-CASE iOS15 x86_64 C++ <div class='a'>&amp;</div>",
    '{"role": "user", "content": "a \\"quoted\\" text", "n": [1, 2.5, -3e10, null, true]}',
    "\x00\x01\x1b[31mred\x1b[0m\x7f \ud7ff\ue000\uffff\U0010ffff",
    "I'M he'Ll WE'VE o'clock 'tis ''quoted'' don’t",
)


def samples(added: tuple[str, ...]) -> Iterator[str]:
    """Texts that separate tokenizers from one another, alone and around added tokens."""
    yield from _TRICKY
    yield "".join(_TRICKY)
    yield " ".join(itertools.chain.from_iterable(itertools.permutations(_TRICKY, 2)))
    for index, token in enumerate(added[:64]):
        left, right = _TRICKY[index % len(_TRICKY)], _TRICKY[(index + 3) % len(_TRICKY)]
        yield f"{token}{left}{token}{right} {token} \n{token}\n{token}{token}"
        yield f"{left}{token[:-1]}{right}{token[1:]}{token.upper()}{token} {token}x"
