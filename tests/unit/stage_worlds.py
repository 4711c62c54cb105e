"""Sound facts of every stage, for tests to break one thing in."""

from __future__ import annotations

from typing import Any

import msgspec

from kvatlas.core.transports import Moved
from kvatlas.report.latency import Report, Timing, report
from kvatlas.validate.counters import Counters
from kvatlas.validate.stages.facts import (
    AgentSeen,
    Baseline,
    Counted,
    EngineSeen,
    Outage,
    Phase,
    Reply,
    RequestSet,
    StageA,
    StageB,
    StageC,
    StageD,
    StageE,
    StoreSample,
)

COUNT, PROMPT, BLOCK = 30, 1024, 32
SETTINGS = {
    "model": "org/model",
    "model_digest": "sha256:1",
    "runtime": "vllm 0.32.0",
    "tensor_parallel": "8",
    "context_tokens": "65536",
    "weights_dtype": "bfloat16",
    "kv_dtype": "bfloat16",
    "graphs": "FULL",
    "speculation": "off",
    "hisparse": "off",
    "connector": "none",
    "shared_store": "none",
    "block_tokens": str(BLOCK),
    "layout": "aa",
    "tokenizer": "ids 1",
    "pool_tokens": "100000",
}
DECLARED = {"image": "registry/vllm@sha256:2"}
REQUESTS = RequestSet("d1", COUNT, PROMPT, 8, 65536)


def load(ttft_s: float = 0.2, tpot_s: float = 0.01, count: int = COUNT, failed: int = 0) -> Report:
    timings = [Timing(ttft_s, ttft_s + 7 * tpot_s, 8) for _ in range(count)]
    return report(timings, failed=failed, duration_s=count * (ttft_s + 7 * tpot_s))


BASELINE = Baseline(
    SETTINGS | DECLARED, REQUESTS, tuple(f"answer {i}" for i in range(COUNT)), load(), 8
)


def engine(name: str = "e", role: str = "combined", **other: str) -> EngineSeen:
    return EngineSeen(name, role, {k: v for k, v in (SETTINGS | other).items() if v})


def replies(count: int = COUNT, **more: Any) -> tuple[Reply, ...]:
    told: dict[str, Any] = {
        "prompt_tokens": PROMPT,
        "cached_tokens": 0,
        "seconds": 0.3,
        "ttft_s": 0.2,
    }
    return tuple(
        Reply(i, 200, BASELINE.answers[i], f"r-{i}", **(told | more)) for i in range(count)
    )


def counted(name: str = "e", external: int | None = 0, **more: Any) -> Counted:
    values: dict[str, Any] = {
        "engine": "vllm",
        "prompt_tokens": COUNT * PROMPT,
        "computed_tokens": COUNT * BLOCK,
        "local_hit_tokens": 0,
        "external_hit_tokens": external,
    }
    return Counted(name, Counters(**(values | more)))


def agent(name: str = "node", **more: Any) -> AgentSeen:
    values: dict[str, Any] = {
        "tiers": {"dram": {"held_bytes": 10, "capacity_bytes": 100, "units": 3}}
    }
    return AgentSeen(name, **(values | more))


def phase(count: int = COUNT, *, engine: str = "e", external: int | None = 0, **more: Any) -> Phase:
    values: dict[str, Any] = {
        "replies": replies(count),
        "engines": (counted(engine, external),),
        "agents": (),
    }
    return Phase(**(values | more))


def sound_a() -> StageA:
    return StageA(
        engine(),
        REQUESTS,
        (replies(), replies()),
        load(),
        declared=dict(DECLARED),
        hbm={"kv_pool_tokens": 1e5, "kv_usage_peak": 0.4},
        power_w=300.0,
    )


def sound_b() -> StageB:
    ids = {f"r-{i}": f"Received request cmpl-r-{i}-0" for i in range(COUNT)}
    moved = Moved(COUNT * 1e6, 1.0, COUNT, 0)
    engines = (
        Counted("p", Counters(engine="vllm"), Moved()),
        msgspec.structs.replace(counted("d", COUNT * (PROMPT - BLOCK)), moved=moved),
    )
    node = agent("node-d", rdma_bytes=int(COUNT * 1e6))
    return StageB(
        engine("p", "prefill", connector="NixlConnector"),
        engine("d", "decode", connector="NixlConnector"),
        BASELINE,
        Phase(replies(prefilled_by="p", worker="d"), engines, (node,)),
        declared=dict(DECLARED),
        transport_seen="rdma",
        logs={"p": dict(ids), "d": dict(ids)},
        shared={"node-d": ""},
        block_tokens=BLOCK,
        trial=Phase(replies(4, fallback="prefill: connect")),
    )


def sound_c() -> StageC:
    warm = COUNT * (PROMPT - BLOCK)
    node = agent(loaded_tokens={"dram": warm}, moved_bytes={"load dram": 10**9})
    return StageC(
        engine(connector="KvatlasConnector"),
        BASELINE,
        phase(replies=replies(ttft_s=0.2)),
        phase(external=warm, replies=replies(ttft_s=0.05), agents=(node,)),
        load(),
        shared={"node": ""},
        declared=dict(DECLARED),
    )


def sound_d() -> StageD:
    hits = COUNT * (PROMPT - BLOCK)
    few = 4 * (PROMPT - BLOCK)
    across = phase(engine="r", external=hits, agents=(agent(loaded_tokens={"object": hits}),))
    back = Outage(phase(4, engine="r"), phase(4, engine="r", external=few), few)
    samples = (StoreSample(50, 100), StoreSample(99, 100, 7), StoreSample(98, 100, 9))
    return StageD(
        writer=engine("w"),
        reader=engine("r"),
        baseline=BASELINE,
        across=across,
        same_tenant=phase(4, engine="r", external=few),
        other_tenant=phase(4, engine="r"),
        stranger=phase(4, engine="s"),
        ttl_before=phase(4, engine="r", external=few),
        ttl_after=phase(4, engine="r"),
        eviction=samples,
        filling=load(),
        full=phase(4, engine="w", agents=(agent(counts={"write_rests": 3}),)),
        dram=samples,
        index=back,
        node=back,
        outage=back,
        partition=back,
        dirty=phase(4, engine="r", agents=(agent(counts={"damaged": 4}),)),
        declared=dict(DECLARED),
    )


def sound_e() -> StageE:
    return StageE(
        change="fp8-kv",
        engines=(
            engine("d", "decode", kv_dtype="fp8_e4m3"),
            engine("p", "prefill", kv_dtype="fp8"),
        ),
        before=dict.fromkeys(("prefill", "decode"), SETTINGS | DECLARED),
        baseline=BASELINE,
        load_before=load(),
        load=load(ttft_s=0.15),
        first=replies(),
        again=replies(cached_tokens=PROMPT - BLOCK),
        hits_before=(PROMPT - BLOCK) / PROMPT,
        moved=Moved(1e6, 1.0, COUNT, 0),
        moves=True,
        declared=dict(DECLARED),
    )


SOUND = {"a": sound_a, "b": sound_b, "c": sound_c, "d": sound_d, "e": sound_e}
