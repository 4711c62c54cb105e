"""What the actors of a simulated cluster say to each other. All of it goes through `Network.send`.

The gateway and its engines say what HTTP and ZMQ carry in a real cluster, and no more: a simulated
gateway knows nothing that a real one could not know.
"""

from __future__ import annotations

import msgspec

from kvatlas.core.events import Batch
from kvatlas.core.layout import Layout
from kvatlas.workload.prompt_keys import Origin
from kvatlas.workload.protocol import Produced


class Source(msgspec.Struct, frozen=True):
    """Where the state of a request's first ``tokens`` tokens lies: an engine, in that life."""

    engine: str
    life: int
    tokens: int


class Submit(msgspec.Struct, frozen=True):
    """Gateway → engine: one request. ``salt`` is the cache salt of its scope.

    ``hand_off``: only its prefill, for another engine to go on from; ``source``: the other half.
    ``origin``: see `Inquiry`.
    """

    id: str
    tokens: bytes
    output_tokens: int
    salt: str = ""
    adapter: str = ""
    hand_off: bool = False
    source: Source | None = None
    origin: Origin | None = None


class Cancel(msgspec.Struct, frozen=True):
    """Gateway → engine: nobody waits for this answer any more."""

    id: str


class Accepted(msgspec.Struct, frozen=True):
    """Engine → gateway: the connection stands and the engine has the request."""

    id: str
    life: int


class Declined(msgspec.Struct, frozen=True):
    """Engine → gateway: it will not run here. ``busy``: a 503, another engine may take it."""

    id: str
    reason: str
    busy: bool


class Usage(msgspec.Struct, frozen=True):
    """What the end of an answer tells about its prompt, as OpenAI's usage does."""

    cached_tokens: int


class Answers(msgspec.Struct, frozen=True):
    """Engine → gateway: tokens of all requests, those of several steps where the engine leapt.

    ``sent_at`` is when the last of them left, on the world's clock, ``produced.times_s`` when each
    did on the engine's, which is ``lag_s`` behind. ``ended`` by request id.
    """

    sent_at: float
    lag_s: float
    produced: tuple[Produced, ...]
    ended: dict[str, Usage]


class Ready(msgspec.Struct, frozen=True):
    """Prefill engine → gateway: the state of the prompt's ``tokens`` tokens waits to be taken.
    ``cached_tokens`` of them were resumed there."""

    id: str
    life: int
    tokens: int
    cached_tokens: int


class Taken(msgspec.Struct, frozen=True):
    """Decode engine → prefill engine: the state was read, or is not needed: let go of it."""

    id: str
    life: int


class Lost(msgspec.Struct, frozen=True):
    """Engine's host → gateway: the process of this ``life`` ended, its connections broke."""

    life: int


class Events(msgspec.Struct, frozen=True):
    """Engine → feed: one batch, as published."""

    batch: Batch


class Subscribed(msgspec.Struct, frozen=True):
    """Engine → feed: the subscription stands (again)."""


class AskReplay(msgspec.Struct, frozen=True):
    """Feed → engine: the batches from ``from_seq`` on."""

    from_seq: int
    token: int


class Replayed(msgspec.Struct, frozen=True):
    """Engine → feed: the answer to `AskReplay`, one batch after another; None: that was all."""

    token: int
    batch: Batch | None


class Look(msgspec.Struct, frozen=True):
    """Gateway → engine: how are you?"""

    number: int


class Pulse(msgspec.Struct, frozen=True):
    """Engine → gateway: the answer to `Look`. ``life`` counts the engine's starts; ``layout`` and
    ``fingerprint`` say what it serves, where that may change."""

    number: int
    life: int
    requests: int
    asleep: bool = False
    layout: Layout | None = None
    fingerprint: bytes = b""


class Pull(msgspec.Struct, frozen=True):
    """Gateway → agent: bring these blocks of a prompt, its first ``tokens``, up to dram, as
    ``engine`` would use them. ``tenant``: whose they are."""

    id: str
    engine: str
    keys: tuple[bytes, ...]
    tokens: int
    tenant: str = ""


class CallOff(msgspec.Struct, frozen=True):
    """Gateway → agent: that `Pull` is not wanted any more."""

    id: str


class Pulled(msgspec.Struct, frozen=True):
    """Agent → gateway: that `Pull` is over. ``moved_bytes`` arrived; ``error``: why it is not
    whole."""

    id: str
    moved_bytes: int
    error: str = ""


class Refused(msgspec.Struct, frozen=True):
    """Network → sender: nobody listens where this ``message`` went."""

    message: Submit | Cancel | AskReplay | Look


Message = (
    Submit
    | Cancel
    | Accepted
    | Declined
    | Answers
    | Ready
    | Taken
    | Lost
    | Refused
    | Events
    | Subscribed
    | AskReplay
    | Replayed
    | Look
    | Pulse
    | Pull
    | CallOff
    | Pulled
)
