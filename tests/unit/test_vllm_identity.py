"""What an engine was told otherwise than its config.json says must be in its keys."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvatlas.connectors.vllm_identity import config_of, name_of, names_served, variant_of


def model_of(folder: Path, **told: Any) -> SimpleNamespace:
    """As vLLM's ModelConfig, in what is read of it."""
    config = {"model_type": "llama", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    plain: dict[str, Any] = {
        "model": str(folder),
        "revision": None,
        "served_model_name": None,
        "hf_overrides": {},
        "quantization": None,
        "dtype": "torch.bfloat16",
        "hf_config": SimpleNamespace(to_dict=lambda: config | told.get("hf_overrides", {})),
    }
    return SimpleNamespace(**plain | told)


def test_an_engine_that_goes_by_its_config_has_no_variant(tmp_path: Path) -> None:
    plain = model_of(tmp_path)
    assert variant_of(plain) == ""
    assert config_of(plain) == (tmp_path / "config.json").read_bytes()
    assert name_of(plain) == str(tmp_path)
    assert names_served(plain) == (str(tmp_path),)


@pytest.mark.parametrize(
    "told",
    [
        {"hf_overrides": {"rope_theta": 5e5}},
        {"quantization": "fp8"},
        {"dtype": "torch.float16"},
    ],
)
def test_what_makes_other_bytes_is_a_variant(tmp_path: Path, told: dict[str, Any]) -> None:
    assert variant_of(model_of(tmp_path, **told))
    assert variant_of(model_of(tmp_path, **told)) == variant_of(model_of(tmp_path, **told))


def test_a_quantization_that_the_config_tells_is_none_on_the_way_in(tmp_path: Path) -> None:
    model = model_of(tmp_path, quantization="fp8")
    config = {"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert variant_of(model) == ""


def test_overrides_are_in_the_config_that_is_told(tmp_path: Path) -> None:
    told = json.loads(config_of(model_of(tmp_path, hf_overrides={"rope_theta": 5e5})))
    assert told["rope_theta"] == 5e5


def test_revision_and_names(tmp_path: Path) -> None:
    model = model_of(tmp_path, revision="main2", served_model_name=["a", "b"])
    assert name_of(model) == f"{tmp_path} main2"
    assert names_served(model) == ("a", "b")
    assert names_served(model_of(tmp_path, served_model_name="a")) == ("a",)
