"""The compiled part of core and its twin in plain Python cannot be told apart."""

from __future__ import annotations

import ast
import hashlib
import inspect
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import twins
from kvatlas.core import _native
from kvatlas.core.keys import Keyring

ROOT = Path(__file__).resolve().parents[2]
WORD = 2**64 - 1
_FACTOR = 0xD6E8FEB86659FD93
_INVERSE = pow(_FACTOR, -1, 2**64)

# -- keys and names that are hard on a hash table -------------------------------------------------


def mix(x: int) -> int:
    """The tables' own hash of a word, as in tables.cpp."""
    x = (x ^ x >> 32) * _FACTOR & WORD
    return (x ^ x >> 32) * _FACTOR & WORD


def unmix(x: int) -> int:
    """The word whose hash is ``x``."""
    for _ in range(2):
        x = x * _INVERSE & WORD
        x ^= x >> 32
    return x


def key_with_hash(value: int, number: int) -> bytes:
    """One of 2**64 keys that all have the hash ``value``."""
    first = unmix(value) ^ mix(number)
    return first.to_bytes(8, "little") + number.to_bytes(8, "little")


# The first and the last place of an array of any size, and one in the middle.
HASHES = [*range(6), WORD // 2, *range(WORD - 5, WORD + 1)]
NAMES = [*(unmix(h) for h in HASHES), *range(5), *(n << 59 for n in range(1, 5)), WORD]
KEYS = [
    bytes(16),
    b"\xff" * 16,
    *(key_with_hash(h, n) for h in HASHES for n in (0, 1, WORD)),
    *(bytes([n]) + bytes(15) for n in range(1, 9)),  # equal but for their first bits
    *(bytes(15) + bytes([n]) for n in range(1, 9)),  # or their last
]
keys = st.sampled_from(KEYS) | st.binary(min_size=16, max_size=16)
names = st.sampled_from(NAMES) | st.integers(-(2**66), 2**66)
# Distinct objects: a run ends where the object changes, not where its value does.
VALUES = [0, 1, 255, *(2**64 + n for n in (0, 0, 1)), 2**300, True]
values = st.sampled_from(VALUES)


def test_the_keys_are_as_hard_as_they_claim() -> None:
    assert [mix(unmix(h)) for h in HASHES] == HASHES
    assert mix(int.from_bytes(KEYS[2][:8], "little") ^ mix(0)) == HASHES[0]


def outcome(call: Callable[[], object]) -> object:
    """What a call returns, or what it raises."""
    try:
        return call()
    except (IndexError, KeyError, TypeError, ValueError) as error:
        return type(error), error.args


# -- the tables -----------------------------------------------------------------------------------


class KeyTables(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.native, self.twin = _native.KeyTable(), twins.KeyTable()
        self.held: list[bytes] = []  # every key that was ever there

    @rule(key=keys, value=values)
    def store(self, key: bytes, value: int) -> None:
        self.native[key] = self.twin[key] = value
        self.held.append(key)

    @rule(some=st.lists(keys), bit=st.sampled_from([0, 3, 8, 70, 300]), known=st.booleans())
    def add(self, some: list[bytes], bit: int, known: bool) -> None:
        some = [*some, *(self.held[-20:] if known else ())]
        shared = {value: value for value in VALUES}
        mine, theirs = dict(shared), dict(shared)
        assert self.native.add(some, 1 << bit, mine) == self.twin.add(some, 1 << bit, theirs)
        assert mine == theirs
        for key in some:  # equal, but each has made its own new objects
            assert self.native.get(key, -1) == self.twin.get(key, -2)
            self.native[key] = self.twin.get(key, -1)
        self.held += some

    @rule(seed=st.integers(0, 9), count=st.integers(1, 400), value=values)
    def grow(self, seed: int, count: int, value: int) -> None:
        source = random.Random(seed)
        for _ in range(count):
            self.store(source.randbytes(16), value)

    @rule(part=st.sampled_from([0.1, 0.5, 0.95, 1.0]), seed=st.integers(0, 9))
    def shrink(self, part: float, seed: int) -> None:
        gone = random.Random(seed).sample(self.held, int(len(self.held) * part))
        for key in gone:
            self.remove(key)

    @rule(key=keys)
    def remove(self, key: bytes) -> None:
        removed = outcome(lambda: self.native.__delitem__(key))
        assert removed == outcome(lambda: self.twin.__delitem__(key))
        assert self.native.get(key, -1) == -1

    @rule(key=keys)
    def get(self, key: bytes) -> None:
        assert self.native.get(key, -1) is self.twin.get(key, -1)

    @rule(prompt=st.lists(keys), data=st.data())
    def runs(self, prompt: list[bytes], data: st.DataObject) -> None:
        if self.held:
            known = data.draw(st.lists(st.sampled_from(self.held), max_size=60))
            prompt = [*known, *prompt]
        self.same_runs(prompt)

    @invariant()
    def everything_is_there(self) -> None:
        assert len(self.native) == len(self.twin)
        assert sys.getsizeof(self.native) < 64 * 24 + 5 * 24 * len(self.twin) + 200
        for key in self.held:
            assert self.native.get(key, -1) is self.twin.get(key, -1)
        self.same_runs([*self.held, *KEYS])
        self.same_runs([*self.twin._held, *KEYS])

    def same_runs(self, prompt: list[bytes]) -> None:
        native, twin = self.native.runs(prompt), self.twin.runs(prompt)
        assert native == twin
        assert all(mine[1] is theirs[1] for mine, theirs in zip(native, twin, strict=True))


class NameTables(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.native, self.twin = _native.NameTable(), twins.NameTable()
        self.held: list[int] = []

    @rule(name=names, key=keys)
    def store(self, name: int, key: bytes) -> None:
        stored = outcome(lambda: self.native.__setitem__(name, key))
        assert stored == outcome(lambda: self.twin.__setitem__(name, key))
        self.held.append(name)

    @rule(some=st.lists(names), key=keys, more=st.integers(0, 1))
    def add(self, some: list[int], key: bytes, more: int) -> None:
        values = [key, *KEYS[1:]] * len(some)
        values = values[: len(some) + more]
        added = outcome(lambda: self.native.add(some, values))
        assert added == outcome(lambda: self.twin.add(some, values))
        self.held += some

    @rule(seed=st.integers(0, 9), count=st.integers(1, 400), key=keys)
    def grow(self, seed: int, count: int, key: bytes) -> None:
        source = random.Random(seed)
        for _ in range(count):
            self.store(source.getrandbits(64), key)

    @rule(part=st.sampled_from([0.1, 0.5, 0.95, 1.0]), seed=st.integers(0, 9))
    def shrink(self, part: float, seed: int) -> None:
        for name in random.Random(seed).sample(self.held, int(len(self.held) * part)):
            self.remove(name)

    @rule(name=names)
    def remove(self, name: int) -> None:
        removed = outcome(lambda: self.native.__delitem__(name))
        assert removed == outcome(lambda: self.twin.__delitem__(name))
        assert name not in self.native

    @rule(name=names)
    def get(self, name: int) -> None:
        assert self.native.get(name) == self.twin.get(name)

    @rule(step=st.integers(1, 500))
    def walk(self, step: int) -> None:
        def walked(table: _native.NameTable | twins.NameTable) -> list[tuple[int, bytes]]:
            starts = range(0, table.slots(), step)
            entries = list(itertools.chain(*(table.entries(i, i + step) for i in starts)))
            values = list(itertools.chain(*(table.values(i, i + step) for i in starts)))
            assert [key for _, key in entries] == values
            return sorted(entries)

        assert walked(self.native) == walked(self.twin)

    @invariant()
    def everything_is_there(self) -> None:
        assert len(self.native) == len(self.twin)
        assert sys.getsizeof(self.native) < 64 * 24 + 5 * 24 * len(self.twin) + 200
        for name in self.held:
            assert self.native.get(name) == self.twin.get(name)
            assert (name in self.native) == (name in self.twin)


for machine in (KeyTables, NameTables):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestKeyTables, TestNameTables = KeyTables.TestCase, NameTables.TestCase


@pytest.mark.parametrize("bad", [b"", bytes(15), bytes(17), bytearray(16), "k" * 16, 1, None])
def test_what_is_no_key_is_refused_alike(bad: object) -> None:
    def refusals(module: object) -> list[object]:
        keyed, named = module.KeyTable(), module.NameTable()  # type: ignore[attr-defined]
        keyed[bytes(16)] = 7
        calls = [
            lambda: keyed.get(bad, 0),
            lambda: keyed.__setitem__(bad, 1),
            lambda: keyed.__delitem__(bad),
            lambda: keyed.runs([bytes(16), bad]),
            lambda: keyed.add([b"k" * 16, bad], 1, {}),
            lambda: keyed.__setitem__(bytes(16), "no number"),
            lambda: named.__setitem__(1, bad),
            lambda: named.__setitem__(1, bytes(16)),
            lambda: named.add([1, 2], [b"k" * 16, bad]),
            lambda: named.add([1, 2], [b"k" * 16, bytes(16)]),
            lambda: named.__delitem__(1),
            lambda: named.values(-1, 2),
            lambda: named.entries(-1, 2),
        ]
        return [*map(outcome, calls), len(keyed), keyed.get(bytes(16), 0), len(named)]

    assert refusals(_native) == refusals(twins)


def test_no_table_is_used_before_it_is_made() -> None:
    keyed = _native.KeyTable.__new__(_native.KeyTable)
    named = _native.NameTable.__new__(_native.NameTable)
    calls = [
        lambda: len(keyed),
        lambda: keyed.get(bytes(16), 0),
        lambda: keyed.__setitem__(bytes(16), 1),
        lambda: len(named),
        lambda: named.get(1),
        lambda: 1 in named,
    ]
    for call in calls:
        with pytest.raises(TypeError, match="initialised"):
            call()


# -- token ids ------------------------------------------------------------------------------------

numbers = st.one_of(
    *(st.integers(2**n - 2, 2**n + 1) for n in (7, 8, 16, 31, 32, 63)), st.integers(-300, 300)
)


def same_ids(raw: bytes) -> bool:
    """Do both read ``raw`` alike? Returns whether they read it at all."""
    try:
        ids = twins.token_ids(raw)
    except ValueError:
        with pytest.raises(ValueError, match=r"list|id"):
            _native.token_ids(raw)
        return False
    assert _native.token_ids(raw) == _native.token_ids(memoryview(raw)) == ids
    return True


@given(st.lists(numbers, max_size=40), st.integers(0, 3))
def test_token_ids_are_read_alike(ids: list[int], repeated: int) -> None:
    ids = ids * 12**repeated  # lists of up to 15, 65,535 and more have heads of their own
    raw = msgspec.msgpack.encode(ids)
    assert same_ids(raw) == all(0 <= i < 2**32 for i in ids)
    assert not same_ids(raw + b"\0")
    assert not ids or not same_ids(raw[:-1])


@pytest.mark.parametrize("kind", [0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3])
@pytest.mark.parametrize("value", [0, 1, 127, 128, 255])
def test_every_width_is_read(kind: int, value: int) -> None:
    width = 1 << (kind & 3)
    if kind < 0xD0 or width > 1 or value < 128:
        assert same_ids(bytes([0x91, kind]) + value.to_bytes(width, "big"))
    else:
        assert not same_ids(bytes([0x91, kind, value]))  # below zero


@given(
    st.binary(max_size=12)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=3) | numbers,
        lambda inner: st.lists(inner, max_size=3),
    ).map(msgspec.msgpack.encode)
)
def test_what_is_no_list_of_token_ids_is_refused_alike(raw: bytes) -> None:
    same_ids(raw)


# -- the chain ------------------------------------------------------------------------------------

needs_sha = pytest.mark.skipif(
    not _native.accelerated, reason="this processor has no SHA instructions: hashlib does it all"
)
long_tokens = st.integers(0, 20_000).map(lambda n: random.Random(n).randbytes(n))


@needs_sha
@given(
    secret=st.binary(min_size=32, max_size=32) | st.binary(max_size=40),
    parent=st.binary(min_size=16, max_size=16) | st.binary(max_size=20),
    tokens=st.binary(max_size=2000) | long_tokens,
    block_bytes=st.integers(1, 300) | st.sampled_from([-1, 0, 1024, 4096, 2**62]),
)
def test_the_chain_is_the_twins(
    secret: bytes, parent: bytes, tokens: bytes, block_bytes: int
) -> None:
    twin = outcome(lambda: twins.chain(secret, parent, tokens, block_bytes))
    for form in (tokens, bytearray(tokens), memoryview(tokens)):
        assert outcome(lambda form=form: _native.chain(secret, parent, form, block_bytes)) == twin


@given(
    tokens=st.binary(max_size=400).map(lambda b: b[: len(b) // 4 * 4]),
    block_tokens=st.integers(1, 40),
    extras=st.lists(st.binary(max_size=80), max_size=12),
)
def test_a_keyring_chains_as_the_twin_does(
    tokens: bytes, block_tokens: int, extras: list[bytes]
) -> None:
    ring, secret = Keyring(bytes(16)), hashlib.sha256(b"kvatlas.secret.1\0" + bytes(16)).digest()
    expected = []
    key = parent = ring.root(bytes(32))
    size = 4 * block_tokens
    for index, start in enumerate(range(0, len(tokens) - size + 1, size)):
        extra = extras[index] if index < len(extras) else b""
        if extra:
            [key] = twins.chain(secret, key, b"extra\0" + extra, len(extra) + 6)
        [key] = twins.chain(secret, key, tokens[start : start + size], size)
        expected.append(key)
    assert ring.chain(parent, tokens, block_tokens, extras) == expected
    assert ring.chain(parent, memoryview(tokens).cast("I"), block_tokens, extras) == expected


# -- the same words, and the same decisions -------------------------------------------------------


def described(path: Path) -> dict[str, tuple[str, str | None]]:
    """Public functions and methods with their signatures and docstrings; classes with theirs."""
    found: dict[str, tuple[str, str | None]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = "", ast.get_docstring(node)
                visit(node.body, f"{node.name}.")
            elif isinstance(node, ast.FunctionDef) and node.name not in ("__init__", "_checked"):
                signature = f"{ast.unparse(node.args)} -> {ast.unparse(node.returns or node)}"
                found[prefix + node.name] = signature, ast.get_docstring(node)

    visit(ast.parse(path.read_text("utf-8")).body, "")
    return found


def test_both_are_described_in_the_same_words() -> None:
    stub = described(ROOT / "src/kvatlas/core/_native.pyi")
    assert described(Path(inspect.getfile(twins))) == stub
    for name in stub:
        thing: object = _native
        for part in name.split("."):
            thing = getattr(thing, part)


def test_the_directory_decides_the_same_with_the_twins() -> None:
    """Its whole test suite runs on them, and without the compiled module."""
    suites = sorted((ROOT / "tests").glob("*/test_directory*.py"))
    assert len(suites) >= 3
    tried = [*suites, ROOT / "tests/unit/test_tables.py", ROOT / "tests/unit/test_hashing.py"]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "twins_in_place", *map(str, tried)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_the_compiled_part_it_says_what_to_do() -> None:
    code = "import sys; sys.modules['kvatlas.core._native'] = None\nimport kvatlas.core.directory"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: kvatlas is not compiled" in done.stderr
    assert "make setup" in done.stderr
