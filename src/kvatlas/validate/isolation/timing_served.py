"""The same prober before the real gateway: real sockets, stub engines, virtual time, tenants.

The prober has credentials of its own and sends the holder's name as the cache salt in each request.
Beside the times, all that it is told must be the same in both twins: status, headers, usage, text.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from kvatlas.config import Config, KeysConfig, WorkerConfig
from kvatlas.config_tenants import TenantsConfig, digest_of
from kvatlas.sim.world import Play
from kvatlas.validate.isolation.timing import BLOCK_TOKENS, HOLDER, Case
from kvatlas.validate.parity_loop import QuietLoop
from kvatlas.validate.parity_served import Served
from kvatlas.validate.parity_values import Scenario, scenario
from kvatlas.workload.trace import Trace, TraceRequest

_SECRET = b"the secret of gateways and agents"


class Told(msgspec.Struct, frozen=True):
    """All that one client sees of its answer, but when it came."""

    status: int
    headers: tuple[tuple[str, str], ...]
    usage: str
    text: str


class Probed:
    """A `timing.Run`. ``told``: per run, what each request's client was told."""

    def __init__(self) -> None:
        self.told: list[dict[int, Told]] = []

    def __call__(self, case: Case, requests: Sequence[TraceRequest]) -> Mapping[int, float]:
        """Seconds from a request to its first token, as its client sees them."""
        trace = Trace(case.name, "made", BLOCK_TOKENS, lambda: iter(requests))
        with tempfile.TemporaryDirectory() as folder:
            run = _Guarded(scenario(case.cluster, trace, Play()), Path(folder))
            with asyncio.Runner(loop_factory=QuietLoop) as runner:
                runner.run(run.play())
        self.told.append({int(name): _told(run, name) for name in run.answers})
        return {i: run.answers[str(i)].times[0] - at for i, at in run.asked_at.items()}


class _Guarded(Served):
    def __init__(self, scenario: Scenario, folder: Path) -> None:
        super().__init__(scenario, folder / "gateway.kvr")
        self.asked_at: dict[int, float] = {}
        names = sorted({request.scope for request in scenario.requests})
        secret, self._tenants = folder / "secret", folder / "tenants.toml"
        self._secret = secret
        secret.write_bytes(_SECRET)
        tables = (f'[[tenant]]\nname = "{n}"\nkeys = ["{digest_of(_key(n))}"]\n' for n in names)
        self._tenants.write_text("\n".join(tables))

    def config(self, workers: list[WorkerConfig]) -> Config:
        return msgspec.structs.replace(
            super().config(workers),
            keys=KeysConfig(secret_file=str(self._secret)),
            tenants=TenantsConfig(file=str(self._tenants)),
        )

    def more(self, request: TraceRequest) -> dict[str, object]:
        return {"cache_salt": HOLDER}

    def headers(self, request: TraceRequest) -> list[tuple[bytes, bytes]]:
        self.asked_at[request.index] = asyncio.get_running_loop().time()
        return [(b"authorization", f"Bearer {_key(request.scope)}".encode())]


def _key(name: str) -> str:
    return f"kva_the key of {name}".replace(" ", "_")


def _told(run: Served, name: str) -> Told:
    answer = run.answers[name]
    headers = tuple(sorted((k, v) for k, v in answer.headers.items() if k != "date"))
    usage = msgspec.json.encode(answer.usage).decode()
    return Told(answer.status, headers, usage, answer.text() or answer.error)
