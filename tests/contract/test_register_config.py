"""[register]: which URLs and settings are taken, and how a fault is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvatlas import config
from kvatlas.config_register import Place, RegisterConfig, place_of, trusting
from kvatlas.errors import ConfigError

GOOD = (
    '[[worker]]\nname = "a"\nurl = "http://127.0.0.1:9100"\n[keys]\nsecret_file = "s"\n[register]\n'
)


@pytest.mark.parametrize(
    ("url", "place", "shown"),
    [
        ("valkey://h", Place((("h", 6379),)), "valkey://h:6379"),
        ("redis://h:1/2", Place((("h", 1),), database=2), "valkey://h:1"),
        (
            "rediss://u:p%40w@[::1]:7",
            Place((("::1", 7),), username="u", password="p@w", tls=True),
            "valkeys://[::1]:7",
        ),
        ("unix:///run/a%20b.sock", Place(path="/run/a b.sock"), "unix:///run/a b.sock"),
        (
            "valkeys-cluster://:p@a:1,b,[::2]:3",
            Place((("a", 1), ("b", 6379), ("::2", 3)), password="p", tls=True, cluster=True),
            "valkeys-cluster://a:1,b:6379,[::2]:3",
        ),
    ],
)
def test_urls(url: str, place: Place, shown: str) -> None:
    assert place_of(url) == place
    assert str(place) == shown


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "none of"),
        ("127.0.0.1:6379", "none of"),
        ("http://127.0.0.1:6379", "'http' is none of"),
        ("valkey://", "'' is not of the form HOST:PORT"),
        ("valkey://:secret@", "'' is not of the form HOST:PORT"),
        ("valkey://h:0", "not of the form"),
        ("valkey://h:65536", "not of the form"),
        ("valkey://h:x", "not of the form"),
        ("valkey://h h", "not of the form"),
        ("valkey://h?ca=x", "not of the form"),
        ("valkey://[::1", "not of the form"),
        ("valkey://h/x", "'x' is no number of a database"),
        ("valkey://h/99999", "no number of a database"),
        ("valkey://:secret@a,b", "2 servers"),
        ("valkey-cluster://a,b/1", "a cluster has one database"),
        ("valkey-cluster://a,,b", "'' is not of the form"),
        ("valkey-cluster://" + ",".join("abcdefg" * 5), "35 servers"),
        ("unix://relative.sock", "the whole path is wanted"),
        ("unix:///a?b", "the whole path is wanted"),
    ],
)
def test_what_is_no_url_is_refused_without_the_password(url: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        place_of(url)
    assert why in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ('url = "valkey://h:x"', ":7: register.url: valkey://h:x: 'h:x' is not of the form"),
        ('url = "embedded"\nname = "a b"', ":8: register.name: 'a b'"),
        ('url = "embedded"\nttl_s = 2.0', ":8: register.ttl_s is 2: at least 3 times"),
        ('url = "embedded"\ndeadline_s = 6.0', "twice register.deadline_s"),
        ('url = "embedded"\ncert = "c"', ":8: register.cert and register.key need each other"),
        ('url = "embedded"\nadvertise = "h:1"', ":8: register.advertise: 'h:1' is not of"),
        ('url = "valkey://u:p@h"\npassword_file = "f"', ":8: register: a password in the URL, and"),
        ('url = "embedded"\nbeats = 1', "unknown key 'register.beats': did you mean 'beat_s'?"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, lines: str, why: str) -> None:
    file = tmp_path / "kvatlas.toml"
    file.write_text(GOOD + lines)
    with pytest.raises(ConfigError) as caught:
        config.load(file)
    assert why in str(caught.value)


def test_members_need_a_secret_that_they_share(tmp_path: Path) -> None:
    file = tmp_path / "kvatlas.toml"
    file.write_text(GOOD.replace('secret_file = "s"\n', "") + 'url = "embedded"')
    with pytest.raises(ConfigError, match=r":5: register: members prove by keys\.secret_file"):
        config.load(file)
    file.write_text(GOOD + 'url = "embedded"')
    assert config.load(file).register.on
    file.write_text(GOOD)
    assert not config.load(file).register.on


def test_files_of_tls_are_those_of_the_cluster_where_it_has_none_of_its_own() -> None:
    found = trusting(RegisterConfig(url="valkeys://h:1"), "ca", "cert", "key")
    assert (found.ca, found.cert, found.key) == ("ca", "cert", "key")
    own = RegisterConfig(url="valkeys://h:1", ca="a", cert="b", key="c")
    assert trusting(own, "ca", "cert", "key") == own
