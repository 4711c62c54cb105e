"""Agents of nodes as the gateway sees them: who is there, what each announces, whose keys agree.

An agent is asked over HTTP like an engine (`service.engines`) and followed like one
(`service.feed`). One that does not answer holds nothing for us: its engines are then as good as
what they have themselves. What it says counts for the engines of its node, and for each only where
both make the same keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from kvatlas.config import AgentConfig
from kvatlas.core.compat import Member, why_not
from kvatlas.core.dispatch import Input, Reset, Settle, Unsettle
from kvatlas.core.keys import Keyring
from kvatlas.core.records import Publisher
from kvatlas.core.shelves import Shelves
from kvatlas.errors import EngineError
from kvatlas.service.agent_front import DESCRIPTION, AgentDescription
from kvatlas.service.engines import Timing
from kvatlas.service.feed import Feed
from kvatlas.service.feed_socket import CURVE_HEADER, CURVE_KEY_CHARS, Curve
from kvatlas.service.http_client import HttpClient
from kvatlas.service.probe import ANSWER_BYTES_MAX, source_of

log = logging.getLogger(__name__)


class Node:
    """What is known of one agent."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.publisher = Publisher(config.name)
        self.up = False
        self.error = "not asked yet"
        self.told: AgentDescription | None = None
        self.asked_s = self.told_s = -1.0  # when, on the event loop's clock
        self.engines: tuple[Publisher, ...] | None = None  # as settled
        self.restarts = 0
        self.failures = 0


