"""Attention scores that ship with kvatlas: measured by ``kvatlas study attention``, by model."""

from __future__ import annotations

from importlib import resources

from kvatlas.core.policy.attention import AttentionScores
from kvatlas.workload.models import known_models


def measured_scores(model: str) -> AttentionScores | None:
    """What was measured on a known model (by name, in any case); None where nothing was."""
    name = model.lower()
    file = resources.files("kvatlas").joinpath("workload", "scores", f"{name}.json")
    if name not in known_models() or not file.is_file():
        return None
    return AttentionScores.decode(file.read_bytes(), file.name)
