"""Model configs: those that ship with kvatlas by name, and others from disk."""

from __future__ import annotations

from codecs import BOM_UTF8
from importlib import resources
from pathlib import Path

import msgspec

from kvatlas.core.families import layout_from_config
from kvatlas.core.layout import Layout, plain
from kvatlas.errors import LayoutError

MAX_CONFIG_BYTES = 4 << 20


def known_models() -> tuple[str, ...]:
    """Names of the configs that ship with kvatlas, sorted."""
    found = resources.files("kvatlas").joinpath("models").iterdir()
    return tuple(sorted(f.name.removesuffix(".json") for f in found if f.name.endswith(".json")))


def load_config(model: str) -> dict[str, object]:
    """The config of a known model (by name, in any case), a config.json, or a model's directory.

    Raises `LayoutError` where there is no such model or file, and where the file is no JSON object.
    """
    if model.lower() in known_models():
        source = resources.files("kvatlas").joinpath("models", f"{model.lower()}.json")
        return msgspec.json.decode(source.read_bytes(), type=dict[str, object])
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise LayoutError(
            f"{model!r} is neither a known model ({', '.join(known_models())}) nor a readable"
            f" config.json: {error.strerror or error}"
        ) from error
    if len(data) > MAX_CONFIG_BYTES:
        raise LayoutError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes: this is no config.json")
    try:
        return msgspec.json.decode(data.removeprefix(BOM_UTF8), type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LayoutError(f"{path}: not a JSON object: {error}") from error


def load_layout(
    model: str,
    *,
    engine: str,
    kv_dtype: str = "auto",
    indexer_dtype: str = "fp8",
    block_tokens: int | None = None,
    draft: bool = False,
) -> Layout:
    """The layout of a known model, a config.json or a directory; of a plain block size as text.

    For the arguments and errors see `kvatlas.core.families.layout_from_config`.
    """
    if model.isdecimal():
        tokens = int(model)
        if not 1 <= tokens <= 1 << 16:
            raise LayoutError(f"a plain block size must be between 1 and 65536 tokens, got {model}")
        return plain(tokens, engine=engine)
    return layout_from_config(
        load_config(model),
        engine=engine,
        kv_dtype=kv_dtype,
        indexer_dtype=indexer_dtype,
        block_tokens=block_tokens,
        draft=draft,
        model=model.lower() if model.lower() in known_models() else "",
    )
