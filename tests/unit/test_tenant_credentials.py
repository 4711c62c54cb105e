"""Credentials of tenants, and the files that an operator writes: what is taken, what refused."""

from __future__ import annotations

import base64
import hmac
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, OctKey, RSAKey

from kvatlas import config, config_tenants
from kvatlas.config_tenants import Quotas, TenantsConfig, TenantsFile, digest_of
from kvatlas.core.keys import Keyring
from kvatlas.core.tenancy import TenantSalt, epoch_at, session_of, tag_of
from kvatlas.errors import ConfigError, RequestError
from kvatlas.service import tenants, tenants_jwt
from kvatlas.service.tenants import Tenants, load

RING = Keyring(b"the deployment's secret")
NOW = 1_800_000_000.0
ISSUER, AUDIENCE = "https://id.example", "kvatlas"
RSA = RSAKey.generate_key(2048, {"kid": "one"})
EC = ECKey.generate_key("P-256", {"kid": "two"})
STRANGER = RSAKey.generate_key(2048, {"kid": "one"})
GOOD = {"iss": ISSUER, "aud": AUDIENCE, "exp": int(NOW) + 60, "tenant": "acme"}


class Door(Tenants):
    """With a clock that a test sets."""

    def __init__(self, folder: Path, text: str = "", **config: Any) -> None:
        self.now = NOW
        path = folder / "tenants.toml"
        path.write_text(text or '[[tenant]]\nname = "acme"\n')
        keys = folder / "jwks.json"
        if not keys.exists():
            write_keys(folder)
        settings = {"jwt_keys": str(keys), "jwt_issuer": ISSUER, "jwt_audience": AUDIENCE}
        wanted = TenantsConfig(file=str(path), **{**settings, **config})
        super().__init__(wanted, RING, clock=lambda: self.now)

    def ask(self, credential: str, **more: str) -> TenantSalt:
        pairs = {"authorization": f"Bearer {credential}"} | more
        return self.admit([(n.encode(), v.encode()) for n, v in pairs.items()]).salt

    def refuses(self, credential: str, **more: str) -> tuple[int, str]:
        with pytest.raises(RequestError) as found:
            self.ask(credential, **more)
        return found.value.status, found.value.code


def write_keys(folder: Path, *keys: Any) -> None:
    found = [
        key if isinstance(key, dict) else key.as_dict(private=False) for key in keys or (RSA, EC)
    ]
    (folder / "jwks.json").write_text(json.dumps({"keys": found}))


def token(key: Any = RSA, algorithm: str = "RS256", head: Any = None, **claims: Any) -> str:
    said = {name: value for name, value in (GOOD | claims).items() if value is not None}
    header = {"alg": algorithm, "kid": getattr(key, "kid", "one")} | (head or {})
    return jwt.encode(header, said, key, algorithms=[algorithm])


def part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def test_a_good_token_says_who_it_is(tmp_path: Path) -> None:
    door, tag = Door(tmp_path), tag_of(RING, "acme")
    for good in (token(), token(EC, "ES256"), token(aud=[AUDIENCE, "more"]), token(nbf=int(NOW))):
        assert door.ask(good) == TenantSalt(tag, 0)


def test_a_token_is_verified_once_and_forgotten_when_it_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, good, calls = Door(tmp_path), token(), []
    real = jwt.decode
    monkeypatch.setattr(jwt, "decode", lambda *a, **k: (calls.append(1), real(*a, **k))[1])
    for _ in range(5):
        door.ask(good)
    assert len(calls) == 1
    door.now = NOW + 64  # within the leeway
    door.ask(good)
    assert len(calls) == 1
    door.now = NOW + 66
    assert door.refuses(good) == (401, "invalid_api_key")
    monkeypatch.setattr(tenants_jwt, "REMEMBERED_MAX", 4)
    door.now = NOW
    for i in range(9):
        door.ask(token(jti=str(i)))
    assert door._tokens is not None
    assert len(door._tokens._good) == 4


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"exp": int(NOW) - 60}, "expired"),
        ({"exp": None}, "never expires"),
        ({"exp": "soon"}, "no time"),
        ({"exp": 1e300}, "never, in effect"),
        ({"exp": float("nan")}, "no number"),
        ({"exp": True}, "no number either"),
        ({"nbf": int(NOW) + 600}, "not yet"),
        ({"iss": "https://id.example.evil"}, "another issuer"),
        ({"iss": None}, "no issuer"),
        ({"aud": "another"}, "another audience"),
        ({"aud": None}, "no audience"),
        ({"tenant": None}, "no tenant"),
        ({"tenant": ""}, "no tenant"),
        ({"tenant": ["acme"]}, "no name"),
        ({"tenant": {"acme": 1}}, "no name"),
    ],
)
def test_claims_that_are_not_taken(tmp_path: Path, claims: dict[str, Any], why: str) -> None:
    assert Door(tmp_path).refuses(token(**claims)) == (401, "invalid_api_key"), why


