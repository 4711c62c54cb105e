"""Who may use the gateway's pages, over TLS and without, and what is written down of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tls_kit import Authority

from kvatlas.cli.certs import make_token
from kvatlas.config import GatewayConfig
from kvatlas.config_tls import AdminConfig, AuditConfig
from kvatlas.dataplane.tls import Trust
from kvatlas.errors import ConfigError, EngineError
from kvatlas.service.admin import Guard, Safety, safety_of
from kvatlas.service.gateway import Gateway
from kvatlas.service.http_client import HttpClient, Response
from kvatlas.service.steer import Health, Inbound
from kvatlas.service.tls import Outgoing, from_outside
from kvatlas.service.trust_metrics import trust_problems


class Quiet:
    """A steer of which only its health is asked."""

    def models(self) -> list[dict[str, object]]:
        return []

    def health(self) -> Health:
        return Health(ready=True, flags=("engine_down:secret-name",), details={})


async def directory(_: str) -> object:
    return {"holders": 7}


async def purge(_: Inbound) -> object:
    return {"purged": True}


class Desk:
    """One gateway, asked as somebody."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def ask(
        self, path: str, outgoing: Outgoing | None = None, token: str = "", method: str = "GET"
    ) -> Response:
        headers = [(b"authorization", f"Bearer {token}".encode())] if token else []
        client = HttpClient(outgoing=outgoing)
        scheme = "http" if self.gateway.door is None else "https"
        try:
            url = f"{scheme}://127.0.0.1:{self.gateway.port}{path}"
            body = b"{}" if method == "POST" else b""
            return await client.request(method, url, headers=headers, body=body)
        finally:
            await client.close()


Open = Callable[[Safety], Awaitable[Desk]]


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    gateways: list[Gateway] = []

    async def start(safety: Safety) -> Desk:
        gateway = Gateway(
            GatewayConfig(port=0),
            Quiet(),  # type: ignore[arg-type]
            pages={"/kvatlas/directory": directory},
            questions={"/kvatlas/purge": purge},
            trust=safety.trust,
            guard=safety.guard,
        )
        await gateway.start()
        gateways.append(gateway)
        return Desk(gateway)

    yield start
    for gateway in gateways:
        await gateway.close()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


def as_client(authority: Authority, name: str) -> Outgoing:
    config = authority.config("client", name)
    return from_outside(authority.ca, config.cert, config.key)


def guarded(trust: Trust | None, folder: Path, *clients: str, tokens: str = "") -> Safety:
    if tokens:
        (folder / "tokens").write_text(tokens)
    admin = AdminConfig(str(folder / "tokens") if tokens else "", clients)
    audit = AuditConfig(str(folder / "audit.jsonl"))
    return safety_of(admin, audit, trust, "gateway", closed=True)


