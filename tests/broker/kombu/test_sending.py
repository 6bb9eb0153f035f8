"""Outputs that are sent without waiting: each is answered once, whatever becomes of its connection meanwhile."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, cast

import pytest
from amqp.exceptions import ConnectionForced

from idemp.broker.kombu import ConfirmingPublisher, KombuBroker
from idemp.testing import FaultProxy
from tests.broker.kombu.tools import SOON, an_output, answers_to, declared, frozen, kinds, within
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from tests.servers.rabbitmq import RabbitMQ


def a_publisher(broker: KombuBroker) -> ConfirmingPublisher:
    """One of this broker's."""
    return cast("ConfirmingPublisher", broker.publisher())


def test_what_was_sent_is_answered_by_its_number(broker: KombuBroker) -> None:
    """Each with all its answers in order, whatever the order in which they came."""
    with a_publisher(broker) as publisher:
        assert publisher.answered(SOON) == [], "nothing was sent, nothing is waited for"
        sent = [
            [an_output("work"), an_output("nowhere")],
            [an_output("work")],
            [an_output("nowhere"), an_output("work")],
        ]
        tickets = [publisher.send(outputs, SOON) for outputs in sent]
        answers = answers_to(publisher, tickets)
    assert [kinds(answers[ticket]) for ticket in tickets] == [[None, "returned"], [None], ["returned", None]]
    assert tickets == [1, 2, 3]


def test_publishing_between_sending_and_answer(broker: KombuBroker) -> None:
    """Neither gets the other's answers."""
    with a_publisher(broker) as publisher:
        tickets = [publisher.send([an_output("work", number=number)], SOON) for number in range(5)]
        assert kinds(publisher.publish([an_output("nowhere"), an_output("work")], SOON)) == ["returned", None]
        assert set(map(tuple, answers_to(publisher, tickets).values())) == {(None,)}
    assert broker.depth("work") == 6


def test_many_at_once_are_waited_for(broker: KombuBroker) -> None:
    """More than would fit into the socket's buffers while nobody reads the answers."""
    with a_publisher(broker) as publisher:
        tickets = [publisher.send([an_output("work") for _ in range(200)], SOON) for _ in range(20)]
        assert {tuple(told) for told in answers_to(publisher, tickets).values()} == {(None,) * 200}
    assert broker.depth("work") == 4000


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_lost_connection_is_made_up_for(
    rabbitmq_url: str, broker: KombuBroker, proxy: FaultProxy, reset: bool
) -> None:
    """What had no answer is sent again, and may arrive twice; what had one is not."""
    with a_publisher(KombuBroker(proxy.through(rabbitmq_url))) as publisher:
        answers_to(publisher, [publisher.send([an_output("work")], SOON)])
        proxy.stall()
        outputs = [an_output("work", number=number) for number in range(10)]
        tickets = [publisher.send([output], SOON) for output in outputs]
        assert publisher.answered(0.0) == []
        proxy.cut(reset=reset)
        proxy.heal()
        assert {tuple(told) for told in answers_to(publisher, tickets).values()} == {(None,)}
    assert {message.message_id for message in broker.browse("work", 99)} >= {str(output.id) for output in outputs}


def test_broker_away(rabbitmq_url: str, proxy: FaultProxy, broker: KombuBroker) -> None:
    """All are refused as soon as that is known, and later ones go through again."""
    del broker
    with a_publisher(KombuBroker(proxy.through(rabbitmq_url))) as publisher:
        answers_to(publisher, [publisher.send([an_output("work")], SOON)])
        proxy.refuse()
        proxy.cut()
        tickets = [publisher.send([an_output("work")], SOON) for _ in range(3)]
        with within(SOON):
            answers = answers_to(publisher, tickets)
        assert [kinds(told) for told in answers.values()] == [["closed"]] * 3
        proxy.heal()
        (told,) = answers_to(publisher, [publisher.send([an_output("work")], SOON)]).values()
        assert told == [None]


def test_no_answer_in_time(own_rabbitmq: RabbitMQ) -> None:
    """Only those whose time is over; the others are sent again on another connection."""
    with a_publisher(declared(own_rabbitmq)) as publisher:
        answers_to(publisher, [publisher.send([an_output("work")], SOON)])
        with frozen(own_rabbitmq):
            hasty, patient = publisher.send([an_output("work")], 0.3), publisher.send([an_output("work")], 60.0)
            while not (told := publisher.answered(0.05)):
                pass
        assert [(ticket, kinds(answers)) for ticket, answers in told] == [(hasty, ["timeout"])]
        assert answers_to(publisher, [patient]) == {patient: [None]}


def test_a_dead_peer_is_noticed_while_waiting(broker: KombuBroker) -> None:
    """Heartbeats are missing, and the socket says nothing: another connection is taken, at once."""
    with a_publisher(broker) as publisher:
        answers_to(publisher, [publisher.send([an_output("work")], SOON)])
        ticket = publisher.send([an_output("work")], SOON)
        link, beats = publisher._link, []

        def beat() -> None:
            beats.append(1)
            raise ConnectionForced("Too many heartbeats missed")

        assert link is not None
        link.read_pending, link.beat = lambda: None, beat  # type: ignore[method-assign]
        with within(SOON / 2):
            assert answers_to(publisher, [ticket]) == {ticket: [None]}
        assert len(beats) == 1
        assert publisher._link is not link


def test_blocked_broker(own_rabbitmq: RabbitMQ) -> None:
    """It is not written to while it reads nothing; what has no answer says why."""
    with a_publisher(declared(own_rabbitmq)) as publisher:
        own_rabbitmq.raise_memory_alarm()
        (told,) = answers_to(publisher, [publisher.send([an_output("work")], 0.5)]).values()
        assert kinds(told) == ["blocked"]
        (told,) = answers_to(publisher, [publisher.send([an_output("work")], 0.5)]).values()
        assert kinds(told) == ["blocked"]
        own_rabbitmq.clear_memory_alarm()
        (told,) = answers_to(publisher, [publisher.send([an_output("work")], SOON)]).values()
        assert told == [None]


def test_closing_with_answers_outstanding(broker: KombuBroker) -> None:
    """Nobody waits; what was sent is there."""
    with closing(a_publisher(broker)) as publisher:
        answers_to(publisher, [publisher.send([an_output("work")], SOON)])
        publisher.send([an_output("work")], SOON)
    wait_until(lambda: broker.depth("work") == 2, "both have arrived")
