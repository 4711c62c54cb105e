"""``kvatlas tenant``: who the tenants are, and what they may hold."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import tomlkit
from rich.console import Console
from rich.table import Table

from kvatlas.cli import tenant_digest
from kvatlas.cli.output import print_json
from kvatlas.config import Config, read_secret, size_bytes
from kvatlas.config import load as load_config
from kvatlas.config_tenants import Quotas, Tenant, TenantsFile, digest_of
from kvatlas.core.keys import Keyring
from kvatlas.core.retention import Retention
from kvatlas.core.tenancy import checked_name, tag_of
from kvatlas.errors import ConfigError
from kvatlas.lasting import whole_file
from kvatlas.service import tenants

_KEY_BYTES = 32
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_EPILOG = """\
  kvatlas tenant list
  kvatlas tenant get acme --json
  kvatlas tenant set acme --new-key            prints an API key, once; the file has its digest
  kvatlas tenant set acme --dram 8GB --disk 200GB
  kvatlas tenant set acme --ttl 7d --retention keep
  kvatlas tenant set acme --raise-epoch        nothing that it has cached is found any more
  kvatlas tenant digest --prompt manual.txt --first 4096 --name manual >> public.toml

The file is the one that [tenants] of kvatlas.toml names; running gateways see a change by
themselves, and tell the agents.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "tenant",
        description="Read and change the file of tenants that a kvatlas.toml names.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_subparsers(title="commands", metavar="WHAT", required=True, dest="what")
    _add(what, "list", "all tenants", _list).add_argument("--json", action="store_true")
    one = _add(what, "get", "one tenant", _get)
    one.add_argument("name")
    one.add_argument("--json", action="store_true")
    _add_set(_add(what, "set", "make or change a tenant", _set))
    tenant_digest.add_parser(what)
    from kvatlas.cli import tenant_purge  # noqa: PLC0415 - it changes the file by what is here

    tenant_purge.add_parsers(what)


def _add(
    what: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, run: Any
) -> argparse.ArgumentParser:
    parser = what.add_parser(name, help=text, description=text)
    parser.add_argument("--config", type=Path, default=Path("kvatlas.toml"), metavar="FILE")
    parser.set_defaults(run=run)
    return parser


def _add_set(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name")
    add("--new-key", action="store_true", help="make an API key, and print it once")
    add("--drop-key", metavar="DIGEST", help="by the first digits of its digest")
    add("--jwt", metavar="VALUE", help="what the tenant claim of its tokens says")
    add("--share", choices=("tenant", "session"), help="who shares what is not public")
    add("--rotation", metavar="TIME", help="new salts so often (12h); 0: never")
    add("--raise-epoch", action="store_true", help="what it has cached is not found any more")
    for tier in Quotas.__struct_fields__:
        add(f"--{tier}", metavar="SIZE", help=f"what it may hold in {tier} of each node; none")
    add("--ttl", metavar="TIME", help="what it saved is kept so long (7d), used or not; 0: no end")
    add(
        "--retention",
        choices=[str(each) for each in Retention],
        help="what a full tier lets go first",
    )


# -- reading --------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    config, file = opened(args.config)
    ring = _ring(config)
    rows = [_shown(ring, tenant) for tenant in file.tenant]
    if args.json:
        print_json(rows)
    else:
        _print(rows, Console(highlight=False))
    return 0


def _get(args: argparse.Namespace) -> int:
    config, file = opened(args.config)
    row = _shown(_ring(config), one_of(file, args.name))
    if args.json:
        print_json(row)
    else:
        _print([row], Console(highlight=False))
    return 0


def opened(path: Path) -> tuple[Config, TenantsFile]:
    """A kvatlas.toml and the tenants that it names. Raises ConfigError."""
    config = load_config(path)
    if not config.tenants.on:
        raise ConfigError(f"{path}: has no [tenants] with a file")
    return config, tenants.load(Path(config.tenants.file))


def one_of(file: TenantsFile, name: str) -> Tenant:
    """The tenant of that name, in whatever form it is written. Raises ConfigError."""
    wanted = _name(name)
    for tenant in file.tenant:
        if tenant.name == wanted:
            return tenant
    known = ", ".join(tenant.name for tenant in file.tenant[:12]) or "none"
    raise ConfigError(f"there is no tenant {name!r}; there is: {known}")


def _name(name: str) -> str:
    try:
        return checked_name(name)
    except ValueError as error:
        raise ConfigError(f"tenant {name!r}: {error}") from error


def _ring(config: Config) -> Keyring:
    return Keyring(read_secret(Path(config.keys.secret_file), "keys.secret_file"))


def _shown(ring: Keyring, tenant: Tenant) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "tag": tag_of(ring, tenant.name),
        "keys": [f"{digest[:8]}…" for digest in tenant.keys],
        "jwt": tenant.jwt or tenant.name,
        "share": tenant.share,
        "epoch": tenant.epoch,
        "rotation_s": tenant.rotation_s,
        "quota_bytes": msgspec.to_builtins(tenant.quota_bytes),
        "ttl_s": tenant.ttl_s,
        "retention": tenant.retention,
    }


