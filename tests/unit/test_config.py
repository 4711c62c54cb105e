"""The operator's file: what it may say, and how a fault in it is told, with its line."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvatlas import config
from kvatlas.errors import ConfigError

GOOD = """\
# two engines
[gateway]
port = 0

[[worker]]
name = "a"
url = "http://127.0.0.1:9100"

[[worker]]
name = "b"
url = "http://127.0.0.1:9101/prefix"
engine = "sglang"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvatlas.toml"


def fault(file: Path, text: str | bytes) -> str:
    """The message that ``text`` earns."""
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as caught:
        config.load(file)
    return str(caught.value)


def test_a_good_file_is_read_with_defaults_for_the_rest(file: Path) -> None:
    file.write_text(GOOD)
    loaded = config.load(file)
    assert [w.name for w in loaded.worker] == ["a", "b"]
    assert [w.engine for w in loaded.worker] == ["vllm", "sglang"]
    assert loaded.gateway.port == 0
    assert loaded.router == config.RouterConfig()


def test_values_cannot_be_changed_after_loading(file: Path) -> None:
    file.write_text(GOOD)
    loaded = config.load(file)
    with pytest.raises(AttributeError):
        loaded.gateway.port = 1  # type: ignore[misc]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read: .*No such file"):
        config.load(tmp_path / "nowhere.toml")


def test_a_file_that_is_no_text_is_named(file: Path) -> None:
    assert "cannot be read" in fault(file, b"\xff\xfe[gateway]")


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("port = 0", "prt = 0", 3, "unknown key 'gateway.prt': did you mean 'port'?"),
        ("[gateway]", "[gatway]", 2, "unknown key 'gatway': did you mean 'gateway'?"),
        ("# two engines", "volume = 11", 1, "unknown key 'volume': there is: worker, gateway"),
        ('engine = "sglang"', "model = 1", 12, "unknown key 'worker[1].model'"),
        ("port = 0", 'port = "0"', 3, "gateway.port: Expected `int`, got `str`"),
        ("port = 0", "port = 70000", 3, "gateway.port: Expected `int` <= 65535"),
        ("port = 0", "max_connections = 0", 3, "gateway.max_connections: Expected `int` >= 1"),
        ("port = 0", "connect_timeout_s = nan", 3, "gateway.connect_timeout_s: Expected"),
        ('name = "b"', "name = 7", 10, "worker[1].name: Expected `str`, got `int`"),
        ('name = "b"', 'name = ""', 10, "worker[1].name: Expected `str` of length >= 1"),
        ('name = "b"', 'name = "a"', 10, "two workers are named 'a'"),
        ("http://127.0.0.1:9101", "127.0.0.1:9101", 11, "worker 'b': '127.0.0.1:9101/prefix' is n"),
        ("http://127.0.0.1:9101", "https://x", 11, "is not of the form http://host:port"),
        ('url = "http://127.0.0.1:9100"', "", 5, "worker[0]: Object missing required field `url`"),
        ('engine = "sglang"', 'engine = "tgi"', 12, "worker[1].engine: Invalid enum value 'tgi'"),
    ],
)
def test_a_fault_is_told_with_its_line(
    file: Path, old: str, new: str, line: int, said: str
) -> None:
    assert old in GOOD
    message = fault(file, GOOD.replace(old, new))
    assert message.startswith(f"{file}:{line}: ")
    assert said in message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[gateway]\nport = 0\n\n[[worker\n", 4),
        ('[gateway]\nhost = "x\n', 2),
        ("[gateway]\nport = 1\nport = 2\n", 3),
    ],
)
def test_broken_toml_is_told_with_its_line(file: Path, text: str, line: int) -> None:
    message = fault(file, text)
    assert message.startswith(f"{file}:{line}: not valid TOML: ")


@pytest.mark.parametrize(
    "name", ["a\\r\\nx-evil: 1", "two words", "é", "a#1", "a\\u0000", "\\u2028"]
)
def test_a_name_is_fit_for_headers(file: Path, name: str) -> None:
    text = GOOD.replace('name = "b"', f'name = "{name}"')
    assert "kvatlas.toml:10: worker " in fault(file, text)


@pytest.mark.parametrize("url", ["http://u:p@h:1", "http://h:1?q", "http://h:1/x#y", "http://"])
def test_parts_of_a_url_that_would_be_dropped_are_refused(file: Path, url: str) -> None:
    text = GOOD.replace("http://127.0.0.1:9100", url)
    assert "kvatlas.toml:7: worker 'a'" in fault(file, text)


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "[gateway]\nport = " + "9" * 5000])
def test_toml_that_breaks_its_reader_is_a_fault(file: Path, text: str) -> None:
    assert "not valid TOML" in fault(file, text)


def test_no_worker_at_all_is_a_fault(file: Path) -> None:
    assert "missing required field `worker`" in fault(file, "[gateway]\nport = 0\n")
    assert "name at least one engine" in fault(file, "worker = []\n")


def test_what_stands_in_comments_and_values_does_not_draw_the_line(file: Path) -> None:
    text = '# name = "a" twice\n' + GOOD.replace('name = "b"', 'name = "a"')
    assert fault(file, text).startswith(f"{file}:11: ")


def test_every_table_of_the_file_is_known_to_the_messages() -> None:
    tables = {
        f.name: f.type
        for f in msgspec.structs.fields(config.Config)
        if isinstance(f.type, type) and issubclass(f.type, msgspec.Struct)
    }
    tables |= {"": config.Config, "worker": config.WorkerConfig}
    assert tables == config._TABLES
