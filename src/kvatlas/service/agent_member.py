"""What an engine that says hello computes with, as what must agree before it may share."""

from __future__ import annotations

import msgspec

from kvatlas.core.compat import Member
from kvatlas.core.families import layout_from_config
from kvatlas.core.keys import Fingerprint
from kvatlas.core.layout import Component, Compute, Layout, Rule
from kvatlas.errors import EngineError, LayoutError
from kvatlas.service import agent_wire as wire
from kvatlas.workload.proofs import Runtime, load_proofs, settled

POOLS_MAX = 64
PAGE_TOKENS_MAX = 1 << 16
PAGE_BYTES_MAX = 1 << 32


def member_of(hello: wire.Hello) -> Member:
    """Raises EngineError where the model's state cannot be described, or booked."""
    layout = _of_pools(hello) if hello.pools else _of_config(hello)
    by_head = layout.tensor_parallel == "by_head"
    fingerprint = Fingerprint(
        model=hello.model,
        weights_digest=hello.weights_digest,
        engine=hello.engine,
        engine_version=hello.engine_version,
        layout_digest=layout.digest(),
        block_tokens=layout.grid_tokens,
        kv_dtype=hello.kv_dtype,
        tensor_parallel=f"{hello.ranks}" if by_head and hello.ranks > 1 else "",
        hash_algorithm=hello.hash_algorithm,
        variant=hello.variant,
    )
    return Member(hello.names, fingerprint, layout)


def _of_config(hello: wire.Hello) -> Layout:
    """Of an engine whose blocks follow from its model's config."""
    try:
        layout = layout_from_config(
            msgspec.json.decode(hello.config, type=dict[str, object]),
            engine="vllm",
            kv_dtype=hello.kv_dtype,
            block_tokens=hello.block_tokens or None,
        )
    except (LayoutError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EngineError(f"model {hello.model!r}: {error}") from error
    runtime = Runtime(hello.engine, hello.engine_version, hello.device)
    return settled(layout, runtime, load_proofs())[0]


def _of_pools(hello: wire.Hello) -> Layout:
    """Of an engine that tells its pools, whose form says whose share of the bytes a page is."""
    page = hello.block_tokens
    names = {pool.name for pool in hello.pools}
    if len(names) != len(hello.pools) or len(names) > POOLS_MAX:
        raise EngineError(f"pools have names of their own, {POOLS_MAX} at most: {sorted(names)}")
    if not 0 < page <= PAGE_TOKENS_MAX:
        raise EngineError(f"a page has 1 to {PAGE_TOKENS_MAX} tokens, not {page}")
    if bad := [p.name for p in hello.pools if not 0 < p.page_bytes <= PAGE_BYTES_MAX]:
        raise EngineError(f"a page has 1 to {PAGE_BYTES_MAX} bytes: {', '.join(bad)}")
    if all(pool.trailing for pool in hello.pools):
        raise EngineError("no pool has something of every page: prefixes cannot be told apart")
    return Layout(
        model=hello.model,
        engine=hello.engine,
        kv_dtype=hello.kv_dtype,
        grid_tokens=page,
        components=tuple(
            Component(
                pool.name,
                Rule.WINDOW if pool.trailing else Rule.CHAIN,
                1,
                page,
                pool.page_bytes,
                pool.page_bytes / page,
                window_tokens=page if pool.trailing else 0,
                pool=pool.form,
            )
            for pool in hello.pools
        ),
        groups=(),
        compute=_compute(hello),
    )


def _compute(hello: wire.Hello) -> Compute | None:
    """What its prefill costs; None where we do not know the model: then tokens are counted."""
    try:
        config = msgspec.json.decode(hello.config, type=dict[str, object])
        return layout_from_config(config, engine=hello.engine).compute
    except (LayoutError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