def written(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


async def test_each_page_needs_its_right(
    opened: Open, authority: Authority, tmp_path: Path
) -> None:
    clients = ("prom:metrics", "reader:read", "ops:change")
    desk = await opened(guarded(authority.trust("gateway"), tmp_path, *clients))
    pages = (("/metrics", "GET"), ("/kvatlas/directory", "GET"), ("/kvatlas/purge", "POST"))
    wanted = {
        "prom": [200, 403, 403],
        "reader": [200, 200, 403],
        "ops": [200, 200, 200],
        "nobody": [403, 403, 403],
    }
    for name, statuses in wanted.items():
        who = as_client(authority, name)
        found = [(await desk.ask(path, who, method=method)).status for path, method in pages]
        assert found == statuses, name
    bare = from_outside(authority.ca)
    assert [(await desk.ask(p, bare, method=m)).status for p, m in pages] == [401] * 3


async def test_a_part_is_no_operator(opened: Open, authority: Authority, tmp_path: Path) -> None:
    """Not even one that is called as an operator is."""
    desk = await opened(guarded(authority.trust("gateway"), tmp_path, "ops:change"))
    config = authority.config("agent", "ops")
    agent = from_outside(authority.ca, config.cert, config.key)
    answer = await desk.ask("/kvatlas/directory", agent)
    assert answer.status == 403
    assert "kvatlas://agent/ops" in answer.json()["error"]["message"]


async def test_probes_are_open_and_tell_nothing(
    opened: Open, authority: Authority, tmp_path: Path
) -> None:
    desk = await opened(guarded(authority.trust("gateway"), tmp_path, "reader:read"))
    bare = from_outside(authority.ca)
    for path in ("/health", "/ready"):
        answer = await desk.ask(path, bare)
        assert answer.status == 200
        assert answer.json() == {"status": "degraded", "ready": True}
        told = await desk.ask(path, as_client(authority, "reader"))
        assert told.json()["flags"] == ["engine_down:secret-name"]


async def test_tokens_open_pages_until_their_line_is_gone(opened: Open, tmp_path: Path) -> None:
    token, line = make_token("ops", "read")
    now = [0.0]
    (tmp_path / "tokens").write_text(f"# operators\n{line}\n")
    guard = Guard(AdminConfig(str(tmp_path / "tokens")), closed=False, clock=lambda: now[0])
    desk = await opened(Safety(None, guard))
    assert (await desk.ask("/kvatlas/directory", token=token)).status == 200
    assert (await desk.ask("/kvatlas/purge", token=token, method="POST")).status == 403
    assert (await desk.ask("/kvatlas/directory", token=token[:-1])).status == 401
    assert (await desk.ask("/kvatlas/directory")).status == 401
    (tmp_path / "tokens").write_text("# operators\n")
    now[0] += 2
    assert (await desk.ask("/kvatlas/directory", token=token)).status == 401
    assert trust_problems(guard, None)["admin_tokens"] == {}
    (tmp_path / "tokens").write_text("no line of a token\n")
    now[0] += 2
    assert "tokens:1: NAME RIGHT SHA256" in trust_problems(guard, None)["admin_tokens"]["file"]
    (tmp_path / "tokens").write_text(line)
    now[0] += 2
    assert trust_problems(guard, None)["admin_tokens"] == {}


async def test_without_admin_and_tls_pages_are_as_they_were(opened: Open) -> None:
    desk = await opened(Safety())
    assert (await desk.ask("/kvatlas/directory")).json() == {"holders": 7}
    assert (await desk.ask("/health")).json()["flags"] == ["engine_down:secret-name"]


async def test_what_people_do_is_written_down_and_no_content(
    opened: Open, authority: Authority, tmp_path: Path
) -> None:
    token, line = make_token("tok", "change")
    desk = await opened(guarded(authority.trust("gateway"), tmp_path, "ops:read", tokens=line))
    ops, bare = as_client(authority, "ops"), from_outside(authority.ca)
    await desk.ask("/kvatlas/directory", ops)
    await desk.ask("/metrics", ops)
    await desk.ask("/kvatlas/purge", bare, token=token, method="POST")
    await desk.ask("/kvatlas/purge", ops, method="POST")
    told = [(line["who"], line["what"], line["outcome"]) for line in written(tmp_path)]
    assert told == [
        ("kvatlas://client/ops", "GET /kvatlas/directory", "done"),
        ("token tok", "POST /kvatlas/purge", "begins"),
        ("", "POST /kvatlas/purge", "refused: kvatlas://client/ops"),
    ]
    assert token not in (tmp_path / "audit.jsonl").read_text()


async def test_a_change_that_cannot_be_written_down_is_refused(
    opened: Open, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    safety = guarded(authority.trust("gateway"), tmp_path, "ops:change")
    desk = await opened(safety)
    ops = as_client(authority, "ops")
    audit = safety.guard.audit
    assert audit is not None
    with monkeypatch.context() as patch:
        patch.setattr(audit, "_write", lambda line, sync: False)
        answer = await desk.ask("/kvatlas/purge", ops, method="POST")
        assert answer.status == 503
        assert answer.json()["error"]["code"] == "audit_unavailable"
        assert (await desk.ask("/kvatlas/directory", ops)).status == 200
        models = await desk.ask("/v1/models", ops)
        assert models.status == 200
    assert (await desk.ask("/kvatlas/purge", ops, method="POST")).status == 200


async def test_clients_of_the_api_must_prove_themselves_where_that_is_wanted(
    opened: Open, authority: Authority, tmp_path: Path
) -> None:
    users = Authority(tmp_path / "users")
    trust = authority.trust("gateway", clients_ca=users.ca)
    desk = await opened(guarded(trust, tmp_path, "alice:change"))
    bare = from_outside(authority.ca)
    answer = await desk.ask("/v1/models", bare)
    assert answer.status == 401
    assert "tls.clients_ca" in answer.json()["error"]["message"]
    own = users.config("client", "alice")
    alice = from_outside(authority.ca, own.cert, own.key)
    assert (await desk.ask("/v1/models", alice)).status == 200
    # Her authority makes no operators, whatever it writes into a certificate.
    assert (await desk.ask("/kvatlas/directory", alice)).status == 401


async def test_a_token_is_not_sent_in_the_clear() -> None:
    client = HttpClient(headers=[(b"x-kvatlas-admin-token", b"t")])
    with pytest.raises(EngineError, match="not sent in the clear"):
        await client.get_json("http://gateway.example/kvatlas/directory")
    await client.close()


@pytest.mark.parametrize(
    "line", ["ops read 12", "ops root " + "0" * 64, "read " + "0" * 64, "o/ps read " + "0" * 64]
)
def test_lines_that_are_no_tokens_end_the_start(tmp_path: Path, line: str) -> None:
    (tmp_path / "tokens").write_text(f"\n{line}\n")
    with pytest.raises(ConfigError, match=r"tokens:2: NAME RIGHT SHA256 is wanted"):
        Guard(AdminConfig(str(tmp_path / "tokens")), closed=True)
