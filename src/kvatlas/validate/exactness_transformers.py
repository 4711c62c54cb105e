"""The second opinion: transformers' own DeepSeek V4 and MLA, saved and restored at any token.

vLLM resumes only at multiples of 256, where no row is pending; here the state is also cut in the
middle of a ratio-4 and a ratio-128 entry, so that the rows that vLLM does not read at its positions
are seen to matter at others. Runs `kvatlas.connectors.transformers_greedy`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvatlas.connectors import transformers_greedy
from kvatlas.errors import ConfigError
from kvatlas.validate.answering import Child, today
from kvatlas.validate.exactness import DECODE_TOKENS, Case, Fault, Report, judge
from kvatlas.validate.exactness_vllm import LOGPROBS, text

MODELS = ("v4", "mla")
POSITIONS = (1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 260, 263, 384, 400)
FAULTS = ("zero", "flip", "swap")  # a tensor cannot be left out: nothing else would take its place
TAIL_TOKENS = 9  # of the prompt, behind the position
_VOCABULARY = 1000


def cases(model: str, positions: Sequence[int] = (), faults: bool = True) -> list[Case]:
    """Restores at each position; faults in each part alone on the grid, beside it, and where both
    kinds of rows are pending. Raises ConfigError for a model that is not one of `MODELS`."""
    if model not in MODELS:
        raise ConfigError(f"transformers runs {' or '.join(MODELS)} here, not {model!r}")
    found = [Case(p + TAIL_TOKENS, p, "load") for p in positions or POSITIONS]
    for position in (256, 260, 263) if faults and not positions else ():
        for part in _parts(model):
            if part == "c128_state" and not position % 128:
                continue  # no row is pending: there is nothing to damage
            found += [
                Case(position + TAIL_TOKENS, position, "load", Fault(part, how), "different")
                for how in FAULTS
            ]
    return found


def _parts(model: str) -> tuple[str, ...]:
    if model == "mla":
        return ("mla_kv",)
    chains = ("c4_kv", "c4_index", "c128_kv")
    return (*chains, "swa", "c4_state", "c4_index_state", "c128_state")


def run(
    model: str, wanted: Sequence[Case], *, venv: Path, seed: int, decode_tokens: int = DECODE_TOKENS
) -> Report:
    """Runs the cases and judges them. Raises `EngineError` where the process fails."""
    with tempfile.TemporaryDirectory() as scratch:
        child = Child(transformers_greedy.__file__, venv, (), Path(scratch))
        answers = child.run(
            {
                "model": model,
                "tokens": decode_tokens,
                "logprobs": LOGPROBS,
                "runs": list(_runs(wanted, seed).values()),
            }
        )
    findings = [judge(c, answers[_reference(c)], answers[c.name()]) for c in wanted]
    return Report(
        model=model,
        runtime=child.runtime("transformers"),
        torch=child.torch(),
        state="",
        seed=seed,
        date=today(),
        fresh=False,
        decode_tokens=decode_tokens,
        findings=findings,
    )


def _reference(case: Case) -> str:
    """The same prompt cut in the same place, on the cache that computed it."""
    return Case(case.prompt_tokens, case.position, "cold").name()


def _runs(wanted: Sequence[Case], seed: int) -> dict[str, dict[str, Any]]:
    runs: dict[str, dict[str, Any]] = {}
    for case in wanted:
        run = {
            "position": case.position,
            "prompt": [t % _VOCABULARY for t in text(seed, case.prompt_tokens)],
            "other": [t % _VOCABULARY for t in text(seed + 1, case.prompt_tokens)],
        }
        reference, name = _reference(case), case.name()
        runs.setdefault(reference, {"id": reference, **run, "restore": False, "fault": None})
        fault = [case.fault.part, case.fault.how] if case.fault else None
        runs[name] = {"id": name, **run, "restore": True, "fault": fault}
    return runs
