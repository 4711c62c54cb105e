"""Whether tenants are apart: shown by many operations, by real stores, by what latency tells."""
