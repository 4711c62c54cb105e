"""What all tenants may share: prompts that an operator wrote down, and nothing else.

A prompt is public as far as it begins with one of them, token by token. The policy says them as
texts and messages, which are made into tokens as a request's would be, or as digests of tokens.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvatlas.config import line_of, read
from kvatlas.core.tenancy import PUBLIC_TOKENS_MAX, prefix_digest, start_of_digest
from kvatlas.errors import ConfigError
from kvatlas.service.tenants import stamp_of
from kvatlas.service.tokens import Prompt
from kvatlas.service.verify import CHAT, COMPLETION

log = logging.getLogger(__name__)

PREFIXES_MAX = 1024
FILE_BYTES_MAX = 16 << 20
STEP_TOKENS = 16  # no engine's blocks are finer: how far a prompt is public is told so exactly
_STRIDES = (32 * STEP_TOKENS, STEP_TOKENS)
_MARKS_MAX = 1 << 20
#: Ends of prompts that have nothing in common: what both begin with is the prefix alone.
_ENDS = ("Q", "9z")
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]

#: As `service.tokens.Tokenizer.prompt`.
ToTokens = Callable[[str, Mapping[str, Any]], Awaitable[Prompt]]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prefix: a ``text`` file; a ``messages`` file, JSON with messages and, if it has them,
    tools; or a ``digest`` of its first ``tokens``. ``model`` for the template, "" for any."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    model: str = ""
    text: str = ""
    messages: str = ""
    digest: _Digest | None = None
    tokens: Annotated[int, msgspec.Meta(ge=0, le=PUBLIC_TOKENS_MAX)] = 0


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    public: tuple[Entry, ...] = ()


_TABLES: dict[str, type[msgspec.Struct]] = {"": Policy, "public": Entry}


class Public(msgspec.Struct, frozen=True):
    """How far a prompt is public: so many tokens, with that digest."""

    tokens: int = 0
    digest: bytes = b""


class PublicPrefixes:
    """Those of one policy file. `refresh` it when the file or the tokenizer may have changed."""

    def __init__(self, path: Path, to_tokens: ToTokens) -> None:
        """Raises ConfigError for a policy that cannot be used."""
        self.problems: dict[str, str] = {}  # entry → why nothing of it counts
        self._path = path
        self._to_tokens = to_tokens
        self._seen: object = None
        self._again = False  # what has not changed may come to something else by now
        self._policy = Policy()
        self._bodies: dict[str, tuple[str, dict[str, Any]]] = {}
        self._closed: dict[int, set[bytes]] = {}  # tokens → digests; all that is before is, too
        self._single: dict[int, set[bytes]] = {}  # of entries of which nothing else is known
        self._read()

    def _read(self) -> None:
        text, policy = read(self._path, Policy, _TABLES)
        bodies = _checked(self._path, text, policy)
        self._policy, self._bodies = policy, bodies

    def _stamp(self) -> object:
        folder = self._path.parent
        files = [e.text or e.messages for e in self._policy.public if e.text or e.messages]
        return stamp_of(self._path), *(stamp_of(folder / name) for name in files)

    async def refresh(self) -> None:
        """Reads and tokenizes what has changed, and what nobody could make tokens of. What cannot
        be used is not public, and flagged."""
        try:
            seen = self._stamp()
            if seen == self._seen and not self._again:
                return
            if seen != self._seen:
                self._read()
                seen = self._stamp()
        except ConfigError as error:
            self.problems, self._again = {"file": str(error)}, True
            return
        self._again = not await self._tokenize()
        self._seen = seen

    async def _tokenize(self) -> bool:
        """Whether all of it was made into tokens."""
        made = True
        closed: dict[int, set[bytes]] = {}
        single: dict[int, set[bytes]] = {}
        problems: dict[str, str] = {}
        plain: dict[tuple[str, str], bytes] = {}
        for entry in self._policy.public:
            if entry.digest is not None:
                single.setdefault(entry.tokens, set()).add(bytes.fromhex(entry.digest))
                continue
            path, body = self._bodies[entry.name]
            common, why = await self._common(path, body)
            made = made and not why
            nothing: dict[str, Any] = {k: v for k, v in body.items() if k == "model"}
            nothing |= dict[str, Any](messages=[]) if path == CHAT else dict[str, Any](prompt="")
            bare = plain.get((path, entry.model))
            if bare is None:
                bare, _ = await self._common(path, nothing)
                plain[path, entry.model] = bare
            if not why and bare.startswith(common):
                why = "every prompt begins with it: it would say nothing, or make all public"
            if why:
                problems[entry.name] = why
                continue
            _add(closed, common)
        if sum(map(len, closed.values())) > _MARKS_MAX:
            problems = {"file": f"more than {_MARKS_MAX * STEP_TOKENS} tokens are public"}
            closed, single = {}, {}
        for bare in plain.values():  # a digest of what every prompt begins with is none
            for tokens in single:
                if 4 * tokens <= len(bare):
                    single[tokens].discard(prefix_digest(bare[: 4 * tokens]))
        self._closed, self._single, self.problems = closed, single, problems
        return made

    async def _common(self, path: str, body: Mapping[str, Any]) -> tuple[bytes, str]:
        """What all prompts begin with that begin with that body; or why it is not known."""
        found = []
        for end in _ENDS:
            if path == CHAT:
                messages = [*body["messages"], {"role": "user", "content": end}]
                prompt = await self._to_tokens(path, {**body, "messages": messages})
            else:
                prompt = await self._to_tokens(path, {**body, "prompt": body["prompt"] + end})
            if prompt.reason:
                return b"", f"it cannot be made into tokens: {prompt.reason}"
            found.append(prompt.tokens)
        return _shared(*found), ""

    def longest(self, tokens: bytes) -> Public:
        """How far a prompt (uint32 ids, little endian) is public."""
        best, digest = Public(), start_of_digest()
        data = memoryview(tokens)
        most = min(len(tokens) // 4, max(self._closed, default=0))
        for width in _STRIDES:  # what is before a public place is public: no need to look there
            while (end := best.tokens + width) <= most:
                longer = digest.copy()
                longer.update(data[4 * best.tokens : 4 * end])
                made = longer.digest()
                if made not in self._closed[end]:
                    break
                best, digest = Public(end, made), longer
        return max(best, self._longest_single(data), key=lambda public: public.tokens)

    def _longest_single(self, data: memoryview) -> Public:
        best, digest, at = Public(), start_of_digest(), 0
        for count in sorted(self._single):
            if 4 * count > len(data):
                break
            digest.update(data[4 * at : 4 * count])
            at = count
            made = digest.copy().digest()
            if made in self._single[count]:
                best = Public(count, made)
        return best


def of_all(prefixes: PublicPrefixes, prompts: Sequence[bytes]) -> Public:
    """How far each of several prompts, which go under one salt, begins with one public prefix."""
    first = min((prefixes.longest(tokens) for tokens in prompts), key=lambda p: p.tokens)
    size = 4 * first.tokens
    same = all(tokens[:size] == prompts[0][:size] for tokens in prompts)
    return first if same else Public()


def _add(closed: dict[int, set[bytes]], tokens: bytes) -> None:
    digest: hashlib._Hash = start_of_digest()
    width = 4 * STEP_TOKENS
    for start in range(0, len(tokens) - width + 1, width):
        digest.update(tokens[start : start + width])
        closed.setdefault((start + width) // 4, set()).add(digest.copy().digest())


def _shared(one: bytes, two: bytes) -> bytes:
    count = 0
    while 4 * count < min(len(one), len(two)) and (
        one[4 * count : 4 * count + 4] == two[4 * count : 4 * count + 4]
    ):
        count += 1
    return one[: 4 * count]


def _checked(path: Path, text: str, policy: Policy) -> dict[str, tuple[str, dict[str, Any]]]:
    """The bodies of requests that begin so, by entry. Raises ConfigError with the line."""
    if len(policy.public) > PREFIXES_MAX:
        raise ConfigError(f"{path}: {len(policy.public)} prefixes: at most {PREFIXES_MAX}")
    bodies: dict[str, tuple[str, dict[str, Any]]] = {}
    names: set[str] = set()
    for index, entry in enumerate(policy.public):
        at = f"{path}:{line_of(text, f'public[{index}]')}: {entry.name!r}"
        if entry.name in names:
            raise ConfigError(f"{at}: two entries have that name")
        names.add(entry.name)
        ways = [name for name in ("text", "messages", "digest") if getattr(entry, name)]
        if len(ways) != 1:
            raise ConfigError(f"{at}: say it in one way: text, messages or digest")
        if (entry.digest is not None) != (entry.tokens > 0):
            raise ConfigError(
                f"{at}: a digest is of a count of tokens above 0 (kvatlas tenant digest)"
            )
        if entry.digest == prefix_digest(b"").hex():
            raise ConfigError(f"{at}: that is the digest of no tokens: all would be public")
        if entry.digest is None:
            bodies[entry.name] = _body(at, path.parent / (entry.text or entry.messages), entry)
    return bodies


def _body(at: str, path: Path, entry: Entry) -> tuple[str, dict[str, Any]]:
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{at}: {path}: cannot be read: {error}") from error
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"{at}: {path}: larger than {FILE_BYTES_MAX} bytes")
    if not text.strip():
        raise ConfigError(f"{at}: {path}: is empty: every prompt begins with nothing")
    model = {"model": entry.model} if entry.model else {}
    if entry.text:
        return COMPLETION, {**model, "prompt": text}
    try:
        body = msgspec.json.decode(text, type=dict[str, Any])
        messages = msgspec.convert(body.get("messages"), list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{at}: {path}: is no JSON object with messages: {error}") from error
    if not messages and not body.get("tools"):
        raise ConfigError(f"{at}: {path}: has no message and no tool")
    return CHAT, {**body, **model, "messages": messages}
