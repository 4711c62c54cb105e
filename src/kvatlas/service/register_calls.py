"""Questions to the register as calls of the server's functions (`register.lua`), answers read.

All keys of one cluster's name lie in one hash slot, so that one step can change them. The library
is named by the format and by a digest of its text: versions of kvatlas that differ in it can share
a server, each with its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

import msgspec

from kvatlas.core import register_values as words
from kvatlas.core.forgetting import FLOORS_MAX, TAG_CHARS, Floor, payer_of
from kvatlas.core.register_values import Answer, Member, No, OfStore, Question, Refused

_LIMITS = ("CLOCK_APART_MS", "MEMBERS_MAX", "LEASES_MAX", "STORES_MAX", "RECORDS_MAX")
_DIGEST_CHARS = 12

Word = bytes | str | int


class Library(msgspec.Struct, frozen=True):
    """``code`` as FUNCTION LOAD takes it, under its ``name``."""

    name: str
    code: str


class Call(msgspec.Struct, frozen=True):
    """One function, without the library's name before it."""

    function: str
    keys: tuple[str, ...]
    args: tuple[Word, ...]


def library() -> Library:
    """The functions, with the limits of `core.register_values`."""
    code = files("kvatlas.service").joinpath("register.lua").read_text("utf-8")
    limits = {name: getattr(words, name) for name in (*_LIMITS, "COMMITS_MAX", "RECORD_BYTES_MAX")}
    for name, value in (limits | {"FLOORS_MAX": FLOORS_MAX, "TAG_CHARS": TAG_CHARS}).items():
        code = code.replace(f"@{name}@", str(value))
    digest = hashlib.sha256(code.encode()).hexdigest()[:_DIGEST_CHARS]
    name = f"kvatlas_{words.FORMAT}_{digest}"
    return Library(name, code.replace("@LIBRARY@", name))


def slot_key(cluster: str) -> str:
    """A key in the slot of all that is kept for this cluster's name."""
    return f"kvatlas:{{{cluster}}}:head"


def call_of(question: Question, cluster: str, candidate: str) -> Call:
    """``candidate``: what the register's life is called, if this begins it."""
    match question:
        case words.Join(member=member):
            told = msgspec.msgpack.encode(member)
            args: tuple[Word, ...] = (member.name, member.life, member.url, told, question.identity)
            args += question.ttl_ms, question.clock_ms, question.format, question.known, candidate
            return _of_members("join", cluster, args)
        case words.Leave():
            return _of_members("leave", cluster, (question.name, question.life))
        case words.Acquire():
            args = (question.what, question.name, question.life, question.ttl_ms, question.above)
            return _of_members("acquire", cluster, args)
        case words.Release():
            args = (question.what, question.name, question.life)
            return _of_members("release", cluster, args)
        case words.Raise():
            each = ((floor.tenant, floor.session, floor.before) for floor in question.floors)
            return _of_all("raise", cluster, [word for floor in each for word in floor])
        case words.AskFloors():
            return _of_all("ask_floors", cluster, (question.known,))
        case words.PutTenants():
            args = (question.text, question.expected, question.offered)
            return _of_all("put_tenants", cluster, args)
        case words.AskTenants():
            return _of_all("ask_tenants", cluster, (question.known,))
        case _:
            function, more = _of_store(question)
            kept = f"store:{question.store}"
            parts = ("floors", "stores", *(f"{kept}:{part}" for part in _STORE))
            return Call(function, _keys(cluster, parts), (question.store, *more))


_STORE = ("records", "ends", "owners", "used")


def _of_store(question: OfStore) -> tuple[str, Iterable[Word]]:
    match question:
        case words.Commit():
            payers = {payer_of(record.owner) for record in question.records}
            met = [(payer, q) for payer, q in question.quota_bytes.items() if payer in payers]
            each = ((r.key, r.owner, r.size_bytes, r.data) for r in question.records)
            records = [word for record in each for word in record]
            quotas = [word for quota in met for word in quota]
            return "commit", [question.generation, question.ttl_ms, len(met), *quotas, *records]
        case words.AskRecords():
            return "ask_records", question.keys
        case words.Withdraw():
            return "withdraw", question.keys
        case words.Expire():
            return "expire", [question.generation]
        case words.ForgetOwner(floor=floor):
            return "forget", [floor.tenant, floor.before, floor.session]
        case words.AskUsage():
            return "ask_usage", []


def answer_of(question: Question, said: Any) -> tuple[int, Answer]:
    """When it was decided, by the server's clock, and what. Raises ValueError, TypeError or
    LookupError for what no function of ours has said."""
    now_ms, kind, *rest = said
    answer = _read(question, kind.decode(), rest)
    if isinstance(answer, words.Joined):
        answer = msgspec.structs.replace(answer, now_ms=int(now_ms))
    return int(now_ms), answer


def _read(question: Question, kind: str, rest: Sequence[Any]) -> Answer:
    match kind, rest:
        case "refused", [why, about]:
            return Refused(No(why.decode()), about.decode())
        case "joined", [created, members, floors, tenants, all_]:
            return words.Joined(0, created.decode(), members, floors, tenants, _members(all_))
        case "done", [int(revision)]:
            return words.Done(revision)
        case "held", [int(token)] if isinstance(question, words.Acquire):
            return words.Held(question.what, token)
        case "floors", [int(revision), all_]:
            return words.ToldFloors(revision, _floors(all_))
        case "tenants", [int(revision), text]:
            return words.ToldTenants(revision, None if text is None else text.decode())
        case "committed", [int(generation), why]:
            refused = tuple(No(no.decode()) if no else None for no in why)
            return words.Committed(generation, refused)
        case "records", [int(generation), data]:
            return words.ToldRecords(generation, tuple(data))
        case "left", [int(gone), int(left)]:
            return words.Left(gone, left)
        case "usage", [int(generation), int(records), used]:
            by_payer = {payer.decode(): int(size) for payer, size in _pairs(used)}
            return words.ToldUsage(generation, records, dict(sorted(by_payer.items())))
    raise ValueError(f"{kind} is no answer to {type(question).__name__}")


def _members(told: list[bytes] | None) -> tuple[Member, ...] | None:
    if told is None:
        return None
    found = [msgspec.msgpack.decode(one, type=Member) for one in told]
    return tuple(sorted(found, key=lambda member: member.name))


def _floors(told: list[bytes] | None) -> tuple[Floor, ...] | None:
    if told is None:
        return None
    found = []
    for key, before in _pairs(told):
        tenant, _, session = key.decode().partition("\0")
        found.append(Floor(tenant, int(before), session))
    return tuple(sorted(found, key=lambda floor: (floor.tenant, floor.session)))


def _pairs(flat: list[bytes]) -> Iterable[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _of_members(function: str, cluster: str, args: Iterable[Word]) -> Call:
    return Call(function, _keys(cluster, ("head", "members", "ends", "leases")), tuple(args))


def _of_all(function: str, cluster: str, args: Iterable[Word]) -> Call:
    return Call(function, _keys(cluster, ("head", "floors", "tenants")), tuple(args))


def _keys(cluster: str, parts: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"kvatlas:{{{cluster}}}:{part}" for part in parts)
