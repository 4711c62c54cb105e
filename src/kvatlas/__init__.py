"""kvatlas: where every KV block lives, how far it can be resumed, what that costs in seconds."""

__version__ = "0.1.0"
