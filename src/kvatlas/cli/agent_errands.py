"""``kvatlas agent where|pull|push|pin|cancel|resize|drain``: what is asked of a running agent."""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from array import array
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.cli.directory import add_prompt_options, block_keys, prompt_body
from kvatlas.cli.directory import ask as ask_gateway
from kvatlas.cli.output import print_json
from kvatlas.config import size_bytes
from kvatlas.connectors.agent_client import Refusal, ask
from kvatlas.core.keys import KEY_BYTES
from kvatlas.errors import ConfigError, EngineError, StoreError
from kvatlas.service import agent_wire as wire

ERRANDS = ("where", "pull", "push", "pin")
COMMANDS = (*ERRANDS, "cancel", "unpin", "resize", "drain")
_LOOK_S = 0.1
_PUSH_TO = "object"
_PIN_S = 60.0

EPILOG = """\
ahead of time, of a running agent:
  kvatlas agent where --tokens ids.txt                 how far a prompt lies in which tier
  kvatlas agent pull --prompt chat.txt --url http://gateway:8000 --wait 10
  kvatlas agent push --to object --keys keys.txt       (kvatlas directory inspect --keys)
  kvatlas agent pin --for 300 --name system --tokens ids.txt
  kvatlas agent cancel system                          unpin is the same
  kvatlas agent resize dram=8GB
  kvatlas agent drain                                  memory to disk, then it ends
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of `COMMANDS`."""
    group = parser.add_argument_group("where, pull, push, pin")
    source = add_prompt_options(group)
    source.add_argument("--keys", type=Path, metavar="FILE", help="a prompt as block keys, in hex")
    add = group.add_argument
    add("--url", help="of the gateway, which makes keys of --prompt and --body")
    add("--salt", default="", help="cache salt of the prompt, with --tokens")
    add("--adapter", default="", help="LoRA adapter of the prompt, with --tokens")
    add("--to", metavar="TIER", help=f"of push: disk or object ({_PUSH_TO})")
    add("--for", dest="for_s", type=float, metavar="S", help=f"of pin ({_PIN_S:g})")
    add("--linger", type=float, default=0.0, metavar="S", help="of drain: let others read so long")
    add("--name", default="", help="by which it is called off (default: one is made)")
    add("--wait", type=float, default=0.0, metavar="S", help="until it is done, so long at most")


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError for what cannot be asked, EngineError for what is refused."""
    message = _message(args)
    answer = answer_of(args.socket, message)
    if args.what in ERRANDS and answer["under_way"] and args.wait > 0:
        answer = _waited(args, message, answer)
    print_json(answer)
    return 0


def _message(args: argparse.Namespace) -> wire.FromOperator:
    if args.what in ERRANDS:
        if args.names:
            raise ConfigError(f"agent {args.what}: {args.names[0]!r}: options tell the prompt")
        for option, value, whose in (("--to", args.to, "push"), ("--for", args.for_s, "pin")):
            if value is not None and args.what != whose:
                raise ConfigError(f"agent {args.what}: {option} is of {whose} alone")
        return _errand(args)
    if args.what == "drain" and not args.names:
        return wire.Drain(args.linger)
    if args.what in ("cancel", "unpin") and len(args.names) == 1:
        return wire.Recall(args.names[0])
    if args.what == "resize" and len(args.names) == 1 and "=" in args.names[0]:
        tier, _, size = args.names[0].partition("=")
        return wire.Resize(tier, 0 if size == "0" else size_bytes(size))
    wanted = {"cancel": "NAME", "unpin": "NAME", "resize": "TIER=SIZE"}.get(args.what, "nothing")
    raise ConfigError(f"agent {args.what}: {wanted} is wanted after it")


def _errand(args: argparse.Namespace) -> wire.Errand:
    tokens = b""
    keys: tuple[bytes, ...] = ()
    if args.keys is not None:
        keys = _keys(args.keys)
    elif args.tokens is not None:
        ids = prompt_body(args)["prompt"]
        try:
            tokens = array("I", ids).tobytes()
        except OverflowError:
            raise ConfigError(f"{args.tokens}: a number in it is no token id") from None
    elif args.prompt is not None or args.body is not None:
        if not args.url:
            raise ConfigError("--prompt and --body need --url: the gateway makes keys of them")
        told = asyncio.run(ask_gateway(args.url, prompt_body(args) | {"keys": True}))
        keys = tuple(bytes.fromhex(key) for key in block_keys(told))
    else:
        raise ConfigError(f"agent {args.what}: which prompt? --tokens, --keys, --prompt or --body")
    return wire.Errand(
        args.what,
        args.name,
        args.model or "",
        tokens,
        keys,
        (_PUSH_TO if args.to is None else args.to) if args.what == "push" else "",
        (_PIN_S if args.for_s is None else args.for_s) if args.what == "pin" else 0.0,
        args.salt,
        args.adapter,
    )


def _keys(path: Path) -> tuple[bytes, ...]:
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    words = text.split()
    digits = 2 * KEY_BYTES
    if not words or not all(re.fullmatch(f"[0-9a-f]{{{digits}}}", word) for word in words):
        raise ConfigError(f"{path}: expected block keys of {digits} hex digits, divided by spaces")
    return tuple(bytes.fromhex(word) for word in words)


def answer_of(path: Path, message: wire.FromOperator | wire.AskStatus) -> dict[str, Any]:
    """Raises ConfigError where no agent answers, or it refuses."""
    try:
        return msgspec.json.decode(ask(path, message), type=dict[str, Any])
    except Refusal as refusal:
        raise ConfigError(f"the agent at {path} refuses: {refusal}") from refusal
    except (OSError, EngineError, StoreError) as error:
        raise ConfigError(f"no agent answers at {path}: {error}") from error


def _waited(
    args: argparse.Namespace, message: wire.FromOperator, answer: dict[str, Any]
) -> dict[str, Any]:
    """How far it came."""
    until = time.monotonic() + args.wait
    name = answer["name"]
    assert isinstance(message, wire.Errand)
    while (left := _under_way(args.socket, name)) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    where = answer_of(args.socket, msgspec.structs.replace(message, what="where"))
    return where | {"name": name, "what": message.what, "under_way": left}


def _under_way(path: Path, name: str) -> int:
    """Copies of an errand that have not ended."""
    errand = answer_of(path, wire.AskStatus())["errands"].get(name, {})
    return int(errand.get("under_way", 0))
