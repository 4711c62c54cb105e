"""Data keys of tenants: who gives them out, and a directory in which they lie wrapped.

Each tenant has keys of its own, and "" (nobody's: public prefixes, or no tenants at all) has, too.
The newest seals what is written; the older ones open what was written before. A key is named by
eight random bytes, not by a number: two nodes that each have a copy of the directory may each make
a second key, and neither then takes the other's for its own.

The directory::

    master.key               wraps all others: 64 hex digits
    master.next.key          while all are wrapped anew: what is found under either is opened
    tenants/TAG/N-ID.key     a data key, wrapped; N counts, the highest is the newest
    tenants/TAG/N-ID.dropped what is left of one that was dropped, for good: a copy of the key
                             that turns up again is not used

Any number of agents and commands may use it at once; changes are made one at a time, under a lock.
Nothing in it may be readable by others. A key is used only while its file is there: who drops it
makes all that it sealed unreadable for every agent that reads this directory, at once.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import hashlib
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvatlas.errors import ConfigError, StoreError
from kvatlas.lasting import sync_folder, whole_file

KEY_BYTES = 32
ID_BYTES = 8
KEYS_MAX = 65_536  # opened ones that are remembered
TENANTS_MAX = 65_536  # in one directory; more get no key
LOOK_S = 1.0  # after so long a newer key of a tenant is found
NOBODY = "nobody"  # its directory
_NONCE_BYTES = 12
_FILE_BYTES_MAX = 4096
_FORM = 1
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_NAME = re.compile(r"([1-9][0-9]{0,8})-([0-9a-f]{16})\.(key|dropped)", re.ASCII)


class KeyMissing(StoreError):
    """What a value was sealed with is not known here, or none can be had to seal one with."""


class KeyDropped(KeyMissing):
    """It is gone for good: nobody can open the value any more."""


class DataKey(msgspec.Struct, frozen=True):
    """``id`` is written beside what it sealed; ``secret``: 256 bits."""

    id: bytes
    secret: bytes


class KeyProvider(Protocol):
    """Where data keys come from. For any number of threads; calls are quick when repeated."""

    def current(self, tenant: str) -> DataKey:
        """What to seal with; a tenant's first is made when it is asked for. Raises KeyMissing."""

    def get(self, tenant: str, key_id: bytes) -> DataKey:
        """What opens a value that names it. Raises KeyMissing, KeyDropped."""

    def drop(self, tenant: str) -> int:
        """Crypto-erase: no value of the tenant can be opened from now on, wherever it lies. Says
        how many keys that were. What is sealed for it later is under a new one. Raises
        StoreError; then it is to be asked again."""


class Listed(msgspec.Struct, frozen=True):
    """A key as people are told of it."""

    tenant: str
    number: int
    id: str
    state: str  # newest, older, dropped
    made: str = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What lies in a key's file. ``master`` names what it is ``wrapped`` by."""

    form: int
    tenant: str
    number: int
    id: str
    made: str
    master: str
    wrapped: str = ""


