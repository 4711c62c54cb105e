"""Text to token ids and back for an engine without a model.

`WordTokenizer` needs no files: a token is a special marker, a word with at most one space before
it, or a single character of white space. Appending to a text changes at most its last token, as
with real tokenizers. `FileTokenizer` reads a model's own tokenizer and chat template.

Answers are made of words that are exactly one token, so that an answer sent back as a part of the
next turn has the ids under which the engine cached it.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import tokenizers

from kvatlas.errors import ConfigError, RequestError
from kvatlas.service.chat_messages import Unkeyable
from kvatlas.service.chat_template import ChatTemplate
from kvatlas.service.encoder import Encoder

VOCAB_SIZE = 129_280  # DeepSeek V4's

_PIECES = re.compile(r"<\|\w+\|>| ?(?:(?!<\|\w+\|>)\S)+|\s")
_NUMBERED = re.compile(r" ?([0-9a-f]{5})")
_SPOKEN_WORDS = 4096


class TextTokenizer(Protocol):
    """What the stub engine needs of a tokenizer."""

    voices: int  # answers are made of so many words

    def encode(self, text: str, *, special: bool) -> bytes:
        """Ids of a raw prompt: uint32, little endian. ``special``: with begin-of-text and such."""
        ...

    def encode_chat(self, body: Mapping[str, object]) -> bytes:
        """Ids of the rendered messages of a chat body. Raises RequestError where it cannot."""
        ...

    def pick(self, number: int, *, first: bool) -> int:
        """The id of answer word ``number`` (below ``voices``), at the start or further on."""
        ...

    def say(self, token: int, *, first: bool) -> str:
        """The text of an id that `pick` gave."""
        ...


def ids_of(tokens: Sequence[int]) -> bytes:
    """Raises RequestError when a token id is negative or wider than 32 bits."""
    try:
        return array("I", tokens).tobytes()
    except (OverflowError, TypeError) as error:
        raise RequestError(f"prompt: token ids must be integers from 0 to 2**32-1: {error}") from (
            error
        )


class WordTokenizer:
    """The tokenizer of an engine that was given none. The word "1f3a0" has that number as its id;
    any other text has a checksum of its bytes, so every process agrees."""

    voices = VOCAB_SIZE

    def encode(self, text: str, *, special: bool) -> bytes:
        pieces: list[str] = _PIECES.findall(text)
        return array("I", map(_word_id, pieces)).tobytes()

    def encode_chat(self, body: Mapping[str, object]) -> bytes:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RequestError("messages: a list with at least one message is needed")
        generation_prompt = body.get("add_generation_prompt") is not False
        text = render(messages, add_generation_prompt=generation_prompt)
        return self.encode(text, special=False)

    def pick(self, number: int, *, first: bool) -> int:
        return number

    def say(self, token: int, *, first: bool) -> str:
        return f"{token:05x}" if first else f" {token:05x}"


def _word_id(piece: str) -> int:
    numbered = _NUMBERED.fullmatch(piece)
    number = int(numbered[1], 16) if numbered else VOCAB_SIZE
    return number if number < VOCAB_SIZE else zlib.crc32(piece.encode()) % VOCAB_SIZE


class FileTokenizer:
    """A model's tokenizer.json and chat template, as the gateway reads them."""

    def __init__(self, model_dir: Path) -> None:
        """Raises ConfigError when the directory has no usable tokenizer, or no plain words."""
        self._encoder = Encoder.load(model_dir, 64 << 20)
        self._template = ChatTemplate.load(model_dir)
        plain = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._words = list(_plain_words(plain))
        if not self._words:
            raise ConfigError(f"{model_dir}: the tokenizer has no word that is a single token")
        self._texts = {first: word for word, first, _ in self._words}
        self._texts |= {later: f" {word}" for word, _, later in self._words}
        self.voices = len(self._words)

    def encode(self, text: str, *, special: bool) -> bytes:
        try:
            return self._encoder.encode(text, special)
        except ValueError as error:
            raise RequestError(f"prompt: {error}") from error

    def encode_chat(self, body: Mapping[str, object]) -> bytes:
        try:
            text = self._template.render(body)
        except Unkeyable as error:
            raise RequestError(f"messages: {error}") from error
        return self.encode(text, special=False)

    def pick(self, number: int, *, first: bool) -> int:
        _, start, later = self._words[number]
        return start if first else later

    def say(self, token: int, *, first: bool) -> str:
        return self._texts[token]


def _plain_words(tokenizer: tokenizers.Tokenizer) -> Iterator[tuple[str, int, int]]:
    """Words that are one token both at the start of a text and after a space: (word, id, id)."""
    found = 0
    for word in sorted(tokenizer.get_vocab()):
        if not re.fullmatch(r"[a-z]{3,}", word):
            continue
        start = tokenizer.encode(word, add_special_tokens=False).ids
        later = tokenizer.encode(f"x {word}", add_special_tokens=False).ids
        if len(start) == 1 and len(later) == 2:
            yield word, start[0], later[1]
            found += 1
            if found == _SPOKEN_WORDS:
                return


def render(messages: Sequence[object], *, add_generation_prompt: bool) -> str:
    """A plain chat template: role marker, content, end marker."""
    parts = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError("messages: each needs a role and content")
        parts.append(f"<|{message['role']}|>\n{content_text(message.get('content'))}<|end|>\n")
    if add_generation_prompt:
        parts.append("<|assistant|>\n")
    return "".join(parts)


def content_text(content: object) -> str:
    """The text of a message: a string, or a list of text parts (anything else is refused)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = []
        for part in content:
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                raise RequestError("messages: this engine reads text content only")
            texts.append(text)
        return "\n".join(texts)
    raise RequestError("messages: content must be a string or a list of parts")
