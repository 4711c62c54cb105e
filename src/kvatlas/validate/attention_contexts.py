"""What the attention study reads: real English and code, as a document, as code, and as chats.

By default these are kvatlas's own pages and modules, so that the study needs nothing else; the
prompts change with them, and a result therefore carries their digests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from kvatlas.errors import ConfigError

CHARS_MAX = 4200  # of one file: about what a context of 1,400 tokens holds
CHARS_MIN = 2000
FILE_BYTES_MAX = 4 << 20
QUESTIONS = (0.35, 0.65)  # where in the text the part is that a question is about
PART_CHARS = 300
TURN_CHARS = 500
#: By default, from the root of a checkout. Those in a chat are told section by section.
TEXTS = (
    Path("docs/understanding/resume-positions.md"),
    Path("src/kvatlas/core/policy/lru_sink.py"),
)
CHATS = (Path("docs/understanding/v4-state.md"), Path("src/kvatlas/core/policy/prefix_tree.py"))


class Question(msgspec.Struct, frozen=True):
    """A next turn, and the words of the context that it is about."""

    text: str
    about: str


class Context(msgspec.Struct, frozen=True):
    """What is held before a question comes; ``kind`` is document, code, chat or code chat."""

    id: str
    kind: str
    messages: tuple[dict[str, str], ...]
    questions: tuple[Question, ...]

    def digest(self) -> str:
        """Names this context and its questions, 16 hex digits."""
        return blake2b(msgspec.json.encode(self), digest_size=8).hexdigest()


def contexts(files: Sequence[Path], chats: Sequence[Path]) -> list[Context]:
    """One per file. Raises ConfigError for a file that cannot be read or is too short, and for two
    of one name: answers are told apart, and paired, by it."""
    names: set[str] = set()
    for path in (*files, *chats):
        if path.name in names:
            raise ConfigError(f"{path}: another text has this name too: give it another")
        names.add(path.name)
    made = [_plain(path, _read(path)) for path in files]
    return made + [_chat(path, _read(path)) for path in chats]


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(f"{path}: larger than {FILE_BYTES_MAX} bytes: give a smaller text")
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: no text that can be read: {error}") from error
    text = text.strip()[:CHARS_MAX]
    if len(text) < CHARS_MIN:
        raise ConfigError(f"{path}: too short: at least {CHARS_MIN} characters are needed")
    return text


def _plain(path: Path, text: str) -> Context:
    code = path.suffix == ".py"
    kind = "code" if code else "document"
    said = f"Here is {'a Python module' if code else 'a document'}. Read it; I have questions.\n\n"
    messages = (
        {"role": "user", "content": said + text},
        {"role": "assistant", "content": "I have read it. What do you want to know?"},
    )
    return Context(path.name, kind, messages, _questions(text))


def _chat(path: Path, text: str) -> Context:
    code = path.suffix == ".py"
    between = r"\n\n(?=class |def |    def )" if code else r"\n\n"
    parts = [part.strip()[:TURN_CHARS] for part in re.split(between, text) if part.strip()]
    messages = []
    for part in parts:
        first = part.splitlines()[0].strip("# ")[:60]
        messages.append({"role": "user", "content": f"Tell me about: {first}"})
        messages.append({"role": "assistant", "content": part})
    told = "\n\n".join(parts)
    return Context(path.name, "code chat" if code else "chat", tuple(messages), _questions(told))


def _questions(text: str) -> tuple[Question, ...]:
    return tuple(_question(text, share) for share in QUESTIONS)


def _question(text: str, share: float) -> Question:
    """About the first line of some length behind that share of the text."""
    at = int(len(text) * share)
    for line in re.finditer(r"(?m)^.{30,}$", text):
        if line.start() >= at:
            words = text[line.start() : line.start() + PART_CHARS].split("\n\n", maxsplit=1)[0]
            quoted = line.group().strip()[:100]
            return Question(f'Explain this part in your own words: "{quoted}"', words)
    part = text[at : at + PART_CHARS].strip().split("\n\n", maxsplit=1)[0]
    return Question(f'Explain this part in your own words: "{part[:100]}"', part)
