"""`kvatlas tenant list|get|set|digest`, and the file that they change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokens_kit import model_dir

from kvatlas.cli.main import main
from kvatlas.config_tenants import Quotas, digest_of
from kvatlas.core.keys import Keyring
from kvatlas.core.retention import Retention
from kvatlas.core.tenancy import prefix_digest, tag_of
from kvatlas.service.tenants import load

__all__ = ["model_dir"]  # a fixture
SECRET = b"the deployment's secret"
WRITTEN = "# of ours\n[[tenant]]  # the first\nname = 'b. & co'\nkeys = ['%s']\n" % ("1" * 64)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "tenants.toml").write_text(WRITTEN)
    (tmp_path / "kvatlas.toml").write_text(
        '[keys]\nsecret_file = "secret"\n[tenants]\nfile = "tenants.toml"\n'
        '[[worker]]\nname = "a"\nurl = "http://127.0.0.1:1"\n'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_set_changes_one_tenant_and_leaves_all_else_as_it_was_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "tenants.toml"
    file.chmod(0o640)
    assert main(["tenant", "set", "acme", "--new-key", "--dram", "8GB", "--disk", "0"]) == 0
    key = capsys.readouterr().out.strip()
    text = file.read_text()
    assert key.startswith("kva_")
    assert key not in text
    assert text.startswith(WRITTEN)
    assert file.stat().st_mode & 0o777 == 0o640
    acme = load(file).tenant[1]
    assert acme.keys == (digest_of(key),)
    assert acme.quota_bytes == Quotas(dram=8 * 10**9, disk=0)
    for options in (["--raise-epoch"], ["--raise-epoch", "--rotation", "12h", "--dram", "none"]):
        assert main(["tenant", "set", "acme", *options]) == 0
    acme = load(file).tenant[1]
    assert (acme.epoch, acme.rotation_s, acme.quota_bytes) == (2, 43200.0, Quotas(disk=0))
    assert main(["tenant", "set", "acme", "--ttl", "7d", "--retention", "drop_first"]) == 0
    acme = load(file).tenant[1]
    assert (acme.ttl_s, acme.retention) == (604800.0, Retention.DROP_FIRST)
    assert main(["tenant", "get", "acme", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["ttl_s"], row["retention"]) == (604800.0, "drop_first")
    assert main(["tenant", "get", "acme"]) == 0
    limits = capsys.readouterr().out
    assert "drop_first" in limits
    assert "7d" in limits
    assert main(["tenant", "set", "acme", "--ttl", "0"]) == 0
    assert load(file).tenant[1].ttl_s == 0
    assert main(["tenant", "set", "b. & co", "--drop-key", "1111", "--new-key"]) == 0
    assert load(file).tenant[0].keys == (digest_of(capsys.readouterr().out.strip()),)
    assert not [path for path in folder.iterdir() if path.name.startswith(".tenants")]


def test_list_and_get_say_what_agents_know_them_by(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tenant", "list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["tag"] == tag_of(Keyring(SECRET), "b. & co")
    assert main(["tenant", "get", "b. & co"]) == 0
    shown = capsys.readouterr().out
    assert "11111111…" in shown
    assert "1" * 64 not in shown


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["get", "nobody"], "there is no tenant"),
        (["get", "a/b"], "slashes"),
        (["set", "../b"], "slashes"),
        (["set", "a\u0000"], "cannot be seen"),
        (["set", "b. & co", "--drop-key", "2"], "0 of its keys"),
        (["set", "b. & co", "--dram", "much"], "no size"),
        (["set", "b. & co", "--rotation", "soon"], "no time"),
        (["set", "b. & co", "--ttl=-1s"], "no time"),
        (["set", "b. & co", "--rotation", "0.00001"], "too short"),
        (["set", "acme", "--jwt", "b. & co"], "in their tokens"),
        (["list", "--config", "none.toml"], "none.toml"),
        (["digest"], "which prompt"),
        (["digest", "--tokens", "ids", "--first", "0"], "0 would be all"),
        (["digest", "--tokens", "ids", "--first", "9"], "has 3 tokens"),
        (["digest", "--prompt", "ids"], "tokenizer.path"),
    ],
)
def test_what_is_refused_changes_nothing(
    folder: Path, args: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "ids").write_text("1 2 3")
    assert main(["tenant", *args]) == 2
    assert why in capsys.readouterr().err
    assert (folder / "tenants.toml").read_text() == WRITTEN


def test_a_digest_is_an_entry_of_a_policy(
    folder: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "ids").write_text("1 2 3")
    assert main(["tenant", "digest", "--tokens", "ids", "--first", "2", "--name", "x"]) == 0
    told = capsys.readouterr().out
    digest = prefix_digest(b"\1\0\0\0\2\0\0\0").hex()
    assert told == f'[[public]]\nname = "x"\ntokens = 2\ndigest = "{digest}"\n'
    (folder / "text").write_text("the quick brown fox")
    config = (folder / "kvatlas.toml").read_text()
    (folder / "kvatlas.toml").write_text(config + f'[tokenizer]\npath = "{model_dir}"\n')
    assert main(["tenant", "digest", "--prompt", "text"]) == 0
    assert "digest = " in capsys.readouterr().out
