"""Dead letters on their way: sent or dropped in batches, paced, and stopped without harm."""

from __future__ import annotations

import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from idemp.cli.letters import row
from idemp.errors import BrokerError, BrokerUnavailable
from idemp.messages import Message, Output, OutputKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from idemp.broker.port import Refusal, TakenMessages


_CONFIRM_SECONDS: Final = 20.0
_LOOK_SECONDS: Final = 0.1
# After these the broker may have it all the same, or takes nothing for now: no use to go on.
_HOPELESS: Final = frozenset({"timeout", "blocked", "closed"})


class Stop:
    """Whether somebody asked to stop: the first time what is in hand is finished, the second ends at once."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, *_: object) -> None:
        """Stop, please; as a signal handler."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("Finishing what is in hand; once more to stop now.", file=sys.stderr)  # noqa: T201

    @classmethod
    @contextmanager
    def on_signals(cls) -> Iterator[Stop]:
        """SIGINT and SIGTERM ask, inside of the block; they come to the main thread only."""
        stop = cls()
        if threading.current_thread() is not threading.main_thread():
            yield stop
            return
        before = {number: signal.signal(number, stop.ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield stop
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait(self, seconds: float) -> None:
        """Let time pass, unless asked to stop."""
        deadline = time.monotonic() + seconds
        while not self.asked and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_SECONDS))


@dataclass(slots=True)
class Moved:
    """What became of dead letters.

    Attributes:
        done: the word for success.
        rows: one for each, with `result` and `refusal`.
        lost: what ended it early, if that was the broker.
        interrupted: whether it was asked to stop.
    """

    done: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    lost: BrokerError | None = None
    interrupted: bool = False

    def tell(self, messages: Sequence[Message], result: str, refusal: str | None = None) -> None:
        """Note the same of several."""
        self.rows += [{**row(message), "result": result, "refusal": refusal} for message in messages]

    def count(self, result: str) -> int:
        """How many ended so."""
        return sum(item["result"] == result for item in self.rows)


class Mover:
    """Acts on dead letters that were taken, batch by batch: sends all of a batch, accepts what the broker confirmed.

    Whatever interrupts it, nothing is lost: a letter stays until the broker has confirmed its copy. What was confirmed
    and not yet accepted when the connection broke comes twice, under the same id: one batch at most.

    Args:
        taken: the letters in our hands.
        send: sends those of these indexes; per index `None` or why not.
        done: the word for success.
        batch: how many at once.
        rate: at most so many a second.
    """

    def __init__(
        self,
        taken: TakenMessages,
        send: Callable[[Sequence[int]], list[Refusal | None]],
        *,
        done: str,
        batch: int,
        rate: float | None = None,
    ) -> None:
        self._taken = taken
        self._send = send
        self._rate = rate
        # A slow pace by large batches would be bursts.
        self._batch = batch if rate is None else max(1, min(batch, int(rate * _LOOK_SECONDS)))
        self._moved = Moved(done)

    def run(self, indexes: Sequence[int], stop: Stop, advance: Callable[[int], object]) -> Moved:
        """Act on these, in order, until all are done, somebody asks to stop, or the broker is lost."""
        begun = time.monotonic()
        at = 0
        while at < len(indexes) and not stop.asked and self._moved.lost is None:
            batch = indexes[at : at + self._batch]
            try:
                going_on = self._act(batch)
            except BrokerError as error:
                self._moved.lost, going_on = error, False
            at += len(batch)
            advance(len(batch))
            if not going_on:
                break
            if self._rate is not None and at < len(indexes):
                stop.wait(begun + at / self._rate - time.monotonic())
        left = [self._taken.messages[index] for index in indexes[at:]]
        self._moved.interrupted = stop.asked and bool(left)
        self._moved.tell(left, "kept", "interrupted" if stop.asked else "the broker is lost" if left else None)
        return self._moved

    def _act(self, batch: Sequence[int]) -> bool:
        """One batch; whether there is use in going on."""
        messages = [self._taken.messages[index] for index in batch]
        try:
            check(self._taken)
        except BrokerError:
            self._moved.tell(messages, "kept", "the broker is lost")
            raise
        answers = self._send(batch)
        sent = [index for index, refusal in zip(batch, answers, strict=True) if refusal is None]
        try:
            accept_all(self._taken, sent)
        except BrokerError:
            for message, refusal in zip(messages, answers, strict=True):
                unsure = "unknown" if refusal is None else "kept"
                self._moved.tell([message], unsure, _said(refusal) or "sent; it may come twice, under the same id")
            raise
        for message, refusal in zip(messages, answers, strict=True):
            self._moved.tell([message], self._moved.done if refusal is None else "kept", _said(refusal))
        hopeless = next((refusal for refusal in answers if refusal is not None and refusal.kind in _HOPELESS), None)
        if hopeless is not None:
            self._moved.lost = BrokerUnavailable(
                f"The broker confirms nothing any more ({_said(hopeless)}).", fix="Nothing is lost: run it again."
            )
        return hopeless is None


def sender(
    publisher: Any, taken: TakenMessages, queue: str, rewrite: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Callable[[Sequence[int]], list[Refusal | None]]:
    """What sends letters to a queue: as exact copies where the broker's adapter has more of them than a `Message`."""
    arrived = getattr(taken, "arrived", None)

    def send_exact(indexes: Sequence[int]) -> list[Refusal | None]:
        from idemp.broker.kombu.taking import exact_copy

        copies = [exact_copy(arrived[index], queue, rewrite) for index in indexes]  # type: ignore[index]
        answers: list[Refusal | None] = publisher.publish_parcels(copies, _CONFIRM_SECONDS)
        return answers

    def send_plain(indexes: Sequence[int]) -> list[Refusal | None]:
        outputs = [_output(taken.messages[index], queue, rewrite) for index in indexes]
        answers: list[Refusal | None] = publisher.publish(outputs, _CONFIRM_SECONDS)
        return answers

    return send_plain if arrived is None else send_exact


def check(taken: TakenMessages) -> None:
    """Make sure that letters are still in our hands, where the adapter can tell.

    Raises:
        BrokerUnavailable: they are not.
    """
    looks = getattr(taken, "check", None)
    if looks is not None:
        looks()


def accept_all(taken: TakenMessages, indexes: Sequence[int]) -> None:
    """Remove several for good, at once where the adapter can.

    Raises:
        BrokerUnavailable: the connection is lost.
    """
    at_once = getattr(taken, "accept_all", None)
    if at_once is not None:
        at_once(indexes)
        return
    for index in indexes:
        taken.accept(index)


def _output(message: Message, queue: str, rewrite: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Output:
    original = replace(message, headers=dict(rewrite(message.headers)))
    return Output(id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=queue, message=original)


def _said(refusal: Refusal | None) -> str | None:
    return None if refusal is None else f"{refusal.kind}: {refusal.detail}".rstrip(": ")
