"""What the halves of a pair are told, by the protocol of their engines.

``nixl`` (vLLM's NixlConnector): one after the other; what the prefill half answers goes into the
request of the decode half. ``mooncake`` (vLLM's MooncakeConnector) and ``sglang``: both at once,
under a number that the gateway draws; the prefill half's bootstrap server is where they meet.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from kvatlas.config import PairingProtocol
from kvatlas.errors import EngineError
from kvatlas.service import body as bodies
from kvatlas.service.body import Answer, Usage, usage_of

#: Both halves are asked at the same time.
CONCURRENT: tuple[PairingProtocol, ...] = ("mooncake", "sglang")

#: Engines that can serve a whole request although they are one half of a pair.
WHOLE: tuple[PairingProtocol, ...] = ("nixl", "mooncake")

_PATHS = ("/v1/chat/completions", "/v1/completions")
_ROOM_BITS = 63
_FIRST_HALF = {"do_remote_decode": True, "do_remote_prefill": False}
_SECOND_HALF = {"do_remote_decode": False, "do_remote_prefill": True}
_WHERE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_NOBODY = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))


def whole_because(path: str, body: Mapping[str, object]) -> str:
    """Why a request cannot be split into halves; "" where it can."""
    if path not in _PATHS:
        return "path"
    for name in ("n", "best_of"):
        count = body.get(name)
        if count is not None and count != 1:
            return name
    for name in ("echo", "prompt_logprobs", "use_beam_search"):
        if body.get(name) not in (None, False):
            return name
    prompt = body.get("prompt")
    if isinstance(prompt, list) and (len(prompt) != 1 or isinstance(prompt[0], int)):
        # A list of token ids is one prompt; of texts or of such lists, each is one.
        return "" if all(isinstance(item, int) for item in prompt) else "batch"
    return ""


class Meeting(msgspec.Struct, frozen=True):
    """Where and under which name both halves meet. Drawn anew for each try: what is left of one
    that failed must not meet the next."""

    protocol: PairingProtocol
    bootstrap: str = ""
    number: int = 0
    engine_id: str = ""

    def prefill(self, raw: bytes, path: str) -> bytes:
        """The body for the prefill half."""
        if self.protocol == "sglang":
            return bodies.edited(raw, self._room())
        one = {"max_tokens": 1, "stream": False}
        if path == "/v1/chat/completions":
            one["max_completion_tokens"] = 1
        params: dict[str, object] = dict(_FIRST_HALF)
        params |= _NOBODY if self.protocol == "nixl" else {"transfer_id": self._name()}
        fields = one | {"kv_transfer_params": params}
        return bodies.edited(raw, fields, ("stream_options", "min_tokens"))

    def decode(self, raw: bytes, params: Mapping[str, object]) -> bytes:
        """The body for the decode half. ``params``: what the prefill half answered (nixl)."""
        if self.protocol == "sglang":
            return bodies.edited(raw, self._room())
        if self.protocol == "mooncake":
            params = _SECOND_HALF | {
                "transfer_id": self._name(),
                "remote_engine_id": self.engine_id,
                "remote_bootstrap_addr": self.bootstrap,
            }
        return bodies.edited(raw, {"kv_transfer_params": params})

    def _name(self) -> str:
        return f"kvatlas-{self.number:016x}"

    def _room(self) -> dict[str, object]:
        parts = urlsplit(self.bootstrap)
        return {
            "bootstrap_host": parts.hostname,
            "bootstrap_port": parts.port,
            "bootstrap_room": self.number,
        }


def meeting(protocol: PairingProtocol, bootstrap: str, engine_id: str = "") -> Meeting:
    """A new one."""
    return Meeting(protocol, bootstrap, secrets.randbits(_ROOM_BITS), engine_id)


class Prefilled(msgspec.Struct, frozen=True):
    """What a prefill half answered. ``params`` is None where it hands nothing on; ``broken``: it
    was given up there, whatever the status says."""

    params: dict[str, object] | None = None
    usage: Usage = Usage()
    broken: bool = False


class _First(Answer):
    kv_transfer_params: object = None


_decode_first = msgspec.json.Decoder(_First).decode


def prefilled(raw: bytes) -> Prefilled:
    """Of the answer to `Meeting.prefill`. Only what promises state is passed on as such."""
    try:
        answer = _decode_first(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Prefilled()
    usage = usage_of(answer) or Usage()
    params = answer.kv_transfer_params
    if not isinstance(params, dict) or params.get("do_remote_prefill") is not True:
        params = None
    return Prefilled(params, usage, _broken(answer.choices))


def _broken(choices: object) -> bool:
    """vLLM ends what it aborted, or whose load failed, with status 200 and these words."""
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, dict) and first.get("finish_reason") in ("abort", "error")


def undelivered(done: Prefilled) -> str:
    """Why the second half must not begin with what the first one answered (nixl): it would
    compute everything itself, and say nothing. "" where all that was promised is there."""
    params = done.params
    if params is None or not all(params.get(name) not in (None, "") for name in _WHERE):
        return "no_state"
    blocks, tokens = params.get("remote_block_ids"), params.get("remote_num_tokens")
    if not isinstance(blocks, list) or not blocks:
        return "no_state"
    # The last token of a prompt is computed by whoever answers.
    short = isinstance(tokens, int) and tokens < done.usage.prompt_tokens - 1
    return "short" if short else ""


def engine_id_of(told: object, url: str) -> str:
    """From the answer of Mooncake's bootstrap server: rank → its engine. Raises EngineError."""
    ranks = list(told.values()) if isinstance(told, dict) else []
    found = ranks[0].get("engine_id") if ranks and isinstance(ranks[0], dict) else None
    if not isinstance(found, str):
        raise EngineError(f"{url}: no engine has registered there")
    return found
