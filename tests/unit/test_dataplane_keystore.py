"""Keys of tenants in a directory: nobody else reads them, nothing half done counts, what was
dropped stays dropped, and any number of agents may use them at once."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvatlas.cli.main import main
from kvatlas.core.keys import Keyring
from kvatlas.core.tenancy import tag_of
from kvatlas.dataplane import keystore
from kvatlas.dataplane.keystore import DataKey, FileKeys, KeyDropped, KeyMissing
from kvatlas.errors import ConfigError, StoreError

TAG, OTHER = "a" * 24, "b" * 24


@pytest.fixture
def keys(tmp_path: Path) -> FileKeys:
    return FileKeys.create(tmp_path / "keys")


def files(keys: FileKeys, tenant: str, ending: str = "key") -> list[Path]:
    folder = keys.directory / "tenants" / (tenant or "nobody")
    return sorted(folder.glob(f"*.{ending}"))


def test_a_tenant_has_one_key_that_everybody_finds(keys: FileKeys) -> None:
    key = keys.current(TAG)
    assert (len(key.id), len(key.secret)) == (8, 32)
    assert keys.current(TAG) == keys.get(TAG, key.id) == key
    assert FileKeys(keys.directory).current(TAG) == key
    assert keys.current(OTHER).secret != key.secret
    assert keys.current("") not in (key, keys.current(OTHER))
    assert [each.tenant for each in keys.listed()] == ["", TAG, OTHER]
    assert {each.state for each in keys.listed()} == {"newest"}


def test_no_secret_lies_there_in_the_clear(keys: FileKeys) -> None:
    secrets = [keys.current(tenant).secret for tenant in ("", TAG)]
    for path in keys.directory.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        for secret in secrets:
            assert secret not in data
            assert secret.hex().encode() not in data
    assert {path.stat().st_mode & 0o077 for path in keys.directory.rglob("*")} == {0}


def test_a_rotated_key_seals_and_the_old_one_opens(
    keys: FileKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, elsewhere = keys.current(TAG), FileKeys(keys.directory)
    assert elsewhere.current(TAG) == first
    told = keys.rotate(TAG)
    second = keys.current(TAG)
    assert (told.number, told.id) == (2, second.id.hex())
    assert second.secret != first.secret
    assert keys.get(TAG, first.id) == first
    assert elsewhere.current(TAG) == first  # for a moment
    monkeypatch.setattr(keystore, "LOOK_S", 0.0)
    assert elsewhere.current(TAG) == second
    assert [each.state for each in keys.listed()] == ["older", "newest"]


def test_what_was_dropped_stays_dropped_for_every_agent_at_once(
    keys: FileKeys, tmp_path: Path
) -> None:
    elsewhere = FileKeys(keys.directory)
    old = [keys.current(TAG), DataKey(bytes.fromhex(keys.rotate(TAG).id), b"")]
    kept = keys.current(OTHER)
    assert elsewhere.current(TAG).id == old[1].id
    elsewhere.get(TAG, old[0].id)
    copied = tmp_path / "copy"
    shutil.copytree(keys.directory, copied)
    assert keys.drop(TAG) == 2
    for reader in (keys, elsewhere, FileKeys(keys.directory)):
        for key in old:
            with pytest.raises(KeyDropped):
                reader.get(TAG, key.id)
        assert reader.get(OTHER, kept.id) == kept
    assert files(keys, TAG) == []
    assert keys.drop(TAG) == 0
    # A backup brings them back, and that changes nothing.
    for path in (copied / "tenants" / TAG).iterdir():
        shutil.copy2(path, keys.directory / "tenants" / TAG)
    with pytest.raises(KeyDropped):
        FileKeys(keys.directory).get(TAG, old[0].id)
    assert elsewhere.current(TAG).id not in {key.id for key in old}
    states = sorted(each.state for each in keys.listed() if each.tenant == TAG)
    assert states == ["dropped", "dropped", "newest"]
    assert keys.drop(TAG) == 1
    assert files(keys, TAG) == []


def test_a_drop_that_was_interrupted_has_dropped(
    keys: FileKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = keys.current(TAG)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", _no)
        with pytest.raises(StoreError, match="not dropped"):
            keys.drop(TAG)
    with pytest.raises(KeyDropped):
        FileKeys(keys.directory).get(TAG, key.id)
    assert keys.drop(TAG) == 0
    assert files(keys, TAG) == []


def test_a_key_of_elsewhere_is_missing_and_not_damage(keys: FileKeys, tmp_path: Path) -> None:
    theirs = FileKeys.create(tmp_path / "theirs").current(TAG)
    with pytest.raises(KeyMissing) as found:
        keys.get(TAG, theirs.id)
    assert not isinstance(found.value, KeyDropped)
    mine = keys.current(TAG)
    for key_id in (b"", b"x", mine.id[:-1], mine.id + b"x"):
        with pytest.raises(KeyMissing):
            keys.get(TAG, key_id)
    with pytest.raises(KeyMissing):
        keys.get(OTHER, mine.id)


@pytest.mark.parametrize("field", ["tenant", "number", "id", "made", "master", "wrapped", "form"])
def test_a_key_file_that_was_changed_is_no_key(keys: FileKeys, field: str) -> None:
    """Not even the key of another tenant under this one's name."""
    key = keys.current(TAG)
    (path,) = files(keys, TAG)
    told = json.loads(path.read_bytes())
    other = {"number": 2, "form": 2, "tenant": OTHER, "id": os.urandom(8).hex()}
    told[field] = other[field] if field in other else "0" * len(told[field])
    path.write_text(json.dumps(told))
    with pytest.raises(KeyMissing):
        FileKeys(keys.directory).get(TAG, key.id)


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff\0", b'{"form": 1}'])
def test_a_key_file_that_is_none_is_missing(keys: FileKeys, data: bytes) -> None:
    key = keys.current(TAG)
    files(keys, TAG)[0].write_bytes(data)
    with pytest.raises(KeyMissing):
        FileKeys(keys.directory).get(TAG, key.id)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
