"""What people and controllers ask of a node's agent ahead of time, over its socket.

An errand moves or keeps what this node holds of one prompt: *pull* it up to dram, *push* it to a
tier below or shared, *pin* it for a while. It has a name by which it is called off at any time.
Besides: where a prompt lies, another size of a tier, and the node's end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from kvatlas.core import agent_values as words
from kvatlas.core.agent import Agent
from kvatlas.core.compat import Member
from kvatlas.core.keys import KEY_BYTES, Keyring
from kvatlas.core.records import Tier
from kvatlas.core.tenancy import sharing_of
from kvatlas.core.units import Part, name_of
from kvatlas.errors import EngineError, RequestError
from kvatlas.service import agent_wire as wire
from kvatlas.service.admin import Guard
from kvatlas.service.agent_driver import Driver
from kvatlas.service.agent_socket import Peer, Prompt, credentials_of

ERRANDS_MAX = 256
KEYS_MAX = 65_536
PIN_S_MAX = 3600.0
PIN_SHARE = 0.5  # of a tier, by all pins together: engines must find room, too
NAME_MAX = 128
SEEK_S = 2.0  # to look into shared tiers: nobody's request waits for it
LINGER_S_MAX = 3600.0
_LOOK_S = 0.05  # between looks at whether a drain is over


class Errand(msgspec.Struct, frozen=True):
    """One under way, or a pin that lasts. ``until`` is on the loop's clock, of a pin."""

    what: str
    until: float = 0.0
    pinned: dict[Tier, int] = {}


