"""The messages of Envoy's external processor, as far as an endpoint picker reads and makes them.

Names and places are those of the endpoint picker protocol of the Gateway API Inference Extension
(proposal 004): a subset to pick from comes in the request's metadata; what was picked goes into a
header and into dynamic metadata, with the same value; who answered comes with the response.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.type.v3.http_status_pb2 import HttpStatus

from kvatlas.errors import RequestError
from kvatlas.service.http import Headers, Request, envelope

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION = "x-gateway-destination-endpoint"

_NAMESPACE = "envoy.lb"
_SERVED = "x-gateway-destination-endpoint-served"
_FILTER = "envoy.filters.http.ext_proc"
_UPSTREAM = "upstream.address"
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
_SUBSET = "x-gateway-destination-endpoint-subset"

#: Some data planes take at most 64 KiB of a body in one message.
CHUNK_BYTES = 62_000

BUFFERED = int(ProcessingMode.BUFFERED)
STREAMED = int(ProcessingMode.STREAMED)
FULL_DUPLEX = int(ProcessingMode.FULL_DUPLEX_STREAMED)

Message: TypeAlias = ext_proc.ProcessingRequest
Reply: TypeAlias = ext_proc.ProcessingResponse


def mode_name(mode: int) -> str:
    """As it is written in Envoy's configuration."""
    return str(ProcessingMode.BodySendMode.Name(mode))


def modes(message: Message) -> tuple[int, int]:
    """How the bodies of request and response come. A data plane that does not say so uses what
    the protocol asks for."""
    if not message.HasField("protocol_config"):
        return FULL_DUPLEX, FULL_DUPLEX
    told = message.protocol_config
    return int(told.request_body_mode), int(told.response_body_mode)


def headers_of(message: ext_proc.HttpHeaders) -> Headers:
    """Names in lower case, pseudo headers among them."""
    return [
        (h.key.lower().encode("latin-1", "replace"), h.raw_value or h.value.encode())
        for h in message.headers.headers
    ]


def request_of(headers: Headers, body: bytes) -> Request:
    """The HTTP request that these make up."""
    pseudo = {name: value for name, value in headers if name.startswith(b":")}
    return Request(
        method=pseudo.get(b":method", b"").decode("latin-1"),
        target=pseudo.get(b":path", b"").decode("latin-1"),
        headers=[pair for pair in headers if not pair[0].startswith(b":")],
        body=body,
        keep_alive=True,
    )


def subset_of(message: Message) -> frozenset[str] | None:
    """The endpoints that alone may be picked (``ip:port``, or ``ip`` for all of its ports); None
    where any may. A list comes as one, or as text with commas, by who set it."""
    found = _metadata(message, _SUBSET_NAMESPACE, _SUBSET)
    if found is None:
        return None
    listed = [v.string_value for v in found.list_value.values] or [found.string_value]
    return frozenset(e for text in listed for part in text.split(",") if (e := part.strip()))


def served_of(message: Message) -> str:
    """The endpoint that answered, where the data plane tells it ("" else): by the protocol, or as
    an attribute that Envoy itself has."""
    found = _metadata(message, _NAMESPACE, _SERVED)
    if found is None and _FILTER in message.attributes:
        found = message.attributes[_FILTER].fields.get(_UPSTREAM)
    return str(found.string_value).strip() if found is not None else ""


def _metadata(message: Message, namespace: str, key: str) -> Any:
    outer = message.metadata_context.filter_metadata
    if namespace not in outer or key not in outer[namespace].fields:
        return None
    return outer[namespace].fields[key]


# -- replies --------------------------------------------------------------------------------------


def changed(headers: Headers, removed: list[str], body: bytes | None = None) -> Any:
    """What is to be done with headers, and with a body that is not streamed (None: nothing)."""
    common = ext_proc.CommonResponse(
        header_mutation=ext_proc.HeaderMutation(
            set_headers=[
                HeaderValueOption(
                    header=HeaderValue(key=name.decode("latin-1"), raw_value=value),
                    append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
                )
                for name, value in headers
            ],
            remove_headers=removed,
        )
    )
    if body is not None:
        common.body_mutation.CopyFrom(
            ext_proc.BodyMutation(body=body) if body else ext_proc.BodyMutation(clear_body=True)
        )
    return common


def headers_reply(kind: str, common: Any = None) -> Reply:
    """``kind``: ``request_headers`` or ``response_headers``."""
    return Reply(**{kind: ext_proc.HeadersResponse(response=common)})


def body_reply(kind: str, common: Any = None) -> Reply:
    """For a body that comes buffered or streamed: one reply for each message."""
    return Reply(**{kind: ext_proc.BodyResponse(response=common)})


def body_parts(kind: str, body: bytes, *, end: bool) -> Iterator[Reply]:
    """``body`` in full duplex: as many replies as it takes, the last one with the end."""
    starts = range(0, len(body), CHUNK_BYTES) if body else range(1 if end else 0)
    for start in starts:
        last = start + CHUNK_BYTES >= len(body)
        part = ext_proc.StreamedBodyResponse(
            body=body[start : start + CHUNK_BYTES], end_of_stream=end and last
        )
        yield body_reply(
            kind,
            ext_proc.CommonResponse(body_mutation=ext_proc.BodyMutation(streamed_response=part)),
        )


def trailers_reply(kind: str) -> Reply:
    """Trailers as they are."""
    return Reply(**{kind: ext_proc.TrailersResponse()})


def picked(reply: Reply, endpoints: str) -> Reply:
    """``reply`` with ``endpoints`` where data planes read them that do not read the header, and
    with the route chosen anew by the header."""
    fields = reply.dynamic_metadata.fields[_NAMESPACE].struct_value.fields
    fields[DESTINATION].string_value = endpoints
    kind = reply.WhichOneof("response")
    getattr(reply, kind).response.clear_route_cache = True
    return reply


def refusal(error: RequestError, request_id: str) -> Reply:
    """The answer to the client in place of any engine's: OpenAI's error envelope."""
    headers = [(b"content-type", b"application/json")]
    if request_id:
        headers.append((b"x-request-id", request_id.encode()))
    if error.retry_after_s:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    text = envelope(str(error), status=error.status, code=error.code, param=error.param)
    mutation = changed(headers, []).header_mutation
    return Reply(
        immediate_response=ext_proc.ImmediateResponse(
            status=HttpStatus(code=error.status), headers=mutation, body=text, details=error.code
        )
    )