@pytest.mark.parametrize("which", ["master.key", "tenants/" + TAG, "."])
def test_what_others_could_read_is_refused_with_the_remedy(
    keys: FileKeys, which: str, mode: int
) -> None:
    keys.current(TAG)
    path = keys.directory / which
    path.chmod(mode | (0o110 if path.is_dir() else 0))
    with pytest.raises(ConfigError, match=r"others could use it \(chmod [67]00 "):
        FileKeys(keys.directory)


def test_a_key_that_others_could_read_is_refused_later_too(keys: FileKeys) -> None:
    late = FileKeys(keys.directory)
    key = keys.current(TAG)
    files(keys, TAG)[0].chmod(0o644)
    with pytest.raises(KeyMissing, match="mode 0644"):
        late.get(TAG, key.id)
    with pytest.raises(ConfigError, match="mode 0644"):
        FileKeys(keys.directory)


@pytest.mark.parametrize("text", ["", "no key", "a" * 63, "A" * 64, "a" * 66])
def test_a_master_key_that_is_none_is_told(keys: FileKeys, text: str) -> None:
    (keys.directory / "master.key").write_text(text)
    with pytest.raises(ConfigError, match="64 hex digits"):
        FileKeys(keys.directory)


def test_a_directory_without_a_master_key_says_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kvatlas keys init"):
        FileKeys(tmp_path / "none")
    FileKeys.create(tmp_path / "keys")
    with pytest.raises(ConfigError, match="already"):
        FileKeys.create(tmp_path / "keys")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError):
        FileKeys.create(tmp_path / "file")


def test_another_master_key_opens_nothing(keys: FileKeys) -> None:
    key = keys.current(TAG)
    (keys.directory / "master.key").write_text("0" * 64)
    with pytest.raises(KeyMissing, match="another master key"):
        FileKeys(keys.directory).get(TAG, key.id)


def test_keys_wrapped_anew_are_the_same_keys(keys: FileKeys) -> None:
    late, early = FileKeys(keys.directory), FileKeys(keys.directory)
    held = {tenant: keys.current(tenant) for tenant in ("", TAG, OTHER)}
    old = (keys.directory / "master.key").read_text()
    assert early.current(TAG) == held[TAG]
    assert keys.rewrap() == 3
    assert (keys.directory / "master.key").read_text() != old
    for reader in (late, early, keys, FileKeys(keys.directory)):
        assert {tenant: reader.current(tenant) for tenant in held} == held
    assert late.current("c" * 24) == FileKeys(keys.directory).current("c" * 24)


