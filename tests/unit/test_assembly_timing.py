"""``[gateway] health_timeout_s``: how long an engine may take to say that it is there."""

from __future__ import annotations

from kvatlas.config import Config, GatewayConfig, WorkerConfig
from kvatlas.service.assembly import Assembly
from kvatlas.service.engines import TIMING, Timing

WORKER = WorkerConfig(name="a", url="http://127.0.0.1:1")


def test_the_file_says_it_unless_who_assembles_does() -> None:
    plain = Config(worker=(WORKER,))
    slow = Config(worker=(WORKER,), gateway=GatewayConfig(health_timeout_s=7.0))
    assert Assembly(plain).timing == TIMING
    assert Assembly(slow).timing.timeout_s == 7.0
    assert Assembly(slow, timing=Timing(timeout_s=3.0)).timing.timeout_s == 3.0
