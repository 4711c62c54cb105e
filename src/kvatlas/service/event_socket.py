"""Events on the wire as engines send them: a PUB socket, and a ROUTER that sends them again.

Frames are [topic, sequence number as 8 bytes big endian, payload], as in vLLM's
`distributed/kv_events.py`; `service.feed` is the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence

import zmq
import zmq.asyncio

from kvatlas.service.feed_socket import Curve

HWM = 100_000  # vLLM's default: batches queued for a slow subscriber before new ones are dropped
ZAP_DOMAIN = "kvatlas"  # whom the listeners of encrypted sockets are known to
END_OF_REPLAY = b"\xff" * 8


class EventSocket:
    """Both sockets on two ports of ``host``; 0 takes a free one. Raises zmq.ZMQError for a port
    that is taken.

    `send` never blocks: a subscriber that lags beyond ``HWM`` batches loses some, and can ask for
    them again while they are among the last ``buffer_steps`` (None: whoever sends looks after
    that, see `rewrite`).
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        host: str,
        port: int = 0,
        replay_port: int = 0,
        *,
        topic: str = "",
        buffer_steps: int | None = None,
        curve: Curve | None = None,
    ) -> None:
        """``curve``: who listens must know its public key, and be let in by the context's ZAP."""
        self.topic = topic
        self._topic = topic.encode()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._seq = 0
        # A plain socket on purpose: a PUB send never waits, so it needs no event loop.
        self._pub: zmq.Socket[bytes] = zmq.Socket(context, zmq.PUB)
        self._router = context.socket(zmq.ROUTER)
        try:
            self._pub.set_hwm(HWM)
            self._router.set_hwm(HWM)
            if curve is not None:
                _encrypt(self._pub, curve)
                _encrypt(self._router, curve)
            self.endpoint = _bind(self._pub, host, port)
            self.replay_endpoint = _bind(self._router, host, replay_port)
        except zmq.ZMQError:
            self._pub.close(linger=0)
            self._router.close(linger=0)
            raise
        self._task: asyncio.Task[None] | None = None

    @property
    def next_seq(self) -> int:
        """The number of the next batch."""
        return self._seq

    def start(self) -> None:
        """Begin to answer replay requests (needs a running event loop)."""
        self._task = asyncio.create_task(self._serve_replay(), name="event replay")

    async def close(self) -> None:
        """Closes both."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._pub.close(linger=0)
        self._router.close(linger=0)

    def send(self, payload: bytes) -> None:
        """Put one payload on the wire under the next sequence number, whatever its bytes."""
        seq, self._seq = self._seq, self._seq + 1
        self._buffer.append((seq, payload))
        self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload))

    def skip(self, count: int) -> None:
        """Lose sequence numbers: subscribers see a gap that no replay can fill."""
        self._seq += count

    def rewrite(self, payloads: Sequence[bytes]) -> None:
        """All that was sent so far comes to the same as ``payloads``: they are sent again in its
        place, under the last numbers of it. There must not be more of them than there were."""
        first = self._seq - len(payloads)
        assert first >= 0, "more batches than were sent"
        self._buffer.clear()
        self._buffer.extend(enumerate(payloads, first))

    async def _serve_replay(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) > 8:
                continue  # as vLLM does: an ill-formed request gets no answer
            client, _, start = frames
            first = int.from_bytes(start, "big")
            for seq, payload in list(self._buffer):
                if seq >= first:
                    reply = [client, b"", self._topic, seq.to_bytes(8, "big"), payload]
                    await self._router.send_multipart(reply)
            await self._router.send_multipart([client, b"", b"", END_OF_REPLAY, b""])


def _encrypt(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, curve: Curve) -> None:
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, curve.secret.encode())
    socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> str:
    if port:
        socket.bind(f"tcp://{host}:{port}")
    else:
        port = socket.bind_to_random_port(f"tcp://{host}")
    return f"tcp://{host}:{port}"
