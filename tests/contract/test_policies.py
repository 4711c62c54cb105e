"""One suite for every eviction policy: the laws of `kvatlas.core.policy.base`."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import pytest

from kvatlas.core.policy.attention import AttentionScores
from kvatlas.core.policy.base import Facts, Heat, Key, Policy
from kvatlas.core.policy.registry import POLICIES, make_policy
from kvatlas.core.records import Tier

SCORES = AttentionScores(
    format="kvatlas.attention-scores.1",
    model="m",
    statistic="attention",
    trained=True,
    source="made up",
    block_tokens=16,
    from_start=(9.0, 3.0),
    last=4.0,
    middle=0.5,
    by_key={"7": 2.0},
)
TIERS = (Tier.HBM, Tier.DRAM, Tier.DISK)
MADE = [(name, tier) for name in POLICIES for tier in TIERS]
#: Exempt sinks and windows are the one reason of a policy not to free what it could.
MAY_HOLD_BACK = {("lru_sink", Tier.HBM)}


def made(name: str, tier: Tier) -> Policy:
    return make_policy(name, tier, scores=SCORES)


every_policy = pytest.mark.parametrize(("name", "tier"), MADE, ids=[f"{n}-{t}" for n, t in MADE])


class Twin:
    """What a policy must believe to be held, and random calls on both."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy = policy
        self.dice = random.Random(seed)
        self.held: dict[Key, Facts] = {}
        self.now = 0.0
        self.trail: list[list[Key]] = []

    def use(self, key: int) -> None:
        """Block ``key`` of a tree in which each block has two children."""
        self.now += self.dice.choice((0.0, 0.1, 50.0))
        if key in self.held:
            self.policy.touched(key, self.now)
            return
        parent = (key - 1) // 2 if key else None
        facts = Facts(
            self.dice.randint(1, 9),
            parent,
            key.bit_length(),
            self.dice.random(),
            Heat.SINK if key < 3 else Heat.COLD,
            self.dice.choice((0, 0, 3)),
        )
        self.policy.added(key, facts, self.now)
        self.held[key] = facts

    def remove(self) -> None:
        if self.held:
            key = self.dice.choice(list(self.held))
            self.policy.removed(key)
            del self.held[key]

    def evict(self, need_bytes: int, pinned: frozenset[Key] = frozenset()) -> list[Key]:
        may_go = (lambda key: key not in pinned) if pinned else None
        found = self.policy.evict(need_bytes, self.now, may_go)
        self.trail.append(found)
        assert len(set(found)) == len(found)
        for key in found:
            assert key not in pinned
            if self.policy.tree:  # nothing that is held hangs below it any more
                assert not {2 * int(key) + 1, 2 * int(key) + 2} & self.held.keys()
            del self.held[key]
        assert len(self.policy) == len(self.held)
        return found

    def step(self) -> None:
        what = self.dice.random()
        if what < 0.7:
            chain, key = [], self.dice.randint(0, 200)
            while key:
                chain.append(key)
                key = (key - 1) // 2
            for each in [0, *reversed(chain)]:
                self.use(each)
        elif what < 0.8:
            self.remove()
        else:
            pinned = frozenset(self.dice.sample(list(self.held), len(self.held) // 4))
            self.evict(self.dice.randint(0, 60), pinned)


@every_policy
def test_random_calls_never_name_what_is_not_held(name: str, tier: Tier) -> None:
    for seed in range(3):
        twin = Twin(made(name, tier), seed)
        for _ in range(200):
            twin.step()
            assert len(twin.policy) == len(twin.held)


@every_policy
def test_it_frees_what_is_asked_or_all_that_may_go(name: str, tier: Tier) -> None:
    twin = Twin(made(name, tier), 1)
    for key in range(100):
        twin.use(key)
    sizes = {key: facts.size_bytes for key, facts in twin.held.items()}
    last = 0
    for need in (1, 17, 90):
        found = twin.evict(need)
        freed = sum(sizes[key] for key in found)
        last = sizes[found[-1]]
        assert freed >= need
        if name != "prefix_tree":  # whose nodes go as a whole
            assert freed - last < need
    pinned = frozenset(list(twin.held)[::3])
    rest = sum(sizes[key] for key in twin.held if key not in pinned)
    freed = sum(sizes[key] for key in twin.evict(1 << 40, pinned))
    if (name, tier) in MAY_HOLD_BACK:
        assert freed <= rest
    elif twin.policy.tree:  # what stands above something pinned stays
        above = {a for key in pinned for a in _above(int(key))} | set(pinned)
        assert set(twin.held) <= above
    else:
        assert freed == rest
        assert set(twin.held) == pinned


def _above(key: int) -> set[int]:
    found = set()
    while key:
        key = (key - 1) // 2
        found.add(key)
    return found


@every_policy
def test_nothing_is_needed_nothing_goes(name: str, tier: Tier) -> None:
    twin = Twin(made(name, tier), 2)
    assert twin.evict(100) == []
    for key in range(10):
        twin.use(key)
    assert twin.evict(0) == []
    assert twin.evict(-5) == []
    assert twin.evict(10, frozenset(twin.held)) == []
    assert len(twin.policy) == 10


@every_policy
def test_the_same_calls_give_the_same_victims(name: str, tier: Tier) -> None:
    trails = []
    for _ in range(2):
        twin = Twin(made(name, tier), 3)
        for _ in range(200):
            twin.step()
        trails.append(twin.trail)
    assert trails[0] == trails[1]


@every_policy
def test_a_block_that_is_not_held_is_a_mistake(name: str, tier: Tier) -> None:
    for call in (
        lambda policy: policy.touched(5, 1.0),
        lambda policy: policy.removed(5),
    ):
        _raises_key_error(made(name, tier), call)
        once = made(name, tier)
        once.added(5, Facts(), 0.0)
        once.removed(5)
        _raises_key_error(once, call)


def _raises_key_error(policy: Policy, call: Callable[[Policy], None]) -> None:
    with pytest.raises(KeyError):
        call(policy)
    assert len(policy) == 0


def footprint(thing: object, seen: set[int]) -> int:
    """Bytes of the containers that an object is made of; what they hold is counted by number."""
    if id(thing) in seen or isinstance(thing, int | float | str | bytes | None):
        return 0
    seen.add(id(thing))
    size = sys.getsizeof(thing)
    if isinstance(thing, dict):
        return size + sum(footprint(v, seen) for pair in thing.items() for v in pair)
    if isinstance(thing, list | tuple | set):
        return size + sum(footprint(v, seen) for v in thing)
    inner = getattr(thing, "__dict__", None)
    return size + (footprint(inner, seen) if inner else 0)


@every_policy
def test_memory_follows_what_is_held(name: str, tier: Tier) -> None:
    """A thousand blocks held, of fifteen thousand seen."""
    policy = made(name, tier)

    def churn(first: int, count: int) -> None:
        for key in range(first, first + count):
            policy.added(key, Facts(1, key - 1 if key % 50 else None, key % 50), key / 100)
            if key - first >= 300:
                for back in (key - 1, key - 299):
                    if back in held:
                        policy.touched(back, key / 100)
            held.add(key)
            if len(held) > 1000:
                for gone in policy.evict(1, key / 100):
                    held.discard(int(gone))

    held: set[int] = set()
    churn(0, 3_000)
    early = footprint(policy, set())
    churn(3_000, 12_000)
    assert len(policy) == len(held) <= 1000 + 1
    assert footprint(policy, set()) < 2.5 * early


@every_policy
def test_parents_may_come_after_their_children(name: str, tier: Tier) -> None:
    """So it is in a lower tier, to which the end of a prompt comes down first."""
    policy = made(name, tier)
    for key in (3, 1, 0, 2):
        policy.added(key, Facts(1, (key - 1) // 2 if key else None, 0), 0.0)
    found = policy.evict(4, 1000.0)
    if policy.tree:
        assert found.index(3) < found.index(1) < found.index(0)
        assert found.index(2) < found.index(0)
    if (name, tier) not in MAY_HOLD_BACK:
        assert sorted(int(key) for key in found) == [0, 1, 2, 3]


@every_policy
def test_keys_may_be_bytes(name: str, tier: Tier) -> None:
    policy = made(name, tier)
    keys = [bytes([n]) * 16 for n in range(8)]
    for n, key in enumerate(keys):
        policy.added(key, Facts(1, keys[n - 1] if n else None, n), 0.0)
    assert set(policy.evict(3, 1000.0)) < set(keys)


def test_every_policy_of_the_registry_is_held_to_it() -> None:
    assert {name for name, _ in MADE} == set(POLICIES)
    assert {policy.tree for policy in (made("lru", Tier.HBM), made("leaf_lru", Tier.HBM))} == {
        False,
        True,
    }


def test_a_policy_that_names_what_is_pinned_is_caught() -> None:
    """The suite can fail: one that does not ask, and one that gives up parents."""

    class Rude:
        tree = True

        def __init__(self) -> None:
            self.keys: dict[Key, None] = {}

        def __len__(self) -> int:
            return len(self.keys)

        def added(self, key: Key, facts: Facts, now: float) -> None:
            self.keys[key] = None

        def touched(self, key: Key, now: float) -> None:
            self.keys[key]

        def removed(self, key: Key) -> None:
            del self.keys[key]

        def evict(self, need_bytes: int, now: float, may_go: object = None) -> list[Key]:
            first = next(iter(self.keys))
            del self.keys[first]
            return [first]

    for pinned in (frozenset({0}), frozenset({9})):
        twin = Twin(Rude(), 0)
        for key in range(5):
            twin.use(key)
        with pytest.raises(AssertionError):
            twin.evict(1, pinned)
