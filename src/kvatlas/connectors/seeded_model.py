"""Runs in an engine's environment: ``seeded_model.py DIRECTORY`` adds weights to a config.json.

Random ones, the same each time, that tell prompts apart: for engines whose own made-up weights are
all but zero.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Writes the weights beside the config."""
    import torch  # noqa: PLC0415  (only the engine's environment has these)
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    source = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=source)
        wide = parameter.dim() > 1
        parameter.data.copy_(noise * parameter.shape[-1] ** -0.5 if wide else 1 + noise / 10)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
