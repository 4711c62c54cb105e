"""What a resume really reads of DeepSeek V4's state in vLLM, in bytes that can be checked by hand.

Flash: window 2 x 37,440 x 43 = 3,219,840, and the newest block of ratio-4 state,
(32,832 + 8,640) x 21 = 870,912. Of the ratio-128 state nothing.
"""

from __future__ import annotations

import pytest

from kvatlas.workload.models import load_layout


@pytest.mark.parametrize(
    ("model", "kv_dtype", "minimal", "full"),
    [
        ("deepseek-v4-flash", "fp8", 4_090_752, 15_467_904),
        ("deepseek-v4-flash-0731", "fp8", 4_090_752, 15_467_904),
        ("deepseek-v4-pro", "fp8", 2 * 37_440 * 61 + 41_472 * 30, 23_340_672),
    ],
)
def test_the_minimal_resume_point(model: str, kv_dtype: str, minimal: int, full: int) -> None:
    layout = load_layout(model, engine="vllm", kv_dtype=kv_dtype)
    assert layout.has_minimal()
    assert layout.resume_point_bytes(minimal=True) == minimal
    assert layout.resume_point_bytes() == full


@pytest.mark.parametrize(
    ("model", "engine", "draft"),
    [
        ("deepseek-v4-flash", "sglang", False),
        ("deepseek-v4-flash", "vllm", True),  # a draft resumes between multiples of 128
        ("deepseek-v3", "vllm", False),
    ],
)
def test_elsewhere_the_full_point(model: str, engine: str, draft: bool) -> None:
    layout = load_layout(model, engine=engine, kv_dtype="fp8", draft=draft)
    assert not layout.has_minimal()
    assert layout.resume_point_bytes(minimal=True) == layout.resume_point_bytes()
