"""Prepared messages in Amazon SQS alone: a queue that holds them back, a log of what was decided, what is parked."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from idemp.errors import BrokerError, ConfigurationError
from idemp.forking import ForkAware, renewed_in_child
from idemp.prepared.carried import Carried
from idemp.prepared.port import Decision, Prepared, Record, State, Taken
from idemp.prepared.sqs.queue import KEPT_SECONDS, LARGEST, LONGEST_DELAY, MOST_AT_ONCE, Received, SqsQueue
from idemp.prepared.sqs.wire import packed, room_for, size_of, unpacked
from idemp.showing import logger

try:
    import boto3
    from botocore import exceptions
    from botocore.config import Config
except ModuleNotFoundError as error:
    raise ConfigurationError(f"SqsHome needs {error.name}.", fix="pip install 'idemp[sqs]'") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

CONNECT_SECONDS: Final = 3.0
"""How long connecting may take."""
LONGEST_LEASE: Final = 12 * 3600
"""Seconds for which SQS hides a message."""
NOTED_SECONDS: Final = 4 * LONGEST_DELAY
"""Seconds after which a note of a decision is worth nothing any more: its message was checked."""
MOST_NOTES: Final = 10_000
"""Decisions that a checker remembers, and messages that a person sees."""
_LOOK_SECONDS: Final = 60

_Seen = tuple[Carried, Received]

log = logger("idemp.prepared")


class SqsHome(ForkAware):
    """Prepared messages in three standard queues of SQS, without a table. Needs a barrier: the barrier is the decision.

    They wait in `<name>-prepared`, delayed until their check is due. What the producer itself published or rolled back it
    notes in `<name>-ops`, so that the checker ends it without asking. What nobody knows goes back as a copy with a higher
    count; what was checked too often goes to `<name>-parked`. Copies are sent before the message is deleted, so that a
    crash makes two of one, never none; both meet the same fate, and have the same id.

    SQS holds a message back for 15 minutes at most, and forgets it after 14 days, parked or not. A message has 256 KiB,
    with what stands beside its body.

    Args:
        name: what its queues begin with. One home, one name: other homes need others.
        session: where credentials and region come from; default boto3's own.
        endpoint: a URL, for servers that speak SQS's protocol.
        timeout: how long an answer may take; connecting takes 3 s at most.
        wait: how long `take` waits for what is due. With 0 SQS asks some of its servers only, and may overlook some.
        connections: how many are kept at most; one per thread that works is enough.

    Raises:
        ConfigurationError: the name can't be that of a queue, there is no region, or another setting of boto3's is wrong.

    Example:
        >>> home = SqsHome("orders", session=boto3.Session(region_name="eu-central-1"))
        >>> home, home.decides
        (SqsHome('orders'), False)
    """

    decides = False

    def __init__(
        self,
        name: str,
        *,
        session: boto3.Session | None = None,
        endpoint: str | None = None,
        timeout: timedelta = timedelta(seconds=10),
        wait: timedelta = timedelta(seconds=1),
        connections: int = 50,
    ) -> None:
        # Nothing here is harmed by being done twice, so that boto3 may try again.
        config = Config(
            retries={"total_max_attempts": 3, "mode": "standard"},
            connect_timeout=CONNECT_SECONDS,
            read_timeout=timeout.total_seconds() + wait.total_seconds(),
            max_pool_connections=connections,
        )
        try:
            made = partial((session or boto3.Session()).client, "sqs", endpoint_url=endpoint, config=config)
            self._make_client: Callable[[], Any] = made
            self._client = made()
        except (exceptions.BotoCoreError, ValueError) as error:
            raise ConfigurationError(f"No client for SQS: {error}.") from error
        self._name = name
        self._wait = _seconds(wait, 20)
        lasting = {"MaximumMessageSize": LARGEST, "MessageRetentionPeriod": KEPT_SECONDS}
        self._waiting = SqsQueue(self._client, f"{name}-prepared", lasting)
        self._notes = SqsQueue(self._client, f"{name}-ops", {"MessageRetentionPeriod": NOTED_SECONDS})
        self._parked = SqsQueue(self._client, f"{name}-parked", lasting)
        self._decided: OrderedDict[UUID, float] = OrderedDict()  # of which there was a note, and when it was read
        self._lock = renewed_in_child(threading.Lock())  # around these
        self.track()

    def after_fork_in_child(self) -> None:
        """Take other connections than the parent."""
        self._client = self._make_client()
        for queue in (self._waiting, self._notes, self._parked):
            queue.client = self._client

    @property
    def place(self) -> str:
        """The endpoint and the name."""
        return f"{self._client.meta.endpoint_url} {self._name}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"

    def verify(self) -> None:
        """Make its queues, or make sure that they are as they would be made.

        Raises:
            BrokerUnavailable: SQS can't be reached, or does not let us.
            ConfigurationError: one of that name has other attributes.
        """
        for queue in (self._parked, self._notes, self._waiting):
            queue.declare()

    def prepare(self, prepared: Prepared, check_after: timedelta) -> None:
        """Send it, delayed.

        Raises:
            BrokerUnavailable: no answer; if it is there all the same, its checker will roll it back.
            BrokerError: it is too large.
            ConfigurationError: SQS can't hold it back for so long, or the queue is missing.
        """
        if not timedelta(0) <= check_after <= timedelta(seconds=LONGEST_DELAY):
            raise ConfigurationError(
                f"SQS can't check after {check_after}.", fix=f"Take at most {LONGEST_DELAY // 60} minutes."
            )
        text, attributes = packed(Carried(prepared))
        if not room_for(text, attributes):
            raise BrokerError(
                f"Message {prepared.id} has {size_of(text, attributes)} bytes with all that stands beside its body; "
                f"SQS takes {LARGEST}, a little of it for copies.",
                fix="Put the body elsewhere, and send its address.",
            )
        self._waiting.send(text, attributes, delay=_seconds(check_after, LONGEST_DELAY))

    def decide(self, prepared: Prepared, decision: Decision, lease: timedelta) -> bool:  # noqa: ARG002
        """Notes a rollback, if SQS answers; one of what was taken ends it."""
        if decision is Decision.COMMIT:
            return True
        # The barrier has decided: a note that fails spares nobody a question, and harms nobody.
        with suppress(BrokerError) if not isinstance(prepared, Taken) else nullcontext():
            self._end(prepared)
        return False

    def published(self, prepared: Prepared) -> None:
        """Notes it; ends what was taken."""
        self._end(prepared)

    def take(self, limit: int, lease: timedelta) -> Sequence[Taken]:
        """What is not delayed any more, hidden from others for `lease`, from a second to 12 hours."""
        self._read_notes()
        found: list[Taken] = []
        ended: list[Received] = []
        for message in self._waiting.receive(limit, hidden=max(1, _seconds(lease, LONGEST_LEASE)), wait=self._wait):
            if (carried := _carried(message)) is None:
                self._set_aside(message)
            elif carried.prepared.id in self._decided:
                ended.append(message)
            else:
                found.append(carried.taken(message))
        self._waiting.delete(ended)
        return found

    def postpone(self, taken: Taken, reason: str, retry_in: timedelta, *, checked: bool) -> None:
        """What was checked goes back as a copy with a higher count; else it is only hidden."""
        if not checked:
            self._waiting.hide([taken.tag], _seconds(retry_in, LONGEST_LEASE))
            return
        copy = packed(Carried(taken, taken.checks + 1, reason))
        self._waiting.send(*copy, delay=_seconds(retry_in, LONGEST_DELAY))
        self._waiting.delete([taken.tag])

    def park(self, prepared: Prepared, reason: str) -> bool:
        """Send a copy to what is parked, and end this one; without one in hand, those that are not delayed."""
        if not isinstance(prepared, Taken):
            return self._move(self._waiting, self._parked, prepared.id, reason)
        self._parked.send(*packed(Carried(prepared, prepared.checks, reason)))
        self._waiting.delete([prepared.tag])
        return True

    def resume(self, id: UUID) -> bool:
        """Send a copy to be checked at once."""
        return self._move(self._parked, self._waiting, id, None)

    def browse(self, state: State | None, limit: int) -> Sequence[Record]:
        """Those that are parked or due; SQS shows nobody what is delayed, nor what a checker has in its hands."""
        found: dict[UUID, Record] = {}
        for queue, there in self._queues():
            if state in {None, there}:
                with _looking(queue, limit) as looking:
                    for carried, _ in looking:
                        found.setdefault(carried.prepared.id, carried.record(there))
        return list(found.values())[:limit]

    def find(self, id: UUID) -> Record | None:
        """One of those that `browse` can see."""
        for queue, there in self._queues():
            with _looking(queue, until=id) as looking:
                for carried, _ in looking:
                    if carried.prepared.id == id:
                        return carried.record(there)
        return None

    def expired(self, retention: timedelta, limit: int) -> Sequence[UUID]:  # noqa: ARG002
        """None: what is decided is not here any more."""
        return ()

    def forget(self, ids: Collection[UUID]) -> None:
        """Nothing: what is decided is not here any more."""

    def close(self) -> None:
        """Give connections back."""
        self._client.close()

    def _queues(self) -> tuple[tuple[SqsQueue, State], ...]:
        return ((self._waiting, State.PREPARED), (self._parked, State.PARKED))

    def _end(self, prepared: Prepared) -> None:
        if isinstance(prepared, Taken):
            self._waiting.delete([prepared.tag])
        else:
            self._notes.send(str(prepared.id), {})

    def _read_notes(self) -> None:
        """Remember what was noted, the last of it: each note only spares a question, so that it may get lost."""
        read = 0
        while read < MOST_NOTES and (notes := self._notes.receive(MOST_AT_ONCE, hidden=_LOOK_SECONDS)):
            read += len(notes)
            with self._lock:
                for id_ in [UUID(note.text) for note in notes if _is_uuid(note.text)]:
                    self._decided[id_] = monotonic()
                    self._decided.move_to_end(id_)
                while len(self._decided) > MOST_NOTES:
                    self._decided.popitem(last=False)
            self._notes.delete(notes)
        self._forget_notes(monotonic() - NOTED_SECONDS)

    def _forget_notes(self, before: float) -> None:
        """Those of an hour ago: a key whose barrier is purged may be used anew, and is another message's by then."""
        with self._lock:
            while self._decided and next(iter(self._decided.values())) < before:
                self._decided.popitem(last=False)

    def _set_aside(self, message: Received) -> None:
        log.error(
            "A message in %s is none that idemp prepared: it is parked as it is",
            self._waiting.name,
            extra={"event": "prepared_unreadable", "queue": self._waiting.name, "message_id": None},
        )
        self._parked.send(message.text, message.attributes)
        self._waiting.delete([message])

    def _move(self, queue: SqsQueue, to: SqsQueue, id: UUID, reason: str | None) -> bool:
        """Move a message, with a new count of checks; whether it was seen. Copies of it may be left, and are harmless."""
        with _looking(queue, until=id) as looking:
            copies = [(carried, message) for carried, message in looking if carried.prepared.id == id]
            if not copies:
                return False
            to.send(*packed(Carried(copies[0][0].prepared, reason=reason)))
            queue.delete([message for _, message in copies])
            return True


@contextmanager
def _looking(queue: SqsQueue, limit: int = MOST_NOTES, *, until: UUID | None = None) -> Iterator[list[_Seen]]:
    """What can be seen in a queue, up to a message if one is named.

    It is hidden from others meanwhile; what was not deleted can be received again afterwards.
    """
    received: list[Received] = []
    seen: list[_Seen] = []
    try:
        while len(received) < limit and until not in {carried.prepared.id for carried, _ in seen}:
            some = queue.receive(min(MOST_AT_ONCE, limit - len(received)), hidden=_LOOK_SECONDS)
            if not some:
                break
            received += some
            seen += [(carried, message) for message in some if (carried := _carried(message)) is not None]
        yield seen
    finally:
        queue.hide(received, 0)


def _carried(message: Received) -> Carried | None:
    try:
        return unpacked(message.text, message.attributes)
    except ValueError:
        return None


def _is_uuid(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


def _seconds(duration: timedelta, most: int) -> int:
    """SQS counts whole seconds; rather later than earlier."""
    return max(0, min(math.ceil(duration.total_seconds()), most))
