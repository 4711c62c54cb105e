"""``kvatlas keys``: the directory of keys that tenants' state is sealed with at rest."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from kvatlas.cli.output import print_json
from kvatlas.config import KeysConfig, read, read_secret
from kvatlas.core.keys import Keyring
from kvatlas.core.tenancy import checked_name, tag_of
from kvatlas.dataplane.keystore import NOBODY, FileKeys, Listed
from kvatlas.errors import ConfigError, StoreError

_TAG = re.compile(r"[0-9a-f]{24}", re.ASCII)
_EPILOG = """\
  kvatlas keys init /etc/kvatlas/keys                  a master key; agents make the others
  kvatlas keys list /etc/kvatlas/keys
  kvatlas keys rotate /etc/kvatlas/keys                a new key for every tenant
  kvatlas keys rotate /etc/kvatlas/keys acme --config kvatlas.toml
  kvatlas keys drop /etc/kvatlas/keys acme --config kvatlas.toml
                                                       crypto-erase: nothing of it opens any more
  kvatlas keys rewrap /etc/kvatlas/keys                another master key

Agents read it with --seal-keys, and see a change within a second. A tenant is named by its tag,
by its name with --config, or "nobody" for what is public and for clusters without tenants.
"""


class _KeysOnly(msgspec.Struct):
    """What makes tags of names."""

    keys: KeysConfig = KeysConfig()


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "keys",
        description="Make, list, rotate and drop the keys that agents seal disks and stores with.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_subparsers(dest="what", metavar="init|list|rotate|drop|rewrap", required=True)
    for name, text in (
        ("init", "a new directory with a master key"),
        ("list", "all keys, by tenant; none is shown"),
        ("rotate", "what is written from now on is sealed with a new key; old ones still open"),
        ("drop", "all keys of a tenant, for good: what they sealed cannot be read by anybody"),
        ("rewrap", "a new master key; no value is touched"),
    ):
        one = what.add_parser(name, help=text, description=text)
        one.add_argument("folder", type=Path, metavar="DIR")
        if name in ("rotate", "drop"):
            every = name == "rotate"
            one.add_argument("tenant", nargs="?" if every else None, metavar="TENANT")
            one.add_argument(
                "--config",
                type=Path,
                metavar="FILE",
                help="kvatlas.toml of the cluster: its secret makes tags of names",
            )
        if name == "list":
            one.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError (exit status 2) for what cannot be done."""
    if args.what == "init":
        FileKeys.create(args.folder)
        print(f"{args.folder}: made; keep a copy of master.key where no agent is")
        return 0
    keys = FileKeys(args.folder)
    try:
        match args.what:
            case "list":
                _list(keys.listed(), as_json=args.json)
            case "rotate":
                _rotate(keys, args)
            case "drop":
                tenant = _tag(args.tenant, args.config)
                print(f"{keys.drop(tenant)} keys of {_shown(tenant)} dropped")
            case "rewrap":
                print(f"{keys.rewrap()} keys wrapped by a new master key")
    except StoreError as error:
        raise ConfigError(f"keys: {error}") from error
    return 0


def _rotate(keys: FileKeys, args: argparse.Namespace) -> None:
    if args.tenant is not None:
        tenants = [_tag(args.tenant, args.config)]
    else:
        tenants = sorted({each.tenant for each in keys.listed() if each.state == "newest"})
    for tenant in tenants:
        made = keys.rotate(tenant)
        print(f"{_shown(tenant)}: key {made.number} ({made.id})")
    if not tenants:
        print("no tenant has a key yet")


def _list(found: list[Listed], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    table = Table("tenant", "number", "id", "state", "made", box=None)
    for each in found:
        table.add_row(_shown(each.tenant), str(each.number), each.id, each.state, each.made)
    Console(highlight=False).print(table)


def _shown(tenant: str) -> str:
    return tenant or NOBODY


def _tag(named: str, config: Path | None) -> str:
    """Raises ConfigError."""
    if named == NOBODY:
        return ""
    if config is None:
        if not _TAG.fullmatch(named):
            raise ConfigError(f"keys: {named!r} is no tag: a tenant's name needs --config")
        return named
    secret_file = read(config, _KeysOnly, {"keys": KeysConfig})[1].keys.secret_file
    if not secret_file:
        raise ConfigError(f"{config}: has no keys.secret_file, which makes tags of names")
    try:
        name = checked_name(named)
    except ValueError as error:
        raise ConfigError(f"keys: {named!r}: {error}") from error
    return tag_of(Keyring(read_secret(Path(secret_file), "keys.secret_file")), name)
