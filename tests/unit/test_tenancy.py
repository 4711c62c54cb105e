"""Tenants' tags and salts: what proves one, what does not, and whose a prompt's blocks are."""

from __future__ import annotations

import unicodedata

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvatlas.core.forgetting import Floor, payer_of
from kvatlas.core.keys import PUBLIC, Keyring, Scope, salt_scope
from kvatlas.core.tenancy import (
    EPOCH_MAX,
    EVERYBODY,
    NAME_CHARS_MAX,
    PUBLIC_TOKENS_MAX,
    SALT_CHARS_MAX,
    Chain,
    Sharing,
    TenantSalt,
    checked_name,
    epoch_at,
    mark_of,
    prefix_digest,
    read_salt,
    salt_of,
    scope_of,
    session_of,
    sharing_of,
    tag_of,
)
from kvatlas.dataplane.sealing import tenant_of

RING = Keyring(b"the deployment's secret")
OTHER = Keyring(b"the secret of another deployment")
FP = b"\1" * 32

tags = st.text("0123456789abcdef", min_size=24, max_size=24)
salts = st.builds(
    lambda tag, epoch, session, public: TenantSalt(tag, epoch, session, *public),
    tags,
    st.integers(0, EPOCH_MAX),
    st.one_of(st.just(""), tags),
    st.one_of(
        st.just((0, "")),
        st.tuples(st.integers(1, PUBLIC_TOKENS_MAX), tags.map(lambda tag: tag[:12])),
    ),
)
names = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=20)


def ids(count: int, first: int = 0) -> bytes:
    return b"".join((first + i).to_bytes(4, "little") for i in range(count))


@given(salts)
def test_what_a_salt_says_comes_back_and_only_under_its_secret(salt: TenantSalt) -> None:
    text = salt_of(RING, salt)
    assert read_salt(RING, text) == salt
    assert read_salt(OTHER, text) is None
    assert salt_of(OTHER, salt) != text
    assert text.isascii()
    assert len(text) <= SALT_CHARS_MAX
    assert not set(text) & set("@/\\\0")  # which vLLM refuses


@given(salts, st.data())
def test_a_salt_that_was_changed_anywhere_proves_nothing(
    salt: TenantSalt, data: st.DataObject
) -> None:
    text = salt_of(RING, salt)
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(exclude_characters=text[at]))
    for forged in (
        text[:at] + other + text[at + 1 :],
        text[:at],
        text[:at] + text[at + 1 :],
        text[:at] + other + text[at:],
        text + "\n",
        " " + text,
        text.upper(),
    ):
        assert read_salt(RING, forged) is None or forged == text
        if forged != text:
            assert sharing_of(RING, forged) == Sharing(salt_scope(forged))


@given(salts, salts)
def test_parts_of_two_salts_make_no_third(one: TenantSalt, two: TenantSalt) -> None:
    assume(one != two)
    first, second = (salt_of(RING, each).split(".") for each in (one, two))
    for at in range(1, 5):
        mixed = ".".join((*first[:at], second[at], *first[at + 1 :]))
        assert (read_salt(RING, mixed) is None) == (first[at] != second[at])
    assert read_salt(RING, ".".join((*first[:5], second[5]))) is None


@pytest.mark.parametrize(
    "number",
    ["01", "+1", "1_0", "٣", "-1", "", "1.0", "9" * 19, "9" * 20, "0x1"],
)
def test_a_number_has_one_form(number: str) -> None:
    """Also where whoever wrote it had the secret: two texts of one scope would be two salts."""
    tag = tag_of(RING, "acme")
    mark = "a" * 12
    for said in (f"kva1.{tag}.{number}.-.0", f"kva1.{tag}.0.-.{number}-{mark}"):
        mac = RING.proof(b"salt\0" + said.encode()).hex()[:32]
        assert read_salt(RING, f"{said}.{mac}") is None


@pytest.mark.parametrize(
    "salt",
    [
        TenantSalt("acme", 0),
        TenantSalt("a" * 24, -1),
        TenantSalt("a" * 24, EPOCH_MAX + 1),
        TenantSalt("a" * 24, 0, "-"),
        TenantSalt("a" * 24, 0, "b" * 23),
        TenantSalt("a" * 24, 0, "", PUBLIC_TOKENS_MAX + 1, "a" * 12),
        TenantSalt("a" * 24, 0, "", -1, "a" * 12),
        TenantSalt("a" * 24, 0, "", 1, ""),
        TenantSalt("a" * 24, 0, "", 1, "a" * 11),
        TenantSalt("a" * 24, 0, "", 0, "a" * 12),
        TenantSalt("a" * 23 + ".", 0),
        TenantSalt("A" * 24, 0),
    ],
)
def test_what_no_salt_can_say_is_refused(salt: TenantSalt) -> None:
    with pytest.raises(ValueError, match="no salt can say"):
        salt_of(RING, salt)


