"""Purges: a tenant, a session or a prefix goes from every part, and a signed receipt says how.

The receipt is written first, and so is the order: agents that are away get it when they are back.
Whatever one part does not do is said in it, and tried again until it is done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvatlas.config_tenants import Tenant, TenantsFile
from kvatlas.core.agent_forget import meant_by
from kvatlas.core.agent_values import Forget
from kvatlas.core.forgetting import Floor, Floors
from kvatlas.core.keys import Keyring
from kvatlas.core.tenancy import EPOCH_MAX, TenantSalt, checked_name, epoch_at, session_of, tag_of
from kvatlas.errors import EngineError, RequestError
from kvatlas.service.agent_purge import KEYS
from kvatlas.service.agents import Agents, Node
from kvatlas.service.http_client import HttpClient
from kvatlas.service.purge_parts import Engine, Here, of_engine, order_agent
from kvatlas.service.receipts import Answer, Receipt, Receipts, is_id
from kvatlas.service.steer import Inbound
from kvatlas.service.tenants import Tenants

if TYPE_CHECKING:
    from kvatlas.service.assembly import Assembly

log = logging.getLogger(__name__)

PAGE = "/kvatlas/tenants/purge"
AGE_S_MAX = 300.0  # of an order that is not known yet
LOOK_S = 1.0  # for agents that are back
AGAIN_S_MAX = 60.0  # between two tries of one purge, which begin with the former
_GATEWAY = "gateway"
_PARTED = (
    "it is not configured any more, so what it holds was not purged: configure it again, or, once "
    "its media are gone, take this receipt away and restart"
)


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator orders. ``id`` names the purge: ordered again, it answers with its receipt.
    ``session``: that one alone; ``prefix``: a request's body, of whose prompt the whole blocks go.
    ``epoch``: that of the tenant in its file, as whoever orders knows it. ``again``: asks after
    the purge of that id, and orders none."""

    id: str
    at: float
    tenant: str
    epoch: int = 0
    session: str = ""
    prefix: dict[str, object] | None = None
    reset: bool = False
    again: bool = False


