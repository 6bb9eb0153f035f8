"""One connection to the broker: frames out, receipts, errors and messages in; no wait without an end."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Final, Self, TypeVar

from idemp.broker.stomp.client import CLIENT_ERRORS, Client, Frame
from idemp.broker.stomp.limits import Limits, Size, is_too_large, too_large
from idemp.errors import BrokerUnavailable, ConfigurationError
from idemp.forking import ForkAware, renewed_in_child

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from idemp.broker.stomp.address import Address

_LAST_WORDS_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 1.0
_NO_MESSAGE: Final = "0"
_WRONG_LOGIN: Final = ("password is invalid", "not authorized", "authentication", "credentials")

T = TypeVar("T")


class StompError(Exception):
    """Something that the broker or the connection said; the text is the reason."""


class Refused(StompError):
    """An ERROR frame that names one of our frames: that one failed, and nothing else."""


class TooLarge(Refused):
    """A frame for which the broker cut the connection, or would: it, or a smaller one, was the only one under way."""


class Lost(StompError):
    """The connection is gone, and with it all that has no receipt yet."""


class Late(StompError):
    """No receipt came in time."""


class Link(ForkAware):
    """A connection. All methods may be called by several threads.

    Args:
        address: where to; `connected` tries several hosts.
        timeout: seconds for connecting.
        limits: which frames are too large for this broker, as far as is known.

    Raises:
        BrokerUnavailable: nobody answers there, or not in time.
        ConfigurationError: the broker refuses this user.
    """

    def __init__(self, address: Address, timeout: float, limits: Limits | None = None) -> None:
        self._limits = Limits() if limits is None else limits
        self.shown = address.shown
        self.server = ""
        self.changed = threading.Condition(renewed_in_child(threading.RLock()))
        self._lost: str | None = None
        self._connected = False
        self._numbers = count(1)
        self._open_receipts: set[str] = set()
        self._unwatched: set[str] = set()
        self._answers: dict[str, Refused | None] = {}
        self._sizes: dict[str, Size] = {}  # of each SEND under way
        self._inboxes: dict[str, deque[Frame]] = {}
        self._client = Client(address, timeout, self)
        self._connect(timeout)
        self.track()

    @property
    def lost(self) -> str | None:
        """Why the connection is gone, `None` while it is there."""
        return self._lost

    def after_fork_in_child(self) -> None:
        """Be closed here; the broker and the parent hear nothing of it."""
        self._lost = self._lost or "it belongs to the parent process"
        self._client.leave_to_parent()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Sending

    def limit(self, seconds: float) -> None:
        """How long each write may take at most."""
        self._client.limit(seconds)

    def post(self, command: str, headers: Mapping[str, str], body: bytes = b"") -> str:
        """Send a frame whose receipt somebody will ask for; returns the receipt's name.

        Raises:
            TooLarge: the broker takes no frame of this size; where that was known before, the connection is still there.
            Lost: the connection is gone.
        """
        return self._send(command, headers, body, self._open_receipts)

    def fire(self, command: str, headers: Mapping[str, str]) -> None:
        """Send a frame whose receipt nobody asks for; where the broker refuses it, the link counts as lost.

        Raises:
            Lost: the connection is gone.
        """
        self._send(command, headers, b"", self._unwatched)

    def tell(self, command: str, headers: Mapping[str, str]) -> None:
        """Send a frame that wants no receipt.

        Raises:
            Lost: the connection is gone.
        """
        self._write(command, dict(headers), b"")

    def call(self, command: str, headers: Mapping[str, str], body: bytes = b"", *, deadline: float) -> None:
        """Send a frame and wait for its receipt.

        Raises:
            StompError: refused, late, or the connection is gone.
        """
        self.answer(self.post(command, headers, body), deadline)

    def answer(self, receipt: str, deadline: float) -> None:
        """Wait for a receipt.

        Raises:
            StompError: refused, late, or the connection is gone.
        """
        with self.changed:
            try:
                # An answer that came before the connection broke is an answer.
                while receipt not in self._answers:
                    if self._lost is not None:
                        raise Lost(self._lost)
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise Late("no receipt came in time")
                    self.changed.wait(left)
            finally:
                self._open_receipts.discard(receipt)
                self._sizes.pop(receipt, None)
                refusal = self._answers.pop(receipt, None)
        if refusal is not None:
            raise refusal

    def end_fired(self, deadline: float) -> None:
        """Wait until all that was fired has its receipt.

        Raises:
            StompError: late, or the connection is gone.
        """
        if self.wait(lambda: True if not self._unwatched else None, deadline) is None:
            raise Late("no receipt came in time")

    # Consuming

    def subscribe(self, destination: str, inbox: deque[Frame], headers: Mapping[str, str]) -> str:
        """Have messages of a destination put into `inbox`; returns the subscription's id.

        Raises:
            Lost: the connection is gone.
        """
        with self.changed:
            name = f"s{next(self._numbers)}"
            self._inboxes[name] = inbox
        self.fire("SUBSCRIBE", {"destination": destination, "id": name, **headers})
        return name

    def forget(self, subscription: str) -> None:
        """Take a subscription's messages out of its inbox, and no more of them; `unsubscribe` is to follow."""
        with self.changed:
            inbox = self._inboxes.pop(subscription, None)
            if inbox is not None:
                kept = [frame for frame in inbox if frame.headers.get("subscription") != subscription]
                inbox.clear()
                inbox.extend(kept)

    def unsubscribe(self, subscription: str) -> None:
        """Give back what a subscription holds.

        Raises:
            Lost: the connection is gone, and it is given back all the same.
        """
        self.forget(subscription)
        self.fire("UNSUBSCRIBE", {"id": subscription})

    def wait(self, look: Callable[[], T | None], deadline: float) -> T | None:
        """What `look` finds, `None` if it finds nothing until the deadline. It is called under `changed`.

        Raises:
            Lost: the connection is gone.
        """
        with self.changed:
            while True:
                if self._lost is not None:
                    raise Lost(self._lost)
                found = look()
                left = deadline - time.monotonic()
                if found is not None or left <= 0:
                    return found
                self.changed.wait(left)

    def number(self) -> int:
        """One that nothing else on this connection has."""
        with self.changed:
            return next(self._numbers)

    def next(self, inbox: deque[Frame], deadline: float) -> Frame | None:
        """The next message of an inbox, `None` if none comes until the deadline.

        Raises:
            Lost: the connection is gone.
        """
        return self.wait(lambda: inbox.popleft() if inbox else None, deadline)

    def browse(self, destination: str, limit: int, deadline: float) -> list[Frame]:
        """Up to `limit` messages without taking them, also those that are in somebody's hands.

        Raises:
            StompError: refused, late, or the connection is gone.
        """
        inbox: deque[Frame] = deque()
        name = self.subscribe(destination, inbox, {"browser": "true", "ack": "auto"})
        found: list[Frame] = []
        while len(found) < limit:
            frame = self.next(inbox, deadline)
            if frame is None:
                raise Late(f"{destination} could not be read in time")
            if frame.headers.get("browser") == "end" and frame.headers.get("message-id") == _NO_MESSAGE:
                break  # any message can say "end"; the id is the broker's own
            found.append(frame)
        self.unsubscribe(name)
        return found

    # Ending

    def fail(self, reason: str) -> None:
        """Count the connection as lost, and end it."""
        self.mark(reason)
        self._client.cut()

    def close(self) -> None:
        """Say goodbye where the broker listens, and end the connection; never blocks on a dead link."""
        if self._lost is None:
            with suppress(StompError):
                self.call("DISCONNECT", {}, deadline=time.monotonic() + _CLOSE_SECONDS)
        self.fail("it is closed")

    # What the listener hears

    def heard_receipt(self, receipt: str) -> None:
        """A RECEIPT came. After an ERROR that ends the connection, none is ours.

        Where a frame is too large, ActiveMQ goes on to read its body for a moment, and obeys the frames that stand in it.
        """
        if self._lost is None:
            self._answered(receipt, None)

    def heard_error(self, headers: Mapping[str, str]) -> None:
        """An ERROR came: of the frame that it names, or of the whole connection."""
        reason = _one_line(headers.get("message", "the broker says no more"))
        receipt = headers.get("receipt-id")
        if self._lost is None and receipt is not None and receipt in self._open_receipts:
            self._answered(receipt, Refused(reason))
        elif self._lost is None:
            if is_too_large(reason):
                self._blame(reason)
            self.mark(reason)

    def heard_message(self, frame: Frame) -> None:
        """A MESSAGE came; for a subscription that was given up, the broker has it back."""
        with self.changed:
            inbox = self._inboxes.get(frame.headers.get("subscription", ""))
            if inbox is not None:
                inbox.append(frame)
                self.changed.notify_all()

    def heard_connected(self, headers: Mapping[str, str]) -> None:
        """The broker took us."""
        with self.changed:
            self.server = headers.get("server", "")
            self._connected = True
            self.changed.notify_all()

    def mark(self, reason: str) -> None:
        """The connection ended; the first reason stays."""
        with self.changed:
            if self._lost is None:
                self._lost = reason
            self.changed.notify_all()

    # Inside

    def _connect(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        try:
            self._client.connect()
            connected = self.wait(lambda: self._connected or None, deadline)
        except (Lost, *CLIENT_ERRORS) as error:
            self._client.cut()
            reason = str(error) or self._client.why_not(max(0.05, deadline - time.monotonic()))
            if any(words in reason.lower() for words in _WRONG_LOGIN):
                raise ConfigurationError(
                    f"{self.shown} refuses this user, or the password is wrong.", fix="Check user and password."
                ) from None
            told = f" ({reason})" if reason else ""
            raise BrokerUnavailable(f"No connection to {self.shown}{told}.", fix="Check the URL, start it.") from None
        if not connected:
            self._client.cut()
            raise BrokerUnavailable(f"{self.shown} did not answer within {timeout:.1f} s.", fix="Check the URL.")

    def _send(self, command: str, headers: Mapping[str, str], body: bytes, waiting: set[str]) -> str:
        with self.changed:
            receipt = f"r{next(self._numbers)}"
            placed = {**headers, "receipt": receipt}
            if command == "SEND":
                size = Size.of(command, placed, body)
                if (reason := self._limits.forbidding(size)) is not None:
                    raise TooLarge(too_large(reason, size))
                self._sizes[receipt] = size
            waiting.add(receipt)
        try:
            self._write(command, placed, body)
        except Lost:
            if receipt in self._answers:
                self.answer(receipt, 0.0)  # raises what it was refused for
            raise
        return receipt

    def _blame(self, reason: str) -> None:
        """The broker does not name the frame that was too large: only one that was alone is known to be it."""
        with self.changed:
            if len(self._sizes) == 1:
                ((receipt, size),) = self._sizes.items()
                self._limits.learn(reason, size)
                self._answered(receipt, TooLarge(too_large(reason, size)))

    def _write(self, command: str, headers: dict[str, str], body: bytes) -> None:
        if self._lost is not None:
            raise Lost(self._lost)
        try:
            self._client.send(command, headers, body)
        except CLIENT_ERRORS as error:
            if not isinstance(error, BlockingIOError | TimeoutError):
                self._hear_last_words()
            self.fail(f"nothing could be written: {type(error).__name__}")
            raise Lost(str(self._lost)) from error

    def _hear_last_words(self) -> None:
        """A broker that hung up while we wrote has said why; its words may still be on their way."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        with self.changed:
            while self._lost is None and (left := deadline - time.monotonic()) > 0:
                self.changed.wait(left)

    def _answered(self, receipt: str, refusal: Refused | None) -> None:
        with self.changed:
            self._unwatched.discard(receipt)
            self._sizes.pop(receipt, None)
            if receipt in self._open_receipts:
                self._answers[receipt] = refusal
            self.changed.notify_all()


def connected(address: Address, timeout: float, limits: Limits) -> Link:
    """A connection to the first of the hosts that takes us; each has its share of the time.

    Raises:
        BrokerUnavailable: none answers, or not in time; says why of the last.
        ConfigurationError: one refuses this user.
    """
    deadline = time.monotonic() + timeout
    for left in range(len(address.hosts), 1, -1):
        with suppress(BrokerUnavailable):
            return Link(replace(address, hosts=address.hosts[-left:][:1]), (deadline - time.monotonic()) / left, limits)
    return Link(replace(address, hosts=address.hosts[-1:]), max(0.05, deadline - time.monotonic()), limits)


def _one_line(text: str) -> str:
    return text.strip().splitlines()[0][:500] if text.strip() else "the broker says no more"