def keys_of(
    tokens: bytes, grid: int, sharing: Sharing = EVERYBODY, adapter: str = ""
) -> list[bytes]:
    whole = len(tokens) // (4 * grid) * 4 * grid
    return Chain(RING, FP, grid, sharing, adapter).extend(tokens[:whole])


# -- names ----------------------------------------------------------------------------------------


@given(names, names)
def test_names_have_tags_of_their_own_whatever_their_unicode_form(one: str, two: str) -> None:
    for name in (one, two):
        try:
            checked_name(name)
        except ValueError:
            assume(False)
    forms = {tag_of(RING, unicodedata.normalize(form, one)) for form in ("NFC", "NFD")}
    assert len(forms) == 1
    assert len(tag_of(RING, one)) == 24
    same = unicodedata.normalize("NFC", one) == unicodedata.normalize("NFC", two)
    assert (tag_of(RING, one) == tag_of(RING, two)) == same
    assert tag_of(RING, one) != tag_of(OTHER, one)


def test_nobody_has_no_tag() -> None:
    assert tag_of(RING, "") == ""
    assert session_of(RING, tag_of(RING, "acme"), "") == ""


@pytest.mark.parametrize(
    "name",
    [
        "a.b", "a-b", "a:b", "a b", "a@b.example", "кот", "猫", "e\u0301", "kva1.acme", "-", "..a",
        "a|b", "100%", "a\u00a0b",
    ],
)  # fmt: skip
def test_names_may_have_separators(name: str) -> None:
    """They are never part of a salt or a scope: only their tags are."""
    salt = TenantSalt(tag_of(RING, name), 3, session_of(RING, tag_of(RING, name), name))
    assert read_salt(RING, salt_of(RING, salt)) == salt
    assert scope_of(salt).id.count(".") == 2


@pytest.mark.parametrize(
    "name",
    [
        "a/b", "../b", "a\\b", ".", "..", " ", " a", "a ", "a\0b", "a\nb", "a\tb", "a\x7f",
        "a\u200bb", "a\u202eb", "\ufeffa", "a\u2028b", "a\u2044b", "a\u2215b", "a\uff0fb",
        "a\uff3cb", "\u2024\u2024", "\uff0e", "\u2026", "a\u00a0", "\ud800", "\ue000",
        "x" * (NAME_CHARS_MAX + 1),
        "\u1e69" * NAME_CHARS_MAX + "x",
    ],
)  # fmt: skip
def test_names_that_cannot_be_seen_or_look_like_paths_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"name|seen"):
        tag_of(RING, name)
    with pytest.raises(ValueError, match=r"name|seen"):
        session_of(RING, "a" * 24, name)


def test_a_session_is_one_tenants() -> None:
    first, second = tag_of(RING, "a"), tag_of(RING, "b")
    assert session_of(RING, first, "s") != session_of(RING, second, "s")
    assert session_of(RING, first, "s") != session_of(RING, first, "t")
    assert session_of(RING, first, "a") != first