class FileKeys:
    """See `KeyProvider`; in a directory, as the module says."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError where it cannot be read, or others can read it."""
        self.directory = directory
        self._tenants = directory / "tenants"
        self._opened: dict[tuple[str, bytes], tuple[Path, DataKey]] = {}
        self._newest: dict[str, tuple[float, bytes]] = {}
        self._changing = threading.Lock()
        for path in (directory, *self._all_files()):
            if problem := _problem(path):
                raise ConfigError(f"keys: {problem}")
        try:
            self._masters = self._read_masters()
        except StoreError as error:
            raise ConfigError(f"keys: {error}") from error
        if not self._masters:
            raise ConfigError(
                f"keys: {directory} has no master.key: kvatlas keys init {directory} makes one"
            )

    @classmethod
    def create(cls, directory: Path) -> FileKeys:
        """A new directory with a master key. Raises ConfigError where there is one already, or
        none can be made."""
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            (directory / "tenants").mkdir(mode=0o700, exist_ok=True)
            if (directory / "master.key").exists():
                raise ConfigError(f"keys: {directory} has a master.key already")
            _write(directory / "master.key", os.urandom(KEY_BYTES).hex().encode() + b"\n")
        except OSError as error:
            raise ConfigError(f"keys: {directory}: {error.strerror}") from error
        return cls(directory)

    # -- the interface --------------------------------------------------------------------------

    def current(self, tenant: str) -> DataKey:
        """See `KeyProvider`. Another's rotation is seen within `LOOK_S`."""
        looked, key_id = self._newest.get(tenant, (0.0, b""))
        now = time.monotonic()
        if key_id and now - looked < LOOK_S:
            with contextlib.suppress(KeyMissing):
                return self.get(tenant, key_id)
        try:
            found = self._living(tenant) or [self._first(tenant)]
        except OSError as error:
            raise KeyMissing(f"{self.directory}: no key can be made: {error.strerror}") from error
        newest = _key_id(found[-1])
        if len(self._newest) >= KEYS_MAX:
            self._newest.clear()
        self._newest[tenant] = now, newest
        return self.get(tenant, newest)

    def get(self, tenant: str, key_id: bytes) -> DataKey:
        """See `KeyProvider`."""
        known = self._opened.get((tenant, key_id))
        if known is not None:
            if os.path.exists(known[0]):  # a third of the time of Path's
                return known[1]
            self._opened.pop((tenant, key_id), None)
        return self._open(tenant, key_id)

    def drop(self, tenant: str) -> int:
        """See `KeyProvider`. What is left of the files is overwritten first, as far as the medium
        does that."""
        try:
            with self._alone():
                living = self._living(tenant)
                for path in living:
                    _write(path.with_suffix(".dropped"), b"")
                for path in self._there(tenant, "key"):
                    with path.open("r+b") as file:
                        file.write(bytes(path.stat().st_size))
                        file.flush()
                        os.fsync(file.fileno())
                    path.unlink()
                    sync_folder(path.parent)
        except OSError as error:
            raise StoreError(f"keys of {tenant or NOBODY!r} not dropped: {error}") from error
        for name in [name for name in list(self._opened) if name[0] == tenant]:
            self._opened.pop(name, None)
        self._newest.pop(tenant, None)
        return len(living)

    # -- for people -----------------------------------------------------------------------------

    def listed(self) -> list[Listed]:
        """All keys that are or were here. Raises StoreError."""
        found = []
        for folder in self._folders():
            living = _living(folder)
            tenant = "" if folder.name == NOBODY else folder.name
            for path in _there(folder, "key"):
                told = _read_file(path)
                state = "older" if path in living else "dropped"
                if path in living[-1:]:
                    state = "newest"
                tenant = told.tenant
                found.append(Listed(tenant, told.number, told.id, state, told.made))
            for path in _there(folder, "dropped"):
                number, _, key_id = path.stem.partition("-")
                if not path.with_suffix(".key").exists():
                    found.append(Listed(tenant, int(number), key_id, "dropped"))
        return sorted(found, key=lambda each: (each.tenant, each.number, each.id))

    def rotate(self, tenant: str) -> Listed:
        """A new key, for all that is written from now on. Raises StoreError."""
        try:
            with self._alone():
                path = self._make(tenant)
        except OSError as error:
            raise StoreError(f"no key made for {tenant or NOBODY!r}: {error}") from error
        self._newest.pop(tenant, None)
        told = _read_file(path)
        return Listed(tenant, told.number, told.id, "newest", told.made)

    def rewrap(self) -> int:
        """A new master key, and all data keys wrapped by it; says how many. What was interrupted
        is gone on with. Raises StoreError, and then the old one is still there."""
        following = self.directory / "master.next.key"
        count = 0
        try:
            with self._alone():
                if not following.exists():
                    _write(following, os.urandom(KEY_BYTES).hex().encode() + b"\n")
                self._masters = self._read_masters()
                master = self._masters[-1]
                for path in (p for folder in self._folders() for p in _there(folder, "key")):
                    told = _read_file(path)
                    if told.master != _named(master):
                        again = _wrap(master, told, self._unwrap(told))
                        _write(path, msgspec.json.encode(again))
                        count += 1
                following.replace(self.directory / "master.key")
                sync_folder(self.directory)
                self._masters = self._read_masters()
        except OSError as error:
            raise StoreError(f"{self.directory}: not wrapped anew: {error}") from error
        return count

    # -- files ----------------------------------------------------------------------------------

    def _folder(self, tenant: str) -> Path:
        if not tenant:
            return self._tenants / NOBODY
        if _PLAIN.fullmatch(tenant) and tenant != NOBODY:
            return self._tenants / tenant
        return self._tenants / f"other.{hashlib.sha256(tenant.encode()).hexdigest()[:32]}"

    def _folders(self) -> list[Path]:
        try:
            return sorted(path for path in self._tenants.iterdir() if path.is_dir())
        except FileNotFoundError:
            return []

    def _all_files(self) -> Iterator[Path]:
        """That are there, and have to be nobody else's."""
        yield from self.directory.glob("master*.key")
        for folder in self._folders():
            yield folder
            yield from _there(folder, "key")

    def _there(self, tenant: str, kind: str) -> list[Path]:
        return _there(self._folder(tenant), kind)

    def _living(self, tenant: str) -> list[Path]:
        return _living(self._folder(tenant))

    def _open(self, tenant: str, key_id: bytes) -> DataKey:
        ending = f"-{key_id.hex()}"
        try:
            if any(path.stem.endswith(ending) for path in self._there(tenant, "dropped")):
                raise KeyDropped(f"the key {key_id.hex()} was dropped")
            for path in self._there(tenant, "key"):
                if path.stem.endswith(ending):
                    if problem := _problem(path):
                        raise KeyMissing(problem)
                    told = _read_file(path)
                    if (told.tenant, told.id) != (tenant, key_id.hex()):
                        raise KeyMissing(f"{path}: is another key's, or another tenant's")
                    key = DataKey(key_id, self._unwrap(told))
                    if len(self._opened) >= KEYS_MAX:
                        self._opened.clear()
                    self._opened[tenant, key_id] = path, key
                    return key
        except KeyMissing:
            raise
        except (OSError, StoreError) as error:
            raise KeyMissing(f"the key {key_id.hex()} cannot be read: {error}") from error
        raise KeyMissing(f"the key {key_id.hex()} is not known here")

    def _first(self, tenant: str) -> Path:
        with self._alone():
            return (self._living(tenant) or [self._make(tenant)])[-1]

    def _make(self, tenant: str) -> Path:
        """Under the lock. Raises OSError."""
        folder = self._folder(tenant)
        if not folder.is_dir():
            if len(self._folders()) >= TENANTS_MAX:
                raise OSError(errno.EDQUOT, f"{TENANTS_MAX} tenants have keys already")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_folder(folder.parent)
        numbers = [int(path.stem.partition("-")[0]) for path in _there(folder, "key", "dropped")]
        key_id, number = os.urandom(ID_BYTES).hex(), max(numbers, default=0) + 1
        made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._masters = self._read_masters()  # it may have been exchanged
        plain = _File(_FORM, tenant, number, key_id, made, "")
        wrapped = _wrap(self._masters[-1], plain, os.urandom(KEY_BYTES))
        path = folder / f"{number}-{key_id}.key"
        _write(path, msgspec.json.encode(wrapped))
        return path

    def _unwrap(self, told: _File) -> bytes:
        """Raises StoreError."""
        for again in (False, True):
            for master in self._masters:
                if _named(master) == told.master:
                    return _unwrapped(master, told)
            if not again:
                self._masters = self._read_masters()
        raise StoreError(f"the key {told.id} is wrapped by another master key")

    def _read_masters(self) -> list[bytes]:
        """The last is the one to wrap by. Raises StoreError."""
        found = []
        for name in ("master.key", "master.next.key"):
            path = self.directory / name
            if problem := _problem(path):
                raise StoreError(problem)
            with contextlib.suppress(FileNotFoundError):
                text = path.read_text("ascii", "replace").strip()
                if not re.fullmatch(r"[0-9a-f]{64}", text):
                    raise StoreError(f"{path}: 64 hex digits are wanted")
                found.append(bytes.fromhex(text))
        return found

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else changes anything meanwhile. Raises OSError."""
        with self._changing:
            fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                yield
            finally:
                os.close(fd)


def _there(folder: Path, *kinds: str) -> list[Path]:
    """Of some kinds, the newest last."""
    try:
        names = [name for name in os.listdir(folder) if _NAME.fullmatch(name)]
    except FileNotFoundError:
        return []
    names = [name for name in names if name.rpartition(".")[2] in kinds]
    return [folder / name for name in sorted(names, key=lambda n: (int(n.partition("-")[0]), n))]


def _living(folder: Path) -> list[Path]:
    gone = {path.stem for path in _there(folder, "dropped")}
    return [path for path in _there(folder, "key") if path.stem not in gone]


def _key_id(path: Path) -> bytes:
    return bytes.fromhex(path.stem.partition("-")[2])


def _read_file(path: Path) -> _File:
    """Raises OSError, StoreError."""
    with path.open("rb") as file:
        data = file.read(_FILE_BYTES_MAX)
    try:
        told = msgspec.json.decode(data, type=_File)
    except msgspec.MsgspecError as error:
        raise StoreError(f"{path}: is no key of ours: {error}") from error
    if told.form != _FORM:
        raise StoreError(f"{path}: has form {told.form}, this is {_FORM}")
    return told


def _named(master: bytes) -> str:
    return hashlib.sha256(b"kvatlas master key\0" + master).hexdigest()[:16]


def _bound(told: _File) -> bytes:
    """What must not be changed about a wrapped key."""
    bare = msgspec.structs.replace(told, wrapped="")
    return msgspec.json.encode(bare)


def _wrap(master: bytes, told: _File, secret: bytes) -> _File:
    """The nonce is random: a master key wraps thousands of keys, not the 2^32 that would matter."""
    named = msgspec.structs.replace(told, master=_named(master))
    nonce = os.urandom(_NONCE_BYTES)
    sealed = nonce + AESGCM(master).encrypt(nonce, secret, _bound(named))
    return msgspec.structs.replace(named, wrapped=sealed.hex())


def _unwrapped(master: bytes, told: _File) -> bytes:
    try:
        sealed = bytes.fromhex(told.wrapped)
        nonce, rest = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        return AESGCM(master).decrypt(nonce, rest, _bound(told))
    except (ValueError, InvalidTag) as error:
        raise StoreError(f"the key {told.id} is damaged") from error


def _problem(path: Path) -> str:
    """Why a path must not be used; one that is not there is no problem of this kind."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path}: {error.strerror}"
    mode = stat.S_IMODE(found.st_mode)
    if not mode & 0o077:
        return ""
    right = "700" if stat.S_ISDIR(found.st_mode) else "600"
    return f"{path} has mode {mode:04o}: others could use it (chmod {right} {path})"


def _write(path: Path, data: bytes) -> None:
    """Raises OSError."""
    with whole_file(path) as file:
        file.write(data)
