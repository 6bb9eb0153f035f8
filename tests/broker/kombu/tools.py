"""What the tests of this folder share."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from idemp.broker.kombu import KombuBroker
from idemp.broker.kombu.link import Link
from idemp.broker.port import Topology
from idemp.messages import Message, Output, OutputKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from idemp.broker.kombu import KombuReceiver
    from idemp.broker.port import Delivery, Refusal, SendingPublisher
    from tests.servers.rabbitmq import RabbitMQ

SOON = 10.0


def an_output(routing_key: str, *, exchange: str = "", number: int = 0, **options: Any) -> Output:
    """An output to a queue, or through an exchange."""
    identity = uuid.uuid4()
    settings = {name: options.pop(name) for name in ("mandatory", "delay") if name in options}
    properties = {"body": json.dumps({"number": number}).encode(), "type": "tests.Thing", **options}
    return Output(
        id=identity,
        ordinal=number,
        kind=OutputKind.PUBLISH if exchange else OutputKind.SEND,
        exchange=exchange,
        routing_key=routing_key,
        message=Message(message_id=str(identity), **properties),
        **settings,
    )


def kinds(refusals: list[Any]) -> list[str | None]:
    """What each was refused for."""
    return [refusal and refusal.kind for refusal in refusals]


class Sending:
    """Publishes by sending one by one, and waits for the confirms only then."""

    def __init__(self, publisher: SendingPublisher) -> None:
        self.inner = publisher

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        """As the port says."""
        tickets = [self.inner.send([output], timeout) for output in outputs]
        answers = answers_to(self.inner, tickets)
        return [answer for ticket in tickets for answer in answers[ticket]]

    def keep_alive(self) -> None:
        """As the port says."""
        self.inner.keep_alive()

    def close(self) -> None:
        """As the port says."""
        self.inner.close()


def answers_to(publisher: SendingPublisher, tickets: Sequence[int]) -> dict[int, list[Refusal | None]]:
    """The answers to what was sent, all of which come, and nothing else."""
    answers: dict[int, list[Refusal | None]] = {}
    while len(answers) < len(tickets):
        for ticket, told in publisher.answered(0.05):
            assert ticket not in answers, "told twice"
            answers[ticket] = told
    assert answers.keys() == set(tickets)
    assert publisher.answered(0.0) == []
    return answers


def received(receiver: KombuReceiver, seconds: float = SOON) -> Delivery:
    """The next delivery, which must come."""
    delivery = receiver.receive(seconds)
    assert delivery is not None, "nothing came"
    return delivery


def declared(server: RabbitMQ, *queues: str) -> KombuBroker:
    """A broker on a node that will be killed, with queue `work` and others, which survive that."""
    broker = KombuBroker(server.url)
    broker.declare(Topology(exchange="", queues=("work", *queues)))
    # RabbitMQ 3.10 notes a new quorum queue on the disk within a second; killed before, it has a queue that never answers.
    server.evaluate("[dets:sync(Table) || Table <- dets:all()]")
    return broker


def full(broker: KombuBroker, queue: str) -> None:
    """Make a queue that takes nothing."""
    with raw_link(broker._url) as link:
        link.channel.queue_delete(queue)
        arguments = {"x-max-length": 0, "x-overflow": "reject-publish"}
        link.channel.queue_declare(queue, durable=True, auto_delete=False, arguments=arguments)


@contextmanager
def frozen(server: RabbitMQ) -> Iterator[None]:
    """The node stands still, its connections stay open."""
    if server.container:
        pytest.skip("only a local server can be frozen")
    pids = server.pids()[1:]  # not the guard, which ends it
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The block takes no longer."""
    begun = time.monotonic()
    yield
    assert (took := time.monotonic() - begun) < seconds, f"took {took:.1f} s"


@contextmanager
def raw_link(url: str) -> Iterator[Link]:
    """A connection for what no application of ours does."""
    link = Link.open(url, connect_timeout=SOON, heartbeat=0)
    try:
        yield link
    finally:
        link.close()


@contextmanager
def meanwhile(action: Callable[[], object]) -> Iterator[None]:
    """Run something in another thread during the block, and fail if it fails."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert not errors, errors
