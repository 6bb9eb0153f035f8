"""One run of an app under faults: the steps that a machine draws or a schedule names, each told in a sentence."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from inspect import signature
from typing import TYPE_CHECKING, Any, Final, cast

from idemp.broker.copies import attempt_of, retried
from idemp.broker.port import Ack, Delivery, Retry
from idemp.errors import ConfigurationError, MessageError, StoreUnavailable, TransientStoreError
from idemp.messages import Message
from idemp.testing.crash_points import Crash
from idemp.testing.deadline import told_hangs
from idemp.testing.options import ALL_POINTS
from idemp.testing.promises import PromiseBroken, Promises
from idemp.testing.story import Story, became, delivered, named, shown
from idemp.work import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from idemp.testing.handled import Handled

MOST_OF_A_TIE: Final = 6
"""How often in a row a database must be away or busy before a delivery is given up for now."""

_OUTSIDE: Final = ("before begin", "before publish", "after publish", "before settle")
COMPETING_POINTS: Final[dict[bool, tuple[str, ...]]] = {True: _OUTSIDE, False: (*_OUTSIDE, "after claim")}
"""Where a second worker can come in between, on databases that let one writer in at a time (`True`), and on others."""
ANYWHERE: Final = (*_OUTSIDE, "after claim", "after handler", "before commit")
"""Where it can on stores in which nobody holds a claim."""

_COMMITS: Final = {
    "lost, committed": "COMMIT took effect and its answer was lost",
    "lost, not committed": "COMMIT did not take effect and its answer was lost",
    "transient": "COMMIT failed by a conflict with others",
    "away": "The database went away at COMMIT",
}
ANSWERS: Final = ("lose", "nacked", "returned", "timeout", "blocked", "closed", "unsendable")
"""How a broker can answer an output, other than by a confirm that arrives."""
_CHOICES: Final[dict[str, Collection[str]]] = {
    "crash": ALL_POINTS,
    "compete": ALL_POINTS,
    "fail commit": _COMMITS,
    "refuse output": ("confirm", *ANSWERS),
}
_CALLED: Final = {
    "crash": "crash point",
    "compete": "crash point",
    "fail commit": "way for COMMIT to fail",
    "refuse output": "answer to an output",
}


class Run:
    """One run, from an empty database and an empty queue until everything has come to rest.

    Args:
        promises: what is held against it, and the harness where it takes place.
        invariants: the user's own: each is called with a session after every step; one that raises or answers `False` fails.
        rehearse: called with each message before its first delivery.
        handled: counts what became of the messages.

    Attributes:
        story: what was done, and what became of it.

    Example:
        >>> from idemp import App, Idempotent
        >>> from idemp.testing.harness import Harness
        >>> app = App("orders")
        >>> @app.handler(dict, type="orders.Place", policy=Idempotent(key="id"))
        ... def place(message: dict[str, int]) -> None: ...
        >>> with Harness(app) as harness:
        ...     run = Run(Promises(harness))
        ...     for action in [("publish", "orders.Place", '{"id":7}'), ("crash", "after commit"), ("deliver",)]:
        ...         run.do(action)
        ...     run.finish()
        >>> for sentence in run.story.sentences:
        ...     print(sentence)
        A producer published orders.Place 'message-1': {"id":7}
        The worker died after commit of orders.Place 'message-1'.
        orders.Place 'message-1' came again, a duplicate: the handler was skipped, and nothing was left to send.
    """

    def __init__(
        self,
        promises: Promises,
        *,
        invariants: Sequence[Callable[[Any], object]] = (),
        rehearse: Callable[[Message], None] = lambda _: None,
        handled: Handled | None = None,
    ) -> None:
        self.promises = promises
        self.harness = promises.harness
        self.story = Story()
        self.published: list[Message] = []
        self._invariants = invariants
        self._rehearse = rehearse
        self._handled = handled
        self._rehearsed: set[str] = set()
        self._actions: dict[str, Callable[..., str]] = {
            "publish": self._publish,
            "duplicate": self._duplicate,
            "deliver": self._deliver,
            "crash": self._crash,
            "fail commit": self._fail_commit,
            "refuse output": self._refuse_output,
            "lose ack": self._lose_ack,
            "database away": self._database_away,
            "database busy": self._database_busy,
            "hold claim": self._hold_claim,
            "compete": self._compete,
            "reorder": self._reorder,
            "restart": self._restart,
            "relay": self._relay,
            "crash relay": self._crash_relay,
            "purge": self._purge,
            "advance": self._advance,
            "replay": self._replay,
        }
        promises.begin_anew()

    @property
    def waiting(self) -> int:
        """How many messages could be delivered now."""
        return self.harness.broker.depth(self.harness.queue)

    def do(self, action: Sequence[Any]) -> None:
        """Do one step, and see whether the promises still hold.

        Raises:
            ConfigurationError: there is no such step.
            Exception: a promise or an invariant does not hold; the error tells the story.
        """
        name, arguments = self._checked(action)
        done = (name, *arguments)
        with self._told():
            try:
                sentence = self._actions[name](*arguments)
            except BaseException as error:
                self.story.add(done, f"{name}{arguments or ''}: {type(error).__name__}")
                raise
            self.story.add(done, sentence)
            self.promises.at_any_time()
            self._check_invariants()

    def _checked(self, action: Sequence[Any]) -> tuple[str, list[Any]]:
        if not isinstance(action, tuple | list) or not action:
            raise ConfigurationError(f"{action!r} is no step.", fix="A step is a tuple: its name, and what it needs.")
        name, *arguments = action
        if name not in self._actions:
            raise ConfigurationError(f"There is no step {name!r}.", fix=f"Use one of {', '.join(self._actions)}.")
        try:
            signature(self._actions[name]).bind(*arguments)
        except TypeError as error:
            raise ConfigurationError(
                f"The step {(name, *arguments)} can't be taken: {error}.",
                fix="Copy the schedule that a failure printed.",
            ) from error
        known = _CHOICES.get(name, ())
        if known and arguments[0] not in known:
            raise ConfigurationError(
                f"There is no {_CALLED[name]} {arguments[0]!r}.", fix=f"Use one of {', '.join(known)}."
            )
        return name, arguments

    def finish(self) -> None:
        """Let everything come to rest, and hold all promises against the run.

        Raises:
            Exception: a promise or an invariant does not hold; the error tells the story.
        """
        with self._told():
            self.harness.rest()
            self._check_invariants()
            if self._handled is not None:
                self._handled.count(self.promises, self.published)
            self.promises.at_rest(self.published)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            with told_hangs():
                yield
        except Exception as error:
            self.story.note_on(error)
            raise

    def _check_invariants(self) -> None:
        for invariant in self._invariants:
            if self.harness.state(invariant) is False:
                raise PromiseBroken(f"The invariant {getattr(invariant, '__name__', invariant)!r} does not hold.")

    # Messages -------------------------------------------------------------------------------------------------------

    def _publish(self, type: str | None, body: str | bytes, properties: dict[str, Any] | None = None) -> str:
        given = dict(properties or {})
        if "timestamp" in given:
            given["timestamp"] = datetime.fromisoformat(given["timestamp"])
        # Dated, so that what comes when its claim may be purged is known to be late.
        given = {"message_id": f"message-{len(self.published) + 1}", "timestamp": self.harness.clock.now(), **given}
        message = self._as_old_as_the_first(
            Message(body=body.encode() if isinstance(body, str) else body, type=type, **given)
        )
        self.published.append(message)
        self.harness.send(message)
        return f"A producer published {named(message)}: {shown(message.body)}"

    def _as_old_as_the_first(self, message: Message) -> Message:
        """A key that comes back when its window is over may be handled anew; that is promised to nobody, and no finding."""
        key, _ = self.promises.key_of(message)
        first = next((earlier for earlier in self.published if self.promises.key_of(earlier)[0] == key), message)
        return replace(message, timestamp=first.timestamp)

    def _duplicate(self, index: int) -> str:
        if not self.published:
            return "Nothing was published that could be published again."
        message = self.published[index % len(self.published)]
        copy = replace(message, message_id=f"{message.message_id}-again")
        if self.promises.key_of(copy) == self.promises.key_of(message):
            self.harness.send(copy)
            return f"The producer published {named(message)} again, under the transport id {copy.message_id!r}."
        self.harness.send(message)
        return f"The producer published {named(message)} again."

    def _reorder(self) -> str:
        with self.harness.broker.take(self.harness.queue, None, 1) as taken:
            for index, message in enumerate(taken.messages):
                self.harness.send(message)
                taken.accept(index)
                return f"The broker put {named(message)} behind all others."
        return "The broker had no messages whose order could change."

    def _replay(self) -> str:
        replayed = self.harness.replay(100)
        if not replayed:
            return "Somebody looked for dead letters; there were none."
        return f"Somebody replayed the dead letters: {', '.join(named(message) for message in replayed)}."

    # Deliveries -----------------------------------------------------------------------------------------------------

    def _deliver(self) -> str:
        return self._delivery()

    def _lose_ack(self) -> str:
        return f"{self._delivery(acks=False)} Its ack was lost."

    def _crash(self, point: str) -> str:
        if point.endswith(" record"):
            return self._crash_recording(point)
        self._rehearse_next()
        self.harness.script.die(point)
        told = self._delivery()
        return told if f" died {point}" in told else f"{told} It did not come to a death {point}."

    def _crash_recording(self, point: str) -> str:
        self.harness.script.die(point)
        try:
            self.harness.process().dispatcher.flush()
        except Crash:
            self.harness.restart(cleanly=False)
            return f"The worker died {point} of its marks."
        finally:
            self.harness.script.clear()
        return "The worker had no marks to record."

    def _fail_commit(self, fault: str) -> str:
        self._rehearse_next()
        self.harness.script.commit_faults = [cast("Any", fault)]
        told = self._delivery()
        return f"{_COMMITS[fault]}: {told}"

    def _refuse_output(self, answer: str, confirmed: int = 0) -> str:
        self._rehearse_next()
        self.harness.script.answers = [cast("Any", each) for each in (*["confirm"] * confirmed, answer)]
        told = self._delivery()
        what = "took output {} and its confirm was lost" if answer == "lose" else f"answered output {{}} by {answer!r}"
        return f"The broker {what.format(confirmed + 1)}: {told}"

    def _database_away(self, times: int = MOST_OF_A_TIE) -> str:
        return self._without_database(StoreUnavailable("the test says: away"), times, "was away")

    def _database_busy(self, times: int = MOST_OF_A_TIE) -> str:
        return self._without_database(TransientStoreError("the test says: busy"), times, "was busy with others")

    def _without_database(self, error: Exception, times: int, what: str) -> str:
        self._rehearse_next()
        self.harness.script.store_faults = [error] * times
        told = self._delivery()
        return f"The database {what} {times} times: {told}"

    def _hold_claim(self) -> str:
        """Another process's transaction holds the claim meanwhile, where it holds up nobody else."""
        message = self._next()
        self._rehearse_next()
        if message is None or not self.harness.premises.holds_claims:
            return self._delivery()
        try:
            claims = decode(self.harness.consumer, Delivery(message=message, queue=self.harness.queue)).claims
        except MessageError:
            return self._delivery()
        with self.harness.store.inner.begin(claims) as unit:
            for claim in claims:
                unit.claim(claim)
            return f"While another transaction held the claim: {self._delivery()}"

    def _compete(self, point: str) -> str:
        message = self._next()
        self._rehearse_next()
        if message is None:
            return self._delivery()
        script, told = self.harness.script, list[str]()

        def meanwhile(_: str) -> None:
            script.crash_before = script.crash_after = None
            told.append(self._second_worker(message))

        script.die(point)
        script.death, death = cast("Any", meanwhile), script.death
        try:
            first = self._delivery()
        finally:
            script.death = death
        return f"{first} Meanwhile, {point}, a second worker got it, too: {told[0]}." if told else first

    def _second_worker(self, message: Message) -> str:
        protocol = self.harness.another_process()
        delivery = Delivery(
            message=message, queue=self.harness.queue, attempt=attempt_of(message), redelivered=True, tag=object()
        )
        outcome, settlement = protocol.handle(delivery)
        protocol.dispatcher.flush()
        if isinstance(settlement, Retry):
            self.harness.send(retried(message, settlement, self.harness.clock.now()))
        elif not isinstance(settlement, Ack):
            self.harness.send(message)
        return became(outcome, named(message), getattr(settlement, "reason", None))

    def _delivery(self, *, acks: bool = True) -> str:
        self._rehearse_next()
        harness = self.harness
        executions, sent = len(harness.executions), len(harness.publisher.sent)
        step = harness.step(acks=acks)
        error = harness.executions[-1].error if len(harness.executions) > executions else None
        return delivered(step, error, sent=len(harness.publisher.sent) - sent)

    def _next(self) -> Message | None:
        return next(iter(self.harness.broker.browse(self.harness.queue, 1)), None)

    def _rehearse_next(self) -> None:
        message = self._next()
        if message is not None:
            key, _ = self.promises.key_of(message)
            if key not in self._rehearsed:
                self._rehearsed.add(key)
                self._rehearse(message)

    # Beside them ----------------------------------------------------------------------------------------------------

    def _restart(self) -> str:
        self.harness.restart()
        return "The worker ended cleanly, and a new one began."

    def _relay(self) -> str:
        taken = self.harness.relay(max_attempts=1_000).taken
        return f"The relay ran: it took {taken} outputs." if taken != 1 else "The relay ran: it took 1 output."

    def _crash_relay(self, sent: int = 0) -> str:
        self.harness.script.crash_after_outputs = sent
        self.harness.relay(max_attempts=1_000)
        return f"The relay ran, and died where it had sent {sent} outputs."

    def _purge(self) -> str:
        purged = self.harness.purge()
        return (
            f"The cleaner ran: it deleted {purged} claims." if purged != 1 else "The cleaner ran: it deleted 1 claim."
        )

    def _advance(self, seconds: float) -> str:
        self.harness.advance(timedelta(seconds=seconds))
        return f"Time went by: {timedelta(seconds=seconds)}."
