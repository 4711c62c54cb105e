"""Fixtures that several files of integration tests use."""

from feed_kit import atlas

__all__ = ["atlas"]
