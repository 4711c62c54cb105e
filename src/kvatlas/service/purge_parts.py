"""What becomes of a purged owner in each part of a cluster: the gateway's own, an agent, an engine.

What cannot be deleted is said as such, with the reason: a receipt that is silent on a part would
claim it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from kvatlas.core.forgetting import Floor
from kvatlas.core.keys import Keyring
from kvatlas.core.tenancy import TenantSalt
from kvatlas.errors import EngineError, RequestError
from kvatlas.service.agent_orders import ask
from kvatlas.service.agent_purge import PURGE, Gone, Order, Purged
from kvatlas.service.agents import Node
from kvatlas.service.decision_log import DecisionLog
from kvatlas.service.engines import Worker
from kvatlas.service.http import Headers
from kvatlas.service.http_client import HttpClient
from kvatlas.service.recording import Recorder
from kvatlas.service.steer import Inbound
from kvatlas.service.steering import KEYED_PATHS, Steering
from kvatlas.service.tokens import Tokenizer

AGENT_S = 120.0  # it waits for what is under way, and looks through its media
ENGINE_S = 30.0
ANSWER_BYTES_MAX = 1 << 20


class Engine(msgspec.Struct, frozen=True):
    """One that may be emptied."""

    worker: Worker
    client: HttpClient
    headers: Headers


class Here:
    """The gateway's own part."""

    def __init__(
        self,
        *,
        steering: Steering,
        log: DecisionLog,
        recorder: Recorder | None,
        tokenizer: Tokenizer | None,
        engines: Callable[[], Iterable[Worker]],
        client: HttpClient,
        headers: Callable[[], Headers],
    ) -> None:
        """``client`` asks engines, with these ``headers``."""
        self.log = log
        self._steering = steering
        self._recorder = recorder
        self._tokenizer = tokenizer
        self._engines = engines
        self._client = client
        self._headers = headers

    def engines(self) -> dict[str, Engine]:
        """All that there are, by name."""
        return {
            worker.name: Engine(worker, self._client, self._headers()) for worker in self._engines()
        }

    async def keys(
        self, body: dict[str, object], request: Inbound, salt: TenantSalt
    ) -> tuple[str, ...]:
        """Block keys, in hex, of a prompt of a tenant, as agents make them for each kind of engine
        that serves it; without what is public of it. Raises RequestError."""
        path = KEYED_PATHS[0] if "messages" in body else KEYED_PATHS[1]
        asked = Inbound(request.id, path, body, request.headers, tenant=salt)
        keys = await self._steering.keys_below(asked)
        if not keys:
            why = "no engine that is up has keys for this prompt"
            raise RequestError(why, status=409, code="not_purged")
        return tuple(key.hex() for key in keys)

    async def forget(self, meant: Callable[[str], bool]) -> tuple[Gone, ...]:
        """All that this process has in memory and in files. Raises OSError."""
        gone = [
            Gone(f"decision log: {place}", "deleted", count, size_bytes, left)
            for place, (count, size_bytes, left) in (await self.log.forget(meant)).items()
        ]
        if self._recorder is not None:
            size_bytes, left_bytes = self._recorder.forget()
            how, note = "deleted", "its KV events do not say whose they are: removed as a whole"
            files = int(size_bytes > 0), size_bytes, int(left_bytes > 0), left_bytes
            gone.append(Gone("recording", how, *files, note))
        if self._tokenizer is not None:
            self._tokenizer.forget()
            gone.append(Gone("texts kept for tokens", "reset", note="of every tenant"))
        gone += [
            Gone(
                "directory",
                "unreachable",
                note="of agents: deleted as they say so; of engines: keyed hashes without tokens, "
                "not asked for any more, gone when the engine evicts them",
            ),
            Gone(
                "replay buffers of engines",
                "untouched",
                note="they hold token ids of their last events, of every tenant, until those are "
                "pushed out by newer ones or the engine ends",
            ),
            Gone(
                "snapshots, traces and recordings elsewhere",
                "untouched",
                note="this gateway keeps no snapshot; files that kvatlas observe, a load or a "
                "log rotation wrote are the operator's",
            ),
        ]
        return tuple(gone)


async def order_agent(
    client: HttpClient,
    ring: Keyring,
    node: Node,
    *,
    floors: Sequence[Floor],
    keys: Sequence[bytes],
    store: bool,
    erase: Sequence[str] = (),
) -> tuple[Gone, ...]:
    """Ask one agent. Raises EngineError where it does not do it."""
    assert node.told is not None, "asked only while it is up"
    order = Order(node.told.life, tuple(floors), tuple(keys), store, tuple(erase))
    told = await ask(client, ring, node.config.url, PURGE, order, kind=Purged, timeout_s=AGENT_S)
    return told.gone


async def of_engine(engine: Engine, *, reset: bool, rotated: bool) -> Gone:
    """What becomes of it in an engine's own memory: a salt that is not used any more reaches
    nothing (``rotated``: it is not); emptied, it is gone, with all that others have there. Raises
    EngineError."""
    if not reset and not rotated:
        note = "a prompt's blocks stay there, and can be used by its tenant: see --reset-engines"
        return Gone("hbm", "untouched", note=note)
    if not reset:
        note = "by salt rotation: nobody asks for it; its blocks go when the engine evicts them"
        return Gone("hbm", "unreachable", note=note)
    told = engine.worker.description
    sglang = told is not None and told.engine == "sglang"
    path = "/flush_cache" if sglang else "/reset_prefix_cache"
    answer = await engine.client.request(
        "POST",
        engine.worker.config.url.rstrip("/") + path,
        headers=engine.headers,
        timeout_s=ENGINE_S,
        size_max=ANSWER_BYTES_MAX,
    )
    if answer.status != 200 or b'"success":false' in answer.body.replace(b" ", b""):
        said = answer.body[:200].decode(errors="replace")
        raise EngineError(
            f"{path}: status {answer.status}: {said} (vLLM has it with VLLM_SERVER_DEV_MODE=1)"
        )
    return Gone("hbm", "reset", note=f"{path}: emptied, for every tenant")
