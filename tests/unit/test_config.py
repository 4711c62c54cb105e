"""The operator's file: what it may say, and how a fault in it is told, with its line."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from kvatlas import config
from kvatlas.cli import serve
from kvatlas.errors import ConfigError
from kvatlas.service.metrics import GatewayMetrics

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


Change = tuple[str, str, int, str]  # what is replaced in a good file by what, and what is told


def assert_told(file: Path, good: str, change: Change) -> None:
    """The fault is told with its line."""
    old, new, line, said = change
    assert old in good
    message = fault(file, good.replace(old, new))
    assert message.startswith(f"{file}:{line}: ")
    assert said in message


def test_a_good_file_is_read_with_defaults_for_the_rest(file: Path) -> None:
    file.write_text(GOOD)
    loaded = config.load(file)
    assert [w.name for w in loaded.worker] == ["a", "b"]
    assert [w.engine for w in loaded.worker] == ["vllm", "sglang"]
    assert loaded.gateway.port == 0
    assert loaded.router == config.RouterConfig()


def test_the_mark_that_windows_begins_a_file_with_is_no_part_of_it(file: Path) -> None:
    file.write_text(GOOD, "utf-8-sig")
    assert [w.name for w in config.load(file).worker] == ["a", "b"]


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
    "change",
    [
        ("port = 0", "prt = 0", 3, "unknown key 'gateway.prt': did you mean 'port'?"),
        ("[gateway]", "[gatway]", 2, "unknown key 'gatway': did you mean 'gateway'?"),
        (
            "# two engines",
            "volume = 11",
            1,
            "unknown key 'volume': there is: worker, agent, gateway",
        ),
        ('engine = "sglang"', "model = 1", 12, "unknown key 'worker[1].model'"),
        ("port = 0", 'port = "0"', 3, "gateway.port: Expected `int`, got `str`"),
        ("port = 0", "port = 70000", 3, "gateway.port: Expected `int` <= 65535"),
        ("port = 0", "max_connections = 0", 3, "gateway.max_connections: Expected `int` >= 1"),
        ("port = 0", "connect_timeout_s = nan", 3, "gateway.connect_timeout_s: Expected"),
        ('name = "b"', "name = 7", 10, "worker[1].name: Expected `str`, got `int`"),
        ('name = "b"', 'name = ""', 10, "worker[1].name: Expected `str` of length >= 1"),
        ('name = "b"', 'name = "a"', 10, "two workers are named 'a'"),
        ("http://127.0.0.1:9101", "127.0.0.1:9101", 11, "worker 'b': '127.0.0.1:9101/prefix' is n"),
        ("http://127.0.0.1:9101", "ftp://x", 11, "is not of the form http://host:port"),
        ('url = "http://127.0.0.1:9100"', "", 5, "worker[0]: Object missing required field `url`"),
        ('engine = "sglang"', 'engine = "tgi"', 12, "worker[1].engine: Invalid enum value 'tgi'"),
    ],
)
def test_a_fault_is_told_with_its_line(file: Path, change: Change) -> None:
    assert_told(file, GOOD, change)


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
    tables |= {
        "": config.Config,
        "worker": config.WorkerConfig,
        "agent": config.AgentConfig,
    }
    assert tables == config._TABLES


AGENT = """\
[[worker]]
name = "a"
url = "http://127.0.0.1:9100"

[[agent]]
name = "node"
url = "http://127.0.0.1:9470"
workers = ["a"]
"""


@pytest.mark.parametrize(
    "change",
    [
        ('["a"]', '["b"]', 8, "agent 'node': there is no worker 'b'"),
        ('["a"]', '["a", "a"]', 8, "'a' is listed for 'node' already"),
        ('["a"]', '["node"]', 8, "there is no worker 'node'"),
        ('["a"]', "[]", 8, "agent[0].workers: Expected `array` of length >= 1"),
        ('"node"', '"a"', 6, "a worker and an agent are named 'a'"),
        ('"node"', '"no de"', 6, "agent 'no de': a name goes into headers"),
        ("http://127.0.0.1:9470", "127.0.0.1", 7, "agent 'node': '127.0.0.1' is not of the form"),
    ],
)
def test_a_fault_of_an_agent_is_told_with_its_line(file: Path, change: Change) -> None:
    file.write_text(AGENT)
    assert config.load(file).agent[0].workers == ("a",)
    assert_told(file, AGENT, change)


HALVES = """\
[[worker]]
name = "p"
url = "http://127.0.0.1:9100"
role = "prefill"
{p}

