"""Pairs by price: the hand-off as measured, the decode half, and a pair beside one engine."""

from __future__ import annotations

import math

import msgspec

from kvatlas.core.cost import Price
from kvatlas.core.pairs import by_price, with_pairs
from kvatlas.core.plans import EQUAL
from kvatlas.core.records import Publisher
from kvatlas.core.router import CROWD, Plan
from kvatlas.core.transports import Transports

P, Q, C, D, E = (Publisher(name) for name in "pqcde")


def plan(
    publisher: Publisher,
    *,
    wait: float = 0.0,
    crowd: float = 0.0,
    compute: float = 1.0,
    over_share: bool = False,
    held: int = 0,
) -> Plan:
    price = Price(wait_s=wait, load_s=0.0, recompute_s=compute, crowd_s=crowd, charge_s=0.0)
    return Plan(publisher, held, held, 0, (), 0, over_share, price)


def order(plans: list[Plan]) -> list[Publisher]:
    return [found.publisher for found in plans]


def test_the_decode_half_is_the_cheapest_by_crowd_and_hand_off() -> None:
    transports = Transports()
    decoders = [plan(D, crowd=CROWD * 0.01, compute=9.0), plan(E, crowd=CROWD * 0.02)]
    assert order(by_price(P, decoders, transports, 10_000, 0.0)) == [D, E], "it computes no prompt"
    for _ in range(50):
        transports.sent(P, D, 10_000, 0.0)
        transports.arrived(P, D, 10_000, 0.5, 0.0)
    assert order(by_price(P, decoders, transports, 10_000, 0.0)) == [E, D]
    assert order(by_price(Q, decoders, transports, 10_000, 0.0)) == [D, E]
    assert by_price(P, [], transports, 10_000, 0.0) == []


def test_a_pair_beside_one_engine() -> None:
    (second,) = by_price(P, [plan(D, crowd=0.3, wait=0.1)], Transports(), 0, 0.0)
    hand_off_s = second.price.hand_off_s
    plans = [plan(P, crowd=5.0), plan(C, crowd=0.5), plan(Q)]
    paired = with_pairs(plans, {P: second}, [P, Q])
    # What decodes at P is nobody's concern; one that finds no second half comes last.
    assert order(paired) == [P, C, Q]
    assert math.isclose(paired[0].price.total_s, 1.0 + 0.3 + 0.1 + hand_off_s)
    assert order(with_pairs([plan(P), plan(C, crowd=0.2)], {P: second}, [P])) == [C, P]
    full = plan(P, over_share=True)
    assert order(with_pairs([full, plan(C, crowd=9.0)], {P: second}, [P])) == [C, P]


def test_of_equal_prices_the_pair_that_holds_most_is_first() -> None:
    plans = [plan(C), plan(P, held=512), plan(Q, held=1024)]

    def ordered(dearer_s: float) -> list[Publisher]:
        (second,) = by_price(P, [plan(D)], Transports(), 0, 0.0)
        price = msgspec.structs.replace(second.price, hand_off_s=dearer_s)
        return order(with_pairs(plans, {P: msgspec.structs.replace(second, price=price)}, [P, Q]))

    alone_s = plan(C).price.total_s
    assert ordered(0.9 * EQUAL * alone_s) == [P, C, Q], "Q has no second half"
    assert ordered(1.1 * EQUAL * alone_s) == [C, P, Q]
