"""The compiled part of core: what it offers is said in `_native.pyi`.

There is no slower stand-in to fall back to: who runs without it would not notice. What it must do
is written in plain Python in `tests/twins`, for readers and for the tests.
"""

try:
    from kvatlas.core._native import KeyTable, NameTable, accelerated, chain, token_ids
except ImportError as error:
    raise ImportError(
        "kvatlas is not compiled for this Python: run `make setup`, or `pip install -e .` in the "
        f"environment that you use ({error})"
    ) from error

__all__ = ["KeyTable", "NameTable", "accelerated", "chain", "token_ids"]
