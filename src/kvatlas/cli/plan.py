"""``kvatlas plan``: what tokens cost on a cluster, what a hit saves, which tier pays for itself."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from kvatlas import __version__
from kvatlas.cli.output import (
    Assumption,
    check_outputs,
    csv_bytes,
    json_bytes,
    table_console,
    write_files,
)
from kvatlas.cli.plan_seed import run_seed_case
from kvatlas.cli.prices import add_price_options, device_prices, room_prices
from kvatlas.errors import ConfigError
from kvatlas.report.money import STORAGE
from kvatlas.sim.cluster import Cluster, ClusterFile, EngineTable, build, load_cluster
from kvatlas.sim.plan import Plan, Terms, all_tiers, plan
from kvatlas.sim.plan_engines import Engine, Kind, kinds
from kvatlas.sim.plan_page import CAPTIONS, page, tables
from kvatlas.workload.device import MEMORY_EFFICIENCY, PREFILL_EFFICIENCY, Device

TOKENS_MAX = 1 << 24
LIST_MAX = 16
TTL_MAX_S = 10 * 365 * 86_400.0
_ENGINE = ("model", "device", "devices", "engines", "precision", "expert_precision")
_CONTEXTS = (2048, 8192, 32_768, 131_072)
_BATCHES = (1, 16, 64, 256)
_MIX = (8192, 1024)
_TTL_S = 3600.0

_EPILOG = """\
Nothing is played: each figure is the time model's, the layout's and the prices'. Prices that you
do not give are list prices or defaults with their source, and the result says so; a device without
a list price needs --gpu-hour. Where the model's time was never calibrated (DeepSeek V4: see
docs/calibration.md), take ratios rather than absolute figures.

examples:
  kvatlas plan --model deepseek-v4-flash --device H200 --devices 2 --expert-precision fp4
  kvatlas plan --cluster examples/v4-flash-h20.toml --gpu-hour 1.10 --html plan.html
  kvatlas plan --cluster cluster.toml --mix 32768:512 --tpot-s 0.03 --ttl-s 86400 --dram-gb-month 0
  kvatlas plan --seed-case        seed document 003, chapter 8, line by line

exit status: 0 done, 2 the input is at fault
"""


class Priced(msgspec.Struct, frozen=True):
    """Engines of one kind and what their devices cost."""

    engine: str
    role: str
    count: int
    devices: int
    device: str
    model: str
    dollars_per_gpu_hour: float
    source: str


class Result(msgspec.Struct, frozen=True):
    """The whole result, as JSON too."""

    version: str
    engines: list[Priced]
    terms: Terms
    assumed: list[Assumption]
    plan: Plan


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``kvatlas plan`` and its options."""
    parser = subparsers.add_parser(
        "plan",
        description="What a million tokens cost, what a hit saves, from where on each tier pays.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--cluster", type=Path, metavar="FILE", help="cluster.toml, as for kvatlas sim")
    add("--model", metavar="NAME", help="without --cluster: a known model or a config.json")
    add("--device", metavar="NAME", help="its device (kvatlas devices)")
    add("--devices", type=int, metavar="N", help="devices of one engine")
    add("--engines", type=int, metavar="N", help="equal engines (1)")
    add("--precision", metavar="TYPE", help="of the weights (fp8)")
    add("--expert-precision", metavar="TYPE", help="of the experts (as --precision)")
    add("--context", metavar="LIST", help="tokens before (2048,8192,32768,131072)")
    add("--batch", metavar="LIST", help="requests at once (1,16,64,256)")
    add("--mix", metavar="PROMPT:OUTPUT", help="tokens of a request (8192:1024)")
    add("--tpot-s", type=float, metavar="S", help="no batch of the mix with longer steps (any)")
    add("--ttl-s", type=float, metavar="S", help="how long a prefix is held (3600)")
    add_price_options(parser, tuple(STORAGE))
    add("--seed-case", action="store_true",
        help="instead: chapter 8 of seed document 003, and what of it stands")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write everything as JSON")
    add("--csv", type=Path, metavar="FILE", help="write a line per figure")
    add("--html", type=Path, metavar="FILE", help="write the report as one page")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_outputs(args, ("json", "csv", "html"), args.cluster)
    if args.seed_case:
        _alone(args)
        return run_seed_case(args.json, args.csv, args.html)
    cluster, assumed = _cluster(args)
    found = kinds(cluster)
    prices, said = device_prices(map(_device, found), args.gpu_hour)
    engines = [Engine(kind, prices[_device(kind).name]) for kind in found]
    assumed += [*said, *_reached(engines)]
    terms = _terms(args, engines, assumed)
    result = Result(
        version=__version__,
        engines=[_priced(engine) for engine in engines],
        terms=terms,
        assumed=assumed,
        plan=plan(cluster, engines, terms),
    )

    def html() -> bytes:
        return page(_head(result), [each.text() for each in assumed], cluster, result.plan).encode()

    try:
        write_files(
            ("--json", args.json, lambda: json_bytes(result)),
            ("--csv", args.csv, lambda: csv_bytes(figures(result.plan))),
            ("--html", args.html, html),
        )
    finally:
        show(result, table_console(120))
    return 0


