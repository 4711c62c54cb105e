"""A trace's prompts as English text or as chats, so that any OpenAI endpoint can be asked. Pure.

Each hash id stands for one run of words, the same in every process: equal leading ids give equal
leading text. Lengths are met on average: ``tokens_per_word`` is measured on the endpoint, and a
boundary between shared and own text moves by a word or two. Another ``tag`` gives other text of the
same shape, which no cache has seen.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import msgspec

from kvatlas.service.load import Prompt
from kvatlas.workload.trace import VOCAB_SIZE, TraceRequest, tokens_of

Form = Literal["text", "chat", "ids"]
TOKENS_PER_WORD = 1.2  # where an endpoint does not tell what it counts
_FILLER = {"user": "Go on.", "assistant": "Yes."}  # a turn whose own text is shorter than a block

# One sentence, word by word: any choice from each gives one.
_SENTENCE = tuple(
    tuple(words.split())
    for words in (
        "the a this every another one that some",
        "old green quiet small broken early narrow heavy plain distant careful empty second local "
        "silver sudden cold bright hidden patient modern spare loose gentle wooden famous busy "
        "rough simple steady curious final",
        "clerk driver letter engine garden window teacher river parcel kitchen market doctor "
        "bridge signal farmer station ladder painter captain bottle lantern student harbour "
        "machine cousin ticket hammer village sailor basket mirror library",
        "carries opens follows checks moves finds repairs counts watches signs closes paints "
        "weighs passes reads holds brings crosses leaves answers keeps needs meets sends turns",
        "the a this every another one that some",
        "table record number paper corner answer harvest blanket morning message question journey "
        "pattern meeting shelter history picture blanket pocket castle forest winter summer dinner "
        "office candle season valley button needle voyage engine",
        "near behind before after beside under above without against beyond across inside",
        "the a this every another one that some",
        "gate tower church cellar valley square bakery harbour museum factory border orchard hotel "
        "station canal school stable chapel quarry theatre",
    )
)


class Prompts:
    """What the requests of one replay ask. ``requests`` are all of them, in order of arrival."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        *,
        form: Form,
        block_tokens: int,
        tokens_per_word: float = TOKENS_PER_WORD,
        vocab_size: int = VOCAB_SIZE,
        tag: str = "",
    ) -> None:
        self._form = form
        self._block_tokens = block_tokens
        self._tokens_per_word = tokens_per_word
        self._vocab_size = vocab_size
        self._tag = tag
        self._bounds = _turns(requests, block_tokens) if form == "chat" else {}

    def __call__(self, request: TraceRequest) -> Prompt:
        if self._form == "ids":
            return Prompt("/v1/completions", {"prompt": self._ids(request)})
        blocks = self._blocks(request)
        if self._form == "text":
            return Prompt("/v1/completions", {"prompt": " ".join(blocks)})
        system_end, *bounds = self._bounds.get(request.index, (0,))
        messages = [_message("system", blocks[:system_end])] if system_end else []
        ends = [system_end, *bounds, len(blocks)]
        for turn, (start, end) in enumerate(pairwise(ends)):
            messages.append(_message("assistant" if turn % 2 else "user", blocks[start:end]))
        return Prompt("/v1/chat/completions", {"messages": messages})

    def _ids(self, request: TraceRequest) -> list[int]:
        if self._tag:
            named = tuple(_other(self._tag, hash_id) for hash_id in request.hash_ids)
            request = msgspec.structs.replace(request, hash_ids=named)
        ids = tokens_of(request, block_tokens=self._block_tokens, vocab_size=self._vocab_size)
        return memoryview(ids).cast("I").tolist()

    def _blocks(self, request: TraceRequest) -> list[str]:
        per_block = self._block_tokens / self._tokens_per_word
        tail = request.input_tokens % self._block_tokens
        blocks = []
        for place, hash_id in enumerate(request.hash_ids):
            words = math.floor((place + 1) * per_block) - math.floor(place * per_block)
            if tail and place == len(request.hash_ids) - 1:
                words = round(tail / self._tokens_per_word)
            blocks.append(words_of(self._tag, hash_id, max(1, words)))
        return blocks


@lru_cache(maxsize=8192)
def words_of(tag: str, hash_id: int, count: int) -> str:
    """``count`` words of sentences, the same for the same arguments everywhere."""
    noise = hashlib.shake_128(b"kvatlas.text.1\0%s\0%d" % (tag.encode(), hash_id)).digest(count)
    words = []
    for place, byte in enumerate(noise):
        slot = place % len(_SENTENCE)
        word = _SENTENCE[slot][byte % len(_SENTENCE[slot])]
        word = word.capitalize() if slot == 0 else word
        last = slot == len(_SENTENCE) - 1 or place == count - 1
        words.append(f"{word}." if last else word)
    return " ".join(words)


def _other(tag: str, hash_id: int) -> int:
    """Another id for this one, the same for the same tag."""
    digest = hashlib.blake2b(b"%s\0%d" % (tag.encode(), hash_id), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _message(role: str, blocks: Sequence[str]) -> dict[str, str]:
    return {"role": role, "content": " ".join(blocks) or _FILLER[role]}


def _turns(requests: Sequence[TraceRequest], block_tokens: int) -> dict[int, tuple[int, ...]]:
    """Where the messages of each request end, in blocks: its system prompt, then by turns user and
    assistant up to the last user's, which has the rest.

    The system prompt is what a session's first request shares with another session. A turn that
    does not go on from the one before it begins a conversation of its own.
    """
    shared = _shared(requests)
    bounds: dict[int, tuple[int, ...]] = {}
    latest: dict[str, TraceRequest] = {}
    for request in requests:
        if not request.session:
            continue
        before, latest[request.session] = latest.get(request.session), request
        whole = request.input_tokens // block_tokens
        if before is not None:
            said = before.input_tokens // block_tokens
            if said <= whole and before.hash_ids[:said] == request.hash_ids[:said]:
                heard = (before.input_tokens + before.output_tokens) // block_tokens
                answer = min(max(said, heard), whole)
                bounds[request.index] = (*bounds[before.index], said, answer)
                continue
        system = next((i for i, h in enumerate(request.hash_ids[:whole]) if h not in shared), whole)
        bounds[request.index] = (system,)
    return bounds


def _shared(requests: Sequence[TraceRequest]) -> set[int]:
    """Ids that more than one session has."""
    owner: dict[int, str] = {}
    shared: set[int] = set()
    for request in requests:
        for hash_id in request.hash_ids:
            if owner.setdefault(hash_id, request.session) != request.session:
                shared.add(hash_id)
    return shared
