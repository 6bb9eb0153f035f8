"""After COMMIT nothing may escape from sending: what can't be sent is an answer like others."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

from idemp import Outcome
from idemp.broker.port import Refusal
from idemp.dispatch import Dispatcher, Refused, Shipment
from idemp.messages import Message, Output, OutputKind
from tests.house import memory_house

if TYPE_CHECKING:
    from collections.abc import Sequence

SECONDS = timedelta(seconds=1)


class Publisher:
    """Needs not be waited for, and fails of some outputs, however they are sent."""

    def __init__(self, *bad: Output) -> None:
        self.bad = bad
        self.sent: list[Output] = []
        self._answers: list[tuple[int, list[Refusal | None]]] = []

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        """As the port says, but for the bad ones."""
        del timeout
        for output in outputs:
            if output in self.bad:
                raise RecursionError
        self.sent.extend(outputs)
        return [None] * len(outputs)

    def send(self, outputs: Sequence[Output], timeout: float) -> int:
        """As the port says, but for the bad ones."""
        self._answers.append((len(self._answers) + 1, self.publish(outputs, timeout)))
        return self._answers[-1][0]

    def answered(self, seconds: float) -> list[tuple[int, list[Refusal | None]]]:
        """As the port says."""
        del seconds
        answers, self._answers = self._answers, []
        return answers

    def keep_alive(self) -> None:
        """As the port says."""

    def close(self) -> None:
        """As the port says."""


def an_output() -> Output:
    message = Message(body=b"{}", type="tests.Thing")
    return Output(id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key="stock", message=message)


def shipment(*outputs: Output) -> Shipment:
    def outcome(refused: Refused) -> Outcome:
        return Outcome.PENDING if refused else Outcome.HANDLED

    return Shipment(outputs=outputs, timeout=SECONDS, outcome=outcome)


def test_an_output_on_which_the_publisher_fails_is_refused_alone() -> None:
    """Those beside it are sent, and so are those of other handlings."""
    good, bad, other = an_output(), an_output(), an_output()
    publisher = Publisher(bad)
    house = memory_house()
    dispatcher = Dispatcher(publisher, house.store, house.clock)
    tickets = [dispatcher.send(shipment(good, bad)), dispatcher.send(shipment(other))]
    answered: dict[int, list[Refused]] = {}
    while len(answered) < len(tickets):
        answered.update(dispatcher.answered())
    assert [(output, refusal.kind) for output, refusal in answered[tickets[0]][0]] == [(bad, "unsendable")]
    assert answered[tickets[1]] == [[]]
    assert publisher.sent == [good, other]
    assert dispatcher.answered() == []
