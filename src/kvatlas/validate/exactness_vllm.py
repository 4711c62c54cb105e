"""Runs the cases of `kvatlas.validate.exactness` on a real vLLM, in processes of its own.

One process computes the references, finds its own blocks again and saves state; a fresh one loads
it. Both run `kvatlas.connectors.vllm_greedy` with the Python of vLLM's virtual environment.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.connectors import vllm_greedy
from kvatlas.core.families import mla
from kvatlas.core.layout import Layout
from kvatlas.errors import ConfigError
from kvatlas.service import agent_wire as wire
from kvatlas.validate.answering import Child, today
from kvatlas.validate.exactness import (
    DECODE_TOKENS,
    INDEX_PARTS,
    LONG_MARGIN_TOKENS,
    Answer,
    Case,
    Finding,
    Report,
    bad_cases,
    good_cases,
    judge,
    middle_length,
    prompt_lengths,
)
from kvatlas.validate.tiny import TINY, tiny
from kvatlas.workload.models import load_config, load_layout

LOGPROBS = 20
POOL_BYTES = 256 << 20
_OTHER = 1  # added to the seed: the prompt whose state is swapped in

_MLA = (
    "vLLM's CPU backend computes wrong numbers from any cached prefix of an MLA model (without AMX"
    " it switches prefix caching off for that reason, and a connector would bring it back in"
    " silence): there is no exactness to validate. Run this on a GPU backend"
)


class Subject(msgspec.Struct, frozen=True):
    """A model to run: its directory, its layout, and whether its weights are to be made up.

    ``top_k_tokens``: the context that V4's indexer lets through whole; 0 without an indexer.
    """

    name: str
    folder: Path
    layout: Layout
    made_up: bool
    top_k_tokens: int = 0


def subject(model: str, scratch: Path) -> Subject:
    """A tiny model by name, or a directory with a real one. Raises ConfigError and LayoutError."""
    names = [t.name for t in TINY]
    if model in names:
        described = tiny(model)
        folder = scratch / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_bytes(described.config())
        block_tokens = described.block_tokens
    else:
        folder, block_tokens = Path(model), 32  # vLLM's CPU attention takes multiples of 32
    if model == "mla":
        raise ConfigError(_MLA)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{model!r} is neither {', '.join(names)} nor a directory with a config.json"
        )
    config = load_config(str(folder))
    if config.get("model_type") in mla.MODEL_TYPES:
        raise ConfigError(_MLA)
    if config.get("model_type") == "deepseek_v4":
        block_tokens = None
    layout = load_layout(str(folder), engine="vllm", block_tokens=block_tokens)
    top_k = config.get("index_topk")
    return Subject(
        name=model,
        folder=folder,
        layout=layout,
        made_up=model in names,
        top_k_tokens=4 * top_k if isinstance(top_k, int) else 0,
    )


def cases(what: Subject, lengths: Sequence[int] = (), faults: bool = True) -> list[Case]:
    """Everything that is tried on a model; ``lengths`` in place of the usual prompt lengths."""
    long = what.top_k_tokens + LONG_MARGIN_TOKENS if what.top_k_tokens else 0
    found = good_cases(what.layout, lengths or prompt_lengths(what.layout, long))
    if faults:
        found += bad_cases(what.layout, middle_length(what.layout), what.top_k_tokens)
        if long and (not lengths or max(lengths) > long):
            found += bad_cases(what.layout, long + 6, what.top_k_tokens, INDEX_PARTS)
    return found


def run(
    what: Subject,
    wanted: Sequence[Case],
    *,
    venv: Path,
    engine_path: Iterable[Path],
    seed: int,
    scratch: Path,
    fresh: bool = True,
    told: Callable[[Finding], None] = lambda _: None,
) -> Report:
    """Runs the cases and judges them. ``fresh`` False does it all in one process, for haste.

    Raises `EngineError` with the end of the engine's log where a process fails.
    """
    child = Child(vllm_greedy.__file__, venv, engine_path, scratch)
    memory = Path("/dev/shm")
    store = Path(tempfile.mkdtemp(prefix="kvatlas-exact-", dir=memory if memory.is_dir() else None))
    written, read = _runs(what.layout, wanted, seed)
    try:
        if fresh:
            answers = child.run(_job(what, store, written, {}))
            answers |= child.run(_job(what, store, read, answers)) if read else {}
        else:
            answers = child.run(_job(what, store, [*written, *read], {}))
    finally:
        shutil.rmtree(store, ignore_errors=True)
    findings = []
    for case in wanted:
        reference = answers[Case(case.prompt_tokens, 0, "cold").name()]
        findings.append(judge(case, reference, answers[case.name()]))
        told(findings[-1])
    return Report(
        model=what.name,
        runtime=child.runtime("vllm"),
        torch=child.torch(),
        state=what.layout.state_digest(),
        seed=seed,
        date=today(),
        fresh=fresh,
        decode_tokens=DECODE_TOKENS,
        findings=findings,
    )


def text(seed: int, count: int) -> list[int]:
    """Token ids of one prompt: a longer one of the same seed continues it."""
    return [(i * 7919 + seed * 613 + (i * i * seed) % 97) % 3900 + 10 for i in range(count)]


def _runs(
    layout: Layout, wanted: Sequence[Case], seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The engine's runs in their order: those that write state, and those that read it."""
    written: list[dict[str, Any]] = []
    read: list[dict[str, Any]] = []
    for n in sorted({case.prompt_tokens for case in wanted}):
        mine = [case for case in wanted if case.prompt_tokens == n]
        reference = Case(n, 0, "cold").name()

        def go(id: str, params: dict[str, Any], *, n: int = n, **more: Any) -> dict[str, Any]:
            prompt = text(more.pop("seed", seed), n)
            return {"id": id, "prompt": prompt, "params": params, "forget": True, **more}

        positions = sorted({c.position for c in mine if c.position} | {layout.grid_tokens})
        positions = [p for p in positions if p < n]
        save = {"save": [[f"{n}-{p}", p] for p in positions]} if positions else {}
        written.append(go(reference, save, like=""))
        for case in mine:
            if case.way == "local":
                written.append(go(case.name(), {}, like=reference, forget=False))
        if any(case.fault and case.fault.how == "swap" for case in mine):
            swapped = {"save": [[f"other-{n}-{p}", p] for p in positions]}
            written.append(go(f"{n}-other", swapped, like="", seed=seed + _OTHER))
        for case in mine:
            at = case.position
            load: dict[str, Any] = {"load": f"{n}-{at}", "at": at}
            if case.fault:
                load["fault"] = [case.fault.part, case.fault.how, f"other-{n}-{at}"]
            if case.way == "load":
                read.append(go(case.name(), load, like=reference))
            elif case.way == "minimal":
                read.append(go(case.name(), load | {"minimal": True}, like=reference))
            elif case.way == "again":
                read.append(go(case.name(), {}, like=reference, forget=False))
            elif case.way in ("resaved", "second"):
                first = at if case.way == "resaved" else layout.grid_tokens
                record, least = f"{case.way}-{n}-{at}", {"minimal": True}
                saving = {"load": f"{n}-{first}", "at": first, "save": [[record, at]]} | least
                read.append(go(f"{case.name()}-saving", saving, like=reference))
                again = load | {"load": record} | (least if case.way == "resaved" else {})
                read.append(go(case.name(), again, like=reference))
    return written, read


