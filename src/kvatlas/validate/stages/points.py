"""All acceptance points, stage by stage."""

from __future__ import annotations

from typing import Any

from kvatlas.validate.stages.judge_a import A
from kvatlas.validate.stages.judge_b import B
from kvatlas.validate.stages.judge_c import C
from kvatlas.validate.stages.judge_d import D
from kvatlas.validate.stages.judge_e import E
from kvatlas.validate.stages.values import Rule, Stage

#: The rules of each stage, in the order in which they are reported.
RULES: dict[Stage, tuple[Rule[Any], ...]] = {"a": A, "b": B, "c": C, "d": D, "e": E}