# -- epochs ---------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(0, 3), st.integers(0, 1 << 32), st.integers(0, 1 << 14))
def test_epochs_only_rise(epoch: int, raised: int, now: int, later_s: int) -> None:
    first = epoch_at(epoch, 3600, now)
    second = epoch_at(epoch + raised, 3600, now + later_s)
    assert first <= second
    assert (first == second) == (not raised and now // 3600 == (now + later_s) // 3600)
    assert epoch_at(epoch, 0, now) == epoch_at(epoch, 0, now + later_s)


def test_epochs_out_of_range_are_refused() -> None:
    for epoch, rotation_s, now in ((-1, 0, 0), (1 << 21, 0, 0), (0, 1e-9, 1e9), (0, 1, -5.0)):
        with pytest.raises(ValueError, match="out of range"):
            epoch_at(epoch, rotation_s, now)


# -- whose blocks ---------------------------------------------------------------------------------


def test_scopes_do_not_depend_on_the_public_prefix() -> None:
    salt = TenantSalt("a" * 24, 7)
    assert scope_of(salt) == Scope("tenant", "a" * 24 + ".7")
    session = msgspec.structs.replace(salt, session="b" * 24)
    assert scope_of(session) == Scope("session", f"{'a' * 24}.7.{'b' * 24}")
    for each in (salt, session):
        assert scope_of(each) == scope_of(
            msgspec.structs.replace(each, public_tokens=9, public_mark="b" * 12)
        )


@given(salts, st.one_of(salts.map(lambda salt: scope_of(salt).id), tags, st.text(max_size=80)))
def test_no_text_that_proves_nothing_is_the_scope_of_a_tenant(salt: TenantSalt, text: str) -> None:
    assert sharing_of(RING, text).scope != scope_of(salt)
    assert sharing_of(RING, text).tenant == ""
    assert sharing_of(RING, "") == EVERYBODY
    proved = sharing_of(RING, salt_of(RING, salt))
    assert proved.scope == scope_of(salt)
    assert proved.tenant == salt.tag
    assert proved.public_tokens == salt.public_tokens


@given(st.integers(0, 40), st.integers(0, 60), st.integers(1, 5))
def test_the_public_blocks_are_everybodys_and_the_others_the_tenants(
    public: int, count: int, grid: int
) -> None:
    tokens = ids(count)
    mine, yours = (
        keys_of(tokens, grid, Sharing(Scope("tenant", f"{who}.0"), public)) for who in "ab"
    )
    everybody = keys_of(tokens, grid)
    blocks, shared = count // grid, min(public, count) // grid
    assert len(mine) == len(yours) == len(everybody) == blocks
    assert mine[:shared] == yours[:shared] == everybody[:shared]
    rest = {*mine[shared:], *yours[shared:], *everybody[shared:]}
    assert len(rest) == 3 * (blocks - shared)


def test_two_public_prefixes_of_one_tenant_part_where_the_shorter_ends() -> None:
    scope = Scope("tenant", "a.0")
    short, long = (keys_of(ids(32), 4, Sharing(scope, n)) for n in (8, 16))
    assert short[:2] == long[:2]
    assert not {*short[2:]} & {*long[2:]}


@given(st.integers(0, 20), st.lists(st.integers(0, 5), max_size=8))
def test_tokens_may_come_in_pieces(public: int, pieces: list[int]) -> None:
    sharing = Sharing(Scope("session", "a.0.b"), public)
    chain, tokens, keys = Chain(RING, FP, 2, sharing), ids(2 * sum(pieces)), []
    for count in pieces:
        at = len(keys) * 8
        keys += chain.extend(tokens[at : at + 8 * count])
    assert keys == keys_of(tokens, 2, sharing)
    with pytest.raises(ValueError, match="whole blocks"):
        chain.extend(b"1234")


def test_without_a_public_prefix_keys_are_what_they_were() -> None:
    scope = Scope("tenant", "a.0")
    assert keys_of(ids(16), 4, Sharing(scope)) == RING.chain(RING.root(FP, scope), ids(16), 4)
    assert keys_of(ids(16), 4) == RING.chain(RING.root(FP), ids(16), 4)
    assert keys_of(ids(16), 4, Sharing(PUBLIC, 8)) == RING.chain(RING.root(FP), ids(16), 4)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))
def test_public_is_only_what_the_salt_names(public: int, count: int, other: int) -> None:
    """The gateway takes a prompt for one that begins with public tokens, and the engine computes
    others, or fewer: then they are the tenant's alone."""
    tokens, scope = ids(count), Scope("tenant", "a.0")
    mark = mark_of(RING, prefix_digest(ids(public))) if public else ""
    sharing = Sharing(scope, public, mark, "a")
    assert sharing.of(RING, tokens) == (sharing if public <= count else Sharing(scope, tenant="a"))
    twisted = bytearray(tokens)
    if other < count:
        twisted[4 * other] ^= 1
        same = public <= count and other >= public
        assert (sharing.of(RING, twisted) == sharing) == (same or not public)
    if public:
        forged = msgspec.structs.replace(sharing, public_mark=mark_of(OTHER, prefix_digest(tokens)))
        assert forged.of(RING, tokens).public_tokens == 0


def test_an_adapter_that_is_named_like_a_salt_opens_nothing() -> None:
    text = salt_of(RING, TenantSalt(tag_of(RING, "acme"), 0))
    sharing = sharing_of(RING, text)
    mine = keys_of(ids(16), 4, sharing)
    for name in (text, sharing.scope.id, f'tenant","{sharing.scope.id}', "kva1." + text):
        for scope in (PUBLIC, Scope("tenant", ""), salt_scope(name)):
            theirs = keys_of(ids(16), 4, Sharing(scope), name)
            assert not {*mine} & {*theirs}
    assert not {*mine} & {*keys_of(ids(16), 4, sharing, text)}


@given(st.integers(0, 1 << 33), st.booleans())
def test_a_salt_that_reads_like_an_owner_is_nobodys(epoch: int, session: bool) -> None:
    """A client may choose it where no gateway says the salt: nothing is sealed under the tenant's
    key, held against its quota, or refused and purged with it."""
    tag = tag_of(RING, "acme")
    true = Sharing(scope_of(TenantSalt(tag, epoch, "c" * 24 if session else "")), tenant=tag)
    claimed = sharing_of(RING, true.scope.owner).scope.owner
    assert (tenant_of(true.scope.owner), payer_of(true.scope.owner)) == (tag, tag)
    assert tenant_of(claimed) == ""
    assert payer_of(claimed) != tag
    floor = Floor(tag, epoch + 1)
    assert floor.covers(true.scope.owner)
    assert not floor.covers(claimed)
    assert EVERYBODY.scope.owner == ""
