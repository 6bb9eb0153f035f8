"""The producer: a steady rate, and every message again until the broker has confirmed it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from idemp.broker.kombu import ConfirmingPublisher
from idemp.messages import Output
from tests.soak.app import CONSUMER, KILLERS, Charge, Kill
from tests.soak.plan import Plan
from tests.storms.looking import sent_to

TICK_SECONDS = 0.2
CONFIRM_SECONDS = 10.0
_COPIES_LATER = 5.0


class Feeder:
    """Sends in a thread of its own.

    Args:
        plan: what, and how fast.
        url: the broker's.
        backlog: how many messages wait for a worker; beyond `most_waiting` nothing new is sent.

    Attributes:
        sent: how many different messages were sent: the numbers below it.
        copies: messages sent a second time on purpose.
        resent: of which the broker had not confirmed the first sending, by number.
        killers: messages sent that kill their worker.
        held_seconds: how long nothing new was sent because too much was waiting.
    """

    def __init__(self, plan: Plan, url: str, backlog: Callable[[], int]) -> None:
        self._plan = plan
        self._backlog = backlog
        self._publisher = ConfirmingPublisher(url)
        self._unconfirmed: dict[str, Output] = {}
        self._later: deque[tuple[float, int]] = deque()
        self._killers_wanted = 0
        self._due = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)
        self._failure: BaseException | None = None
        self.most_waiting = int(plan.rate * 20)
        self.sent = 0
        self.copies = 0
        self.resent: set[str] = set()
        self.killers: list[str] = []
        self.held_seconds = 0.0

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def add_killer(self) -> None:
        """Send a message that kills its worker, at the next tick."""
        self._killers_wanted += 1

    def finish(self) -> None:
        """Send nothing new, and return when all that was sent is confirmed.

        Raises:
            BaseException: what ended the thread.
        """
        self._stop.set()
        self._thread.join()
        self._publisher.close()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._stop.wait(TICK_SECONDS):
                self._send_new()
                self._publish()
            while self._later or self._unconfirmed:
                self._send_copies(time.monotonic() + _COPIES_LATER)
                self._publish()
        except BaseException as error:
            self._failure = error

    def _send_new(self) -> None:
        while len(self.killers) < self._killers_wanted:
            name = f"killer-{len(self.killers)}"
            self.killers.append(name)
            self._unconfirmed[name] = sent_to(KILLERS, Kill(), name)
        self._send_copies(time.monotonic())
        if self._backlog() > self.most_waiting:
            self.held_seconds += TICK_SECONDS
            return
        self._due += self._plan.rate * TICK_SECONDS
        for _ in range(int(self._due)):
            self._add(self.sent, 0)
            if self._plan.is_sent_twice(self.sent):
                self._later.append((time.monotonic() + self.sent % _COPIES_LATER, self.sent))
            self.sent += 1
        self._due %= 1.0

    def _send_copies(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            self._add(self._later.popleft()[1], 1)
            self.copies += 1

    def _add(self, number: int, copy: int) -> None:
        message = Charge(order_id=self._plan.order_id(number), number=number, kind=self._plan.kind(number))
        name = self._plan.message_id(number, copy)
        self._unconfirmed[name] = sent_to(CONSUMER, message, name)

    def _publish(self) -> None:
        if not self._unconfirmed:
            return
        names = list(self._unconfirmed)
        answers = self._publisher.publish(list(self._unconfirmed.values()), CONFIRM_SECONDS)
        for name, answer in zip(names, answers, strict=True):
            if answer is None:
                del self._unconfirmed[name]
            else:
                self.resent.add(name)
