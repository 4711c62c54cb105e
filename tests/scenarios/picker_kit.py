"""A gRPC client that plays Envoy's part before the endpoint picker, message by message."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import grpc
import msgspec
from envoy.config.core.v3.base_pb2 import HeaderValue
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf import json_format, struct_pb2
from harness import COMPLETION, WAIT_S, Product

from kvatlas.config import PickerConfig
from kvatlas.service import picker_wire as wire
from kvatlas.service.http import Limits
from kvatlas.service.picker import Picker

PROCESS = f"/{wire.SERVICE}/Process"


class Told(msgspec.Struct):
    """What the proxy was told: of a request where it goes, of an answer what the client gets."""

    headers: dict[str, str] = {}
    removed: list[str] = []
    metadata: str = ""
    clears_route: bool = False
    body: bytes = b""
    ended: bool = False
    status: int = 0  # of an answer in place of any engine's
    replies: int = 0

    @property
    def endpoints(self) -> list[str]:
        """Where it goes: header and metadata must say the same."""
        assert self.headers[wire.DESTINATION] == self.metadata
        return self.metadata.split(",")

    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found

    def take(self, reply: Any) -> None:
        """One more reply of the picker."""
        self.replies += 1
        kind = reply.WhichOneof("response")
        if reply.HasField("dynamic_metadata"):
            self.metadata = json_format.MessageToDict(reply.dynamic_metadata)["envoy.lb"][
                wire.DESTINATION
            ]
        found = getattr(reply, kind)
        if kind == "immediate_response":
            self.status, self.body, self.ended = found.status.code, found.body, True
            self._mutated(found.headers)
            return
        if kind.endswith("trailers"):
            return
        self._mutated(found.response.header_mutation)
        self.clears_route |= found.response.clear_route_cache
        mutation = found.response.body_mutation
        self.body += mutation.streamed_response.body + mutation.body
        self.ended |= mutation.streamed_response.end_of_stream

    def _mutated(self, mutation: Any) -> None:
        for one in mutation.set_headers:
            self.headers[one.header.key] = one.header.raw_value.decode()
        self.removed += mutation.remove_headers


class Stream:
    """One request's stream. ``modes``: how bodies travel, as Envoy says it in its first message."""

    def __init__(self, call: Any, modes: tuple[str, str] | None) -> None:
        self.call = call
        self.modes = modes

    async def send(self, **message: Any) -> None:
        await self.call.write(ext_proc.ProcessingRequest(**message))

    async def read(self) -> Any:
        """The next reply; EOF when the picker ended the stream."""
        async with asyncio.timeout(WAIT_S):
            return await self.call.read()

    async def code(self) -> tuple[str, str]:
        """How the picker ended the stream."""
        async with asyncio.timeout(WAIT_S):
            return (await self.call.code()).name, await self.call.details()

    async def ask_head(
        self,
        path: str = COMPLETION,
        headers: Mapping[str, str] | None = None,
        *,
        method: str = "POST",
        subset: object = None,
        end: bool = False,
        **more: Any,
    ) -> None:
        """Sends the request's headers."""
        named = {":method": method, ":path": path, ":authority": "kvatlas"} | dict(headers or {})
        message: dict[str, Any] = {"request_headers": _headers(named, end=end), **more}
        if subset is not None:
            hint = {"envoy.lb.subset_hint": {f"{wire.DESTINATION}-subset": subset}}
            message["metadata_context"] = _metadata(hint)
        if self.modes is not None:
            config = dict(zip(("request_body_mode", "response_body_mode"), self.modes, strict=True))
            message["protocol_config"] = ext_proc.ProtocolConfiguration(**config)
        await self.send(**message)

    async def ask(
        self, body: object, path: str = COMPLETION, *, pieces: int = 3, **head: Any
    ) -> Told:
        """Sends a whole request in full duplex, and takes all that comes of it."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        length = {"content-length": str(len(raw)), "content-type": "application/json"}
        head["headers"] = length | dict(head.get("headers") or {})
        await self.ask_head(path, **head)
        size = max(1, -(-len(raw) // pieces))
        parts = [raw[i : i + size] for i in range(0, len(raw), size)] or [b""]
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            await self.send(request_body=ext_proc.HttpBody(body=part, end_of_stream=last))
        return await self.told()

    async def told(self) -> Told:
        """Replies until the body that they carry has ended."""
        told = Told()
        while not told.ended:
            reply = await self.read()
            assert reply is not grpc.aio.EOF, await self.code()
            told.take(reply)
        return told

    async def answer_head(
        self,
        status: int = 200,
        *,
        served: str = "",
        upstream: str = "",
        kind: str = "application/json",
    ) -> Told:
        """The engine's head; what is told of it. ``upstream``: as Envoy's attribute."""
        message: dict[str, Any] = {
            "response_headers": _headers({":status": str(status), "content-type": kind})
        }
        if served:
            message["metadata_context"] = _metadata(
                {"envoy.lb": {f"{wire.DESTINATION}-served": served}}
            )
        request = ext_proc.ProcessingRequest(**message)
        if upstream:
            request.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": upstream})
        await self.call.write(request)
        told = Told()
        told.take(await self.read())
        return told

    async def answer(self, pieces: Iterable[bytes], **head: Any) -> Told:
        """The engine's answer, in full duplex; what the client gets, its headers included."""
        told = await self.answer_head(**head)
        listed = list(pieces)
        for index, piece in enumerate(listed):
            last = index == len(listed) - 1
            await self.send(response_body=ext_proc.HttpBody(body=piece, end_of_stream=last))
        rest = await self.told()
        told.body, told.ended = rest.body, rest.ended
        return told


def _headers(named: Mapping[str, str], *, end: bool = False) -> Any:
    listed = [HeaderValue(key=k, raw_value=v.encode()) for k, v in named.items()]
    message = ext_proc.HttpHeaders(end_of_stream=end)
    message.headers.headers.extend(listed)
    return message


def _metadata(outer: Mapping[str, Mapping[str, object]]) -> Any:
    message = ext_proc.ProcessingRequest().metadata_context
    for namespace, fields in outer.items():
        value = struct_pb2.Struct()
        value.update(dict(fields))
        message.filter_metadata[namespace].CopyFrom(value)
    return message


class Proxy:
    """A picker in front of a product, and the channel to it."""

    def __init__(self, picker: Picker, channel: Any) -> None:
        self.picker = picker
        self.channel = channel
        self._process = channel.stream_stream(
            PROCESS,
            request_serializer=ext_proc.ProcessingRequest.SerializeToString,
            response_deserializer=ext_proc.ProcessingResponse.FromString,
        )

    @contextlib.asynccontextmanager
    async def stream(
        self, modes: tuple[str, str] | None = ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED")
    ) -> AsyncIterator[Stream]:
        """Ended by the proxy at the end, as by a client that leaves."""
        call = self._process()
        try:
            yield Stream(call, modes)
        finally:
            call.cancel()


@contextlib.asynccontextmanager
async def picking(
    product: Product, *, limits: Limits | None = None, steer: Any = None, **config: Any
) -> AsyncIterator[Proxy]:
    """The picker beside the gateway of a product, on a free port."""
    settings = msgspec.structs.replace(
        product.config, picker=PickerConfig(listen="127.0.0.1:0", **config)
    )
    steering = steer or product.assembly.steering
    tenants = product.assembly.tenancy.tenants
    picker = Picker(settings, steering, product.gateway.metrics, limits, tenants)
    await picker.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}") as channel:
            yield Proxy(picker, channel)
    finally:
        await picker.close()