[[worker]]
name = "d"
url = "http://127.0.0.1:9101"
role = "decode"
{d}
"""


def test_halves_of_pairs_are_read(file: Path) -> None:
    at = 'pairing = "sglang"\nbootstrap = "http://127.0.0.1:8998"'
    file.write_text(HALVES.format(p=at, d='pairing = "sglang"'))
    assert [w.role for w in config.load(file).worker] == ["prefill", "decode"]


@pytest.mark.parametrize(
    ("p", "d", "message"),
    [
        ("", 'pairing = "sglang"', "4: worker 'p' has the role 'prefill', and no worker with"),
        ('pairing = "mooncake"', 'pairing = "mooncake"', "1: worker 'p' needs bootstrap"),
        ('pairing = "sglang"\nbootstrap = "x:1"', 'pairing = "sglang"', "6: worker 'p' needs"),
        ('bootstrap = "http://x:1"', "", "5: worker 'p' has a bootstrap address"),
        ("", 'bootstrap = "http://x:1"', "11: worker 'd' has a bootstrap address"),
    ],
)
def test_halves_that_could_not_meet_are_refused(file: Path, p: str, d: str, message: str) -> None:
    assert f"{file}:{message}" in fault(file, HALVES.format(p=p, d=d))


def test_only_halves_have_a_transport(file: Path) -> None:
    file.write_text(HALVES.format(p='transport = "rdma"', d=""))
    assert [w.transport for w in config.load(file).worker] == ["rdma", "any"]
    whole = HALVES.format(p="", d='transport = "rdma"').replace('role = "decode"', "")
    whole = whole.replace('role = "prefill"', "")
    assert f"{file}:11: worker 'd' hands nothing over" in fault(file, whole)
    wrong = HALVES.format(p='transport = "ib"', d="")
    assert f"{file}:5: worker[0].transport: Invalid enum value 'ib': use one of any, rdma" in fault(
        file, wrong
    )


PICKER = """\
[picker]
listen = "127.0.0.1:9002"
[[worker]]
name = "a"
url = "http://10.0.0.1:8000"
[[worker]]
name = "b"
url = "http://[fd00::1]:8000/"
"""


@pytest.mark.parametrize("listen", ["127.0.0.1:9002", "[::]:0", "picker.example:65535"])
def test_a_picker_is_read(file: Path, listen: str) -> None:
    file.write_text(PICKER.replace("127.0.0.1:9002", listen))
    assert config.load(file).picker.listen == listen


@pytest.mark.parametrize(
    "change",
    [
        ("127.0.0.1:9002", "9002", 2, "'9002' is not of the form HOST:PORT"),
        ("127.0.0.1:9002", "a:70000", 2, "is not of the form HOST:PORT"),
        ("127.0.0.1:9002", "::1:80", 2, "is not of the form HOST:PORT"),
        (
            "10.0.0.1",
            "vllm-0",
            5,
            "'a': 'http://vllm-0:8000': a proxy that asks the endpoint picker needs an IP address",
        ),
        (
            "::1]:8000/",
            "::1]:8000/base",
            8,
            "a proxy that asks the endpoint picker cannot add its path",
        ),
    ],
)
def test_a_fault_of_a_picker_is_told_with_its_line(file: Path, change: Change) -> None:
    assert_told(file, PICKER, change)


def test_names_are_good_where_there_is_no_picker(file: Path) -> None:
    file.write_text(PICKER.replace("127.0.0.1:9002", "").replace("10.0.0.1", "vllm-0"))
    assert config.load(file).worker[0].url == "http://vllm-0:8000"


def test_without_the_extra_of_the_picker_it_says_what_to_install(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(PICKER)
    loaded = config.load(file)
    monkeypatch.delitem(sys.modules, "kvatlas.service.picker", raising=False)
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvatlas\[picker\]'"):
        serve.new_picker(loaded, None, GatewayMetrics())  # type: ignore[arg-type]
