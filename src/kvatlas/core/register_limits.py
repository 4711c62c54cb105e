"""What no register takes, whoever asks: questions have a size, numbers are such that count."""

from __future__ import annotations

from kvatlas.core import register_values as words
from kvatlas.core.register_values import Question


def fault_of(question: Question) -> str:
    """Why it is too much to be asked; empty where it is not."""
    match question:
        case words.Join(member=one):
            return (
                _names(one.name, one.life, question.identity)
                or _many(len(one.url), words.URL_CHARS_MAX, "characters of a URL")
                or _many(len(one.told), words.MEMBER_BYTES_MAX, "bytes of what a member tells")
                or _numbers(question.ttl_ms, question.clock_ms, question.known)
            )
        case words.Leave():
            return _names(question.name, question.life)
        case words.Acquire():
            return _names(question.what, question.name, question.life) or _numbers(
                question.ttl_ms, question.above
            )
        case words.Release():
            return _names(question.what, question.name, question.life)
        case words.Raise(floors=floors):
            return (
                _many(len(floors), words.KEYS_MAX, "floors")
                or _names(*(floor.tenant for floor in floors), *(f.session for f in floors))
                or _numbers(*(floor.before for floor in floors))
            )
        case words.PutTenants():
            size = len(question.text.encode())
            return _many(size, words.TENANTS_BYTES_MAX, "bytes of tenants") or _numbers(
                question.offered
            )
        case words.Commit():
            return _commit(question)
        case words.AskRecords() | words.Withdraw():
            return _names(question.store) or _keys(question.keys)
        case words.Expire():
            return _names(question.store) or _numbers(question.generation)
        case words.ForgetOwner(floor=floor):
            return _names(question.store, floor.tenant, floor.session) or _numbers(floor.before)
        case words.AskUsage():
            return _names(question.store)
        case words.AskFloors() | words.AskTenants():
            return ""


def _commit(asked: words.Commit) -> str:
    return (
        _names(asked.store)
        or _many(len(asked.records), words.COMMITS_MAX, "records")
        or _keys(tuple(record.key for record in asked.records))
        or _names(*(record.owner for record in asked.records), most=words.OWNER_CHARS_MAX)
        or _numbers(asked.generation, asked.ttl_ms, *(r.size_bytes for r in asked.records))
        or _many(len(asked.quota_bytes), words.KEYS_MAX, "quotas")
    )


def _names(*names: str, most: int = words.NAME_CHARS_MAX) -> str:
    """They are parts of keys, with NUL between them."""
    for name in names:
        if len(name) > most or "\0" in name:
            return f"{name[:40]!r}: at most {most} characters, none of them NUL"
    return ""


def _keys(keys: tuple[bytes, ...]) -> str:
    longest = max((len(key) for key in keys), default=0)
    return _many(len(keys), words.KEYS_MAX, "keys") or _many(
        longest, words.KEY_BYTES_MAX, "bytes of a key"
    )


def _numbers(*numbers: int) -> str:
    wrong = [number for number in numbers if not 0 <= number <= words.NUMBER_MAX]
    return f"{wrong[0]} is no number of 0 … {words.NUMBER_MAX}" if wrong else ""


def _many(count: int, most: int, what: str) -> str:
    return f"{count} {what}, at most {most}" if count > most else ""
