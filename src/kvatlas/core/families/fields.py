"""Reading a model's config with suspicion: every value is typed, bounded and named when wrong."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvatlas.errors import LayoutError

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20  # of any hidden size, head count times dim, expert width


class Wanted(msgspec.Struct, frozen=True):
    """In which engine and how the model runs: all of a layout that the config does not say."""

    engine: str
    kv_dtype: str
    indexer_dtype: str
    block_tokens: int | None
    draft: bool
    model: str

    def no_draft(self) -> None:
        """Refuse a draft where the family does not describe one."""
        if self.draft:
            raise LayoutError(f"draft: the draft state of {self.model} is not described yet")


class Fields:
    """The fields of one config.json; of a multimodal model, of its language part.

    A field that stands in ``text_config`` and beside it with another value is contradictory.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        if not isinstance(config, Mapping):
            raise LayoutError("the config must be a JSON object")
        inner = config.get("text_config")
        if inner is not None and not isinstance(inner, Mapping):
            raise LayoutError("text_config must be a JSON object")
        self._outer: Mapping[str, object] = config if inner else {}
        self._fields: Mapping[str, object] = inner or config
        self.model_type = self._model_type()
        self._check_architecture()

    def _model_type(self) -> str:
        value = self._fields.get("model_type") or self._outer.get("model_type")
        if not isinstance(value, str) or not value:
            raise LayoutError("model_type is missing: a config.json names its architecture there")
        return value

    def _check_architecture(self) -> None:
        """``architectures`` must not name another model than ``model_type`` does."""
        names = self._fields.get("architectures")
        if self._outer or not isinstance(names, list) or not names or not names[0]:
            return
        stem = self.model_type.removesuffix("_text").replace("_", "")
        rest = str(names[0]).lower().removeprefix(stem)
        if rest == str(names[0]).lower() or rest[:1].isdigit():
            raise LayoutError(
                f"architectures {names[0]!r} contradicts model_type {self.model_type!r}"
            )

    def get(self, name: str) -> object:
        """The raw value, None where it is absent or null."""
        value = self._fields.get(name)
        outer = self._outer.get(name)
        if outer is None or outer == value:
            return value
        if value is None:
            return outer
        raise LayoutError(f"{name} contradicts itself: {outer!r} outside text_config, {value!r} in")

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def count(
        self, name: str, *, low: int = 1, high: int = MAX_WIDTH, default: int | None = None
    ) -> int:
        """A whole number between ``low`` and ``high``; ``default`` stands in for an absent one."""
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise LayoutError(f"{name} is missing in the config of a {self.model_type} model")
        if isinstance(value, bool) or not isinstance(value, int):
            raise LayoutError(f"{name} must be a whole number, got {value!r}")
        if not low <= value <= high:
            raise LayoutError(f"{name} must be between {low} and {high}, got {value}")
        return value

    def layers(self) -> int:
        return self.count("num_hidden_layers", high=MAX_LAYERS)

    def items(self, name: str) -> list[object] | None:
        """A list, one item per layer or more; None where it is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) > 2 * MAX_LAYERS:
            raise LayoutError(f"{name} must be a list with one item per layer")
        return list(value)


def index_key_bytes(dim: int, dtype: str) -> int:
    """Bytes of one indexer key: its values and one fp32 scale per 128 of them."""
    if dtype not in ("fp8", "fp4"):
        raise LayoutError(f"indexer_dtype {dtype!r} is not one of fp8, fp4")
    if dim % 128:
        raise LayoutError(f"index_head_dim must be a multiple of 128, got {dim}")
    return (dim if dtype == "fp8" else dim // 2) + dim // 128 * 4
