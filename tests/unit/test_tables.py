"""The compact tables behave as dicts do, at every size on the way up and down."""

from __future__ import annotations

import random
import sys

import pytest

from kvatlas.core.native import KeyTable, NameTable

SMALL = 2**64 - 1


def random_key(source: random.Random) -> bytes:
    return source.randrange(1, 400).to_bytes(16, source.choice(("little", "big")))


def test_a_key_table_is_a_dict() -> None:
    source, table, twin = random.Random(1), KeyTable(), dict[bytes, int]()
    for step in range(60_000):
        key = random_key(source)
        # Alternate between growing and shrinking, so that both resizes happen often.
        if source.random() < (0.7 if step // 3000 % 2 else 0.3):
            table[key] = twin[key] = source.getrandbits(source.choice((3, 64, 300)))
        elif key in twin:
            del table[key], twin[key]
        else:
            with pytest.raises(KeyError):
                del table[key]
        assert len(table) == len(twin)
        assert table.get(key, -1) == twin.get(key, -1)
    for number in range(400):
        key = number.to_bytes(16, "little")
        assert table.get(key, 0) == twin.get(key, 0)


def test_a_name_table_is_a_dict() -> None:
    source, table, twin = random.Random(2), NameTable(), dict[int, bytes]()
    for step in range(60_000):
        name = source.choice((source.randrange(500), SMALL - source.randrange(500)))
        if source.random() < (0.7 if step // 3000 % 2 else 0.3):
            table[name] = twin[name] = random_key(source)
        elif name in twin:
            del table[name], twin[name]
        assert (name in table) == (name in twin)
        assert table.get(name) == twin.get(name)
    walked = [k for i in range(0, table.slots(), 7) for k in table.values(i, i + 7)]
    assert sorted(walked) == sorted(twin.values())
    assert table.values(table.slots(), 2**62) == []
    with pytest.raises(ValueError, match="start"):
        table.values(2, 1)
    assert len(table) == len(twin)


def test_runs_join_neighbours_that_hold_the_same_object() -> None:
    table = KeyTable()
    keys = [i.to_bytes(16, "little") for i in range(1, 101)]
    many, few = 2**80 + 1, 2**80
    for i, key in enumerate(keys[:70]):
        table[key] = many if i < 40 else few
    assert table.runs((*keys, *keys)) == [(0, many), (40, few), (70, 0)]
    assert table.runs(keys[80:]) == [(0, 0)]
    assert table.runs([*keys[90:], *keys[:50]]) == [(0, 0)]
    assert table.runs(keys[:60]) == [(0, many), (40, few)]
    assert table.runs([]) == []
    assert KeyTable().runs(tuple(keys)) == [(0, 0)]


def test_memory_follows_what_is_held() -> None:
    table, names = KeyTable(), NameTable()
    for i in range(1, 50_001):
        table[i.to_bytes(16, "little")] = 1
        names[i] = i.to_bytes(16, "little")
    full = sys.getsizeof(table), sys.getsizeof(names)
    assert max(full) < 50_000 * 24 * 1.9 + 1000
    for i in range(1, 50_001):
        del table[i.to_bytes(16, "little")], names[i]
    assert max(sys.getsizeof(table), sys.getsizeof(names)) < 4000


def test_wrong_types_are_refused_and_change_nothing() -> None:
    table, names = KeyTable(), NameTable()
    with pytest.raises(TypeError, match="16 bytes"):
        table[b"short"] = 1
    with pytest.raises(TypeError, match="integers"):
        table[bytes(16)] = "x"  # type: ignore[assignment]
    with pytest.raises(TypeError, match="16 bytes"):
        table.runs([bytes(16), b""])
    with pytest.raises(ValueError, match="zeros"):
        names[1] = bytes(16)
    with pytest.raises(TypeError):
        names["1"] = b"k" * 16  # type: ignore[index]
    with pytest.raises(KeyError):
        del names[1]
    assert (len(table), len(names)) == (0, 0)


def test_names_are_taken_modulo_two_to_the_64() -> None:
    names = NameTable()
    names[-1] = b"k" * 16
    assert names.get(SMALL) == names.get(2**65 - 1) == b"k" * 16


def test_values_are_released() -> None:
    big = 2**200 + 12345
    before = sys.getrefcount(big)
    table = KeyTable()
    for i in range(1000):
        table[i.to_bytes(16, "little")] = big
        table[i.to_bytes(16, "little")] = big
    table.runs([i.to_bytes(16, "little") for i in range(2000)])
    for i in range(500):
        del table[i.to_bytes(16, "little")]
    assert sys.getrefcount(big) == before + 500
    del table
    assert sys.getrefcount(big) == before
