"""kvatlas: where every KV block lives, how far it can be resumed, and what that costs in seconds."""

__version__ = "0.1.0"
