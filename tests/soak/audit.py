"""The consumer of the outputs: reads all the time, remembers eight bytes of each."""

from __future__ import annotations

import json
import threading
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import kombu
from amqp.exceptions import AMQPError

from idemp.messages import Message
from tests.soak.app import CONSUMER, OUTPUT_TYPES, Charge
from tests.soak.plan import Plan
from tests.storms.looking import id_of_output

_UNSEEN = 0
_PREFETCH = 200


class Ledger:
    """Which outputs were seen, and whether each had the right id and always the same body. Any thread may tell it.

    Attributes:
        seen: how many copies came.
        found: what was wrong, by name.
        examples: the first few of each.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._bodies = {name: array("Q") for name in OUTPUT_TYPES}
        self._lock = threading.Lock()
        self.seen = 0
        self.found: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def enter(self, message_type: str, message_id: str, body: bytes) -> None:
        """One copy of an output."""
        if message_type not in self._bodies:
            self._tell("outputs of an unknown type", message_type)
            return
        number = json.loads(body)["number"]
        wanted = id_of_output(
            CONSUMER, Charge.__message_type__, self._plan.order_id(number), OUTPUT_TYPES.index(message_type)
        )
        digest = int.from_bytes(blake2b(body, digest_size=8).digest()) or 1
        with self._lock:
            self.seen += 1
            bodies = self._bodies[message_type]
            bodies.extend([_UNSEEN] * (number + 1 - len(bodies)))
            former, bodies[number] = bodies[number], digest
        if message_id != wanted:
            self._tell("outputs under a wrong id", f"{message_type} {number}: {message_id}, not {wanted}")
        if former not in (_UNSEEN, digest):
            self._tell("outputs with several bodies", f"{message_type} {number}")

    def has_seen(self, message_type: str, number: int) -> bool:
        """Whether an output was seen."""
        bodies = self._bodies[message_type]
        return number < len(bodies) and bodies[number] != _UNSEEN

    def check(self, sent: int) -> None:
        """Hold what was seen against what was sent: outputs of all that is handled, and of nothing that is parked."""
        for number in range(sent):
            parked = self._plan.kind(number) == "always"
            for name in OUTPUT_TYPES:
                if self.has_seen(name, number) == parked:
                    what = "outputs of what was rolled back" if parked else "outputs missing"
                    self._tell(what, f"{name} {number}")

    def _tell(self, what: str, example: str) -> None:
        with self._lock:
            self.found[what] += 1
            examples = self.examples.setdefault(what, [])
            if len(examples) < 10:
                examples.append(example)


class Drain:
    """Empties a queue in a thread of its own, through all outages of the broker; it can be stopped for a while.

    Args:
        url: the broker's.
        queue: which queue.
        enter: told of each message, before its ack: what was not acked comes again.
    """

    def __init__(self, url: str, queue: str, enter: Callable[[str, str, bytes], None]) -> None:
        self._url = url
        self._queue = queue
        self._enter = enter
        self._wanted = threading.Event()
        self._wanted.set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"drain-{queue}", daemon=True)
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def pause(self) -> None:
        """Leave the queue alone."""
        self._wanted.clear()

    def resume(self) -> None:
        """Go on."""
        self._wanted.set()

    def end(self) -> None:
        """End the thread.

        Raises:
            BaseException: what had ended it before.
        """
        self._ended.set()
        self._wanted.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._wanted.wait()
                with suppress(AMQPError, OSError):
                    self._consume()
                self._ended.wait(0.1)
        except BaseException as error:
            self._failure = error

    def _consume(self) -> None:
        with kombu.Connection(self._url, connect_timeout=5) as connection:
            channel = connection.channel()
            channel.auto_decode = False
            channel.basic_qos(0, _PREFETCH, False)
            channel.basic_consume(self._queue, callback=self._take)
            while self._wanted.is_set() and not self._ended.is_set():
                with suppress(TimeoutError):
                    connection.drain_events(timeout=0.2)

    def _take(self, message: Any) -> None:
        body = message.body if isinstance(message.body, bytes) else bytes(message.body)
        self._enter(message.properties["type"], message.properties["message_id"], body)
        message.channel.basic_ack(message.delivery_tag)


def reasons_by_id(letters: list[Message]) -> dict[str, list[str]]:
    """Dead letters: why, by message id, once for each copy."""
    found: dict[str, list[str]] = {}
    for letter in letters:
        found.setdefault(letter.message_id or "", []).append(str(letter.headers.get("idemp-dead-reason")))
    return found
