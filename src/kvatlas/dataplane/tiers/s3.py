"""Values as objects of an S3-compatible store, by obstore (the object_store crate of Rust).

It sends label and view as they lie, and hands an answer over as memory that is copied once, to its
place. Objects are created, never replaced (If-None-Match), unless the store cannot do that.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import islice
from typing import Any

import msgspec

from kvatlas.core.records import Tier
from kvatlas.dataplane.codec import Codec
from kvatlas.dataplane.keystore import KeyMissing
from kvatlas.dataplane.records import SealedLabel
from kvatlas.dataplane.sealing import Sealer
from kvatlas.dataplane.tiers import framing
from kvatlas.dataplane.tiers.base import Counts, Entry, Finish, Piece, asked
from kvatlas.dataplane.tiers.framing import HEADER_BYTES, Verdict
from kvatlas.dataplane.tiers.work import Batch, Why, Workers
from kvatlas.errors import ConfigError, StoreError

DELETE_KEYS = 1000  # S3 takes no more in one request


class Settings(msgspec.Struct, frozen=True):
    """Which bucket, and how. Without keys: as AWS clients find them (environment, instance).

    ``endpoint`` "": AWS itself. ``conditional`` False for stores without If-None-Match: the last
    of two writers wins, with the same bytes.
    """

    bucket: str
    endpoint: str = ""
    region: str = "us-east-1"
    access_key: str = ""
    secret_key: str = ""
    prefix: str = "kvatlas/"
    conditional: bool = True
    codec: Codec = Codec.RAW
    retries: int = 1
    threads: int = 8
    queue_max: int = 4096
    deadline_s: float = 20.0

    def __post_init__(self) -> None:
        """Raises ConfigError on values that cannot work."""
        if not 3 <= len(self.bucket) <= 63:
            raise ConfigError(f"s3: {self.bucket!r} is no name of a bucket")
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"s3: endpoint {self.endpoint!r} must begin with http:// or https://")
        if bool(self.access_key) != bool(self.secret_key):
            raise ConfigError("s3: access_key and secret_key belong together")
        if not self.prefix or self.prefix.startswith("/") or not self.prefix.endswith("/"):
            raise ConfigError(f"s3: prefix {self.prefix!r} must end with / and not begin with it")
        if min(self.threads, self.queue_max) < 1 or not 0 < self.deadline_s < 86400:
            raise ConfigError("s3: threads and queue_max must be at least 1, deadline_s above 0")
        if not 0 <= self.retries <= 10:
            raise ConfigError(f"s3: retries is {self.retries}: 0 … 10")


class S3Store:
    """See `base.Store`."""

    tier = Tier.OBJECT

    def __init__(self, settings: Settings, sealer: Sealer | None = None) -> None:
        """Connects when it is first used. Raises ConfigError where obstore is not installed, or
        what it is told cannot work."""
        self.settings = settings
        self.transport = "tcp" if settings.endpoint.startswith("http://") else "tls"
        self._counts = Counts()
        self._sealer = sealer
        self._api, self._bucket = _opened(settings)
        self._workers = Workers(
            "kvatlas-s3",
            self._counts,
            threads=settings.threads,
            queue_max=settings.queue_max,
            deadline_s=settings.deadline_s,
        )

    @property
    def counts(self) -> dict[str, int]:
        """Failures by reason."""
        return self._counts.all()

    def write(self, pieces: Sequence[Piece], done: Finish) -> None:
        """See `base.Store`."""
        self._workers.run("write", pieces, self._write, done)

    def read(self, pieces: Sequence[Piece], done: Finish) -> None:
        """See `base.Store`."""
        self._workers.run("read", pieces, self._read, done)

    def find(self, names: Sequence[bytes], done: Finish) -> None:
        """See `base.Shared`; a request for each name."""
        self._workers.run("find", asked(names), self._find, done)

    def delete(self, names: Sequence[bytes]) -> None:
        """See `base.Store`. Raises StoreError."""
        try:
            for start in range(0, len(names), DELETE_KEYS):
                keys = [self._key(name) for name in names[start : start + DELETE_KEYS]]
                self._api.delete(self._bucket, keys)
        except FileNotFoundError:
            pass
        except Exception as error:
            raise StoreError(f"s3: delete: {error}") from error

    def scan(self) -> Iterator[Entry]:
        """See `base.Store`; sizes only. Raises StoreError."""
        try:
            for page in self._api.list(self._bucket, self.settings.prefix, chunk_size=1000):
                for found in page:
                    name = self._name(found["path"])
                    if name is not None and found["size"] > HEADER_BYTES:
                        yield Entry(name, found["size"] - HEADER_BYTES)
        except Exception as error:
            raise StoreError(f"s3: list: {error}") from error

    def labels(self) -> Iterator[Entry]:
        """See `base.Shared`; a request for each value. Raises StoreError."""
        with ThreadPoolExecutor(self.settings.threads, "kvatlas-s3-labels") as threads:
            found = self.scan()
            while some := list(islice(found, DELETE_KEYS)):
                yield from filter(None, threads.map(self._labelled, some))

    def _labelled(self, found: Entry) -> Entry | None:
        """None: it is gone meanwhile, or no value of ours."""
        key = self._key(found.name)
        try:
            head = self._api.get_range(self._bucket, key, start=0, length=HEADER_BYTES)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise StoreError(f"s3: {key}: {error}") from error
        label = framing.unpack(memoryview(head))
        return None if label is None or label.name != found.name else framing.entry(label)

    def close(self) -> None:
        """See `base.Store`."""
        if not self._workers.close():
            self._counts.add("left_open")

    # -- one piece --------------------------------------------------------------------------------

    def _write(self, batch: Batch, piece: Piece) -> bool:
        if not framing.fit(piece):
            batch.settle(piece, Why.INVALID)
            return False
        try:
            parts = framing.coded(piece, self.settings.codec, self._sealer)
        except KeyMissing:
            batch.settle(piece, Why.NO_KEY)
            return False
        if parts is None:
            batch.settle(piece, Why.DAMAGED)
            return False
        mode = "create" if self.settings.conditional else "overwrite"
        try:
            self._api.put(
                self._bucket, self._key(piece.name), list(parts), mode=mode, use_multipart=False
            )
        except Exception as error:
            batch.settle(piece, None if _is(error, "AlreadyExists") else self._failed(error))
            return False
        batch.settle(piece, None)
        return False

    def _read(self, batch: Batch, piece: Piece) -> bool:
        if not framing.fit(piece, into=True):
            batch.settle(piece, Why.INVALID)
            return False
        try:
            found = self._api.get(self._bucket, self._key(piece.name))
            size = int(found.meta["size"])
            want = HEADER_BYTES + piece.view.nbytes
            data = memoryview(found.bytes()) if HEADER_BYTES < size <= want else memoryview(b"")
        except Exception as error:
            batch.settle(piece, self._failed(error))
            return False
        if not data:
            batch.settle(piece, Why.DAMAGED)
            return False
        stored = data[HEADER_BYTES:]
        label = framing.unpack(data[:HEADER_BYTES])
        if len(stored) == piece.view.nbytes and not isinstance(label, SealedLabel):
            piece.view[:] = stored
        verdict = framing.judge(label, piece, len(stored), stored=stored, sealer=self._sealer)
        verdict.count(self._counts)
        if verdict.goes:
            try:
                self.delete([piece.name])
            except StoreError:
                self._counts.add("quarantine_failed")
        wrong = Why.MISSING if verdict.missing else Why.DAMAGED
        batch.settle(piece, None if verdict is Verdict.RIGHT else wrong)
        return False

    def _find(self, batch: Batch, piece: Piece) -> bool:
        try:
            self._api.head(self._bucket, self._key(piece.name))
        except Exception as error:
            batch.settle(piece, self._failed(error))
        else:
            batch.settle(piece, None)
        return False

    def _failed(self, error: Exception) -> Why:
        if isinstance(error, FileNotFoundError):
            if "NoSuchBucket" in str(error):
                self._counts.add("failed_no_bucket")
                return Why.IO
            return Why.MISSING
        for kind in ("PermissionDenied", "Unauthenticated", "Timeout"):
            if _is(error, kind) or kind.lower() in str(error).lower():
                self._counts.add(f"failed_{kind.lower()}")
                return Why.IO
        self._counts.add("failed_other")
        return Why.IO

    def _key(self, name: bytes) -> str:
        return self.settings.prefix + name.hex()

    def _name(self, key: str) -> bytes | None:
        try:
            return bytes.fromhex(key[len(self.settings.prefix) :])
        except ValueError:
            return None


def _is(error: Exception, kind: str) -> bool:
    return type(error).__name__.startswith(kind)


def _opened(settings: Settings) -> tuple[Any, Any]:
    try:
        api: Any = importlib.import_module("obstore")
        stores: Any = importlib.import_module("obstore.store")
    except ImportError as error:
        raise ConfigError(
            f"s3: its client cannot be loaded ({error}): pip install 'kvatlas[s3]'"
        ) from error
    config: dict[str, Any] = {"region": settings.region}
    if settings.endpoint:
        config |= {"endpoint": settings.endpoint, "virtual_hosted_style_request": False}
    if settings.access_key:
        config |= {
            "access_key_id": settings.access_key,
            "secret_access_key": settings.secret_key,
        }
    wait = timedelta(seconds=settings.deadline_s)
    try:
        bucket = stores.S3Store(
            settings.bucket,
            config=config,
            client_options={"allow_http": True, "timeout": wait, "connect_timeout": wait},
            retry_config={"max_retries": settings.retries, "retry_timeout": wait},
        )
    except Exception as error:
        raise ConfigError(f"s3: {error}") from error
    return api, bucket