class Purger:
    """Of one gateway. Lives on the event loop; `start` and `close` it."""

    def __init__(
        self,
        folder: Path,
        ring: Keyring,
        *,
        tenants: Tenants,
        agents: Callable[[], Agents],
        here: Here,
        client: HttpClient,
        poll_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``folder`` is that of the receipts; ``client`` asks agents. Raises ConfigError where
        receipts cannot be kept."""
        self.receipts = Receipts(folder, ring)
        self.floors = Floors(floor for receipt in self.receipts for floor in receipt.floors)
        self._ring = ring
        self._tenants = tenants
        self._agents = agents
        self._here = here
        self._client = client
        self._poll_s = poll_s
        self._clock = clock
        self._told: dict[str, tuple[str, int]] = {}  # agent → life, and how many floors it has
        self._behind: dict[str, str] = {}  # agents that are there and have not all floors → why
        self._count = len(self.floors)
        #: Told of floors that are new here: the other gateways are to know them.
        self.raised: Callable[[tuple[Floor, ...]], None] = lambda _: None
        self._file: TenantsFile | None = None  # whose epochs are among the floors
        self._again: dict[str, tuple[float, float]] = {}  # purge → when, and how long after that
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        tenants.renew = self.renewed
        here.log.forgotten = self.floors.forgotten

    def start(self) -> None:
        """Carry on what is not complete, and tell agents that are new."""
        self._task = asyncio.create_task(self._keep(), name="purges")

    async def close(self) -> None:
        """What is not complete is carried on by the next gateway."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def renewed(self, tag: str, session: str) -> str:
        """The tag of a session that may have been purged: then another, which none had before."""
        while session and self.floors.forgotten(f"{tag}.{EPOCH_MAX}.{session}"):
            session = session_of(self._ring, tag, session)
        return session

    def problems(self) -> dict[str, str]:
        """For /health: purges that are not complete and who is missing, agents not told of them."""
        return {f"purges at {name}": why for name, why in self._behind.items()} | {
            f"purge {receipt.id}": "; ".join(f"{who}: {why}" for who, why in missing.items())
            for receipt in self.receipts
            if not receipt.complete and (missing := receipt.missing())
        }

    # -- orders ---------------------------------------------------------------------------------

    async def question(self, request: Inbound) -> object:
        """POST `PAGE`: a purge; answered with its receipt. Raises RequestError."""
        try:
            wanted = msgspec.convert(request.body, Wanted)
        except msgspec.ValidationError as error:
            raise RequestError(f"not an order of a purge: {error}", code="bad_purge") from error
        async with self._turn:
            receipt = self.receipts.get(wanted.id)
            if receipt is None and wanted.again:
                raise _refused(f"no purge {wanted.id!r} was ordered of this gateway")
            if receipt is None:
                receipt = self._put(await self._receipt(wanted, request))
            elif receipt.tenant != wanted.tenant:
                raise _refused(f"purge {wanted.id!r} is one of tenant {receipt.tenant!r}")
            if not receipt.complete:
                receipt = await self._carry_on(receipt)
        return msgspec.to_builtins(receipt)

    async def _receipt(self, wanted: Wanted, request: Inbound) -> Receipt:
        """What is meant, before anybody is asked. Raises RequestError."""
        if not is_id(wanted.id):
            raise _refused(f"{wanted.id!r} can be no purge's name: letters, digits, hyphens")
        if not abs(self._clock() - wanted.at) <= AGE_S_MAX:
            raise _refused("this was ordered too long ago (or the clocks differ): order it anew")
        if self.receipts.full():
            raise _refused("there are too many receipts: take old ones away, and restart")
        await asyncio.to_thread(self._tenants.refresh)
        tenant = self._tenant(wanted)
        tag = tag_of(self._ring, tenant.name)
        keys: tuple[str, ...] = ()
        floors: tuple[Floor, ...] = ()
        if wanted.prefix is not None:
            epoch = epoch_at(tenant.epoch, tenant.rotation_s, self._clock())
            within = self._session(tenant, tag, wanted.session) if wanted.session else ""
            keys = await self._here.keys(wanted.prefix, request, TenantSalt(tag, epoch, within))
        elif wanted.session:
            floors = (Floor(tag, session=self._session(tenant, tag, wanted.session)),)
        else:
            floors = (Floor(tag, epoch_at(tenant.epoch, 0.0, 0.0)),)
            same = next((receipt.id for receipt in self.receipts if receipt.floors == floors), "")
            if same:  # whatever came since then would stay, and the receipt would not say so
                raise _refused(f"purge {same!r} was of this epoch: raise it, or ask after that one")
        return Receipt(
            wanted.id,
            tenant.name,
            wanted.session,
            floors,
            keys,
            wanted.reset,
            self._clock(),
            answers=(Answer(_GATEWAY, error="not asked yet"),),
        )

    def _tenant(self, wanted: Wanted) -> Tenant:
        try:
            name = checked_name(wanted.tenant)
        except ValueError as error:
            raise _refused(f"the tenant's name: {error}") from error
        found = next((each for each in self._tenants.file.tenant if each.name == name), None)
        if found is None:
            raise _refused(f"there is no tenant {name!r} in the file of this gateway")
        if found.epoch < wanted.epoch:
            why = self._tenants.problem or "it reads another file than you"
            raise _refused(f"this gateway has epoch {found.epoch}, not {wanted.epoch}: {why}")
        whole = wanted.prefix is None and not wanted.session
        if whole and not found.epoch:
            raise _refused("raise the tenant's epoch first: old salts must not be found any more")
        return found

    def _session(self, tenant: Tenant, tag: str, name: str) -> str:
        if tenant.share != "session":
            raise _refused("this tenant's sessions share what they cache: purge the tenant")
        try:
            return self.renewed(tag, session_of(self._ring, tag, name))
        except ValueError as error:
            raise _refused(f"the session's name: {error}") from error

    def _put(self, receipt: Receipt) -> Receipt:
        try:
            made = self.receipts.put(receipt)
        except OSError as error:
            raise RequestError(
                f"nothing was purged: the receipt cannot be written: {error.strerror or error}",
                status=503,
                code="no_receipt",
            ) from error
        self._raise(made.floors)
        return made

    def learn(self, floors: Iterable[Floor]) -> None:
        """Floors that another gateway has raised; agents are told with the next look."""
        self._count += sum(self.floors.put(floor) for floor in floors)

    def _raise(self, floors: Iterable[Floor]) -> None:
        new = tuple(floor for floor in floors if self.floors.put(floor))
        self._count += len(new)
        if new:
            self.raised(new)

    # -- carried out ----------------------------------------------------------------------------

    async def _carry_on(self, receipt: Receipt) -> Receipt:
        """Ask all who have not done it; the receipt as it is then."""
        done = {answer.who: answer for answer in receipt.answers if answer.done}
        event = Forget(floors=receipt.floors)
        if _GATEWAY not in done:
            done[_GATEWAY] = await self._mine(event)
        nodes = list(self._agents().nodes.values())
        asked = [node for node in nodes if f"agent {node.config.name}" not in done]
        for answer in await asyncio.gather(
            *(self._order(n, receipt, store=not n.config.store) for n in asked)
        ):
            done[answer.who] = answer
        for store, users in _stores(nodes).items():
            if f"store {store}" not in done:
                away = [n.config.name for n in users if not done[f"agent {n.config.name}"].done]
                answer = await self._store(store, users, receipt, away)
                done[answer.who] = answer
        for name, engine in self._here.engines().items():
            if f"engine {name}" not in done:
                done[f"engine {name}"] = await self._engine(name, engine, receipt)
        for who in receipt.missing():
            done.setdefault(who, Answer(who, error=_PARTED))
        answers = tuple(done.values())
        completed_at = self._clock() if all(answer.done for answer in answers) else 0.0
        return self._put(
            msgspec.structs.replace(receipt, answers=answers, completed_at=completed_at)
        )

    async def _mine(self, event: Forget) -> Answer:
        try:
            gone = await self._here.forget(meant_by(event))
        except Exception as error:  # a disk, most likely
            log.exception("purge: the gateway's own part")
            return Answer(_GATEWAY, error=f"{type(error).__name__}: {error}")
        return Answer(_GATEWAY, self._clock(), gone=gone)

    async def _engine(self, name: str, engine: Engine, receipt: Receipt) -> Answer:
        who = f"engine {name}"
        try:
            rotated = bool(receipt.floors)
            gone = await of_engine(engine, reset=receipt.reset, rotated=rotated)
        except EngineError as error:
            return Answer(who, error=str(error))
        return Answer(who, self._clock(), gone=(gone,))

    async def _order(
        self, node: Node, receipt: Receipt, *, store: bool, erase: bool = True
    ) -> Answer:
        """``erase``: the tenant's keys go, where they have not for this purge: by the next try what
        is there are keys of its new epoch."""
        who = f"agent {node.config.name}"
        said = (gone for answer in receipt.answers if answer.who == who for gone in answer.gone)
        dropped = tuple(gone for gone in said if gone.part == KEYS and gone.done)
        if not node.up or node.told is None:
            return Answer(who, error=f"it does not answer: {node.error}", gone=dropped)
        tags = [floor.tenant for floor in receipt.floors if not floor.session]
        try:
            gone = await order_agent(
                self._client,
                self._ring,
                node,
                floors=receipt.floors,
                keys=[bytes.fromhex(key) for key in receipt.keys],
                store=store,
                erase=tags if erase and not dropped else (),
            )
        except EngineError as error:
            return Answer(who, error=str(error), gone=dropped)
        return Answer(who, self._clock(), gone=(*gone, *dropped))

    async def _store(
        self, store: str, users: list[Node], receipt: Receipt, away: list[str]
    ) -> Answer:
        """A store that nodes share is purged by one of them, once none writes to it any more."""
        who = f"store {store}"
        up = [node for node in users if node.up]
        if not up:
            return Answer(who, error="no agent that uses it answers")
        told = await self._order(up[0], receipt, store=True, erase=False)
        gone = tuple(each for each in told.gone if each.part == "object")
        if told.error or away:
            why = told.error or f"{', '.join(away)} may write there still: purged again after it"
            return Answer(who, self._clock(), why, gone)
        return Answer(who, told.at, gone=gone)

    # -- later ----------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                async with self._turn:
                    await self.look()
            except Exception:  # one look that went wrong must not end those to come
                log.exception("purges are not carried on")

    async def look(self) -> None:
        """New lives of agents get all floors; what waits for somebody who is back goes on."""
        if self._tenants.file is not self._file:
            self._file = self._tenants.file
            self._raise(
                Floor(tag_of(self._ring, tenant.name), epoch_at(tenant.epoch, 0.0, 0.0))
                for tenant in self._file.tenant
                if tenant.epoch
            )
        now_s = asyncio.get_running_loop().time()
        nodes = {n.config.name: n for n in self._agents().nodes.values() if n.up and n.told}
        for receipt in self.receipts:
            due_s, pause_s = self._again.get(receipt.id, (0.0, LOOK_S))
            if not receipt.complete and now_s >= due_s and _somebody_is_back(receipt, nodes):
                self._again[receipt.id] = now_s + pause_s, min(2 * pause_s, AGAIN_S_MAX)
                if (await self._carry_on(receipt)).complete:
                    del self._again[receipt.id]
        self._behind = {name: why for name, why in self._behind.items() if name in nodes}
        for name, node in nodes.items():
            now = node.told.life if node.told else "", self._count
            if len(self.floors) and self._told.get(name) != now:
                why = await self._tell(node)
                if why:
                    self._behind[name] = why
                else:
                    self._told[name] = now
                    self._behind.pop(name, None)

    async def _tell(self, node: Node) -> str:
        """All floors that there are; no keys are dropped for it. Why it has not done it, or ""."""
        try:
            gone = await order_agent(
                self._client, self._ring, node, floors=self.floors.all(), keys=(), store=False
            )
        except EngineError as error:
            return str(error)
        return ", ".join(f"something is left: {each.part}" for each in gone if not each.done)


def _somebody_is_back(receipt: Receipt, nodes: dict[str, Node]) -> bool:
    missing = receipt.missing()
    return any(
        who == _GATEWAY or who.startswith(("engine ", "store ")) or who[len("agent ") :] in nodes
        for who in missing
    )


def _stores(nodes: Iterable[Node]) -> dict[str, list[Node]]:
    """Who uses which store; one without a name is its node's own, and goes with it."""
    found: dict[str, list[Node]] = {}
    for node in nodes:
        if node.config.store:
            found.setdefault(node.config.store, []).append(node)
    return found


def _refused(text: str) -> RequestError:
    return RequestError(text, status=409, code="not_purged")


def purger_of(gateway: Assembly) -> Purger | None:
    """That of a gateway; None where there are no tenants, or no folder for receipts."""
    tenants, folder = gateway.tenancy.tenants, gateway.config.tenants.receipts
    if tenants is None or not folder:
        return None
    here = Here(
        steering=gateway.steering,
        log=gateway.log,
        recorder=gateway.recorder,
        tokenizer=gateway.tokenizer,
        engines=lambda: list(gateway.engines.workers.values()),
        client=gateway.client,
        headers=lambda: tenants.for_engines,
    )
    return Purger(
        Path(folder),
        gateway.dispatcher.keyring,
        tenants=tenants,
        agents=lambda: gateway.agents,
        here=here,
        client=gateway.agents_client,
        poll_s=LOOK_S,
    )