def _job(
    what: Subject, store: Path, runs: list[dict[str, Any]], known: dict[str, Answer]
) -> dict[str, Any]:
    """What `vllm_greedy` reads."""
    layout = what.layout
    settings: dict[str, Any] = {
        "kv_cache_memory_bytes": POOL_BYTES,
        # Steps of one grid block: a resume cuts the rest of the prompt as the reference does.
        "max_num_batched_tokens": layout.grid_tokens,
        "max_num_seqs": 1,
        "max_model_len": max(len(r["prompt"]) for r in runs) + DECODE_TOKENS,
    }
    if what.made_up:
        settings["load_format"] = "dummy"
    v4 = layout.tensor_parallel == "replicated"  # vLLM chooses its blocks itself
    if not v4:
        settings["block_size"] = layout.grid_tokens
    return {
        "model": str(what.folder.absolute()),
        "settings": settings,
        "seed_weights": what.made_up and not v4,  # V4's come from the shim
        "store": str(store),
        "parts": parts(layout),
        "tokens": DECODE_TOKENS,
        "logprobs": LOGPROBS,
        "reference": known,
        "runs": runs,
    }


def parts(layout: Layout) -> list[dict[str, Any]]:
    """The components as `vllm_probe` recognises them: by kind, window, block and page."""
    return [msgspec.structs.asdict(part) for part in wire.parts_of(layout)]