# -- what is given, and what is not -------------------------------------------------------------


def _alone(args: argparse.Namespace) -> None:
    """The seed's case has inputs of its own."""
    rooms = ("dram_gb_month", "disk_gb_month", "store_gb_month")
    terms = ("mix", "tpot_s", "ttl_s", "context", "batch", "gpu_hour", *rooms)
    for name in ("cluster", *_ENGINE, *terms):
        if getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option}: the seed's case has its own inputs: leave it out")


def _cluster(args: argparse.Namespace) -> tuple[Cluster, list[Assumption]]:
    given = [name for name in _ENGINE if getattr(args, name) is not None]
    if args.cluster is not None:
        if given:
            option = f"--{given[0].replace('_', '-')}"
            raise ConfigError(f"{option}: that is in the cluster's file: leave one out")
        cluster = load_cluster(args.cluster)
        return cluster, [] if cluster.tiers is not None else _rates()
    for name in ("model", "device", "devices"):
        if getattr(args, name) is None:
            raise ConfigError(f"--{name} is missing: what is to be priced? (or --cluster FILE)")
    table = {name: getattr(args, name) for name in given if name != "engines"}
    for name, least, most in (("devices", 1, 4096), ("engines", 1, 1024)):
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(f"--{name} {value}: {least} to {most:,} are possible")
    count = 1 if args.engines is None else args.engines
    engine = EngineTable(count=count, **table)
    file = ClusterFile(engine=(engine,))
    said = [] if args.precision else [Assumption("--precision", "fp8", "default")]
    limits = (
        f"up to {engine.max_running} requests at once, {engine.step_tokens:,} tokens in a step, "
        f"{engine.memory_share:.0%} of the memory"
    )
    said.append(Assumption("[[engine]]", limits, "defaults; a cluster's file may say otherwise"))
    return build(file, lambda place: f"--model {args.model}"), [*said, *_rates()]


def _rates() -> list[Assumption]:
    """The ways to all tiers, where no [tiers] says which there are."""
    spec = all_tiers()
    rates = {
        "host memory": spec.host_link,
        "disk": spec.disk_read_link,
        "store": spec.store_link,
    }
    said = ", ".join(f"{name} {link.bytes_per_s / 1e9:g} GB/s" for name, link in rates.items())
    return [Assumption("[tiers]", said, "default links of docs/hardware.md, no sizes")]


def _device(kind: Kind) -> Device:
    assert kind.spec.device is not None
    return kind.spec.device


def _reached(engines: list[Engine]) -> list[Assumption]:
    """What is reached of the devices' rates where nobody measured it."""
    said = {}
    for engine in engines:
        kind, device = engine.kind, _device(engine.kind)
        reached = (device.compute_efficiency, device.memory_efficiency)
        measured = kind.spec.prefill_tokens_per_s is not None
        if not measured and reached == (PREFILL_EFFICIENCY, MEMORY_EFFICIENCY):
            said[device.name] = Assumption(
                f"reached of {device.name}",
                f"{reached[0]:.0%} of FLOP/s, {reached[1]:.0%} of bandwidth",
                "not calibrated for this model: docs/calibration.md; give your own [[device]] or "
                "measured rates",
            )
    return list(said.values())


