"""A real agent and engines of several tenants: what is public is everybody's, nothing else is."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fake_engine import GRID, tokens_of
from test_agent_purge import BLUE, RED, RING, Node, node

from kvatlas.config_tenants import Quotas, Tenant, TenantsFile
from kvatlas.core.forgetting import Floor
from kvatlas.core.keys import Keyring
from kvatlas.core.tenancy import Chain, TenantSalt, mark_of, prefix_digest, salt_of, sharing_of
from kvatlas.service.agent_front import DESCRIPTION, AgentDescription
from kvatlas.service.agent_orders import PROOF, signed
from kvatlas.service.agent_pulls import PULL, Brought, Wanted
from kvatlas.service.http_client import HttpClient
from kvatlas.service.tenancy import Teller
from kvatlas.service.tenant_limits import LIMITS, Limits

__all__ = ["node"]  # the fixture
Make = Callable[..., Node]
PROMPT = tokens_of(1, 6 * GRID)
PUBLIC = 2 * GRID
MARK = mark_of(RING, prefix_digest(PROMPT[: 4 * PUBLIC]))


def salt(tag: str, *, session: str = "", public: int = PUBLIC, ring: Keyring = RING) -> str:
    mark = MARK if public else ""
    return salt_of(ring, TenantSalt(tag, 0, session, public, mark))


def load(agent: Node, scope: str, tokens: bytes) -> int:
    with agent.engine(scope) as engine:
        return engine.load("loaded", tokens + tokens_of(9, 3))[0]


def save(agent: Node, scope: str, tokens: bytes) -> None:
    with agent.engine(scope) as engine:
        assert engine.save("saved", tokens)
    agent.idle()


def test_public_blocks_are_everybodys_and_the_rest_one_tenants(node: Make) -> None:
    agent = node()
    save(agent, salt(RED), PROMPT)
    assert load(agent, salt(RED), PROMPT) == 6 * GRID
    assert load(agent, salt(BLUE), PROMPT) == PUBLIC
    assert load(agent, salt(RED, session="c" * 24), PROMPT) == PUBLIC
    assert load(agent, salt(BLUE, public=0), PROMPT) == 0
    assert load(agent, "", PROMPT) == PUBLIC  # who has no salt has what is public
    # Other tokens under a salt that calls the first ones public: none of them are.
    other = tokens_of(2, 6 * GRID)
    save(agent, salt(RED), other)
    assert load(agent, salt(BLUE), other) == 0
    assert load(agent, "", other) == 0
    assert load(agent, salt(RED), other) == 6 * GRID


def test_forged_salts_are_scopes_of_their_own(node: Make) -> None:
    agent = node()
    save(agent, salt(RED), PROMPT)
    true = salt(RED)
    stranger = salt(RED, ring=Keyring(b"the secret of another deployment"))
    for forged in (true[:-1], true + "0", stranger, f"{RED}.0", RED, true.replace("kva1", "kva2")):
        assert load(agent, forged, PROMPT) == 0
    swapped = true.replace(RED, BLUE)
    assert load(agent, swapped, PROMPT) == 0


def test_an_agent_that_wants_tenants_keeps_nothing_of_others(node: Make) -> None:
    agent = node("--tenants=required")
    for scope in ("", "free text", salt(RED)[:-1]):
        with agent.engine(scope) as engine:
            staged = engine.want("r", PROMPT)
            assert staged.tokens == 0
            assert "--tenants required" in staged.why
            assert engine.save("r", PROMPT) == 0
    status = agent.idle()
    assert status["counts"]["salts_refused"] >= 3
    save(agent, salt(RED), PROMPT)
    assert load(agent, salt(RED), PROMPT) == 6 * GRID


def limits(
    agent: Node, ring: Keyring = RING, life: str = "", path: str = LIMITS, **quotas: int
) -> int:
    """Told as a gateway tells it, with a proof for ``path``; the status of the answer."""
    life = life or str(agent.wait(lambda _: True)["arena"])
    body, proof = signed(ring, path, Limits(life, {RED: quotas} if quotas else {}))
    ask = urllib.request.Request(agent.url + LIMITS, body, {PROOF: proof})
    try:
        with urllib.request.urlopen(ask, timeout=25) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_quota_is_told_by_who_has_the_secret_and_holds(node: Make) -> None:
    agent = node()
    assert limits(agent, dram=0, disk=0) == 200
    with agent.engine(salt(RED, public=0)) as engine:
        engine.save("saved", PROMPT)
    agent.idle()
    assert load(agent, salt(RED, public=0), PROMPT) == 0
    save(agent, salt(BLUE, public=0), PROMPT)
    assert load(agent, salt(BLUE, public=0), PROMPT) == 6 * GRID
    assert limits(agent, Keyring(b"another secret than theirs"), dram=1) == 403
    assert limits(agent, life="an earlier one", dram=1) == 409
    assert limits(agent, path=PULL) == 403  # what was signed for another page ends no limit
    assert limits(agent, hbm=1) == 200
    assert limits(agent, nowhere=1) == 400
    assert limits(agent) == 200  # no limits any more
    save(agent, salt(RED, public=0), PROMPT)
    assert load(agent, salt(RED, public=0), PROMPT) == 6 * GRID


@pytest.mark.parametrize("name", ["a.b", "acme"])
def test_an_adapter_named_like_a_salt_is_just_an_adapter(node: Make, name: str) -> None:
    agent = node()
    save(agent, salt(RED, public=0), PROMPT)
    for adapter in (salt(RED), f"{RED}.0", name):
        with agent.engine("") as engine:
            assert engine.client.want("r", PROMPT, 0, 30.0, scope="", adapter=adapter)
            engine.client.end("r")
        assert load(agent, "", PROMPT) == 0


async def test_a_gateway_tells_each_life_of_an_agent_the_limits_of_the_file(node: Make) -> None:
    agent = node()
    told = SimpleNamespace(life=str(agent.wait(lambda _: True)["arena"]))
    place = SimpleNamespace(told=told, config=SimpleNamespace(url=agent.url))
    agents: Any = SimpleNamespace(nodes={"n": place})
    client = HttpClient()
    teller = Teller(RING, client)
    try:
        await teller.tell(agents, TenantsFile((Tenant("red", quota_bytes=Quotas(dram=0, disk=0)),)))
        assert teller.problems == {}
        with agent.engine(salt(RED, public=0)) as engine:
            engine.save("saved", PROMPT)
        agent.idle()
        assert load(agent, salt(RED, public=0), PROMPT) == 0
        await teller.tell(agents, TenantsFile((Tenant("red"),)))
        save(agent, salt(RED, public=0), PROMPT)
        assert load(agent, salt(RED, public=0), PROMPT) == 6 * GRID
        told.life = "another"
        await teller.tell(agents, TenantsFile((Tenant("red", quota_bytes=Quotas(dram=1)),)))
        assert "another life" in teller.problems["n"]
        told.life = str(agent.wait(lambda _: True)["arena"])
        await teller.tell(agents, TenantsFile((Tenant("red", ttl_s=0.001),)))
        assert teller.problems == {}
        agent.wait(lambda status: status["counts"].get("expired", 0) >= 6)
        assert load(agent, salt(RED, public=0), PROMPT) == 0
        place.told = None
        await teller.tell(agents, TenantsFile())
        assert teller.problems == {}
    finally:
        await client.close()


def test_what_a_gateway_has_copied_ahead_is_the_tenants(node: Make) -> None:
    """It tells keys and their owner: a copy that is booked on anybody else passes its quota."""
    agent = node()
    save(agent, salt(RED, public=0), PROMPT)
    agent.end()
    agent.start()  # what was in memory is gone, what is on the disk is not
    sharing = sharing_of(RING, salt(RED, public=0))
    with agent.engine(salt(RED)):
        life = str(agent.wait(lambda status: bool(status["engines"]))["arena"])
        with urllib.request.urlopen(agent.url + DESCRIPTION, timeout=25) as answer:
            told = msgspec.json.decode(answer.read(), type=AgentDescription)
        (served,) = told.engines.values()
        chain = Chain(RING, served.member.fingerprint.digest(), GRID, sharing)
        keys = tuple(chain.extend(PROMPT))

        def brought() -> Brought:
            body, proof = signed(RING, PULL, Wanted(life, "", keys, sharing.scope.owner))
            ask = urllib.request.Request(agent.url + PULL, body, {PROOF: proof})
            with urllib.request.urlopen(ask, timeout=25) as answer:
                return msgspec.json.decode(answer.read(), type=Brought)

        assert limits(agent, dram=0) == 200
        with pytest.raises(urllib.error.HTTPError, match="409"):
            brought()
        assert limits(agent) == 200
        assert brought().tokens == 6 * GRID
    assert agent.purge(Floor(RED, 1))["dram"].units == 6
