"""``kvatlas tenant purge`` and ``kvatlas tenant receipt``."""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvatlas.cli import tenant as file_of
from kvatlas.cli.output import check_output, json_bytes, print_json, read_file
from kvatlas.cli.running import add_url, client
from kvatlas.config import Config, read_secret
from kvatlas.config import load as load_config
from kvatlas.core.keys import Keyring
from kvatlas.errors import ConfigError, EngineError
from kvatlas.service.purge import PAGE, Wanted
from kvatlas.service.receipts import RECEIPT_BYTES_MAX, Receipt, verify

PURGE_S = 300.0
_EPILOG = """\
  kvatlas tenant purge acme                          all of it; its epoch is raised first
  kvatlas tenant purge acme --session tuesday        one session (share = "session")
  kvatlas tenant purge acme --prefix request.json    the whole blocks of one prompt
  kvatlas tenant purge acme --reset-engines          engines are emptied, too, for every tenant
  kvatlas tenant purge acme --id ID                  ask again how far a purge has come
"""


def add_parsers(what: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Both."""
    purge = what.add_parser(
        "purge",
        help="delete what is cached of a tenant, with a receipt",
        description="Delete what is cached of a tenant, of a session or of a prompt, on every tier "
        "and in every file of the gateway. KVATLAS_ADMIN_TOKEN holds a token with the right to "
        "change. Status 0: it is complete; 1: who has not answered gets it when he is back.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = purge.add_argument
    add("name")
    add("--config", type=Path, default=Path("kvatlas.toml"), metavar="FILE")
    add_url(purge)
    add("--session", default="", metavar="NAME", help="that one alone")
    add("--prefix", type=Path, metavar="FILE", help="a request as JSON: the blocks of its prompt")
    add("--reset-engines", action="store_true", help="empty engines, for every tenant")
    add("--id", default="", metavar="ID", help="ask after a purge that was ordered before")
    add("--output", type=Path, metavar="FILE", help="where the receipt goes")
    add("--json", action="store_true", help="print the receipt as JSON")
    purge.set_defaults(run=_purge)
    receipt = what.add_parser(
        "receipt",
        help="check the receipt of a purge",
        description="Check that a receipt is as it was signed. Status 0: it is, and the purge is "
        "complete; 1: it is, and somebody has not answered; 2: it is not.",
    )
    receipt.add_argument("action", choices=("verify",))
    receipt.add_argument("file", type=Path)
    receipt.add_argument("--config", type=Path, default=Path("kvatlas.toml"), metavar="FILE")
    receipt.add_argument("--json", action="store_true", help="print it as JSON")
    receipt.set_defaults(run=_receipt)


def _purge(args: argparse.Namespace) -> int:
    check_output("--output", args.output, args.config, args.prefix)
    if args.id and (args.session or args.prefix is not None or args.reset_engines):
        raise ConfigError("--id asks after a purge as it was ordered: nothing else goes with it")
    config, file = file_of.opened(args.config)
    tenant, prefix = file_of.one_of(file, args.name), None
    if args.prefix is not None:
        try:
            prefix = msgspec.json.decode(read_file(args.prefix), type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--prefix {args.prefix}: {error}") from error
    epoch = tenant.epoch
    if prefix is None and not args.session and not args.id:
        epoch += 1
        path = Path(config.tenants.file)
        file_of.rewrite(path, tenant.name, lambda table: table.update(epoch=epoch))
    wanted = Wanted(
        args.id or uuid.uuid4().hex,
        time.time(),
        tenant.name,
        epoch,
        args.session,
        prefix,
        args.reset_engines,
        again=bool(args.id),
    )
    receipt = asyncio.run(_ask(args.url, wanted, _ring(config)))
    if args.output is not None:
        args.output.write_bytes(json_bytes(receipt))
    return _show(receipt, as_json=args.json)


async def _ask(url: str, wanted: Wanted, ring: Keyring) -> Receipt:
    """Raises EngineError where the gateway does not do it."""
    async with client() as asked:
        answer = await asked.request(
            "POST",
            url.rstrip("/") + PAGE,
            headers=[(b"content-type", b"application/json")],
            body=msgspec.json.encode(wanted),
            timeout_s=PURGE_S,
            size_max=RECEIPT_BYTES_MAX,
        )
    if answer.status != 200:
        raise EngineError(f"{url}: status {answer.status}: {answer.said()}")
    try:
        return verify(ring, answer.body)
    except ConfigError as error:
        raise EngineError(f"{url}: {error}") from error


def _receipt(args: argparse.Namespace) -> int:
    receipt = verify(_ring(load_config(args.config)), read_file(args.file))
    return _show(receipt, as_json=args.json)


def _ring(config: Config) -> Keyring:
    return Keyring(read_secret(Path(config.keys.secret_file), "keys.secret_file"))


def _show(receipt: Receipt, *, as_json: bool) -> int:
    """Prints it; the exit status."""
    if as_json:
        print_json(receipt)
        return int(not receipt.complete)
    console = Console(highlight=False)
    what = "all of it"
    if receipt.session:
        what = f"session {receipt.session!r}"
    elif receipt.keys:
        what = f"{len(receipt.keys)} block(s) of a prompt"
    console.print(f"purge {receipt.id}: tenant {receipt.tenant!r}, {what}", markup=False)
    table = Table("who", "part", "what", "units", "bytes", "left", box=None)
    for answer in receipt.answers:
        for gone in answer.gone:
            row = answer.who, gone.part, gone.how, *map(str, (gone.units, gone.size_bytes))
            table.add_row(*row, str(gone.left))
    console.print(table)
    notes = {gone.note: gone.part for answer in receipt.answers for gone in answer.gone}
    for note, part in notes.items():
        if note:
            console.print(f"  {part}: {note}", markup=False, soft_wrap=True)
    for who, why in receipt.missing().items():
        console.print(f"not done: {who}: {why}", markup=False, soft_wrap=True)
    console.print("complete" if receipt.complete else "not complete: it goes on by itself")
    return int(not receipt.complete)