@pytest.mark.parametrize("name", ["iss", "aud", "exp"])
def test_the_claim_that_is_not_right_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match=f"missing_claim: {name}"):
        Door(tmp_path).ask(token(**{name: None}))


def test_forged_tokens(tmp_path: Path) -> None:
    door, good = Door(tmp_path), token()
    head, body, signature = good.split(".")
    public = RSA.as_pem(private=False)

    def confused(kid: str) -> str:
        """Signed as by a shared secret, with what everybody may know."""
        said = f"{part({'alg': 'HS256', 'kid': kid})}.{body}"
        mac = hmac.new(public, said.encode(), "sha256").digest()
        return f"{said}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"

    other = token(tenant="another").split(".")
    for forged in (
        f"{part({'alg': 'none'})}.{body}.",
        f"{part({'alg': 'none', 'kid': 'one'})}.{body}.{signature}",
        f"{part({'alg': 'None'})}.{body}.",
        confused("one"),
        confused("two"),
        token(STRANGER),
        token(RSA, "RS512"),  # a good signature, by an algorithm that is not wanted
        token(RSA, "PS256"),
        token(RSA, head={"kid": "none of ours"}),
        token(STRANGER, head={"jwk": STRANGER.as_dict(private=False)}),
        f"{head}.{other[1]}.{signature}",
        f"{head}.{body}.{other[2]}",
        f"{other[0]}.{part(GOOD | {'tenant': 'acme', 'exp': int(NOW) + 9999})}.{signature}",
        f"{head}.{body}.",
        f"{head}.{body}.{signature[:-4]}",
        f"{head}..{signature}",
        "..",
        "a.b.c",
        f"{part([1])}.{body}.{signature}",
        f"{part({'alg': 'RS256', 'crit': ['x']})}.{body}.{signature}",
        good + ".x.y",
        good.upper(),
    ):
        assert door.refuses(forged) == (401, "invalid_api_key"), forged
    assert door.ask(good)


def test_a_tenant_that_is_none_of_ours_is_known_and_may_not(tmp_path: Path) -> None:
    assert Door(tmp_path).refuses(token(tenant="globex")) == (403, "unknown_tenant")


def test_the_claim_may_be_another_word_than_the_name(tmp_path: Path) -> None:
    door = Door(tmp_path, '[[tenant]]\nname = "acme"\njwt = "org-17"\n', jwt_tenant_claim="org")
    assert door.ask(token(org="org-17")).tag == tag_of(RING, "acme")
    assert door.refuses(token(org="acme")) == (403, "unknown_tenant")


def test_the_session_is_what_the_token_says_not_what_the_header_does(tmp_path: Path) -> None:
    text = '[[tenant]]\nname = "acme"\nshare = "session"\n'
    door = Door(tmp_path, text, jwt_session_claim="sid", session_header=True)
    tag = tag_of(RING, "acme")
    got = door.ask(token(sid="mine"), **{"x-kvatlas-session": "theirs"})
    assert got.session == session_of(RING, tag, "mine")
    got = door.ask(token(), **{"x-kvatlas-session": "own"})
    assert got.session == session_of(RING, tag, "own")
    assert door.refuses(token()) == (403, "session_needed")
    assert door.refuses(token(sid=7)) == (401, "invalid_api_key")
    assert door.refuses(token(sid="a/b")) == (400, "bad_session")


