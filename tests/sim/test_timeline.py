"""Virtual time and messages: order, cancelling, loss and delay on the way."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvatlas.sim.messages import Cancel, Look, Message, Refused
from kvatlas.sim.network import Envelope, Network
from kvatlas.sim.timeline import Timeline


def test_calls_come_in_order_of_time_and_then_of_asking() -> None:
    timeline, seen = Timeline(), []
    for name, at in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)):
        timeline.at(at, seen.append, name)
    timeline.after(0.5, lambda: timeline.at(0.0, seen.append, "late"))
    while timeline.step():
        pass
    assert seen == ["late", "a", "b", "c", "d"]
    assert timeline.now == 2.0


def test_what_is_cancelled_never_comes_and_does_not_pile_up() -> None:
    timeline, seen = Timeline(), []
    for number in range(20_000):
        timer = timeline.at(1e9, seen.append, number)
        timer.cancel()
        timer.cancel()
    timeline.at(1.0, seen.append, "kept")
    assert len(timeline._heap) < 5_000
    assert timeline.next_at() == 1.0
    while timeline.step():
        pass
    assert seen == ["kept"]


class Ends:
    """Two ends of a network."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.network = Network(self.timeline, latency_s=0.1)
        self.got: list[tuple[float, str, Message]] = []
        for name in ("a", "b"):
            self.network.attach(name, self.receive)

    def receive(self, source: str, message: Message) -> None:
        self.got.append((self.timeline.now, source, message))

    def run(self) -> list[tuple[float, str, Message]]:
        while self.timeline.step():
            pass
        return self.got


def test_a_message_takes_its_time_and_keeps_its_order() -> None:
    ends = Ends()
    ends.network.send("a", "b", Look(1))
    ends.network.send("a", "b", Look(2))
    assert ends.run() == [(0.1, "a", Look(1)), (0.1, "a", Look(2))]


def test_nobody_there_is_told_to_the_sender_where_a_connection_would() -> None:
    ends = Ends()
    ends.network.detach("b")
    ends.network.send("a", "b", Look(1))
    assert ends.run() == [(0.2, "b", Refused(Look(1)))]
    assert ends.network.undelivered == 1
    ends.network.detach("a")  # and nobody answers a refusal
    ends.network.send("b", "a", Cancel("x"))
    ends.run()
    assert ends.network.undelivered == 3


def test_what_is_interposed_loses_doubles_and_delays() -> None:
    ends = Ends()

    def change(envelope: Envelope) -> Sequence[Envelope]:
        match envelope.message:
            case Look(1):
                return ()
            case Look(2):
                return (envelope, envelope)
            case Look(3):
                return (msgspec.structs.replace(envelope, delay_s=5.0),)
        return (envelope,)

    ends.network.interpose(change)
    for number in range(1, 5):
        ends.network.send("a", "b", Look(number))
    told = [message.number for _, _, message in ends.run() if isinstance(message, Look)]
    assert told == [2, 2, 4, 3]
    assert ends.network.lost == 1
