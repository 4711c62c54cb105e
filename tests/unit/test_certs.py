"""`kvatlas certs`, and what of [tls] cannot be."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from kvatlas import config
from kvatlas.cli.certs import issue, make_ca
from kvatlas.cli.main import main
from kvatlas.dataplane.tls import Identity, life_of
from kvatlas.errors import ConfigError


def test_a_first_day(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "ca")
    assert main(["certs", "init", folder]) == 0
    named = ["--name", "front", "--host", "gw.example", "--host", "10.0.0.1"]
    assert main(["certs", "issue", folder, "--part", "gateway", *named, "--days", "2"]) == 0
    cert = tmp_path / "ca" / "gateway-front.pem"
    assert main(["certs", "show", str(cert)]) == 0
    told = capsys.readouterr().out
    assert "identity: kvatlas://gateway/front" in told
    assert "hosts:    gw.example, 10.0.0.1" in told
    assert "2.0 days left" in told
    for path in (tmp_path / "ca").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "ca").stat().st_mode) == 0o700


def test_an_authority_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_ca(tmp_path)
    before = (tmp_path / "ca.key").read_bytes()
    assert main(["certs", "init", str(tmp_path)]) == 2
    assert "it is not overwritten" in capsys.readouterr().err
    assert (tmp_path / "ca.key").read_bytes() == before


def test_who_only_asks_gets_no_certificate_to_serve_with(tmp_path: Path) -> None:
    make_ca(tmp_path)
    purposes = {}
    for part in ("agent", "client"):
        cert, _ = issue(tmp_path, part, "x", ["127.0.0.1"])
        told = x509.load_pem_x509_certificate(cert.read_bytes())
        found = told.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        purposes[part] = ExtendedKeyUsageOID.SERVER_AUTH in found
        basic = told.extensions.get_extension_for_class(x509.BasicConstraints).value
        assert not basic.ca
    assert purposes == {"agent": True, "client": False}
    assert life_of(tmp_path / "agent-x.pem").identity == Identity("agent", "x")


@pytest.mark.parametrize(
    ("part", "name", "hosts", "said"),
    [
        ("agent", "../gateway/x", ["h"], "letters, digits"),
        ("agent", "", ["h"], "letters, digits"),
        ("agent", "x", [], "where is agent x reached"),
        ("agent", "x", ["host:80"], "no port"),
        ("agent", "x", ["a\nb"], "no port"),
    ],
)
def test_what_cannot_be_issued(
    tmp_path: Path, part: str, name: str, hosts: list[str], said: str
) -> None:
    make_ca(tmp_path)
    with pytest.raises(ConfigError, match=said):
        issue(tmp_path, part, name, hosts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca.key", "ca.pem"]


def test_without_an_authority_nothing_is_issued(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kvatlas certs init"):
        issue(tmp_path, "agent", "x", ["h"])


# -- [tls] ----------------------------------------------------------------------------------------

TLS = '[tls]\nca = "a"\ncert = "b"\nkey = "c"\n'
HERE = '[[worker]]\nname = "w"\nurl = "http://127.0.0.1:1"\n'
AWAY = '[[worker]]\nname = "w"\nurl = "https://10.0.0.1:1"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HERE + '[tls]\ncert = "b"\n', r":4: TLS needs ca, cert and key .* no tls\.ca, tls\.key"),
        (HERE + '[tls]\nclients_ca = "b"\n', r":5: tls\.clients_ca says nothing without"),
        (HERE + TLS + 'front_cert = "x"\n', "front_cert and tls.front_key need each other"),
        (AWAY.replace("https", "http") + TLS, ":3: 'w' is asked in the clear"),
        (AWAY + TLS, "'w' sends its events in the clear"),
        (AWAY + 'events = "tcp://10.0.0.1:2"\n' + TLS, ":4: 'w' sends its events in the clear"),
        (
            HERE + '[[agent]]\nname = "n"\nurl = "http://127.0.0.1:2"\nworkers = ["w"]\n' + TLS,
            ":6: agent 'n': with .tls. it is https",
        ),
        (HERE + '[picker]\nlisten = "0.0.0.0:1"\n' + TLS, "picker.listen speaks no TLS"),
        (HERE + '[admin]\nclients = ["ops:root"]\n', ":5: admin.clients: 'ops:root'"),
    ],
)
def test_what_would_go_in_the_clear_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "kvatlas.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        config.load(tmp_path / "kvatlas.toml")


@pytest.mark.parametrize(
    "text",
    [
        HERE + TLS,
        AWAY + 'events = ""\n' + TLS,
        AWAY + TLS + "plain_events = true\n",
        AWAY.replace("https", "http") + TLS + "plain_events = true\nplain_engines = true\n",
        AWAY.replace("https", "http"),
        HERE + '[admin]\nclients = ["ops:change"]\n',
    ],
)
def test_what_was_said_to_be_so_is_taken(tmp_path: Path, text: str) -> None:
    (tmp_path / "kvatlas.toml").write_text(text)
    assert config.load(tmp_path / "kvatlas.toml").worker