def _terms(args: argparse.Namespace, engines: list[Engine], assumed: list[Assumption]) -> Terms:
    longest = min(engine.kind.spec.context_tokens for engine in engines)
    contexts = tuple(tokens for tokens in _CONTEXTS if tokens <= longest) or (longest,)
    if args.context is not None:
        contexts = _numbers("--context", args.context, min(longest, TOKENS_MAX))
    batches = _BATCHES if args.batch is None else _numbers("--batch", args.batch, 1 << 20)
    prompt, output = _MIX if args.mix is None else _mix(args.mix)
    if prompt + output > longest:
        raise ConfigError(
            f"--mix {prompt}:{output}: the engines take up to {longest:,} tokens together"
        )
    if args.mix is None:
        assumed.append(Assumption("--mix", f"{prompt}:{output}", "default"))
    ttl_s = _TTL_S if args.ttl_s is None else args.ttl_s
    if args.ttl_s is None:
        assumed.append(Assumption("--ttl-s", f"{ttl_s:g}", "default"))
    for option, value, most in (("--ttl-s", ttl_s, TTL_MAX_S), ("--tpot-s", args.tpot_s, 3600.0)):
        if value is not None and not (math.isfinite(value) and 0 < value <= most):
            raise ConfigError(f"{option} {value:g}: seconds above 0, up to {most:g}, are needed")
    storage, said = room_prices(args, tuple(STORAGE))
    assumed += said
    assumed.append(Assumption("HBM", "its share of the device's memory and price", "convention"))
    return Terms(contexts, batches, prompt, output, args.tpot_s, ttl_s, storage)


def _numbers(option: str, text: str, most: int) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not (word.isascii() and word.isdecimal() and 1 <= int(word[:12]) <= most):
            raise ConfigError(f"{option} {text!r}: numbers from 1 to {most:,}, with commas between")
    if len(words) > LIST_MAX:
        raise ConfigError(f"{option}: {len(words)} numbers: up to {LIST_MAX} are possible")
    return tuple(sorted({int(word) for word in words}))


def _mix(text: str) -> tuple[int, int]:
    words = text.split(":")
    known = all(w.isascii() and w.isdecimal() and 1 <= int(w[:12]) <= TOKENS_MAX for w in words)
    if len(words) != 2 or not known:
        raise ConfigError(f"--mix {text!r}: write PROMPT:OUTPUT in tokens, as 8192:1024")
    return int(words[0]), int(words[1])


def _priced(engine: Engine) -> Priced:
    kind, price, device = engine.kind, engine.price, _device(engine.kind)
    return Priced(
        kind.name,
        kind.role,
        kind.count,
        kind.spec.devices,
        device.name,
        f"{kind.layout.model} in {kind.layout.engine}, {kind.layout.kv_dtype}",
        price.dollars_per_gpu_hour,
        price.source,
    )


# -- what is shown ------------------------------------------------------------------------------


def show(result: Result, console: Console) -> None:
    """The plan for people: the advice first."""
    console.print(result.plan.advice, markup=False)
    for said in _head(result):
        console.print(said, markup=False)
    for name, (heads, lines) in tables(result.plan).items():
        made = Table(title=CAPTIONS[name], title_justify="left")
        for index, head in enumerate(heads):
            made.add_column(head, justify="right" if index else "left")
        for line in lines:
            made.add_row(*line)
        console.print(made)
    for assumed in result.assumed:
        console.print(f"assumed: {assumed.text()}", markup=False)


def _head(result: Result) -> list[str]:
    """What was priced."""
    lines = [
        f"kvatlas {result.version}: {result.plan.devices} devices, "
        f"${result.plan.dollars_per_hour:,.2f} per hour."
    ]
    for each in result.engines:
        lines.append(
            f"{each.count} × {each.engine} ({each.role}): {each.devices} × {each.device}, "
            f"{each.model}, ${each.dollars_per_gpu_hour:g} per device and hour."
        )
    return lines


_OF = ("engine", "way", "tier", "context", "position", "batch", "hit_share", "block_tokens")


def figures(found: Plan) -> Iterator[list[object]]:
    """A line per figure: its table, what it is of, its name, its value."""
    yield ["table", "of", "figure", "value"]
    for name in CAPTIONS:
        for row in getattr(found, name):
            values = msgspec.structs.asdict(row)
            keys = [key for key in _OF if key in values]
            of = " ".join(str(values[key]) for key in keys)
            for figure, value in values.items():
                if figure not in keys:
                    yield [name, of, figure, value]
