"""What an engine computes with: its layout, its fingerprint, and how /v1/models lists it."""

from __future__ import annotations

from pathlib import Path

from kvatlas.config import WorkerConfig
from kvatlas.core.keys import Fingerprint
from kvatlas.core.layout import Layout, drafted
from kvatlas.errors import ConfigError, LayoutError
from kvatlas.service.probe import Description
from kvatlas.workload.models import load_config, load_layout

#: Of one whose layout is not known: nothing is believed to be cached there.
UNKNOWN = Layout(model="", engine="", kv_dtype="", grid_tokens=1 << 30, components=(), groups=())


def configured_layout(worker: WorkerConfig, draft: bool = False) -> Layout | None:
    """What its configuration says; None where it leaves it to the engine. Raises ConfigError."""
    if worker.layout == "auto":
        return None
    try:
        return _layout(worker.layout, worker, draft)
    except LayoutError as error:
        raise ConfigError(f"worker {worker.name!r}: layout: {error}") from error


def told_layout(config: WorkerConfig, told: Description, draft: bool) -> Layout:
    """From the model's own config where it can be read. Raises LayoutError."""
    if not told.model_path:
        raise LayoutError("the engine does not tell where its model is")
    path = Path(told.model_path)
    model = told.model_path if path.exists() else path.name
    # DeepSeek V4 reports the step of its hash chain as its block size, not its block.
    composite = load_config(model).get("model_type") == "deepseek_v4"
    block = None if composite or not told.block_tokens else told.block_tokens
    return _layout(model, config, draft, block)


def _layout(
    model: str, worker: WorkerConfig, draft: bool, block_tokens: int | None = None
) -> Layout:
    """With its draft where that is described; else such that no promise counts on it."""

    def load(draft: bool) -> Layout:
        return load_layout(
            model,
            engine="sglang" if worker.engine == "sglang" else "vllm",
            kv_dtype=worker.kv_dtype,
            block_tokens=block_tokens,
            draft=draft,
        )

    layout = load(False)
    if not draft:
        return layout
    if model.isdecimal():
        return drafted(layout)
    try:
        return load(True)
    except LayoutError:
        return drafted(layout)


def fingerprint_of(config: WorkerConfig, told: Description, layout: Layout) -> Fingerprint:
    """Who has the same may share what is cached."""
    ranks = config.tensor_parallel or told.tensor_parallel
    by_head = layout.tensor_parallel != "replicated"
    return Fingerprint(
        model=told.model_path or ",".join(told.models),
        weights_digest=config.weights_digest,
        engine=told.engine,
        engine_version=told.version,
        layout_digest=layout.digest(),
        block_tokens=layout.grid_tokens,
        kv_dtype=told.kv_dtype,
        tensor_parallel=f"{ranks}" if by_head and ranks > 1 else "",
        draft_mode="draft" if config.draft or told.draft else "",
        hash_algorithm=dict(told.facts).get("prefix_caching_hash_algo", ""),
    )


def entries(told: Description) -> tuple[dict[str, object], ...]:
    """As the engine's own /v1/models lists what it serves."""
    base: dict[str, object] = {"object": "model", "created": 0, "owned_by": told.engine}
    models = [
        {"id": name, **base, "max_model_len": told.context_tokens or None} for name in told.models
    ]
    adapters = [{"id": a.name, **base, "parent": a.base, "root": a.path} for a in told.adapters]
    return (*models, *adapters)
