"""Stores by their URL: what is meant, and what is refused in one clear line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.codec import Codec
from kvatlas.dataplane.tiers.opening import DEADLINE_S, address_of, open_object
from kvatlas.dataplane.tiers.valkey import ValkeyStore
from kvatlas.errors import ConfigError


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(1 << 20, directory=None)
    yield made
    made.close()


def opened(url: str, arena: Arena) -> ValkeyStore:
    store = open_object(url, arena, lambda _: None)
    store.close()
    assert isinstance(store, ValkeyStore)
    return store


def test_what_the_url_says_is_what_the_store_is_told(arena: Arena, tmp_path: Path) -> None:
    (tmp_path / "word").write_text("open sesame\n")
    url = f"valkey://10.0.0.9:7000?database=3&ttl_s=60&codec=planes&password_file={tmp_path}/word"
    settings = opened(url, arena).settings
    assert (settings.host, settings.port, settings.database) == ("10.0.0.9", 7000, 3)
    assert (settings.ttl_s, settings.codec) == (60.0, Codec.PLANES)
    assert settings.password == "open sesame"
    assert settings.deadline_s == DEADLINE_S


def test_defaults_and_sockets(arena: Arena) -> None:
    store = opened("valkey://there?codec=raw&deadline_s=2", arena)
    assert (store.settings.port, store.transport) == (6379, "tcp")
    assert (store.settings.codec, store.settings.deadline_s) == (Codec.RAW, 2.0)
    local = opened("valkey:///run/valkey.sock", arena)
    assert (local.settings.host, local.transport) == ("/run/valkey.sock", "unix")


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("redis://there:1", "one of valkey://, valkeys://, rediss://, mooncake://, s3://"),
        ("there:6379", "one of"),
        ("", "one of"),
        ("valkey://there:port", "ort"),
        ("valkey://me:secret@there:1", "password_file"),
        ("valkey://there:1?password=x", "password must not stand in a URL"),
        ("s3://bucket?secret_key=x", "secret_key must not stand in a URL"),
        ("valkey://there:1?colour=blue", "'colour' is no setting"),
        ("valkey://there:1?database=many", "database"),
        ("valkey://there:1?database", "bad query field"),
        ("valkey://there:1?codec=jpeg", "codec"),
        ("valkey://there:1?ttl_s=-1", "ttl_s"),
        ("valkey://there:1?password_file=/nowhere/at/all", "No such file"),
        ("mooncake://there", "that of the master"),
        ("mooncake://there:1?codec=zstd", "'codec' is no setting"),
        ("s3://b", "no name of a bucket"),
        ("s3://bucket?endpoint=there", "must begin with http"),
    ],
)
def test_what_cannot_be_meant_is_refused(arena: Arena, url: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        open_object(url, arena, lambda _: None)


def test_addresses() -> None:
    assert address_of("10.0.0.1:7400") == ("10.0.0.1", 7400)
    assert address_of("[::1]:7400") == ("::1", 7400)
    for bad in ("10.0.0.1", ":7400", "there:port", "there:70000", "a/b:1", "me@there:1", ""):
        with pytest.raises(ConfigError, match="HOST:PORT is wanted"):
            address_of(bad)
