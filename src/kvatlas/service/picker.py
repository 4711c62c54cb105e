"""The endpoint picker: an external processor for Envoy and other gateways of the Gateway API
Inference Extension. They carry the bytes; we say which engine gets a request, by the same `Steer`
as the gateway.

Fails open as the protocol has it: what is no answer to a client ends the stream with an error, and
the proxy's own failure mode decides whether the request goes on without us. Where tenants are told
apart it is refused instead: without us it would have no salt.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from kvatlas.config import Config
from kvatlas.errors import ConfigError
from kvatlas.service import picker_wire as wire
from kvatlas.service.http import Limits
from kvatlas.service.metrics import GatewayMetrics
from kvatlas.service.picker_exchange import Exchange, ProtocolError
from kvatlas.service.steer import Steer
from kvatlas.service.tenants import Tenants

log = logging.getLogger(__name__)

_MESSAGE_SLACK_BYTES = 1 << 20  # headers, metadata and framing around a body
_ALIVE = ("", "liveness")
_READY = ("readiness", wire.SERVICE)


class _FullError(Exception):
    """One of our own limits is reached."""


class Picker:
    """Serves ``config.picker.listen`` on the running loop."""

    def __init__(
        self,
        config: Config,
        steer: Steer,
        metrics: GatewayMetrics,
        limits: Limits | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        self.port = 0
        self._address = config.picker.listen
        self._streams_max = config.picker.max_streams
        self._config = config.gateway
        self._limits = limits or Limits(body_bytes_max=config.gateway.max_body_bytes)
        self._steer = steer
        self._metrics = metrics
        self._tenants = tenants
        self._streams = 0
        self._bodies_bytes = 0
        self._draining = False
        self._server: Any = None

    async def start(self) -> None:
        """Raises ConfigError when the address cannot be had."""
        room = self._limits.body_bytes_max + _MESSAGE_SLACK_BYTES
        options = [("grpc.max_receive_message_length", room), ("grpc.so_reuseport", 0)]
        server = grpc.aio.server(options=options)
        process = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=wire.Message.FromString,
            response_serializer=wire.Reply.SerializeToString,
        )
        check = grpc.unary_unary_rpc_method_handler(
            self._check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(wire.SERVICE, {"Process": process}),
                grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check}),
            )
        )
        try:
            self.port = server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {self._address}: stop what listens there, or set [picker] listen"
            ) from error
        await server.start()
        self._server = server

    async def drain(self) -> None:
        """Takes nothing new, and lets what runs end for a while."""
        self._draining = True
        await self._server.stop(self._config.drain_timeout_s)

    async def close(self) -> None:
        """Ends everything at once."""
        if self._server is not None:
            await self._server.stop(None)

    async def _check(self, request: Any, context: Any) -> Any:
        status = health_pb2.HealthCheckResponse
        if request.service in _ALIVE:
            return status(status=status.SERVING)
        if request.service not in _READY:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        ready = self._steer.health().ready and not self._draining
        return status(status=status.SERVING if ready else status.NOT_SERVING)

    async def _process(self, _: Any, context: Any) -> None:
        exchange = Exchange(
            self._config,
            self._steer,
            self._metrics,
            self._limits,
            self._reserve,
            tenants=self._tenants,
        )
        if self._streams >= self._streams_max:
            text = f"over picker.max_streams ({self._streams_max})"
            await _end(exchange, context, grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            return
        self._streams += 1
        code, text = grpc.StatusCode.OK, ""
        try:
            code, text = await self._converse(exchange, context)
        except ProtocolError as error:
            code, text = grpc.StatusCode.FAILED_PRECONDITION, str(error)
            log.warning("endpoint picker: %s", error)
        except _FullError as error:
            code, text = grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
        except Exception:  # ours: the proxy must not wait for an answer
            code, text = grpc.StatusCode.INTERNAL, "a fault of the endpoint picker, see its log"
            log.exception("the endpoint picker failed on a request")
        finally:
            self._streams -= 1
            self._release(exchange)
            exchange.close(fault=code is grpc.StatusCode.INTERNAL)
        if text:
            await _end(exchange, context, code, text)

    async def _converse(self, exchange: Exchange, context: Any) -> tuple[grpc.StatusCode, str]:
        while not exchange.done:
            try:
                async with asyncio.timeout(
                    exchange.time_left_s(self._config.engine_idle_timeout_s)
                ):
                    message = await context.read()
            except TimeoutError:
                reply = exchange.late()
                if reply is None:
                    return grpc.StatusCode.DEADLINE_EXCEEDED, "the engine fell silent"
                await context.write(reply)
                break
            if message is grpc.aio.EOF:
                break
            for reply in await exchange.take(message):
                await context.write(reply)
            if exchange.asked:
                self._release(exchange)
        return grpc.StatusCode.OK, ""

    def _reserve(self, size_bytes: int) -> None:
        room = self._limits.bodies_bytes_max
        if self._bodies_bytes + size_bytes > room:
            raise _FullError(f"the bodies of all requests are over {room} bytes")
        self._bodies_bytes += size_bytes

    def _release(self, exchange: Exchange) -> None:
        self._bodies_bytes -= exchange.body_bytes
        exchange.body_bytes = 0


async def _end(exchange: Exchange, context: Any, code: grpc.StatusCode, text: str) -> None:
    """A stream that is no answer: the proxy's failure mode decides, or we do."""
    refusal = exchange.turn_away(text)
    if refusal is None:
        await context.abort(code, text)
    else:
        await context.write(refusal)
