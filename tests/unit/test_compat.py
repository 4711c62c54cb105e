"""Who may share with whom: each thing that must agree, alone, and its name in the refusal."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.core.compat import Member, layout_differences, may_share, not_shared, why_not
from kvatlas.core.keys import Fingerprint
from kvatlas.core.layout import Layout
from kvatlas.workload.models import load_layout

FLASH = load_layout("deepseek-v4-flash", engine="vllm", kv_dtype="fp8")
PRINT = Fingerprint(
    model="v4",
    weights_digest="w1",
    tokenizer_digest="t1",
    chat_template_digest="c1",
    engine="vllm",
    engine_version="0.32.0",
    layout_digest=FLASH.digest(),
    block_tokens=256,
    kv_dtype="fp8_ds_mla",
    tensor_parallel="8",
    draft_mode="",
    hash_algorithm="sha256",
)


def changed(**fields: Any) -> Fingerprint:
    return msgspec.structs.replace(PRINT, **fields)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("block_tokens", 128),
        ("kv_dtype", "bf16"),
        ("tensor_parallel", "4"),
        ("weights_digest", "w2"),
        ("tokenizer_digest", "t2"),
        ("chat_template_digest", "c2"),
        ("draft_mode", "draft"),
        ("hash_algorithm", "xxhash"),
        ("engine", "sglang"),
        ("engine_version", "0.31.0"),
        ("layout_digest", "0"),
        ("variant", "dtype float16"),
    ],
)
def test_what_differs_alone_forbids_it_and_is_named(field: str, other: object) -> None:
    """vllm#42895: each of these was left out of somebody's check once."""
    assert may_share(PRINT, changed(**{field: other})) == [field]
    assert PRINT.digest() != changed(**{field: other}).digest()


def test_weights_decide_before_names() -> None:
    assert may_share(PRINT, changed(model="renamed")) == []
    assert PRINT.digest() == changed(model="renamed").digest()
    assert may_share(PRINT, changed(weights_digest="w2")) == ["weights_digest"]
    # one that says nothing of its weights is not taken for one that does
    silent = changed(weights_digest="")
    assert "weights_digest" in may_share(PRINT, silent)
    assert may_share(silent, silent) == []
    assert may_share(silent, msgspec.structs.replace(silent, model="renamed")) == ["model"]


FIELDS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["a", "b"]),
        "weights_digest": st.sampled_from(["", "x", "y"]),
        "kv_dtype": st.sampled_from(["fp8", "bf16"]),
        "block_tokens": st.sampled_from([16, 32]),
    }
)


@given(a=FIELDS, b=FIELDS)
def test_words_and_digest_agree(a: dict[str, Any], b: dict[str, Any]) -> None:
    left, right = Fingerprint(**a), Fingerprint(**b)
    reasons = may_share(left, right)
    assert (reasons == []) == (left.digest() == right.digest())
    assert reasons == may_share(right, left)


def _pro(**wish: Any) -> Layout:
    return load_layout("deepseek-v4-pro", **{"engine": "vllm", "kv_dtype": "fp8", **wish})


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (_pro(), "c4_kv: layers 21, 30"),  # layer count
        (load_layout("deepseek-v4-flash", engine="vllm", kv_dtype="bf16"), "kv_dtype"),
        (
            load_layout("deepseek-v4-flash", engine="vllm", kv_dtype="fp8", block_tokens=128),
            "grid_tokens 256, 128",  # compressed group page
        ),
        (
            load_layout("deepseek-v4-flash", engine="vllm", kv_dtype="fp8", draft=True),
            "group swa: lookahead 0, 1",
        ),
        (
            load_layout("deepseek-v4-flash", engine="vllm", kv_dtype="fp8", draft=True),
            "draft_swa: only on the other side",
        ),
        (load_layout("deepseek-v4-flash", engine="sglang", kv_dtype="fp8"), "engine vllm, sglang"),
    ],
)
def test_parts_of_layouts_are_named(other: Layout, named: str) -> None:
    found = layout_differences(FLASH, other)
    assert any(part.startswith(named) for part in found), found
    assert layout_differences(FLASH, FLASH) == []
    fingerprint = changed(layout_digest=other.digest())
    reasons = why_not(Member((), PRINT, FLASH), Member((), fingerprint, other))
    assert f"layout: {named}" in " ".join(reasons)


def test_engines_of_one_name_are_told_apart() -> None:
    def member(*names: str, **fields: Any) -> Member:
        return Member(names, changed(**fields), FLASH)

    members = {
        "a": member("m"),
        "b": member("m"),
        "c": member("m", weights_digest="w2"),
        "d": member("m", kv_dtype="bf16", engine_version=""),
        "e": member("other", weights_digest="w9"),
    }
    assert not_shared(members) == {
        "c": "'m': not with a: weights_digest w2, w1",
        "d": "'m': not with a: engine_version unknown, 0.32.0; kv_dtype bf16, fp8_ds_mla",
    }
    assert not_shared({}) == {}
    assert not_shared({"a": members["a"], "e": members["e"]}) == {}
