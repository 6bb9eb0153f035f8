"""What the tests of this folder share."""

from __future__ import annotations

import json
import threading
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from idemp.broker.kombu.link import Link
from idemp.messages import Message, Output, OutputKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from idemp.broker.kombu import KombuReceiver
    from idemp.broker.port import Delivery

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


def received(receiver: KombuReceiver, seconds: float = SOON) -> Delivery:
    """The next delivery, which must come."""
    delivery = receiver.receive(seconds)
    assert delivery is not None, "nothing came"
    return delivery


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
