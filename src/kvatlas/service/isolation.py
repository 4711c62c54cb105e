"""What of a request could reach another tenant's state: taken out of it, or refused.

An allow list of paths: an endpoint that does not hand the cache salt on, or that finds what others
stored by its name, would share in silence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from kvatlas.errors import RequestError

#: Endpoints of engines that put the body's salt into their prefix cache (vLLM 0.32, SGLang 0.5.23).
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
#: Of vLLM alone.
VLLM_PATHS = ("/v1/embeddings", "/v1/messages")

#: Members of a body that say whose state it is: the gateway's alone to say. SGLang adds
#: ``extra_key`` to the salt, finds a session's state by its name, and what it aborts for a client
#: who has left is all whose ``rid`` begins alike. vLLM reads encoders' outputs from whoever
#: ``ec_transfer_params`` name, and gives tools a session by ``request_id``.
FIELDS = (
    "cache_salt",
    "extra_key",
    "session_params",
    "session_id",
    "rid",
    "request_id",
    "ec_transfer_params",
)

#: Where clients show who they are: not for an engine.
CREDENTIALS = frozenset({b"authorization", b"x-api-key"})

#: Code that SGLang unpickles and runs where an operator allows it: it could read all there is.
_CODE = "custom_logit_processor"
_RESPONSES = "/v1/responses"
_BY_NAME = ("previous_response_id", "background", "conversation")
_DEPTH_MAX = 8
_PARTS = {dict, list}  # of JSON as it is read: there are no others


def paths_for(engines: Collection[str]) -> tuple[str, ...]:
    """Where requests may go, by the kinds of the engines."""
    return PATHS if "sglang" in engines else (*PATHS, *VLLM_PATHS)


def check(method: str, path: str, body: Mapping[str, object], paths: Collection[str]) -> None:
    """Raises RequestError where state could be shared that must not be."""
    if path not in paths or method != "POST":
        raise RequestError(
            f"{method} {path}: what engines keep of it is not told apart by tenant; there is: "
            f"POST to {', '.join(paths)}",
            status=403,
            code="not_isolated",
        )
    for name in _BY_NAME if path == _RESPONSES else ():
        if body.get(name):
            raise _refused(name, "engines find what they stored by its name, whoever asks")
    if body.get(_CODE):
        raise _refused(_CODE, "it is code, which could read what engines have of everybody")
    if any(_named_media(body.get(name), _DEPTH_MAX) for name in ("messages", "input", "prompt")):
        raise _refused("uuid", "engines find media by the name that a client gives it")


def fields_for(path: str) -> dict[str, object]:
    """Members of the body that are set so."""
    return {"store": False} if path == _RESPONSES else {}


def _named_media(value: object, depth: int) -> bool:
    """Is there a part, of whatever kind, with a name of its own for what it holds?"""
    if isinstance(value, dict):
        if "uuid" in value:
            return True
        inner: Iterator[object] = iter(value.values())
    elif isinstance(value, list):
        if _PARTS.isdisjoint(map(type, value)):  # quick: a prompt may be 100,000 token ids
            return False
        inner = iter(value)
    else:
        return False
    return depth > 0 and any(_named_media(each, depth - 1) for each in inner)


def _refused(name: str, why: str) -> RequestError:
    text = f"{name}: {why}, and tenants are kept apart here"
    return RequestError(text, status=403, code="not_isolated", param=name)
