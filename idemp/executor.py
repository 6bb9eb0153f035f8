"""The executor: takes deliveries from their bytes to COMMIT, one transaction each, or one for a batch."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from idemp.cloudevents import read_event
from idemp.context import BaseContext
from idemp.errors import (
    Conflict,
    HandlerError,
    InFlight,
    Late,
    Poison,
    TransactionRolledBack,
    UnknownType,
    Unreadable,
    describe_error,
)
from idemp.events import log
from idemp.failures import RULES, Action, Decision, Phase
from idemp.handlers import Handlers
from idemp.messages import SPOILT, UNREADABLE, Delivery
from idemp.ports import AsyncStore, Claimed, Handled, Store, Verdict
from idemp.work import Work, parts

__all__ = ["Executor"]

PATIENCE: Final = 5.0  # seconds within which a delivery is run again at once
NO_MORE: Final = 1_000_000
LOOKS: Final = 3  # deaths while a message is only claimed, before it is parked undecoded
UNCLAIMED: Final = (Claimed(Verdict.CLAIMED),)  # for a delivery of a type that is not opted in, which runs alone


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
    running: Work | None = field(default=None, init=False)
    seen: float = field(default=0.0, init=False)

    def alone(self, store: AsyncStore[Any] | None = None) -> Executor:
        """Return an executor for one execution while others run; with a store for that, its handler may be `async def`."""
        return replace(self) if store is None else replace(self, store=store, wait=store.wait, pause=store.pause)

    # Accept

    def accept(self, delivery: Delivery) -> Work:
        """Find the handler of a delivery, decode it and identify it."""
        work = Work(delivery, properties=delivery.properties)
        try:
            if UNREADABLE in delivery.properties:
                raise Unreadable("some of its properties cannot be read, so neither its type nor its id is sure")
            if delivery.row is not None and SPOILT in delivery.row.history[-1:]:
                raise Unreadable("its history cannot be read, so it is not known how often it has failed: replay it")
            if delivery.row is not None and delivery.row.deaths_alone >= self.handlers.most_attempts(delivery) + LOOKS:
                raise _poison(delivery)
            event = read_event(delivery)
            work.properties = event.properties
            work.handler = self.handlers.of(event)
            if work.handler is None:
                type = event.properties.get("type")
                raise UnknownType(f"no handler takes messages of type {type!r}" if type else "the message does not say its type")
            work.claim = work.handler.identify(event)
            if delivery.row is None or not work.poison:
                work.message = work.handler.decode(event)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a message class may raise anything
            work.fail(error)
        return work

    # Execute

    def execute(self, batches: Sequence[Sequence[Work]]) -> bool:
        """Claim, handle and store each batch in one transaction. If many fail, the culprit runs alone, and the others without it.

        Returns:
            Whether the database takes no work, so that deliveries are held: one that was tried, and all after it.
        """
        todo = list(filter(None, reversed(batches)))
        while todo:
            some = todo.pop()
            if len(some) > 1:
                todo += reversed(self._execute_batch(some))
                continue
            self._execute_alone(some[0])
            if some[0].decision is not None and some[0].held:
                for rest in todo:
                    _hold(rest, some[0])
                return True
        return False

    def _execute_batch(self, works: Sequence[Work]) -> Sequence[Sequence[Work]]:
        """Execute many deliveries; return the parts that are to run in their place if that failed."""
        culprit: Work | None = None
        ended: HandlerError | None = None
        try:
            with self.store.connect() as tx:
                try:
                    self._transaction(works, tx)
                except Exception:
                    culprit, ended = self._culprit(), self.store.ended(tx)
                    raise
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the parts find out what it means
            self.running, self.seen = None, time.monotonic()
            log("batch.split", count=len(works), error=error)
        else:
            if self.hook is not None:
                _call_hook(self.hook, works)
            return ()
        if ended is not None and ended.committed is not False:  # all claims are committed, so nothing can run again
            _park_batch(works, ended)
            return ()
        for work in works:
            self.renew(work)
        return parts([work for work in works if work.error is None], culprit)

    def _culprit(self) -> Work | None:
        """Return the delivery that failed; a handler of lists does not say which."""
        work = self.running
        in_list = work is not None and work.handler is not None and work.handler.takes_list
        return None if work is not None and in_list and work.phase is Phase.HANDLER else work

    def _execute_alone(self, work: Work) -> None:
        """Execute one delivery; run it again if the failure table says so."""
        reruns, patience = 0, time.monotonic() + PATIENCE
        while True:
            ended: HandlerError | None = None
            try:
                with self.store.connect() as tx:
                    try:
                        self._transaction((work,), tx)
                    except Exception:
                        ended = self.store.ended(tx)  # which the handler may have caught; other units have errors of their own
                        raise
            except MemoryError:
                raise
            except Exception as raised:  # noqa: BLE001 - a handler may raise anything
                self.running, self.seen = None, time.monotonic()
                reruns = reruns if self.seen < patience else NO_MORE
                error, own = ended or raised, ended is not None
                work.phase = max(work.phase, Phase.CLAIM)
                decision = work.decide(error, self.store, own=own, reruns=reruns)
                if decision.action is Action.HOLD:
                    of_handler = work.phase is Phase.HANDLER and self.store.classify(error) is None
                    work.obstacle = "no connection can claim and store" if of_handler else describe_error(error)
                if decision.action is not Action.RERUN:
                    return work.fail(error, decision)
            else:
                return None if self.hook is None else _call_hook(self.hook, (work,))
            reruns += 1
            self.pause(random.uniform(0.0, 0.02 * reruns))
            self.renew(work)
            if work.error is not None:
                return None

    def renew(self, work: Work) -> None:
        """Decode a message for another run, because a handler may have changed it."""
        again = self.accept(work.delivery)
        work.message, work.claim, work.error, work.decision = again.message, again.claim, again.error, again.decision
        work.phase, work.verdict, work.outputs = Phase.ACCEPT, None, ()
        if work.claim is not None and work.claim.resends == "due":
            work.claim.resends = "pending"  # a duplicate of our own, if only the answer to COMMIT was lost

    # One transaction

    def _transaction(self, works: Sequence[Work], tx: Any) -> None:
        fresh = self._claim(works, tx)
        in_list = bool(fresh) and fresh[0][0].handler is not None and fresh[0][0].handler.takes_list
        handled: list[Handled] = []
        for some in [fresh] if in_list else zip(fresh):
            handled += self._run_handler(some, tx)
            if len(works) > 1 and not self.store.intact(tx):
                raise TransactionRolledBack("a rollback")
        self.running = None
        if handled:
            self.store.finish(tx, handled)  # proves the transaction, stores, commits

    def _claim(self, works: Sequence[Work], tx: Any) -> list[tuple[Work, bool]]:
        """Claim the ids; return the deliveries that are new, and of each whether it is late."""
        self.running = None
        claims = []
        for work in works:
            work.phase = Phase.CLAIM
            if work.claim is not None:
                claims.append(work.claim)
        fresh = []
        for work, answer in zip(works, self.store.claim(tx, claims) or UNCLAIMED, strict=False):
            self.running = work
            work.verdict, work.outputs, work.claimer = answer.verdict, answer.outputs, answer.worker
            if answer.verdict is Verdict.CLAIMED:
                fresh.append((work, answer.late))
            elif answer.verdict is Verdict.CONFLICT:  # which claims nothing, so the others can go on
                work.fail(Conflict("another message was handled under its id"))
            elif answer.verdict is Verdict.IN_FLIGHT:
                raise InFlight("another transaction holds its id")
        return fresh

    def _run_handler(self, fresh: Sequence[tuple[Work, bool]], tx: Any) -> list[Handled]:
        """Run a handler for one message, or a handler of lists for all fresh ones."""
        works, messages, contexts = [], [], []
        for work, late in fresh:
            contexts.append(self._prepare(work, tx, late=late))
            works.append(work)
            messages.append(work.message)
        handler = works[0].handler
        assert handler is not None
        self.running, start, process = works[0], time.monotonic(), os.getpid()
        try:
            if self.wait is not None and handler.is_async:
                outputs = self.wait(tx, handler.call_async(messages, contexts))
            else:
                outputs = handler.call(messages, contexts)
        finally:
            if os.getpid() != process:  # a child that the handler forked must not go on as a second worker
                os._exit(int(sys.exc_info()[0] is not None))
            self.seen = time.monotonic()
            handler.ran((self.seen - start) / len(works))
        handled = []
        for work, emitted in zip(works, outputs, strict=True):
            work.outputs, work.phase = emitted, Phase.FINISH
            handled.append(Handled(handler.consumer, work.claim, emitted))
        return handled

    def _prepare(self, work: Work, tx: Any, *, late: bool) -> BaseContext:
        handler, row = work.handler, work.delivery.row
        assert handler is not None
        self.running = work
        if row is not None and work.poison:
            raise _poison(work.delivery)
        if late and handler.parks_late and not work.forced:
            raise Late("claims of its age have been deleted, so it may have been handled: check, then replay it with --force")
        work.phase = Phase.HANDLER
        if self.hook is not None:
            self.hook("before_handle", work)
        return handler.context(handler.consumer, work.properties, tx, work.claim, row.attempts + 1 if row else 1)


def _hold(works: Sequence[Work], held: Work) -> None:
    """Hold deliveries for the reason of another one, whose turn came before theirs."""
    assert held.error is not None
    for work in works:
        work.obstacle = held.obstacle
        work.fail(held.error, held.decision)


def _call_hook(hook: Callable[..., None], works: Sequence[Work]) -> None:
    for work in works:
        if work.error is None:
            hook("on_duplicate" if work.verdict is Verdict.DUPLICATE else "after_commit", work)


def _park_batch(works: Sequence[Work], ended: HandlerError) -> None:
    """Make dead letters of a batch that its handler has committed: all claims are committed, and no output is stored."""
    for work in works:
        if work.verdict is Verdict.CLAIMED:
            work.fail(ended, Decision(RULES["transaction ended"], Action.PARK))


def _poison(delivery: Delivery) -> Poison:
    alone = delivery.row.deaths_alone if delivery.row else 0
    return Poison(f"{alone} processes ended while they handled this message and nothing else")