def test_keys_that_are_exchanged_end_what_they_signed(tmp_path: Path) -> None:
    door, good = Door(tmp_path), token()
    door.ask(good)
    write_keys(tmp_path, EC)
    door.refresh()
    assert door.refuses(good) == (401, "invalid_api_key")
    assert door.ask(token(EC, "ES256"))
    (tmp_path / "jwks.json").write_text("{")
    door.refresh()
    assert "jwks.json" in door.problem
    assert door.ask(token(EC, "ES256"))
    write_keys(tmp_path)
    door.refresh()
    assert not door.problem
    assert door.ask(good)


def test_a_key_set_that_cannot_be_used_keeps_no_tenant(tmp_path: Path) -> None:
    """Who is taken out of the file goes, whatever becomes of the other file."""
    entry = '[[tenant]]\nname = "acme"\nkeys = ["{}"]\n'
    door = Door(tmp_path, entry.format(digest_of("stolen")))
    assert door.ask("stolen")
    (tmp_path / "jwks.json").write_text("{")
    (tmp_path / "tenants.toml").write_text(entry.format(digest_of("another")) + "\n")
    assert door.refresh()
    assert "jwks.json" in door.problem
    assert door.refuses("stolen") == (401, "invalid_api_key")
    assert door.ask("another")


