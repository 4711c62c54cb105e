"""Eviction policies, one file each, named as in their papers, and what else decides over life.

``base`` has the interface. Those that evict: ``lru``, ``fifo``, ``lfu``, ``s3fifo``, ``gdsf``,
``lru_sink``, ``prefix_tree``, ``attention``. ``speculative`` says what to bring up before it is
asked for, ``checkpoints`` at which positions of a prompt to keep a resume point.
"""
