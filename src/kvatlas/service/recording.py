"""A recording of all that reached the dispatcher and what it decided: so that it can decide again.

It holds token ids, those of prompts and those of KV events, and is therefore as confidential as
the prompts themselves: only its owner may read the file, and nothing is recorded unless asked for.

A file is frames, each a length (uint32, little endian) and so many bytes of msgpack: one `Header`,
then `Frame`s. A gateway that was killed leaves at most one frame cut short.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvatlas import __version__
from kvatlas.core.admission import Rules
from kvatlas.core.directory import Limits
from kvatlas.core.dispatch import Input, Join, Question, Settle
from kvatlas.core.records import Publisher
from kvatlas.core.router import Decision, Params
from kvatlas.core.tenancy import Sharing
from kvatlas.errors import ConfigError, TraceError

log = logging.getLogger(__name__)

FORMAT = 1
_FRAME_BYTES_MAX = 1 << 28
_LENGTH = struct.Struct("<I")

KeysOf = Callable[[Publisher, bytes, Sharing, str], list[bytes]]


class Header(msgspec.Struct, frozen=True):
    """What the dispatcher was made with."""

    format: int
    version: str
    params: Params
    limits: Limits
    rules: Rules = Rules()


class Frame(msgspec.Struct, frozen=True):
    """One input and when it came (seconds of the gateway's clock); its answer, if a question.

    ``keys``: of a question, where agents are heard, its block keys as one publisher of each kind is
    asked for them: agents announce keys, and who decides again has another secret.
    """

    at: float
    event: Input
    answer: Decision | None = None
    keys: tuple[tuple[Publisher, tuple[bytes, ...]], ...] = ()


class Recorder:
    """Writes until ``max_bytes`` are reached; ``error`` then says so, or why else it stopped."""

    def __init__(
        self,
        path: str,
        max_bytes: int,
        params: Params,
        limits: Limits,
        rules: Rules = Rules(),  # noqa: B008 - frozen
    ) -> None:
        """Raises ConfigError when ``path`` cannot be made, or is there already."""
        self.error = ""
        self.keys_of: KeysOf | None = None  # the dispatcher's, once there is one
        self._kinds: dict[Publisher, bytes] = {}
        self._agents = False
        self._path = path
        self._left = max_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._file: BinaryIO | None = None
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ConfigError(f"router.recording: {path}: {error.strerror}") from error
        self._file = os.fdopen(fd, "wb", buffering=1 << 20)
        self._write(Header(FORMAT, __version__, params, limits, rules))

    def __call__(self, now: float, event: Input, answer: Decision | None) -> None:
        """A `Tap`."""
        keys: dict[tuple[bytes, str], tuple[Publisher, tuple[bytes, ...]]] = {}
        match event:
            case Join(publisher, _, fingerprint):
                self._kinds[publisher] = fingerprint
            case Settle():
                self._agents = True
            case Question(_, among, tokens) if self._agents and self.keys_of is not None:
                for publisher, adapter in among if self._file is not None else ():
                    kind = self._kinds[publisher], adapter
                    if kind not in keys:
                        found = self.keys_of(publisher, tokens, event.sharing(), adapter)
                        keys[kind] = publisher, tuple(found)
        self._write(Frame(now, event, answer, tuple(keys.values())))

    def _write(self, frame: Header | Frame) -> None:
        if self._file is None:
            return
        data = self._encoder.encode(frame)
        size = _LENGTH.size + len(data)
        if size > self._left or len(data) > _FRAME_BYTES_MAX:
            self._stop("router.recording_max_bytes is reached")
            return
        self._left -= size
        try:
            self._file.write(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            self._stop(str(error.strerror))

    def _stop(self, reason: str) -> None:
        self.error = f"nothing is recorded any more: {reason}"
        log.error("recording: %s", self.error)
        self.close()

    def forget(self) -> tuple[int, int]:
        """The file is removed, and nothing is recorded any more: KV events in it have token ids and
        do not say whose, and of requests that were routed by load alone nothing does. How many
        bytes there were, and how many are left. Raises OSError."""
        path = Path(self._path)
        if not path.exists():
            return 0, 0
        self._stop("it was removed by a purge")
        return _removed(path)

    def close(self) -> None:
        """Write out what is buffered and close the file."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self.error = f"its last part is lost: {error.strerror}"


def _removed(path: Path) -> tuple[int, int]:
    """The bytes of a file, and how many of them there are afterwards."""
    size_bytes = path.stat().st_size
    path.unlink()
    return size_bytes, path.stat().st_size if path.exists() else 0


def read(path: Path) -> tuple[Header, Iterator[Frame]]:
    """The header and, one at a time, the frames of a recording; a last frame that was cut short
    is left out. Raises TraceError, also from the iterator, where the file is damaged."""
    frames = _frames(path)
    try:
        header = msgspec.msgpack.decode(next(frames, b""), type=Header)
    except msgspec.MsgspecError as error:
        raise TraceError(f"{path}: not a recording of a gateway: {error}") from error
    if header.format != FORMAT:
        raise TraceError(
            f"{path}: recorded in format {header.format} by kvatlas {header.version}; "
            f"this one reads format {FORMAT}"
        )
    return header, _decoded(path, frames)


def _decoded(path: Path, frames: Iterator[bytes]) -> Iterator[Frame]:
    decoder = msgspec.msgpack.Decoder(Frame)
    for number, data in enumerate(frames, start=1):
        try:
            yield decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{path}: frame {number}: {error}") from error


def _frames(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
                (size,) = _LENGTH.unpack(head)
                if size > _FRAME_BYTES_MAX:
                    raise TraceError(f"{path}: a frame of {size} bytes: the file is damaged")
                data = file.read(size)
                if len(data) < size:
                    return
                yield data
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
