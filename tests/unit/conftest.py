"""Fixtures that several files of unit tests use."""

from tokens_kit import local, model_dir, other_dir

__all__ = ["local", "model_dir", "other_dir"]
