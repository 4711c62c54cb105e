"""The staged proof of a cluster (seed document 000, section 5): points, evidence, verdicts."""
