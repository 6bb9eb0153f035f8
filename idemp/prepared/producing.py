"""Prepared messages as producers use them: prepare, local work behind a barrier, decide, publish with a confirm."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from idemp.emitting import Emitter
from idemp.errors import ConfigurationError
from idemp.forking import renewed_in_child
from idemp.identity import effective_id, new_id, output_id
from idemp.messages import OutputKind
from idemp.prepared.checking import Checking, Round
from idemp.prepared.deciding import Deciding
from idemp.prepared.half import Half
from idemp.prepared.port import Answer, Decision, Prepared
from idemp.prepared.publishing import Publishers
from idemp.showing import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from uuid import UUID

    from idemp.app import App
    from idemp.messages import Message
    from idemp.prepared.port import Barrier, Home

log = logger("idemp.prepared")

CHECK_AFTER: Final = timedelta(seconds=60)
LEASE: Final = timedelta(seconds=60)
TIMEOUT: Final = timedelta(seconds=15)
RETENTION: Final = timedelta(days=7)
BARRIER_RETENTION: Final = timedelta(days=30)
MAX_CHECKS: Final = 15

F = TypeVar("F", bound="Callable[[Prepared], Answer | str | None]")


class PreparedMessages:
    """Messages of an app whose local work is in another store than they are.

    Each is durable before the work begins, and invisible until the work's fate is decided: by its producer, or by a checker
    where the producer died. A worker of the app runs the checker.

    Args:
        app: whose messages they are: its types, its broker, its name for derived ids. It has one `PreparedMessages`.
        home: where they wait.
        barrier: in the store of the local work; a broker as home needs one.
        checker: instead of a barrier: gets the whole message, answers "commit", "rollback" or "unknown"; an exception or
            nothing is "unknown". May be given by the decorator `checker`, too.
        check_after: how long a message waits for its producer before the first check, and between two of them; by default
            what the home keeps (a queue has one delay), else a minute.
        max_checks: "unknown" answers after which a message is parked.
        lease: how long a producer or checker alone has a message; well above `timeout`.
        timeout: how long a publish waits for its confirm.
        retention: how long the home keeps what is decided and published.
        barrier_retention: how long the barrier keeps a row after that.

    Attributes:
        asked: the checker, where there is one.
        publishers: of the app's broker.
        deciding: what decisions do.

    Raises:
        ConfigurationError: a home that can't decide without a barrier, barrier and checker at once, a time or number that
            can't be, or the app has one already.

    Example:
        >>> from idemp import App
        >>> from idemp.broker.memory import InMemoryBroker
        >>> from idemp.inbox.memory import InMemoryStore
        >>> from idemp.prepared import InMemoryBarrier, InMemoryHome
        >>> app = App("orders", store=InMemoryStore(), broker=InMemoryBroker())
        >>> prepared = PreparedMessages(app, InMemoryHome(), barrier=InMemoryBarrier())
        >>> with prepared.prepare({"sku": "A-1"}, to="stock", type="stock.Reserve", key="order-7") as half:
        ...     with prepared.barrier.begin() as work:
        ...         half.pass_barrier(work)
        ...     confirmed = half.commit()
        >>> prepared.home.find(half.id).state.value
        'committed'
    """

    def __init__(
        self,
        app: App,
        home: Home,
        *,
        barrier: Barrier | None = None,
        checker: Callable[[Prepared], Answer | str | None] | None = None,
        check_after: timedelta | None = None,
        max_checks: int = MAX_CHECKS,
        lease: timedelta = LEASE,
        timeout: timedelta = TIMEOUT,
        retention: timedelta = RETENTION,
        barrier_retention: timedelta = BARRIER_RETENTION,
    ) -> None:
        check_after = check_after if check_after is not None else getattr(home, "check_after", CHECK_AFTER)
        if barrier is None and not home.decides:
            raise ConfigurationError(
                f"{type(home).__name__} can't compare and set: it needs a barrier, which is the decision.",
                fix="Say barrier=SqlBarrier(engine), with the engine of the local work.",
            )
        if barrier is not None and checker is not None:
            raise _two_checkers()
        if max_checks < 1 or check_after < timedelta(0) or not timedelta(0) < timeout < lease:
            raise ConfigurationError(
                f"max_checks={max_checks}, check_after={check_after}, lease={lease}, timeout={timeout} can't be.",
                fix="Use max_checks of 1 or more, no negative times, and a lease above the timeout.",
            )
        if app.prepared is not None:
            raise ConfigurationError(f"App {app.name!r} has prepared messages already.", fix="Use those.")
        self.app = app
        self.home = home
        self.barrier = barrier
        self.check_after = check_after
        self.max_checks = max_checks
        self.lease = lease
        self.timeout = timeout
        self.retention = retention
        self.barrier_retention = barrier_retention
        self.asked = checker
        self._ready = False
        self._lock = renewed_in_child(threading.Lock())
        self.publishers = Publishers(app)
        self.deciding = Deciding(app.name, home, barrier, self.publishers, lease=lease, timeout=timeout)
        if (belongs_to := getattr(home, "belongs_to", None)) is not None:  # a table may keep those of several apps
            belongs_to(app.name)
        app.prepared = self

    def checker(self, function: F) -> F:
        """Decorator: this function decides what stayed undecided; see the argument of the same name.

        Raises:
            ConfigurationError: there is a barrier, or another checker, already.

        Example:
            >>> from idemp import App
            >>> from idemp.inbox.memory import InMemoryStore
            >>> from idemp.prepared import InMemoryHome
            >>> app = App("orders", store=InMemoryStore(), broker="local://orders.db")
            >>> prepared = PreparedMessages(app, InMemoryHome())
            >>> @prepared.checker
            ... def was_ordered(prepared: Prepared) -> str:
            ...     return "unknown"
        """
        if self.barrier is not None or self.asked is not None:
            raise _two_checkers()
        self.asked = function
        return function

    def needed_barrier(self) -> Barrier:
        """The barrier.

        Raises:
            ConfigurationError: there is none.
        """
        if self.barrier is None:
            raise ConfigurationError(
                "There is no barrier: without one nobody knows whether the work was committed.",
                fix="Say PreparedMessages(…, barrier=SqlBarrier(engine)), or use prepare() and decide yourself.",
            )
        return self.barrier

    @property
    def needless(self) -> bool:
        """Whether an initiation does it better: home and local work are in the database of the app's own inbox."""
        return self.barrier is not None and self.home.place == self.barrier.place == getattr(
            self.app.store, "place", None
        )

    def verify(self) -> None:
        """See that home and barrier are ready, at the worker's start.

        Raises:
            ConfigurationError: they are not, or nobody can decide what stays undecided.
            StoreUnavailable: they can't be reached.
            BrokerUnavailable: they can't be reached.
        """
        self._check_decidable()
        self._verify_ports()
        if self.needless:
            log.warning(
                "messages, local work and inbox share %s: `app.initiate` does it in one transaction, without a checker",
                self.home.place,
                extra={"event": "prepared_needless", "consumer": self.app.name},
            )

    def needed_checker(self) -> Callable[[Prepared], Answer | str | None]:
        """The function that decides in the barrier's stead.

        Raises:
            ConfigurationError: there is none.
        """
        if self.asked is None:
            raise ConfigurationError(
                f"The prepared messages of app {self.app.name!r} have neither barrier nor checker.",
                fix="Say barrier=…, or decorate a function with @prepared.checker.",
            )
        return self.asked

    def ready(self) -> None:
        """See, once, that home and barrier are there, before they are first used. Errors as of `verify`."""
        with self._lock:
            if not self._ready:
                self._verify_ports()

    def _check_decidable(self) -> None:
        if self.barrier is None:
            self.needed_checker()

    def _verify_ports(self) -> None:
        self.home.verify()
        if self.barrier is not None:
            self.barrier.verify()
        self._ready = True

    # Producers ------------------------------------------------------------------------------------------------------

    def submit_after(
        self,
        work: Callable[[Any], object],
        message: Any,
        *,
        to: str | None = None,
        key: str | None = None,
        **options: Any,
    ) -> UUID:
        """Prepare, work, decide and publish: the message is published if and only if the work's transaction commits.

        Work that meets a deadlock or a serialization failure runs again, three times in all. Work of a key that is committed
        already is not done again; its message is published if it is not yet. A key that was rolled back is used up.

        Args:
            work: a plain function; called with a session of the barrier's, which it must neither commit nor roll back.
            message: as for `Context.send`.
            to: the queue to send to; without it the message is published to whoever subscribed to its type.
            key: what makes two calls the same, such as the order's id; without it an id is minted.
            options: as for `Context.send`.

        Returns:
            The id of the message. It is committed; where the broker did not confirm it the checker publishes it.

        Raises:
            Undecided: the work's COMMIT, or the decision, has no answer: the checker will decide.
            RolledBack: the checker was first, or the key was rolled back before.
            PreparedConflict: the key was used for another message; no work was done.
            StoreError: the message could not be prepared, or the work's store could not do its part; nothing is committed.
            BrokerError: the message could not be prepared.
            Exception: what the work raised; rolled back.
            ConfigurationError: the work is asynchronous or a generator, or rolled back its session itself; nothing is sent.
        """
        barrier = self.needed_barrier()
        prepared = self.make(message, to=to, key=key, **options)
        self.ready()
        self.home.prepare(prepared, self.check_after)
        self.deciding.commit_after(barrier, prepared, work)
        return prepared.id

    @contextmanager
    def prepare(self, message: Any, *, to: str | None = None, key: str | None = None, **options: Any) -> Iterator[Half]:
        """Prepare a message, and decide in the block: see `Half`.

        Leaving the block without a decision, by an exception or not, is no rollback: the barrier is asked, and where that
        does not tell, the checker decides later.

        Args:
            message: as for `submit_after`, with all that follows.
            to: the queue to send to.
            key: what makes two messages the same.
            options: as for `Context.send`.

        Raises:
            PreparedConflict: the key was used for another message; no work was done.
            StoreError: the message could not be prepared; no work was done.
            BrokerError: likewise.
        """
        prepared = self.make(message, to=to, key=key, **options)
        self.ready()
        self.home.prepare(prepared, self.check_after)
        half = Half(self, prepared)
        try:
            yield half
        except Exception:
            self.deciding.leave(half)
            raise
        self.deciding.leave(half)

    def make(self, message: Any, *, to: str | None = None, key: str | None = None, **options: Any) -> Prepared:
        """The message as it would be prepared; stores nothing."""
        consumer = self.app.consumer
        id_ = self.id_of(key if key is not None else str(new_id(consumer.clock.now())))
        said: list[Message] = []

        def wire(made: Message) -> Message:
            said.append(made)
            return consumer.wrap(made) if consumer.wrap is not None else made

        emitter = Emitter(
            types=consumer.types,
            exchange=consumer.exchange,
            derive_id=lambda _ordinal: id_,
            causation_id=key,
            max_body_bytes=consumer.max_body_bytes,
            wire=wire,
            trace=consumer.telemetry.trace_headers(),
            now=consumer.clock.now(),
        )
        emitter.emit(OutputKind.SEND if to is not None else OutputKind.PUBLISH, message, to=to, **options)
        (output,) = emitter.close()
        return Prepared.of(output, said[0])

    def id_of(self, key: str) -> UUID:
        """The id of the message with this key: the same in every process.

        Raises:
            InvalidId: it is empty or blank, no text, or longer than 255 bytes.
        """
        return output_id(self.app.settings.namespace, self.app.name, effective_id("prepared", key).key, 0)

    def decide(self, prepared: Prepared, decision: Decision) -> bool:
        """Decide about a prepared message, after its local work; the barrier has to agree. Repeating it is harmless.

        Returns:
            Whether the broker confirmed the final message; where it did not, the checker publishes it.

        Raises:
            OppositeDecision: the opposite is decided already; nothing was changed.
            UnknownPrepared: there is no such message.
            Undecided: the decision could not be made or written; the checker will decide.
        """
        return self.deciding.decide(prepared, decision)

    # The checker ----------------------------------------------------------------------------------------------------

    def run_once(self, limit: int = 50) -> Round:
        """Check what is due, and publish what is committed and was not confirmed.

        Raises:
            ConfigurationError: there is neither barrier nor checker; nothing was taken.
            StoreError: the home could not do its part.
            BrokerError: likewise.
        """
        self._check_decidable()
        return Checking(self).run_once(limit)

    def run(self, stop: threading.Event, interval: timedelta = timedelta(seconds=1)) -> None:
        """Rounds until `stop`: at once while there is work, else every `interval`. A worker of the app does this.

        Raises:
            ConfigurationError: there is neither barrier nor checker; nothing was taken.
        """
        self._check_decidable()
        Checking(self).run(stop, interval)

    def purge(self, limit: int = 1000) -> int:
        """Delete what has been decided and published for longer than the retention, and old rows of the barrier.

        How many of either kind: with `limit` of them there may be more. The barrier's rows outlive the home's: a row that
        goes first would make a late probe take "commit" for "rollback".

        Raises:
            StoreError: home or barrier could not do their part; calling it again goes on.
        """
        ids = self.home.expired(self.retention, limit)
        if self.barrier is None:
            self.home.forget(ids)
            return len(ids)
        self.barrier.settle(ids)
        self.home.forget(ids)
        return max(len(ids), self.barrier.purge(self.barrier_retention, limit))

    def close(self) -> None:
        """Give connections back."""
        self.publishers.close()
        self.home.close()
        if self.barrier is not None:
            self.barrier.close()


def _two_checkers() -> ConfigurationError:
    return ConfigurationError(
        "There is a barrier, or a checker, already: two that decide could disagree.", fix="Give one of them."
    )