@pytest.mark.parametrize("steps", range(5))
def test_wrapping_anew_that_was_interrupted_is_gone_on_with(
    keys: FileKeys, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    held = {tenant: keys.current(tenant) for tenant in ("", TAG, OTHER)}
    left, write = steps, keystore._write

    def failing(path: Path, data: bytes) -> None:
        nonlocal left
        if not left:
            raise OSError(28, "no room")
        left -= 1
        write(path, data)

    monkeypatch.setattr(keystore, "_write", failing)
    if steps < 4:
        with pytest.raises(StoreError, match="not wrapped anew"):
            keys.rewrap()
    else:
        keys.rewrap()
    monkeypatch.undo()
    other = FileKeys(keys.directory)
    assert {tenant: other.current(tenant) for tenant in held} == held
    other.rewrap()
    assert not (keys.directory / "master.next.key").exists()
    last = FileKeys(keys.directory)
    assert {tenant: last.current(tenant) for tenant in held} == held


def test_no_key_can_be_made_where_nothing_can_be_written(
    keys: FileKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = keys.current(TAG)
    monkeypatch.setattr(keystore, "_write", _no)
    assert keys.current(TAG) == key
    with pytest.raises(KeyMissing, match="no key can be made"):
        keys.current(OTHER)
    with pytest.raises(StoreError):
        keys.rotate(TAG)
    assert keys.current(TAG) == key


def test_many_agents_rotate_and_begin_at_once(keys: FileKeys) -> None:
    """Each on files of its own, as in processes of their own."""
    agents = [FileKeys(keys.directory) for _ in range(6)]

    def work(n: int) -> list[DataKey]:
        agent, seen = agents[n], []
        for turn in range(4):
            seen.append(agent.current(TAG))
            if turn % 2 == n % 2:
                agent.rotate(TAG)
            seen.append(agent.current(TAG))
        return seen

    with ThreadPoolExecutor(len(agents)) as threads:
        seen = [key for found in threads.map(work, range(len(agents))) for key in found]
    there = keys.listed()
    assert [each.number for each in there] == list(range(1, 14))  # a first one, and 12 rotations
    assert [each.state for each in there] == ["older"] * 12 + ["newest"]
    for key in seen:
        assert keys.get(TAG, key.id) == key
    assert {key.id.hex() for key in seen} <= {each.id for each in there}


@pytest.mark.parametrize(
    "tenant", ["nobody", "../up", "/", ".", "x" * 300, "nul\0", "Müller", "a/b"]
)
def test_names_of_tenants_are_no_paths(keys: FileKeys, tenant: str) -> None:
    key = keys.current(tenant)
    assert key != keys.current("")
    assert FileKeys(keys.directory).get(tenant, key.id) == key
    assert tenant in {each.tenant for each in keys.listed()}
    inside = {path.parent for path in keys.directory.rglob("*.key")}
    assert all(path.parent == keys.directory / "tenants" for path in inside - {keys.directory})
    assert keys.drop(tenant) == 1


def test_memory_of_keys_is_bounded(keys: FileKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keystore, "KEYS_MAX", 4)
    held = {tenant: keys.current(tenant) for tenant in map(str, range(9))}
    assert len(keys._opened) <= 4
    assert len(keys._newest) <= 4
    assert {tenant: keys.current(tenant) for tenant in held} == held


def test_tenants_of_a_directory_are_bounded(
    keys: FileKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keystore, "TENANTS_MAX", 2)
    held = [keys.current(tenant) for tenant in (TAG, OTHER)]
    with pytest.raises(KeyMissing, match="no key can be made: 2 tenants"):
        keys.current("c" * 24)
    assert [keys.current(tenant) for tenant in (TAG, OTHER)] == held
    assert keys.rotate(TAG).number == 2


# -- the command ----------------------------------------------------------------------------------


def test_the_command_makes_lists_rotates_and_drops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, config = str(tmp_path / "keys"), tmp_path / "kvatlas.toml"
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    config.write_text(f'[keys]\nsecret_file = "{secret}"\n')
    tag = tag_of(Keyring(b"0123456789abcdef"), "acme")

    def said(*words: str) -> str:
        assert main(["keys", *words]) == 0
        return capsys.readouterr().out

    assert "made" in said("init", folder)
    assert "no tenant has a key yet" in said("rotate", folder)
    assert f"{tag}: key 1 " in said("rotate", folder, "acme", "--config", str(config))
    assert "nobody: key 1 " in said("rotate", folder, "nobody")
    assert said("rotate", folder).count(": key 2 ") == 2
    listed = json.loads(said("list", folder, "--json"))
    assert [(each["tenant"], each["state"]) for each in listed] == [
        *(("", "older"), ("", "newest")),
        *((tag, "older"), (tag, "newest")),
    ]
    assert "4 keys" in said("rewrap", folder)
    assert "2 keys of" in said("drop", folder, tag)
    assert "dropped" in said("list", folder)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["list", "{}/none"], "kvatlas keys init"),
        (["drop", "{}", "acme"], "needs --config"),
        (["drop", "{}", "acme", "--config", "{}/none.toml"], "cannot be read"),
        (["rotate", "{}", ""], "is no tag"),
        (["init", "{}"], "already"),
    ],
)
def test_the_command_says_what_is_wrong(
    keys: FileKeys, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert main(["keys", *(word.format(keys.directory) for word in words)]) == 2
    assert reason in capsys.readouterr().err


def _no(*_: object, **__: object) -> None:
    raise OSError(30, "read-only")
