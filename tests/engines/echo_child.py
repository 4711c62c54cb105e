"""A child that answers with what it was asked, and hangs or ends when it is told to."""

from __future__ import annotations

import os
import socket
import sys
import time

import msgspec

from kvatlas.dataplane.tiers import child


class Word(msgspec.Struct, frozen=True, array_like=True):
    number: int
    text: str = ""


def word(sock: socket.socket) -> Word:
    return msgspec.msgpack.decode(child.received(sock), type=Word)


def work() -> None:
    end, starts = msgspec.json.decode(sys.argv[1], type=tuple[int, bool])
    sock = socket.socket(fileno=end)
    if not starts:
        os._exit(1)
    child.send(sock, Word(0, "ready"))
    while True:
        said = word(sock)
        if said.text == "hang":
            time.sleep(60)
        elif said.text == "end":
            os._exit(139)
        child.send(sock, said)


if __name__ == "__main__":
    child.serve(work)