class Agents:
    """All that are configured. Lives on the event loop; `close` it."""

    def __init__(
        self,
        feed: Feed,
        client: HttpClient,
        *,
        tell: Callable[[Input], None],
        ranks: Callable[[str], Sequence[Publisher]],
        timing: Timing,
        curve: Curve | None = None,
    ) -> None:
        """``tell`` is the dispatcher; ``ranks`` says of which ranks a worker is made up now.
        ``curve``: of ``feed``, told to each agent; what one then announces in the clear is not
        listened to."""
        self._curve = curve
        self.nodes: dict[str, Node] = {}
        self._feed = feed
        self._client = client
        self._tell = tell
        self._ranks = ranks
        self._timing = timing
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def take(self, configs: Iterable[AgentConfig]) -> None:
        """These are the agents from now on; one whose settings changed begins anew."""
        wanted = {config.name: config for config in configs}
        for name, node in list(self.nodes.items()):
            if wanted.get(name) != node.config:
                await self._remove(name)
        for name, config in wanted.items():
            if name not in self.nodes:
                node = self.nodes[name] = Node(config)
                self._settle(node)
                watch = asyncio.create_task(self._watch(node), name=f"watch {name}")
                self._tasks[name] = watch

    def settle(self) -> None:
        """The ranks of a worker may be others now."""
        for node in self.nodes.values():
            self._settle(node)

    async def close(self) -> None:
        """Stops asking; what was said is left as it is."""
        for name in list(self._tasks):
            await self._end(name)

    async def _remove(self, name: str) -> None:
        await self._end(name)
        node = self.nodes.pop(name)
        self._feed.remove(node.publisher)
        self._tell(Unsettle(node.publisher))

    async def _end(self, name: str) -> None:
        task = self._tasks.pop(name)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def _settle(self, node: Node) -> None:
        engines = tuple(rank for worker in node.config.workers for rank in self._ranks(worker))
        if engines == node.engines:
            return
        known, node.engines = node.engines is not None, engines
        self._tell(Settle(node.publisher, engines, node.config.store))
        if known and node.up:  # it is settled anew, with nothing said
            self._feed.restarted(node.publisher, "its engines are others")

    # -- one of them ----------------------------------------------------------------------------

    async def _watch(self, node: Node) -> None:
        """Ask, wait, ask again. Ends only when it is cancelled."""
        while True:
            try:
                await self._look(node)
            except EngineError as error:
                self._failed(node, str(error))
            except Exception:
                log.exception("%s: asking it failed", node.config.name)
                self._failed(node, "asking it failed; see the log")
            timing = self._timing
            pause_s = timing.poll_s * 2.0 ** min(node.failures, 16)
            await asyncio.sleep(timing.poll_s if node.up else min(pause_s, timing.retry_max_s))

    async def _look(self, node: Node) -> None:
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        told = await self._ask(node.config.url.rstrip("/"))
        before, node.told = node.told, told
        node.asked_s, node.told_s = asked_s, loop.time()
        source = source_of(node.config.url, told.events, told.replay)
        # It is the agent that binds.
        source = msgspec.structs.replace(source, bind=False, curve_key=told.curve_key)
        if before is not None and before.life != told.life:
            node.restarts += 1
            self._feed.restarted(node.publisher, "its process started anew")
        self._feed.add(node.publisher, source)
        if not node.up:
            log.info("%s: up", node.config.name)
        node.up, node.error, node.failures = True, "", 0

    async def _ask(self, base: str) -> AgentDescription:
        url = base + DESCRIPTION
        curve = self._curve
        headers = [(CURVE_HEADER.encode(), curve.public.encode())] if curve is not None else []
        answer = await self._client.request(
            "GET", url, headers=headers, timeout_s=self._timing.timeout_s, size_max=ANSWER_BYTES_MAX
        )
        if answer.status != 200:
            said = answer.body[:200].decode("utf-8", "replace")
            raise EngineError(f"{url}: status {answer.status}: no agent's page: {said}")
        try:
            told = msgspec.json.decode(answer.body, type=AgentDescription)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise EngineError(f"{url}: not what an agent says of itself: {error}") from error
        if curve is not None and len(told.curve_key) != CURVE_KEY_CHARS:
            raise EngineError(f"{url}: it announces in the clear: start it with [tls], too")
        return told

    def _failed(self, node: Node, error: str) -> None:
        node.error = error
        node.failures += 1
        if node.up and node.failures >= self._timing.down_after:
            log.warning("%s: down: %s", node.config.name, error)
            node.up, node.told = False, None
            # Its memory may be gone; if it is not, it says all again when it is back.
            self._feed.remove(node.publisher)
            self._tell(Reset(node.publisher))

    def draining(self) -> list[Publisher]:
        """Those that save nothing more, and end soon."""
        nodes = self.nodes.values()
        return [node.publisher for node in nodes if node.told is not None and node.told.draining]

    def serving(self, agent: Publisher, root: str) -> tuple[str, str, str]:
        """Of an agent with an engine whose keys begin at ``root``: its URL, its life, and a name
        that the engine's model has there. Raises EngineError where there is none now."""
        node = self.nodes.get(agent.worker)
        if node is None or node.told is None:
            raise EngineError(f"{agent}: it does not answer")
        for served in node.told.engines.values():
            if served.root == root and served.member.names:
                return node.config.url.rstrip("/"), node.told.life, served.member.names[0]
        raise EngineError(f"{agent}: no engine of these keys is attached there")

    # -- for people -----------------------------------------------------------------------------

    def down(self) -> dict[str, str]:
        """Agents that do not answer, and why."""
        return {name: node.error for name, node in self.nodes.items() if not node.up}

    def report(self, shelves: Shelves) -> dict[str, object]:
        """All that is known of each, for people."""
        return {
            name: {
                "url": node.config.url,
                "up": node.up,
                "error": node.error,
                "restarts": node.restarts,
                "workers": list(node.config.workers),
                "draining": node.told is not None and node.told.draining,
                "engines": {
                    engine: "its pages have keys of its own: nothing is foreseen"
                    if names_pages(served.member)
                    else ""
                    for engine, served in (node.told.engines.items() if node.told else ())
                },
                "behind": not self._feed.idle(node.publisher),
                "held": {
                    tier.name.lower(): {"bodies": bodies, "points": points}
                    for tier, (bodies, points) in shelves.held(node.publisher).items()
                },
            }
            for name, node in self.nodes.items()
        }

    def strangers(self, members: Mapping[str, Member], ring: Keyring) -> dict[str, str]:
        """Engines that nothing is foreseen for from their agent's tiers, and why. ``members``: what
        the engines that are up compute with."""
        found: dict[str, str] = {}
        for node in self.nodes.values():
            if node.told is None:
                continue
            for worker in node.config.workers:
                if worker in members and (why := _why_apart(members[worker], node.told, ring)):
                    found[worker] = f"{node.config.name}: {why}"
        return found


def names_pages(member: Member) -> bool:
    """Does this engine name its pages itself (SGLang)? What its agent holds for it then has keys
    that no prompt can be looked up by, and nothing is foreseen; it is no fault of anybody."""
    return not member.layout.groups


def _why_apart(ours: Member, told: AgentDescription, ring: Keyring) -> str:
    """ "" where the agent makes the keys that we make for this engine."""
    root = ring.root(ours.fingerprint.digest()).hex()
    served = [s for s in told.engines.values() if set(s.member.names) & set(ours.names)]
    if any(s.root == root or names_pages(s.member) for s in served):
        return ""
    if not served:
        return "no engine of these names is attached there: start it with the agent's connector"
    for engine in served:
        if reasons := why_not(ours, engine.member):
            return f"it makes other keys than we do for this engine: {'; '.join(reasons)}"
    return "it has another secret: give both the same keys.secret_file"