class Errands:
    """Those of one node. For the event loop's thread alone."""

    def __init__(
        self,
        core: Agent,
        driver: Driver,
        ring: Keyring,
        *,
        members: Callable[[], dict[str, Member]],
        tiers: Callable[[], set[Tier]],
        given: Mapping[Tier, int],
    ) -> None:
        """``members``: attached engines by name; ``tiers``: those that this node can write to;
        ``given``: the bytes of its own, each, as at the start: a disk books less, for whole
        pages."""
        self.draining = asyncio.Event()
        self.drained = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self._core = core
        self._driver = driver
        self._ring = ring
        self._members = members
        self._tiers = tiers
        self._given = given
        self._loop = asyncio.get_running_loop()
        self._sizes = {t: core.ledger(t).limits.capacity_bytes for t in given}
        self._open: dict[str, Errand] = {}
        self._number = 0
        self._draining: asyncio.Task[None] | None = None

    def take(
        self, message: wire.FromOperator, reply: Callable[[wire.Status | wire.Refused], None]
    ) -> None:
        """``reply`` is called once, now or soon; what cannot be is refused, with what to do."""

        def answer() -> None:
            reply(self._answer(message))

        if not (isinstance(message, wire.Errand) and self._sought(message, answer)):
            answer()

    def _sought(self, asked: wire.Errand, then: Callable[[], None]) -> bool:
        """Look in shared tiers for what is unknown here; False: there is nothing to look for."""
        ways = self._driver.ways
        if not ways.any:
            return False
        try:
            worker, member, keys = self._meant(asked)
        except EngineError:
            return False  # it will be refused
        tokens, _ = self._core.depths(worker, keys)
        whole = len(keys) * member.layout.grid_tokens
        beyond = self._core.unknown(words.Ask("", worker, keys, tokens, whole), tokens)
        return any(beyond) and ways.seek(beyond, member.fingerprint.digest(), SEEK_S, then)

    def _answer(self, message: wire.FromOperator) -> wire.Status | wire.Refused:
        try:
            return wire.Status(msgspec.json.encode(self._take(message)))
        except EngineError as error:
            self.counts["errands_refused"] += 1
            return wire.Refused(str(error))

    def _take(self, message: wire.FromOperator) -> dict[str, object]:
        match message:
            case wire.Errand():
                return self._errand(message)
            case wire.Recall(name):
                self._recall(name)
                return {"name": name, "recalled": True}
            case wire.Resize(tier, size_bytes):
                return self._resize(tier, size_bytes)
            case wire.Drain(linger_s):
                return self._drain(linger_s)

    def status(self) -> dict[str, object]:
        """Those that are not over, by name."""
        self._tidy()
        now = self._loop.time()
        return {
            name: {"what": errand.what, "under_way": self._core.under_way(name)}
            | ({"left_s": round(errand.until - now, 3)} if errand.until else {})
            for name, errand in self._open.items()
        }

    def close(self) -> None:
        """No drain is waited for any more."""
        if self._draining is not None:
            self._draining.cancel()

    # -- errands --------------------------------------------------------------------------------

    def _errand(self, asked: wire.Errand) -> dict[str, object]:
        self._tidy()
        worker, member, keys = self._meant(asked)
        sharing = sharing_of(self._ring, asked.scope)
        told = bool(asked.keys) and not sharing.tenant  # with keys it is told as the owner
        asked = msgspec.structs.replace(asked, scope=asked.scope if told else sharing.scope.owner)
        tokens, by_tier = self._core.depths(worker, keys)
        if not tokens and asked.what != "where":
            raise EngineError(
                f"nothing of this prompt can be resumed from here ({len(keys)} whole blocks asked "
                "for): check model, salt and adapter, or that its first block was saved"
            )
        name = ""
        if asked.what != "where":
            name = self._name(asked)
            begin = {"pull": self._pull, "push": self._push, "pin": self._pin}.get(asked.what)
            if begin is None:
                raise EngineError(f"{asked.what!r} is no errand: where, pull, push or pin")
            # All of it that can be used, and nothing beyond.
            keys = keys[: tokens // member.layout.grid_tokens]
            self._open[name] = begin(name, worker, keys, asked)
            tokens, by_tier = self._core.depths(worker, keys)
        answer = {
            "name": name,
            "what": asked.what,
            "blocks": len(keys),
            "resume_tokens": tokens,
            "by_tier": {tier.name.lower(): count for tier, count in by_tier.items()},
            "under_way": self._core.under_way(name) if name else 0,
        }
        self._tidy()
        return answer

    def _pull(self, name: str, worker: str, keys: tuple[bytes, ...], asked: wire.Errand) -> Errand:
        self._driver.tell(words.Pull(worker, keys, asked.scope, name))
        tokens, by_tier = self._core.depths(worker, keys)
        if by_tier.get(Tier.DRAM, 0) < tokens and not self._core.under_way(name):
            raise EngineError("there is no room in dram for it: all is in use or pinned, or busy")
        return Errand("pull")

    def _push(self, name: str, worker: str, keys: tuple[bytes, ...], asked: wire.Errand) -> Errand:
        tier = _tier(asked.tier)
        if tier is Tier.DRAM or tier not in self._tiers():
            raise EngineError(f"this node has no tier {asked.tier!r} to push to")
        self._here(keys)
        self._driver.tell(words.Push(worker, keys, tier, asked.scope, name))
        _, by_tier = self._core.depths(worker, keys)
        own = max(by_tier.get(t, 0) for t in self._sizes)  # more than that it cannot write
        if by_tier.get(tier, 0) < own and not self._core.under_way(name):
            raise EngineError(f"there is no room in {asked.tier} for it, or too much is under way")
        return Errand("push")

    def _pin(self, name: str, worker: str, keys: tuple[bytes, ...], asked: wire.Errand) -> Errand:
        if not 0 < asked.hold_s <= PIN_S_MAX:  # what is no number is refused, too
            raise EngineError(f"a pin lasts above 0 and at most {PIN_S_MAX:g} s")
        pinned = self._here(keys)
        for tier, size in pinned.items():
            others = sum(e.pinned.get(tier, 0) for e in self._open.values())
            if others + size > PIN_SHARE * self._core.ledger(tier).limits.capacity_bytes:
                raise EngineError(
                    f"pins may hold {PIN_SHARE:.0%} of {tier.name.lower()}: {others} bytes are "
                    f"pinned, {size} more were asked for"
                )
        until = self._loop.time() + asked.hold_s
        self._driver.tell(words.Keep(name, keys, until))
        return Errand("pin", until, pinned)

    def _here(self, keys: tuple[bytes, ...]) -> dict[Tier, int]:
        """Its bytes in tiers of the node's own, of which there are some."""
        held = self._core.held_bytes(keys)
        if not any(held.values()):
            raise EngineError("nothing of it lies in dram or disk of this node: pull it first")
        return held

    def _recall(self, name: str) -> None:
        self._tidy()
        if self._open.pop(name, None) is None:
            raise EngineError(f"no errand {name!r} is under way here: it is over, or never was")
        self._driver.tell(words.Release(name))

    def _tidy(self) -> None:
        """Forget what is over."""
        now = self._loop.time()
        for name, errand in list(self._open.items()):
            lasts = errand.until > now if errand.until else bool(self._core.under_way(name))
            if not lasts:
                del self._open[name]

    def _name(self, asked: wire.Errand) -> str:
        if len(self._open) >= ERRANDS_MAX:
            raise EngineError(f"{ERRANDS_MAX} errands are under way: call some off first")
        if len(asked.name) > NAME_MAX:
            raise EngineError(f"a name has at most {NAME_MAX} characters")
        if asked.name in self._open:
            raise EngineError(f"an errand {asked.name!r} is under way: call it off first")
        name = asked.name
        while not name or name in self._open:
            self._number += 1
            name = f"{asked.what}-{self._number}"
        return name

    def _meant(self, asked: wire.Errand) -> tuple[str, Member, tuple[bytes, ...]]:
        """An attached engine that serves the model: it says how its state is laid out; and the keys
        of the prompt. While a model is served from old and new state side by side, the state is
        meant in which more of the prompt is held, or the newer."""
        model = asked.model
        found = {n: m for n, m in self._members().items() if not model or model in (n, *m.names)}
        if not found:
            what = f"that serves {model!r}" if model else "at all"
            raise EngineError(f"no engine is attached {what}: only with one its keys are known")
        kinds = {member.fingerprint.digest(): name for name, member in found.items()}
        names = sorted({name for member in found.values() for name in member.names})
        if not model and len({found[name].names for name in kinds.values()}) > 1:
            raise EngineError(f"which model? Attached are: {', '.join(names)}")
        choice = [(name, found[name], self._keys(asked, found[name])) for name in kinds.values()]
        if asked.keys and len(choice) > 1:  # keys are of one kind of state alone
            made_by = self._driver.copies.made_by(name_of(asked.keys[0], Part.BODY))
            choice = [each for each in choice if each[1].fingerprint.digest() == made_by]
            if not choice:
                engines = ", ".join(kinds.values())
                raise EngineError(f"whose keys are these? Name one as the model: {engines}")
        return max(reversed(choice), key=lambda each: self._core.depths(each[0], each[2])[0])

    def _keys(self, asked: wire.Errand, member: Member) -> tuple[bytes, ...]:
        if asked.tokens and asked.keys:
            raise EngineError("either tokens or keys say which prompt, not both")
        keys = list(asked.keys)
        if asked.tokens:
            keys = Prompt.of(self._ring, member, asked).keys
        if not keys:
            grid = member.layout.grid_tokens
            raise EngineError(f"a prompt of at least one block ({grid} tokens) is wanted")
        if len(keys) > KEYS_MAX or any(len(key) != KEY_BYTES for key in keys):
            raise EngineError(f"keys have {KEY_BYTES} bytes, and are at most {KEYS_MAX}")
        return tuple(keys)

    # -- the node -------------------------------------------------------------------------------

    def _resize(self, name: str, size_bytes: int) -> dict[str, object]:
        tier = _tier(name)
        if tier not in self._sizes:
            own = ", ".join(t.name.lower() for t in self._sizes)
            raise EngineError(f"{name!r} is no tier of this node's own: {own}")
        given_bytes, had_bytes = self._given[tier], self._sizes[tier]
        if not 0 <= size_bytes <= given_bytes:
            raise EngineError(
                f"{name} can have 0 to {given_bytes} bytes, what it had when the agent "
                f"started, not {size_bytes}"
            )
        self._driver.tell(words.Resize(tier, had_bytes * size_bytes // given_bytes))
        usage = self._core.ledger(tier).usage()
        return {
            "tier": name,
            "capacity_bytes": usage.capacity_bytes,
            "held_bytes": usage.committed_bytes,
            "leaving_bytes": usage.leaving_bytes,
        }

    def _drain(self, linger_s: float) -> dict[str, object]:
        if not 0 <= linger_s <= LINGER_S_MAX:
            raise EngineError(f"linger_s {linger_s}: 0 to {LINGER_S_MAX:g} seconds")
        if self._draining is None:
            self._driver.tell(words.Drain())
            self.draining.set()
            self._draining = self._loop.create_task(self._wait_drained(linger_s), name="drain")
        return {"draining": True, "busy": self._core.busy}

    async def _wait_drained(self, linger_s: float) -> None:
        await asyncio.sleep(linger_s)
        while not self._core.drained:  # noqa: ASYNC110 - the machine tells nobody
            await asyncio.sleep(_LOOK_S)
        self.drained.set()


def _tier(name: str) -> Tier:
    try:
        return Tier[name.upper()]
    except KeyError:
        raise EngineError(f"{name!r} is no tier: dram, disk and object are") from None


def taken(errands: Errands, guard: Guard, peer: Peer, message: wire.FromOperator) -> None:
    """What somebody asks at the agent's socket: written down before it is done."""
    if guard.audit is not None:
        pid, uid, _ = credentials_of(peer.sock)
        who, address = f"uid {uid}", f"pid {pid}"
        what = message.what if isinstance(message, wire.Errand) else type(message).__name__.lower()
        target = getattr(message, "name", "") or getattr(message, "tier", "")
        if what == "where":
            guard.audit.note(who, what, target, address=address)
        else:
            try:
                guard.audit.changing(who, what, target, address=address)
            except RequestError as error:
                peer.send(wire.Refused(str(error)))
                return
    errands.take(message, peer.send)