def _print(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table("tenant", "tag", "keys", "share", "epoch", "limits", box=None)
    table.columns[1].no_wrap, table.columns[1].min_width = True, 24  # people copy tags: whole
    for row in rows:
        limits = [f"{tier} {size / 1e9:g} GB" for tier, size in row["quota_bytes"].items()]
        limits += [f"ttl {_life(row['ttl_s'])}"] if row["ttl_s"] else []
        limits += [row["retention"]] if row["retention"] != Retention.NORMAL else []
        table.add_row(
            row["name"],
            row["tag"],
            " ".join(row["keys"]) or "–",
            row["share"],
            str(row["epoch"]),
            ", ".join(limits) or "–",
        )
    console.print(table)


def _life(seconds: float) -> str:
    """As `--ttl` takes it, in the largest unit that it fills."""
    whole = [unit for unit, size in _SECONDS.items() if not seconds % size]
    unit = whole[-1] if whole else "s"
    return f"{seconds / _SECONDS[unit]:g}{unit}"


# -- changing -------------------------------------------------------------------------------------


def _set(args: argparse.Namespace) -> int:
    config = load_config(args.config)
    if not config.tenants.on:
        raise ConfigError(f"{args.config}: has no [tenants] with a file")
    path = Path(config.tenants.file)
    name = _name(args.name)
    made = f"kva_{secrets.token_urlsafe(_KEY_BYTES)}" if args.new_key else ""

    def change(tenant: dict[str, Any]) -> None:
        _change(args, tenant, made)

    rewrite(path, name, change)
    if made:
        print(made)
    return 0


def _change(args: argparse.Namespace, tenant: dict[str, Any], made: str) -> None:
    if made:
        tenant.setdefault("keys", tomlkit.array()).append(digest_of(made))
    if args.drop_key:
        keys = [key for key in tenant.get("keys", ()) if str(key).startswith(args.drop_key)]
        if len(keys) != 1:
            raise ConfigError(f"--drop-key {args.drop_key}: {len(keys)} of its keys begin so")
        tenant["keys"].remove(keys[0])
    said = ("jwt", args.jwt), ("share", args.share), ("retention", args.retention)
    for option, value in said:
        if value is not None:
            tenant[option] = value
    if args.rotation is not None:
        tenant["rotation_s"] = _seconds(args.rotation)
    if args.ttl is not None:
        tenant["ttl_s"] = _seconds(args.ttl)
    if args.raise_epoch:
        tenant["epoch"] = int(tenant.get("epoch", 0)) + 1
    for tier in Quotas.__struct_fields__:
        size = getattr(args, tier)
        if size is not None:
            quotas = tenant.setdefault("quota_bytes", tomlkit.inline_table())
            if size == "none":
                quotas.pop(tier, None)
            else:
                quotas[tier] = 0 if size == "0" else size_bytes(size)


def rewrite(path: Path, name: str, change: Any) -> None:
    """Changes one tenant of the file, or makes it, and leaves all else as the operator wrote it.
    What would not be taken is not written. Raises ConfigError."""
    text = path.read_text("utf-8-sig") if path.exists() else ""
    document = tomlkit.parse(text)
    listed = document.setdefault("tenant", tomlkit.aot())
    tenant = next((each for each in listed if _is(each, name)), None)
    if tenant is None:
        tenant = tomlkit.table()
        tenant["name"] = name
        change(tenant)
        listed.append(tenant)
    else:
        change(tenant)
    _replace(path, tomlkit.dumps(document))


def _is(table: Mapping[str, Any], name: str) -> bool:
    with suppress(ValueError):
        return checked_name(str(table.get("name", ""))) == name
    return False


def _replace(path: Path, text: str) -> None:
    """The file's new content, checked as a gateway would, and on the disk before it is there."""
    with whole_file(path) as file:
        file.write(text.encode())
        file.flush()
        try:
            tenants.load(Path(file.name))
        except ConfigError as error:
            raise ConfigError(f"not changed: {error}".replace(file.name, str(path))) from error
        if path.exists():
            Path(file.name).chmod(path.stat().st_mode & 0o777)


def _seconds(text: str) -> float:
    number, unit = (text[:-1], text[-1]) if text[-1:] in _SECONDS else (text, "s")
    with suppress(ValueError):
        seconds = float(number) * _SECONDS[unit]
        if 0 <= seconds <= 1e9:
            return seconds
    raise ConfigError(f"{text!r} is no time: 90s, 15m, 12h or 7d")
