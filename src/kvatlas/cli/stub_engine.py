"""``kvatlas stub-engine``: engines without a model, for tests, demos and load experiments."""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
from pathlib import Path

import msgspec
import uvloop

from kvatlas.config_tls import TlsConfig
from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.connectors.stub_text import FileTokenizer, TextTokenizer, WordTokenizer
from kvatlas.connectors.stub_wire import EVENT_FORMATS
from kvatlas.core.layout import Layout
from kvatlas.dataplane.tls import Trust
from kvatlas.errors import ConfigError
from kvatlas.workload.device import DEVICES, Device
from kvatlas.workload.models import known_models, load_config, load_layout
from kvatlas.workload.pool import Pool, pool_blocks
from kvatlas.workload.profiles import read_profiles
from kvatlas.workload.shape import shape_of
from kvatlas.workload.spec import EngineSpec

STEP_TOKENS = 8192  # that one step may compute

_EPILOG = f"""\
Each engine serves OpenAI's interface and vLLM's own paths, publishes KV events and keeps a prefix
cache as the layout's components demand. Its answers are a digest of every piece of state that it
resumed from: the same prompt gives the same words, and damage to any piece changes them.

When all engines listen, one line of JSON tells where:
  {{"engines":[{{"name":"stub-0","url":"http://127.0.0.1:9100","events":"tcp://…","replay":"tcp://…"}}]}}

known layouts: {", ".join(known_models())}

examples:
  kvatlas stub-engine --count 8 --port 9100 --layout deepseek-v4-flash --device H200
  kvatlas stub-engine --layout ./config.json --time-scale 0.05 --ports-file ports.json
  kvatlas stub-engine --layout 16 --prefill-tokens-per-s 8000 --decode-step-s 0.02

for tests, on every engine:
  GET  /stub/state     counters, cache and digest
  POST /stub/fault     fail_next, fail_status, delay_s, cut_after_tokens, health_status
  POST /stub/pace      compute, attention, memory, step: these parts take so much longer from now on
  POST /stub/damage    {{"group": 0}}: turn over the bytes of that group's blocks
  POST /stub/events    skip, payloads (hexadecimal): gaps and garbage on the event socket
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "stub-engine",
        description="Run engines without a model, many in one process.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--count", type=int, default=1, metavar="N", help="engines to run (1)")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=int, default=0, help="first HTTP port, the next follow (0: free ones)")
    add("--events-port", type=int, default=0, help="first port for KV events, two per engine (0)")
    add("--ports-file", type=Path, metavar="FILE", help="also write the line of JSON here")
    add(
        "--layout",
        default="deepseek-v4-flash",
        metavar="L",
        help="a known name, a config.json or its directory, or a plain block size "
        "(deepseek-v4-flash)",
    )
    add("--engine", choices=("vllm", "sglang"), default="vllm", help="whose layout (vllm)")
    add("--kv-dtype", default="auto", help="KV dtype of the layout (auto)")
    add("--model-name", default="", help="name that clients use (default: the layout's)")
    add("--adapter", action="append", default=[], metavar="NAME", help="a LoRA name (repeatable)")
    add("--tokenizer", type=Path, metavar="DIR", help="tokenizer.json and chat template")
    add("--context-tokens", type=int, default=1 << 20, metavar="N", help="longest request (1M)")
    add("--answer-tokens", type=int, default=64, metavar="N", help="where no limit is asked (64)")
    add("--event-format", choices=EVENT_FORMATS, default="vllm", help="wire form (vllm)")
    add("--topic", default="", help="ZMQ topic of the KV events")
    add("--no-events", action="store_true", help="no KV-event socket")
    add(
        "--tls",
        nargs=3,
        metavar=("CA", "CERT", "KEY"),
        help="HTTP over TLS, as kvatlas://engine/NAME; events stay plain, as those of real engines",
    )
    cache = parser.add_argument_group("cache")
    cache.add_argument(
        "--pool-tokens", type=int, metavar="N", help="room for one request of N tokens"
    )
    cache.add_argument("--pool-blocks", type=int, metavar="N", help="usable blocks of the pool")
    cache.add_argument("--pool-gib", type=float, metavar="G", help="KV memory in GiB")
    cache.add_argument(
        "--retention-tokens",
        default="0",
        metavar="N",
        help="windows kept: 0 the last of each prompt and junctions, N one per N, all (0)",
    )
    _add_time(parser)
    parser.set_defaults(run=run)


def _add_time(parser: argparse.ArgumentParser) -> None:
    timing = parser.add_argument_group("time")
    timing.add_argument(
        "--device", default="H200", metavar="D", help="one that kvatlas devices lists (H200)"
    )
    timing.add_argument(
        "--device-file",
        type=Path,
        metavar="FILE",
        help="[[device]] tables of your own;"
        " with one the model's layers, experts and exchanges count too",
    )
    timing.add_argument("--devices", type=int, default=1, metavar="N", help="that work together")
    timing.add_argument("--precision", default="fp8", help="of the arithmetic (fp8)")
    timing.add_argument("--prefill-tokens-per-s", type=float, metavar="R", help="measured, instead")
    timing.add_argument("--decode-step-s", type=float, metavar="S", help="measured, instead")
    timing.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="multiply every duration: 0.1 is ten times faster, 0 instant (1)",
    )
    timing.add_argument(
        "--spread",
        type=float,
        default=1.0,
        metavar="X",
        help="each engine has a pace of its own, each part of a step up to X times slower or"
        " faster (1: all equal)",
    )
    timing.add_argument("--seed", type=int, default=0, metavar="N", help="of those paces (0)")


def run(args: argparse.Namespace) -> int:
    layout = load_layout(args.layout, engine=args.engine, kv_dtype=args.kv_dtype)
    options = StubOptions(
        layout=layout,
        spec=_spec(args, layout),
        model_name=args.model_name or layout.model or "stub",
        count=args.count,
        host=args.host,
        port=args.port,
        events_port=args.events_port,
        events=not args.no_events,
        event_format=args.event_format,
        topic=args.topic,
        adapters=tuple(args.adapter),
        natural_output_tokens=args.answer_tokens,
        spread=args.spread,
        seed=args.seed,
        trust=Trust(TlsConfig(*args.tls), "engine") if args.tls else None,
    )

    def tokenizer() -> TextTokenizer:
        return FileTokenizer(args.tokenizer) if args.tokenizer else WordTokenizer()

    return uvloop.run(_serve(StubCluster(options, tokenizer), args.ports_file))


def _spec(args: argparse.Namespace, layout: Layout) -> EngineSpec:
    prefill, decode = args.prefill_tokens_per_s, args.decode_step_s
    measured = prefill is not None or layout.compute is None
    if measured:  # a plain block size tells no speed: figures of a 30B dense model on an H100
        prefill = 8000.0 if prefill is None else prefill
        decode = 0.02 if decode is None else decode
    retention = None if args.retention_tokens == "all" else _whole(args.retention_tokens)
    return EngineSpec(
        blocks=_blocks(args, layout),
        step_tokens=STEP_TOKENS,
        context_tokens=args.context_tokens,
        retention_tokens=retention,
        device=_device(args),
        shape=shape_of(load_config(args.layout)) if args.device_file and not measured else None,
        devices=args.devices,
        precision=args.precision,
        prefill_tokens_per_s=prefill,
        decode_step_s=decode,
        time_scale=args.time_scale,
    )


def _device(args: argparse.Namespace) -> Device:
    profiles = read_profiles(args.device_file) if args.device_file else DEVICES
    if args.device not in profiles:
        raise ConfigError(f"--device {args.device!r} is unknown: use one of {', '.join(profiles)}")
    return profiles[args.device]


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"--retention-tokens {text}: a whole number or all is needed")
    return int(text)


def _blocks(args: argparse.Namespace, layout: Layout) -> int:
    """The pool's size from whichever of the three options was given."""
    given = [v for v in (args.pool_tokens, args.pool_blocks, args.pool_gib) if v is not None]
    if len(given) > 1:
        raise ConfigError("give only one of --pool-tokens, --pool-blocks and --pool-gib")
    if args.pool_blocks is not None:
        return int(args.pool_blocks)
    if args.pool_gib is not None:
        if not math.isfinite(args.pool_gib):
            raise ConfigError(f"--pool-gib {args.pool_gib:g}: a number is needed")
        return pool_blocks(layout, int(args.pool_gib * (1 << 30)))
    tokens = args.pool_tokens if args.pool_tokens is not None else 1 << 20
    return Pool(layout, 1, step_tokens=STEP_TOKENS).peak_blocks(tokens)


async def _serve(cluster: StubCluster, ports_file: Path | None) -> int:
    """Runs until SIGTERM (status 0) or SIGINT (status 130)."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()
    for number, status in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        loop.add_signal_handler(number, _settle, stopped, status)
    async with cluster:
        line = msgspec.json.encode({"engines": cluster.addresses}).decode()
        if ports_file is not None:
            _write(ports_file, line)
        print(line, flush=True)
        return await stopped


def _settle(stopped: asyncio.Future[int], status: int) -> None:
    if not stopped.done():
        stopped.set_result(status)


def _write(path: Path, line: str) -> None:
    """All or nothing: a reader that waits for the file never sees half of it."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(line + "\n")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"--ports-file {path}: cannot be written: {error}") from error