def test_who_began_with_an_older_file_does_not_end_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway looks at the file in a thread, and a purge in another one."""
    entry = '[[tenant]]\nname = "acme"\nepoch = {}\n'
    door, path = Door(tmp_path, entry.format(1)), tmp_path / "tenants.toml"
    begun, on = threading.Event(), threading.Event()

    def slow(path: Path) -> TenantsFile:
        found = load(path)
        if not begun.is_set():
            begun.set()
            on.wait(0.5)
        return found

    monkeypatch.setattr(tenants, "load", slow)
    path.write_text(entry.format(2) + "\n")
    looks = [threading.Thread(target=door.refresh) for _ in range(2)]
    looks[0].start()
    assert begun.wait(20)
    path.write_text(entry.format(3) + "\n\n")
    looks[1].start()
    looks[1].join(0.05)
    on.set()
    for look in looks:
        look.join(20)
    assert door.ask(token()).epoch == epoch_at(3, 0.0, 0.0)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ([OctKey.generate_key(256).as_dict()], "shared secret"),
        ([RSA.as_dict(private=True)], "private key"),
        ([{"kty": "RSA", "n": "x" * 171, "e": "AQAB"}], "2,048 bits"),
        ([{"kty": "RSA"}], "cannot be read|2,048"),
        ([], "keys"),
    ],
)
def test_key_sets_that_are_refused(tmp_path: Path, keys: list[Any], why: str) -> None:
    (tmp_path / "jwks.json").write_text(json.dumps({"keys": keys}))
    with pytest.raises(ConfigError, match=why):
        Door(tmp_path)


def test_salts_change_with_the_epoch_and_with_time(tmp_path: Path) -> None:
    door = Door(tmp_path, '[[tenant]]\nname = "acme"\nepoch = 2\nrotation_s = 3600\n')
    far = token(exp=int(NOW) + 90_000)
    first = door.ask(far)
    assert first.epoch == epoch_at(2, 3600, NOW)
    door.now += 3600
    assert door.ask(far).epoch == first.epoch + 1


# -- the file -------------------------------------------------------------------------------------

A, B = digest_of("key a"), digest_of("key b")
ONE = f'[[tenant]]\nname = "a"\nkeys = ["{A}"]\n'


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        (
            f'[[tenant]]\nname = "a"\nkeys = ["{A}"]\n[[tenant]]\nname = "b"\nkeys = ["{A}"]\n',
            4,
            "one key",
        ),
        (
            f'[[tenant]]\nname = "\u00e9"\nkeys = ["{A}"]\n[[tenant]]\nname = "e\u0301"\n',
            4,
            "one form",
        ),
        ('[[tenant]]\nname = "a"\n[[tenant]]\nname = "b"\njwt = "a"\n', 3, "in their tokens"),
        ('[[tenant]]\nname = "a"\nkeys = ["a secret key itself"]\n', 1, "SHA-256"),
        (f'[[tenant]]\nname = "a"\nkeys = ["{A.upper()}"]\n', 1, "lower"),
        (f'[[tenant]]\nname = "a"\nkeys = ["{digest_of("")}"]\n', 1, "empty"),
        (f'[[tenant]]\nname = "a"\nkeys = ["{digest_of("a")}"]\n', 1, "the name itself"),
        ('[[tenant]]\nname = ""\n', 1, "characters"),
        ('[[tenant]]\nname = "a/b"\n', 1, "slashes"),
        ('[[tenant]]\nname = "a\\u0000"\n', 1, "cannot be seen"),
        ('[[tenant]]\nname = "a"\nrotation_s = 0.0001\n', 1, "too short"),
        ('[[tenant]]\nname = "a"\nepoch = -1\n', 3, "epoch"),
        ('[[tenant]]\nname = "a"\nsalt = "x"\n', 3, "unknown key"),
        ('[[tenant]]\nname = "a"\nquota_bytes = {hbm = 1}\n', 3, "hbm"),
        ('[[tenant]]\nname = "a"\nquota_bytes = {dram = -1}\n', 3, "quota_bytes"),
        ('[[tenant]]\nname = "a"\nttl_s = -1.0\n', 3, "ttl_s"),
        ('[[tenant]]\nname = "a"\nretention = "forever"\n', 3, "retention"),
    ],
)
def test_a_file_that_would_share_by_accident(
    tmp_path: Path, text: str, line: int, why: str
) -> None:
    path = tmp_path / "t.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why) as found:
        load(path)
    assert f"{path}:{line}" in str(found.value)


def test_a_quota_of_nothing_is_one(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text('[[tenant]]\nname = "a"\nquota_bytes = {dram = 0}\n')
    assert load(path).tenant[0].quota_bytes == Quotas(dram=0)


def test_limits_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.toml"
    monkeypatch.setattr(config_tenants, "TENANTS_MAX", 2)
    path.write_text("".join(f'[[tenant]]\nname = "{i}"\n' for i in range(3)))
    with pytest.raises(ConfigError, match="at most 2"):
        load(path)
    monkeypatch.setattr(config_tenants, "KEYS_MAX", 1)
    path.write_text(f'[[tenant]]\nname = "a"\nkeys = ["{A}", "{B}"]\n')
    with pytest.raises(ConfigError, match="at most 1"):
        load(path)


def test_a_file_by_which_nobody_could_come_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nobody could come in"):
        Door(tmp_path, jwt_keys="", jwt_issuer="", jwt_audience="")


KVATLAS = '[[worker]]\nname = "w"\nurl = "http://127.0.0.1:1"\n'
SECRET = '[keys]\nsecret_file = "s"\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[tenants]\nfile = "t"\n', "keys.secret_file"),
        (SECRET + '[tenants]\npublic = "p"\n', "says nothing without tenants.file"),
        (SECRET + '[tenants]\nfile = "t"\njwt_issuer = "i"\n', "nothing without tenants.jwt_keys"),
        (SECRET + '[tenants]\nfile = "t"\njwt_keys = "k"\n', "needs jwt_issuer"),
        (
            SECRET + '[tenants]\nfile = "t"\njwt_keys = "k"\njwt_issuer = "i"\n',
            "needs jwt_audience",
        ),
        *(
            (
                f'{SECRET}[tenants]\nfile = "t"\njwt_keys = "k"\njwt_issuer = "i"\n'
                f'jwt_audience = "a"\njwt_algorithms = ["{name}"]\n',
                "key pair",
            )
            for name in ("HS256", "none", "dir", "RS1")
        ),
        (
            SECRET + '[tenants]\nfile = "t"\npublic = "p"\n[router]\npolicy = "round_robin"\n',
            "looks at no prompt",
        ),
    ],
)
def test_a_configuration_that_would_share_by_accident(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "kvatlas.toml"
    path.write_text(text + KVATLAS)
    with pytest.raises(ConfigError, match=why) as found:
        config.load(path)
    assert str(found.value).startswith(f"{path}:")
