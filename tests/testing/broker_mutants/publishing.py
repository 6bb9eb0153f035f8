"""Brokers that lose or change what is published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from uuid import uuid4

from idemp.broker.memory import MemoryPublisher, MemoryReceiver
from idemp.broker.port import Delivery, Refusal
from idemp.messages import Message, Output
from tests.testing.broker_mutants.sound import Broker, Changing, breaks

# Publishing and arriving


@breaks("publish_confirm_receive_ack")
class AttemptsFromZero(Broker):
    """The first attempt has the number 0."""

    class receives(MemoryReceiver):  # noqa: N801 - an attribute that happens to be a class
        def receive(self, timeout: float) -> Delivery | None:
            delivery = super().receive(timeout)
            return delivery and replace(delivery, attempt=delivery.attempt - 1)


@breaks("publish_confirm_receive_ack", "unsettled_returns_after_close")
class WronglyRedelivered(Broker):
    """It tells the contrary about redeliveries."""

    class receives(MemoryReceiver):  # noqa: N801
        def receive(self, timeout: float) -> Delivery | None:
            delivery = super().receive(timeout)
            return delivery and replace(delivery, redelivered=not delivery.redelivered)


@breaks("publish_nothing")
class OneAnswerAtLeast(Broker):
    """There is an answer where nothing was asked."""

    class publishes(MemoryPublisher):  # noqa: N801
        def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
            return super().publish(outputs, timeout) or [None]


@breaks("properties_headers_and_bytes_survive")
class RepliesGoNowhere(Broker):
    """The place for answers is lost."""

    class publishes(Changing):  # noqa: N801
        def changed(self, message: Message) -> Message:
            return replace(message, reply_to=None)


@breaks("properties_headers_and_bytes_survive")
class HeadersAsText(Broker):
    """Headers become text."""

    class publishes(Changing):  # noqa: N801
        def changed(self, message: Message) -> Message:
            return replace(message, headers={name: str(value) for name, value in message.headers.items()})


@breaks("properties_headers_and_bytes_survive")
class BodiesAsText(Broker):
    """Bodies are decoded on their way, and bytes that are no text are replaced."""

    class publishes(Changing):  # noqa: N801
        def changed(self, message: Message) -> Message:
            return replace(message, body=bytes(message.body).decode(errors="replace").encode())


@breaks("falsy_values_survive")
class FalsyHeadersLost(Broker):
    """Only headers that are true travel."""

    class publishes(Changing):  # noqa: N801
        def changed(self, message: Message) -> Message:
            return replace(message, headers={name: value for name, value in message.headers.items() if value})


@breaks("falsy_values_survive")
class FalsyPropertiesLost(Broker):
    """An empty correlation id and the priority 0 become absent."""

    class publishes(Changing):  # noqa: N801
        def changed(self, message: Message) -> Message:
            return replace(message, correlation_id=message.correlation_id or None, priority=message.priority or None)


@breaks("absent_values_stay_absent")
class InventsValues(Broker):
    """A message without a correlation id gets one."""

    class publishes(Changing):  # noqa: N801
        def changed(self, message: Message) -> Message:
            return replace(message, correlation_id=message.correlation_id or str(uuid4()))


@breaks("large_body")
class BodiesCutOff(Broker):
    """A body ends after 256 KiB."""

    class publishes(Changing):  # noqa: N801
        def changed(self, message: Message) -> Message:
            return replace(message, body=message.body[: 256 * 1024])


@breaks("empty_body")
class EmptyIsNull(Broker):
    """No bytes become `null`."""

    class publishes(Changing):  # noqa: N801
        def changed(self, message: Message) -> Message:
            return replace(message, body=message.body or b"null")


@breaks("unroutable_mandatory_is_returned_and_others_go", "topic_rules_reach_words_not_letters")
class ConfirmsTheUnroutable(Broker):
    """What no queue takes is confirmed, and dropped."""

    class publishes(MemoryPublisher):  # noqa: N801
        def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
            return [None for _ in super().publish(outputs, timeout)]


@breaks("unroutable_mandatory_is_returned_and_others_go")
class OneRefusalForAll(Broker):
    """One refusal counts for the whole batch."""

    class publishes(MemoryPublisher):  # noqa: N801
        def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
            answers = super().publish(outputs, timeout)
            first = next((answer for answer in answers if answer is not None), None)
            return [first] * len(answers)


@breaks("unroutable_mandatory_is_returned_and_others_go")
class StopsAtTheFirstRefusal(Broker):
    """What comes after a refused output is not sent."""

    class publishes(MemoryPublisher):  # noqa: N801
        def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
            answers: list[Refusal | None] = []
            for output in outputs:
                refused = next((answer for answer in answers if answer), None)
                answers += [refused] if refused else super().publish([output], timeout)
            return answers


@breaks("unroutable_without_mandatory_is_fine")
class AlwaysMandatory(Broker):
    """An event that nobody wants is refused."""

    class publishes(MemoryPublisher):  # noqa: N801
        def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
            return super().publish([replace(output, mandatory=True) for output in outputs], timeout)


class _Routing(MemoryPublisher):
    def goes(self, pattern: str, key: str) -> bool:
        raise NotImplementedError

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        answers: list[Refusal | None] = []
        for output in outputs:
            bound = self._store.bindings.get(output.exchange, set())
            queues = sorted({queue for pattern, queue in bound if self.goes(pattern, output.routing_key)})
            for queue in queues:
                super().publish([replace(output, exchange="", routing_key=queue)], timeout)
            answers.append(None if queues or not output.mandatory else Refusal("returned"))
            if not output.exchange:
                answers[-1] = super().publish([output], timeout)[0]
        return answers


@breaks("topic_rules_reach_words_not_letters")
class PatternsOfFileNames(Broker):
    """`*` stands for any letters."""

    class publishes(_Routing):  # noqa: N801
        def goes(self, pattern: str, key: str) -> bool:
            return fnmatchcase(key, pattern.replace(".#", "*"))


@breaks("topic_bindings")
class HashIsOneWord(Broker):
    """`#` stands for exactly one word."""

    class publishes(_Routing):  # noqa: N801
        def goes(self, pattern: str, key: str) -> bool:
            wanted, words = pattern.split("."), key.split(".")
            return len(wanted) == len(words) and all(a in {b, "*", "#"} for a, b in zip(wanted, words, strict=True))


@breaks("topic_bindings")
class OneQueueOnly(Broker):
    """A message goes to one of its queues."""

    class publishes(MemoryPublisher):  # noqa: N801
        def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
            return [self._first(output, timeout) for output in outputs]

        def _first(self, output: Output, timeout: float) -> Refusal | None:
            queues = self._store._route(output)
            if queues and output.exchange:
                output = replace(output, exchange="", routing_key=queues[0].name)
            return super().publish([output], timeout)[0]


@breaks("delayed_outputs_wait")
class DelaysIgnored(Broker):
    """A delayed output arrives at once."""

    class publishes(MemoryPublisher):  # noqa: N801
        def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
            return super().publish([replace(output, delay=0.0) for output in outputs], timeout)


@breaks("delayed_outputs_wait")
class DelaysHoldUpAll(Broker):
    """What is published after a delayed output waits behind it."""

    class publishes(MemoryPublisher):  # noqa: N801
        def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
            longest = max((output.delay for output in outputs), default=0.0)
            return super().publish([replace(output, delay=longest) for output in outputs], timeout)


@breaks("order_of_one_publisher")
class LastInFirstOut(Broker):
    """A batch arrives in the contrary order."""

    class publishes(MemoryPublisher):  # noqa: N801
        def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
            return super().publish(outputs[::-1], timeout)[::-1]
