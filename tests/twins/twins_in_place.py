"""A pytest plugin: whatever runs, runs on the twins in place of the compiled part of core."""

import sys

import twins

sys.modules["kvatlas.core._native"] = twins
