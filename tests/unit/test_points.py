"""Resume points: what one of them weighs in a store, and at which positions they are kept."""

from __future__ import annotations

import pytest

from kvatlas.core.policy.checkpoints import ENDS, ENDS_AND_JUNCTIONS, Spacing, spacing_of
from kvatlas.core.units import Sizes
from kvatlas.errors import ConfigError
from kvatlas.workload.models import load_layout


def test_the_minimal_point_of_v4_flash_is_a_quarter() -> None:
    layout = load_layout("deepseek-v4-flash", engine="vllm")
    whole, least = (Sizes(layout, minimal=minimal) for minimal in (False, True))
    far = 100
    assert whole.body_bytes == least.body_bytes == 1_002_240
    assert (whole.point_bytes(far), least.point_bytes(far)) == (15_467_904, 4_090_752)
    # A prompt of 4096 tokens with a point at each of its 16 positions.
    both = [16 * (s.body_bytes + s.point_bytes(far)) for s in (whole, least)]
    assert both == [263_522_304, 81_487_872]


def test_spacings_have_names() -> None:
    assert spacing_of("all") is None
    assert spacing_of("ends") is ENDS
    assert spacing_of("junctions") is ENDS_AND_JUNCTIONS
    assert spacing_of("1024") == Spacing(every_tokens=1024)
    for bad in ("", "none", "0", "-256", "1e3", "9" * 20):
        with pytest.raises(ConfigError, match="all, prompt-end, ends, junctions, or a number"):
            spacing_of(bad)
