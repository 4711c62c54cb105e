"""Measurements of kvatlas beside its peers, in one run: ``python -m benchmarks [NAME...]``."""
