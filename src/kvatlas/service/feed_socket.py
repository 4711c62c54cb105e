"""The feed's sockets: their limits, their keys, and which end of them binds.

Between our own parts events go over ZMQ's CURVE. Both ends have keys of one start of their process,
and tell them to each other over TLS (`service.agents`): nobody else can read or send.
"""

from __future__ import annotations

import errno

import msgspec
import zmq

from kvatlas.errors import ConfigError
from kvatlas.service import wire

FAILED = (
    zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
)
#: What is heard of a connection.
MONITORED = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | FAILED
CURVE_HEADER = "x-kvatlas-curve"
CURVE_KEY_CHARS = 40  # 32 bytes in Z85


class Curve(msgspec.Struct, frozen=True):
    """A pair of keys, in Z85."""

    public: str
    secret: str


def new_curve() -> Curve:
    """Of this start of the process. Raises ConfigError where libzmq cannot encrypt."""
    if not zmq.has("curve"):
        raise ConfigError("tls: this libzmq has no CURVE: install pyzmq from its wheel")
    public, secret = zmq.curve_keypair()
    return Curve(public.decode(), secret.decode())


def tune(socket: zmq.Socket[bytes], queue_max: int, curve: Curve | None, key: str) -> None:
    """Before it is attached; ``key``: that of the other end, "" for none."""
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RCVHWM, queue_max)
    socket.set(zmq.MAXMSGSIZE, wire.PAYLOAD_BYTES_MAX)
    socket.set(zmq.IPV6, 1)
    socket.set(zmq.HEARTBEAT_IVL, 5_000)  # a host that vanished says no goodbye
    socket.set(zmq.HEARTBEAT_TIMEOUT, 15_000)
    if curve is not None and key:
        socket.set(zmq.CURVE_SERVERKEY, key.encode())
        socket.set(zmq.CURVE_PUBLICKEY, curve.public.encode())
        socket.set(zmq.CURVE_SECRETKEY, curve.secret.encode())


def attach(sub: zmq.Socket[bytes], endpoint: str, bind: bool | None) -> bool:
    """Bind or connect, as `feed.Source` says; returns True when bound. Raises ZMQError."""
    if bind is not False:
        try:
            sub.bind(endpoint)
            return True
        except zmq.ZMQError as error:
            if bind or error.errno not in (zmq.EADDRINUSE, zmq.EADDRNOTAVAIL, errno.ENODEV):
                raise
    sub.connect(endpoint)
    return False
