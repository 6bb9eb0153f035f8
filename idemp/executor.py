"""The executor: takes deliveries from their bytes to a COMMIT that is on disk, one transaction each, or one for a batch."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from idemp.context import BaseContext
from idemp.envelopes import read_delivery
from idemp.errors import (
    Conflict,
    HandlerError,
    InFlight,
    Late,
    Poison,
    TimedOut,
    TransactionRolledBack,
    Unavailable,
    Unreadable,
    describe_error,
)
from idemp.events import RUNNING, log
from idemp.failures import RULES, Action, Decision, Phase
from idemp.handlers import Handler, Handlers
from idemp.handling import Handling, parts
from idemp.messages import RESULT, SPOILT, Delivery, Output
from idemp.ports import AsyncStore, ClaimAnswer, Handled, Kind, Store, Verdict

__all__ = ["Executor"]

PATIENCE: Final = 5.0  # seconds within which a delivery is run again at once
NO_MORE: Final = 1_000_000
LOOKS: Final = 3  # deaths while a message is only claimed, before it is parked undecoded
NOT_OPTED_IN: Final = (ClaimAnswer(Verdict.CLAIMED),)  # the answer for a delivery without a claim, which has no batch


@dataclass
class Executor:
    """Accepts deliveries, and runs their handlers in the transactions of their claims.

    A failure is noted on its delivery, with what the table of failures says becomes of it.

    Attributes:
        handlers: Handlers of the consumer.
        store: Claims ids and stores outputs.
        hook: Calls a hook by its name, on all that the app has.
        wait: Waits, in a transaction, for what an `async def` handler does.
        pause: Waits for some seconds before a delivery is run again.
        lazy: Whether COMMIT leaves the wait for the disk to `read_back`, if the store can do that.
        running: The delivery that is being claimed or handled.
        seen: When a handler or an attempt ended last, by the monotonic clock.

    Example:
        >>> Executor(Handlers(), None).accept(Delivery("billing", {}, b"{}")).error
        UnknownType('the message does not say its type')
    """

    handlers: Handlers
    store: Store[Any]
    hook: Callable[..., None] | None = None
    wait: Callable[[Any, Awaitable[Any]], Any] | None = field(default=None, kw_only=True)
    pause: Callable[[float], None] = field(default=time.sleep, kw_only=True)
    lazy: bool = field(default=False, kw_only=True)
    running: Handling | None = field(default=None, init=False)
    seen: float = field(default=0.0, init=False)

    def for_task(self, store: AsyncStore[Any] | None = None) -> Executor:
        """Return an executor for one of many executions at once; with a store for that, its handler may be `async def`."""
        return replace(self) if store is None else replace(self, store=store, wait=store.wait, pause=store.pause)

    # Accept

    def accept(self, delivery: Delivery) -> Handling:
        """Find the handler of a delivery, decode it and identify it."""
        handling = Handling(delivery, properties=delivery.properties)
        try:
            if delivery.row is not None and SPOILT in delivery.row.history[-1:]:
                raise Unreadable("its history cannot be read, so it is not known how often it has failed: replay it")
            if delivery.row is not None and delivery.row.deaths_alone >= self.handlers.most_attempts(delivery) + LOOKS:
                raise _poison(delivery)
            event = read_delivery(delivery)
            handling.properties = event.properties
            handling.handler = handler = self.handlers.find(event)
            handling.claim = handler.identify(event)
            if delivery.row is None or not handling.poison:
                handling.message = handler.decode(event)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a message class may raise anything
            handling.fail(error)
        return handling

    # Execute

    def execute(self, batches: Sequence[Sequence[Handling]]) -> bool:
        """Claim, handle and store each batch in one transaction. If a batch fails, its culprit runs alone, and the others without it.

        Returns:
            Whether the database takes no work, so that deliveries are held: one that was tried, and all after it.
        """
        todo = list(filter(None, reversed(batches)))
        while todo:
            some = todo.pop()
            if len(some) > 1:
                todo += reversed(self._execute_batch(some))
                continue
            if self._execute_alone(some[0]):
                for rest in todo:
                    _hold(rest, some[0])
                return True
        return False

    def _execute_batch(self, handlings: Sequence[Handling]) -> Sequence[Sequence[Handling]]:
        """Execute many deliveries; return the parts that are to run in their place if that failed."""
        culprit: Handling | None = None
        ended: HandlerError | None = None
        try:
            with self.store.connect() as tx:
                try:
                    self._transaction(handlings, tx)
                except Exception:
                    culprit, ended = self._culprit(), self.store.ended(tx)
                    raise
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the parts find out what it means
            self.running, self.seen = None, time.monotonic()
            log("batch.split", count=len(handlings), error=error)
        else:
            if self.hook is not None:
                _call_hook(self.hook, handlings)
            return ()
        if ended is not None and ended.committed is not False:  # all claims are committed, so nothing can run again
            _park_batch(handlings, ended)
            return ()
        for handling in handlings:
            self.renew(handling)
        return parts([handling for handling in handlings if handling.error is None], culprit)

    def _culprit(self) -> Handling | None:
        """Return the delivery that failed; a handler of lists does not say which."""
        handling = self.running
        in_list = handling is not None and handling.handler is not None and handling.handler.takes_list
        return None if handling is not None and in_list and handling.phase is Phase.HANDLER else handling

    def _execute_alone(self, handling: Handling) -> bool:
        """Execute one delivery, again if the failure table says so; return whether it is held."""
        reruns, patience = 0, time.monotonic() + PATIENCE
        while True:
            ended: HandlerError | None = None
            try:
                with self.store.connect() as tx:
                    try:
                        self._transaction((handling,), tx)
                    except Exception:
                        ended = self.store.ended(tx)  # which the handler may have caught; other units have errors of their own
                        raise
            except MemoryError:
                raise
            except Exception as raised:  # noqa: BLE001 - a handler may raise anything
                self.running, self.seen = None, time.monotonic()
                reruns = reruns if self.seen < patience else NO_MORE
                error, own = ended or raised, ended is not None
                handling.phase = max(handling.phase, Phase.CLAIM)  # also if no connection was there: the message is not to blame
                decision = handling.decide(error, self.store, own=own, reruns=reruns)
                if decision.action is Action.HOLD:
                    handling.obstacle = describe_error(error)
                if decision.action is not Action.RERUN:
                    handling.fail(error, decision)
                    return decision.action is Action.HOLD
            else:
                if self.hook is not None:
                    _call_hook(self.hook, (handling,))
                return False
            reruns += 1
            self.pause(random.uniform(0.0, 0.02 * reruns))
            self.renew(handling)
            if handling.error is not None:
                return False

    def renew(self, handling: Handling) -> None:
        """Decode a message for another run, because a handler may have changed it."""
        again = self.accept(handling.delivery)
        handling.message, handling.claim = again.message, again.claim
        handling.error, handling.decision = again.error, again.decision
        handling.phase, handling.verdict, handling.outputs = Phase.ACCEPT, None, ()
        if handling.claim is not None and handling.claim.resends == "due":
            handling.claim.resends = "pending"  # a duplicate of our own, if only the answer to COMMIT was lost

    # Read back

    def read_back(self, handlings: Sequence[Handling]) -> bool:
        """Wait until the claims that these deliveries rest on are on disk, where their COMMIT may not have waited for that.

        That is so for lazy commits, and for duplicates, because another worker may have committed their claims lazily.

        Returns:
            Whether deliveries are held, to be claimed again: the database is away, or has lost their claims.
        """
        found, claims = [], []
        for handling in handlings:
            if handling.error is None and handling.claim and (handling.lazy or handling.verdict is Verdict.DUPLICATE):
                found.append(handling)
                claims.append(handling.claim)
        if not found:
            return False
        error: Exception = Unavailable("the database has lost its latest commits")
        try:
            stands = self.store.read_back(claims)
        except MemoryError:
            raise
        except Exception as raised:  # noqa: BLE001 - for any reason, nothing is known to be on disk
            stands, error = [False] * len(found), raised
        for handling, kept in zip(found, stands, strict=True):
            if not kept:
                handling.obstacle = describe_error(error)
                handling.fail(error, Decision(RULES["database away"], Action.HOLD))
        return not all(stands)

    # One transaction

    def _transaction(self, handlings: Sequence[Handling], tx: Any) -> None:
        fresh = self._claim(handlings, tx)
        in_list = bool(fresh) and fresh[0][0].handler is not None and fresh[0][0].handler.takes_list
        handled: list[Handled] = []
        for some in [fresh] if in_list else zip(fresh):  # one list, or a tuple of one for each
            handled += self._run_handler(some, tx)
            if len(handlings) > 1 and not self.store.intact(tx):
                raise TransactionRolledBack("a rollback")
        self.running = None
        if handled:
            lazy = self.lazy and self.store.lazy and handled[0].claim is not None  # what has no claim cannot be read back
            self.store.finish(tx, handled, lazy=lazy)  # proves the transaction, stores, commits
            for handling, _ in fresh:
                handling.lazy = lazy

    def _claim(self, handlings: Sequence[Handling], tx: Any) -> list[tuple[Handling, bool]]:
        """Claim the ids; return the deliveries that are new, and of each whether it is late."""
        self.running = None
        claims = []
        for handling in handlings:
            handling.phase = Phase.CLAIM
            if handling.claim is not None:
                claims.append(handling.claim)
        fresh = []
        answers = self.store.claim(tx, claims)  # which marks the transaction, even if there is nothing to claim
        for handling, answer in zip(handlings, answers if claims else NOT_OPTED_IN, strict=False):  # after IN_FLIGHT come none
            self.running = handling
            handling.verdict, handling.outputs, handling.claimer = answer.verdict, answer.outputs, answer.worker
            handling.result = answer.result
            if answer.verdict is Verdict.CLAIMED:
                fresh.append((handling, answer.late))
            elif answer.verdict is Verdict.CONFLICT:  # which claims nothing, so the others can go on
                handling.fail(Conflict("another message was handled under its id"))
            elif answer.verdict is Verdict.IN_FLIGHT:
                raise InFlight("another transaction holds its id")
        return fresh

    def _run_handler(self, fresh: Sequence[tuple[Handling, bool]], tx: Any) -> list[Handled]:
        """Run a handler for one message, or a handler of lists for all fresh ones."""
        handlings, messages, contexts = [], [], []
        for handling, late in fresh:
            contexts.append(self._prepare(handling, tx, late=late))
            handlings.append(handling)
            messages.append(handling.message)
        handler = handlings[0].handler
        assert handler is not None
        self.running, start, process = handlings[0], time.monotonic(), os.getpid()
        logged = list(handlings)
        token = RUNNING.set(logged)
        try:
            if self.wait is not None and handler.is_async:
                outputs = self.wait(tx, handler.call_async(messages, contexts))
            elif handler.timeout is None:
                outputs = handler.call(messages, contexts)
            else:
                outputs = self._call_limited(handler, handler.timeout, messages, contexts, tx)
        finally:
            if os.getpid() != process:  # a child that the handler forked must not go on as a second worker
                os._exit(int(sys.exc_info()[0] is not None))
            RUNNING.reset(token)
            logged.clear()  # for a task that the handler has started and that goes on
            self.seen = time.monotonic()
            handler.ran((self.seen - start) / len(handlings))
        handled = []
        for handling, emitted in zip(handlings, outputs, strict=True):
            handling.outputs, handling.phase = emitted, Phase.FINISH
            handled.append(Handled(handler.consumer, handling.claim, emitted))
            if emitted and emitted[-1].kind == RESULT:  # stored, and not sent
                handling.outputs, handling.result = emitted[:-1], emitted[-1].body
        return handled

    def _call_limited(
        self, handler: Handler, timeout: float, messages: Sequence[Any], contexts: Sequence[BaseContext], tx: Any
    ) -> list[list[Output]]:
        """Run a plain handler, whose statements the database ends when they take too long; a thread cannot be ended."""
        start = time.monotonic()
        try:
            with self.store.limited(tx, timeout):
                outputs = handler.call(messages, contexts)
        except Exception as error:
            took, meaning = time.monotonic() - start, self.store.classify(error)
            if took > timeout and meaning in (Kind.TRANSIENT, Kind.LOST):  # by the limit: which would not count; see `failures`
                raise TimedOut(took, timeout) from error
            raise
        if (took := time.monotonic() - start) > timeout:
            raise TimedOut(took, timeout)
        return outputs

    def _prepare(self, handling: Handling, tx: Any, *, late: bool) -> BaseContext:
        handler, row = handling.handler, handling.delivery.row
        assert handler is not None
        self.running = handling
        if row is not None and handling.poison:
            raise _poison(handling.delivery)
        if late and handler.parks_late and not handling.forced:
            raise Late("claims of its age have been deleted, so it may have been handled: check, then replay it with --force")
        handling.phase = Phase.HANDLER
        if self.hook is not None:
            self.hook("before_handle", handling)
        attempt = row.attempts + 1 if row else 1
        handling.context = context = handler.context(handler.consumer, handling.properties, tx, handling.claim, attempt)
        return context


def _hold(handlings: Sequence[Handling], held: Handling) -> None:
    """Hold deliveries for the reason of another one, whose turn came before theirs."""
    assert held.error is not None
    for handling in handlings:
        handling.obstacle = held.obstacle
        handling.fail(held.error, held.decision)


def _call_hook(hook: Callable[..., None], handlings: Sequence[Handling]) -> None:
    for handling in handlings:
        if handling.error is None:
            hook("on_duplicate" if handling.verdict is Verdict.DUPLICATE else "after_commit", handling)


def _park_batch(handlings: Sequence[Handling], ended: HandlerError) -> None:
    """Make dead letters of a batch that its handler has committed: all claims are committed, and no output is stored."""
    for handling in handlings:
        if handling.verdict is Verdict.CLAIMED:
            handling.fail(ended, Decision(RULES["transaction ended"], Action.PARK))


def _poison(delivery: Delivery) -> Poison:
    alone = delivery.row.deaths_alone if delivery.row else 0
    return Poison(f"{alone} processes ended while they handled this message and nothing else")
