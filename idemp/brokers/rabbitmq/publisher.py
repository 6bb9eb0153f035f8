"""Publishing with the broker's confirm for each message, many in flight."""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import amqp
from amqp.exceptions import AMQPError

from idemp.brokers.rabbitmq.link import LINK_ERRORS, Link
from idemp.errors import Unavailable, describe_error
from idemp.messages import Output, Refusal

__all__ = ["RabbitPublisher"]

BLAMES_A_MESSAGE: Final = frozenset({403, 404, 406, 311, 501, 502, 503, 505, 540, 541})
"""Reply codes by which the broker closes a channel or a connection for one message, which it does not name."""
DOUBTFUL: Final = frozenset({403, 541})
"""Codes among these that a missing privilege or a fault of the broker may cause, too."""
UNSENDABLE: Final = (
    struct.error, AMQPError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError
)  # fmt: skip
DIRECT: Final = "amq.rabbitmq.reply-to"  # a pseudo-queue, from which a mandatory message is returned and delivered
IN_FLIGHT: Final = 1000
LOSSES: Final = 3  # connections that single messages may cost in a call before that counts as an outage
AT_ONCE: Final = 64  # messages sent in one piece
NACKED: Final = Refusal("the broker refused it")


class RabbitPublisher:
    """Publishes lists of messages. Connects at first use; any unclear error costs the connection.

    Args:
        connect: Function that opens a link within some seconds.

    Example:
        >>> RabbitPublisher(lambda timeout: None).publish([], 1.0)
        []
    """

    def __init__(self, connect: Callable[[float], Link]) -> None:
        self._connect = connect
        self._link: Link | None = None
        self._outputs: Sequence[Output] = ()
        self._pending: dict[int, int] = {}  # place in the call, by delivery tag
        self._answers: dict[int, Refusal | None] = {}
        self._returned: dict[int, Refusal] = {}
        self._last = 0

    def send(self, outputs: Sequence[Output]) -> None:
        """Send messages, if there is a connection; `publish` detects failures."""
        self._begin(outputs)
        if self._link is not None and self._link.alive:
            try:
                self._send_some(self._link, deque(range(len(outputs))))
            except LINK_ERRORS:
                self._drop()

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        """Send messages, or those that `send` has left, and wait for a positive confirm of each."""
        deadline = time.monotonic() + timeout
        if outputs is not self._outputs:
            self._begin(outputs)
        alone, second_chance = False, self._link is not None  # an idle connection may be lost without being noticed
        doubtful: list[int] = []
        while (left := self._unanswered()) and time.monotonic() < deadline:
            try:
                link = self._open(max(0.1, min(5.0, deadline - time.monotonic())))
                flying = list(self._pending.values())
                self._send(link, left[:1] if alone else [place for place in left if place not in flying], deadline)
            except Unavailable as error:
                self._refuse(left, Refusal(str(error)))
            except LINK_ERRORS as error:
                flying, code = list(self._pending.values()), error.reply_code if isinstance(error, AMQPError) else None
                self._drop()
                if second_chance and code not in BLAMES_A_MESSAGE:
                    second_chance = False
                    continue
                alone = True  # one by one, until the one to blame is known, so that the others are sent once more at most
                if not flying or len(doubtful) == LOSSES:
                    self._refuse(left, Refusal(describe_error(error)))
                elif len(flying) == 1:
                    blamed = code in BLAMES_A_MESSAGE
                    self._refuse(flying, Refusal(describe_error(error), own=blamed and code not in DOUBTFUL))
                    doubtful += [] if blamed else flying
        self._conclude(doubtful)
        self._outputs = ()
        return [self._answers[place] for place in range(len(outputs))]

    def _conclude(self, doubtful: Sequence[int]) -> None:
        """Refuse unanswered messages. If the broker confirmed others, blame each message that cost a connection on its own."""
        if left := self._unanswered():
            self._give_up(left)
        elif NACKED in self._answers.values():
            self._drop()  # RabbitMQ 3.10 goes on refusing on a channel that it has refused on
        if None in self._answers.values():
            self._answers |= dict.fromkeys(doubtful, Refusal("the broker closes the connection for it", own=True))

    def _give_up(self, places: Sequence[int]) -> None:
        blocked = self._link is not None and self._link.blocked
        self._refuse(places, Refusal("the broker takes no messages (an alarm)" if blocked else "no confirm in time"))
        if self._pending:
            self._drop()  # late confirms must not be taken for those of the next call

    def close(self) -> None:
        """Close the connection."""
        if self._link is not None:
            self._link.close()
        self._drop()

    def _begin(self, outputs: Sequence[Output]) -> None:
        if self._pending:  # confirms of a call that was abandoned
            self._drop()
        self._outputs, self._answers = outputs, {}

    def _unanswered(self) -> list[int]:
        return [place for place in range(len(self._outputs)) if place not in self._answers]

    def _send(self, link: Link, places: Sequence[int], deadline: float) -> None:
        unsent = deque(places)
        while (unsent or self._pending) and time.monotonic() < deadline:
            self._send_some(link, unsent)
            if self._pending or link.blocked:
                link.wait(min(1.0, deadline - time.monotonic()))
                link.read()

    def _send_some(self, link: Link, unsent: deque[int]) -> None:
        while unsent and not link.blocked and len(self._pending) < IN_FLIGHT:
            with link.gathering():
                for _ in range(min(len(unsent), AT_ONCE)):
                    self._send_one(link, unsent.popleft())
            if unsent:
                link.read()

    def _send_one(self, link: Link, place: int) -> None:
        output = self._outputs[place]
        try:
            message = _encode(output, link.longest_properties)
        except UNSENDABLE as error:
            self._answers[place] = Refusal(f"it cannot be sent: {describe_error(error)}", own=True)
            return
        self._last += 1
        self._pending[self._last] = place
        mandatory = output.mandatory and not output.routing_key.startswith(DIRECT)
        link.channel._basic_publish(message, output.exchange, output.routing_key, mandatory=mandatory)  # noqa: SLF001

    def _open(self, timeout: float) -> Link:
        if self._link is None or not self._link.alive:
            self._drop()
            self._link = link = self._connect(timeout)
            link.channel.confirm_select()
            link.channel.events["basic_ack"].add(partial(self._on_confirm, None))
            link.channel.events["basic_nack"].add(partial(self._on_confirm, NACKED))
            link.channel.events["basic_return"].add(self._on_return)
        return self._link

    def _drop(self) -> None:
        if self._link is not None:
            self._link.drop()
        self._link, self._pending, self._returned, self._last = None, {}, {}, 0

    def _refuse(self, places: Sequence[int], refusal: Refusal) -> None:
        self._answers.update(dict.fromkeys(places, refusal))

    def _on_return(self, error: Any, exchange: str, routing_key: str, message: Any) -> None:
        """Find the oldest message that may be the returned one, which comes back with nothing but its address and id."""
        address = (exchange, routing_key, message.properties.get("message_id"))
        for tag, place in self._pending.items():
            output = self._outputs[place]
            sent = (output.exchange, output.routing_key, output.properties.get("message_id"))
            if tag not in self._returned and output.mandatory and sent == address:
                self._returned[tag] = Refusal(f"no queue takes {routing_key!r}: {error.reply_text}", own=True)
                return

    def _on_confirm(self, refusal: Refusal | None, tag: int, multiple: bool) -> None:
        tags = [each for each in self._pending if each <= tag or not tag] if multiple else [tag]
        for each in tags:
            if each in self._pending:
                returned = self._returned.pop(each, None)
                self._answers[self._pending.pop(each)] = refusal or returned


def _encode(output: Output, longest: int) -> amqp.Message:
    """Return a message with encoded properties, so that one that cannot be sent fails before a frame is begun."""
    properties = {name: value for name, value in output.properties.items() if value is not None and name != "headers"}
    headers = dict(output.properties.get("headers") or {})
    stamp = properties.pop("timestamp", None)
    if stamp is not None:
        properties["timestamp"] = int(stamp)
    message = amqp.Message(output.body, delivery_mode=2, application_headers=headers, **properties)
    encoded = message._serialize_properties()  # noqa: SLF001
    if len(encoded) > longest:
        raise ValueError(f"its properties have {len(encoded):,} bytes, and the broker takes {longest:,}")
    message._serialize_properties = lambda: encoded  # noqa: SLF001
    return message
