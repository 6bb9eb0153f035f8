"""The protocol.

    group ─ accept ─ execute: BEGIN, claim, handler, store outputs, COMMIT ─ dispatch: publish, confirms ─ settle: rows, ack

The confirms of one group may be on their way while the next one executes.
A crash before COMMIT leaves nothing, and the broker delivers again.
A crash after COMMIT leaves pending outputs: a redelivery is a duplicate that sends them, and so does the relay.
A crash after the confirms leaves a delivery that was not acked: its redelivery is a duplicate with nothing to send.
A failure becomes a row before the ack: a crash between them brings the delivery again, which finds the row by its digest.
A redelivery becomes a row, too, which counts the deaths of its processes: after the second one it runs alone.
Nothing is acked before a commit of its id, or of its retry or dead letter.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from idemp.cloudevents import is_event, read_event
from idemp.context import BaseContext
from idemp.errors import (
    Conflict,
    HandlerError,
    InFlight,
    Late,
    Poison,
    TransactionEnded,
    TransactionRolledBack,
    Unavailable,
    Undelivered,
    UnknownType,
    Unreadable,
    describe_error,
    describe_place,
    describe_trace,
)
from idemp.events import log
from idemp.failures import RULES, Action, Decision, Phase, decide
from idemp.handlers import Handler
from idemp.identity import message_digest
from idemp.messages import SPOILT, UNREADABLE, Delivery, Output, Refusal, Row
from idemp.ports import AsyncStore, Claimed, Failed, Handled, Kind, Publisher, Receiver, Scheduler, Store, Verdict
from idemp.work import RETRY, Work, batches, parts

__all__ = ["Protocol", "publish"]

LONGEST_HISTORY: Final = 20
PATIENCE: Final = 5.0  # seconds within which a delivery is run again at once
NO_MORE: Final = 1_000_000
LOOKS: Final = 3  # deaths while a message is only claimed, before it is parked undecoded
UNCLAIMED: Final = (Claimed(Verdict.CLAIMED),)  # for a delivery of a type that is not opted in, which runs alone


@dataclass(slots=True)
class Flight:
    """A group whose outputs were sent.

    Attributes:
        stored: Ids of those that have a pending row.
    """

    works: Sequence[Work]
    outputs: list[Output]
    stored: list[str]


@dataclass
class Protocol:
    """Runs groups of deliveries of one consumer, one group at a time.

    Attributes:
        hook: Calls a hook by its name, on all that the app has.
        default_type: Type of messages that do not say theirs.
        wait: Waits, in a transaction, for what an `async def` handler does.
        pause: Waits for some seconds before a delivery is run again.
        running: The delivery that is being claimed or handled.
        flight: The group that was sent, and not settled.
        obstacle: Why deliveries were held last.
        seen: When a handler or an attempt ended last, by the monotonic clock.

    Example:
        >>> handlers: dict[str, Handler] = {}
        >>> Protocol(handlers, None, None, None, None).accept(Delivery("billing", {"type": "shop.Pay"}, b"{}")).error
        UnknownType("no handler takes messages of type 'shop.Pay'")
    """

    handlers: Mapping[str, Handler]
    store: Store[Any]
    scheduler: Scheduler
    publisher: Publisher | None
    receiver: Receiver | None
    publish_timeout: float = 10.0
    worker: str = field(default="", kw_only=True)
    hook: Callable[..., None] | None = field(default=None, kw_only=True)
    default_type: str = field(default="", kw_only=True)
    wait: Callable[[Any, Awaitable[Any]], Any] | None = field(default=None, kw_only=True)
    pause: Callable[[float], None] = field(default=time.sleep, kw_only=True)
    running: Work | None = field(default=None, init=False)
    flight: Flight | None = field(default=None, init=False)
    obstacle: str = field(default="", init=False)
    seen: float = field(default=0.0, init=False)

    def on(self, store: AsyncStore[Any]) -> Protocol:
        """Return a protocol of its own for one execution, whose handler may be `async def`."""
        return replace(self, store=store, wait=store.wait, pause=store.pause)

    def handle(self, group: Sequence[Work], *, more: bool = False) -> list[Work]:
        """Run a group of accepted deliveries up to its acks; if more follow at once, only settle the group before.

        Returns:
            What is to be held: the database takes no work, so these deliveries open the next group.
        """
        held: list[Work] = []
        for batch in batches(group):
            self.execute(batch)
            if batch[0].held or (len(batch) > 1 and any(work.held for work in batch)):
                held = [work for work in group if work.held]
                break
        held = [*self.complete(), *held]
        self.flight = self._send([work for work in group if not work.held] if held else group)
        return held if more else [*self.complete(), *held]

    def complete(self) -> list[Work]:
        """Wait for the confirms of the group in flight, and settle it; return what is to be held."""
        flight, self.flight = self.flight, None
        if flight is None:
            return []
        self.record(flight, publish(self.publisher, flight.outputs, self.publish_timeout) if flight.outputs else {})
        return list(self.settle(flight.works))

    def set_aside(self, redelivered: Sequence[Delivery]) -> list[Delivery]:
        """Move deliveries whose process may have died of them into rows, undecoded; these count the deaths.

        Returns:
            Deliveries that could not be moved because the database went away.
        """
        lost = self._settle_rows([Failed(each, delay=0.0, deaths=1, identity=self._moved(each)) for each in redelivered])
        kept = {id(each.delivery) for each in lost if isinstance(each, Failed)}
        self._ack([delivery for delivery in redelivered if id(delivery) not in kept])
        return [delivery for delivery in redelivered if id(delivery) in kept]

    def accept(self, delivery: Delivery) -> Work:
        """Find the handler of a delivery, decode it and identify it."""
        work = Work(delivery, properties=delivery.properties)
        try:
            if UNREADABLE in delivery.properties:
                raise Unreadable("some of its properties cannot be read, so neither its type nor its id is sure")
            if delivery.row is not None and SPOILT in delivery.row.history[-1:]:
                raise Unreadable("its history cannot be read, so it is not known how often it has failed: replay it")
            if delivery.row is not None and delivery.row.deaths_alone >= self._most_deaths(delivery):
                raise _poison(delivery)
            event = read_event(delivery)
            work.properties = event.properties
            work.handler = self._handler_of(event)
            if work.handler is None:
                type = event.properties.get("type")
                raise UnknownType(f"no handler takes messages of type {type!r}" if type else "the message does not say its type")
            work.claim = work.handler.identify(event)
            if delivery.row is None or not work.poison:
                work.message = work.handler.decode(event)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a message class may raise anything
            work.fail(error, decide(error, Phase.ACCEPT, work.retry, work.history, self.store))
        return work

    def execute(self, works: Sequence[Work]) -> None:
        """Claim, handle and store in one transaction. If many fail, the culprit runs alone, and the others without it."""
        todo = [works] if works else []
        while todo:
            some = todo.pop()
            if len(some) > 1:
                todo += reversed(self._execute_batch(some))
                continue
            self._execute_alone(some[0])
            if todo and some[0].held:
                return

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
        if ended is not None and ended.committed is not False:  # all claims stand, so nothing can run again
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
                        self._transaction([work], tx)
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
                decision = decide(error, work.phase, work.retry, work.history, self.store, own=own, reruns=reruns)
                if decision.action is Action.HOLD:
                    of_handler = work.phase is Phase.HANDLER and self.store.classify(error) is None
                    self.obstacle = "no connection can claim and store" if of_handler else describe_error(error)
                if decision.action is not Action.RERUN:
                    return work.fail(error, decision)
            else:
                return None if self.hook is None else _call_hook(self.hook, [work])
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
        if work.claim is not None and work.claim.resends == "grace":
            work.claim.resends = "pending"  # a duplicate of our own, if only the answer to COMMIT was lost

    def _transaction(self, works: Sequence[Work], tx: Any) -> None:
        answers = self._claim(works, tx)
        fresh = [(work, answer.late) for work, answer in zip(works, answers, strict=True) if answer.verdict is Verdict.CLAIMED]
        one = len(works) == 1
        in_list = bool(fresh) and fresh[0][0].handler is not None and fresh[0][0].handler.takes_list
        handled: list[Handled] = []
        for some in [fresh] if in_list else [[each] for each in fresh]:
            handled += self._run_handler(some, tx)
            if not one and not self.store.intact(tx):
                raise TransactionRolledBack("a rollback")
        self.running = None
        if handled:
            self.store.finish(tx, handled)  # proves the transaction, stores, commits

    def _claim(self, works: Sequence[Work], tx: Any) -> Sequence[Claimed]:
        self.running = None
        for work in works:
            work.phase = Phase.CLAIM
        answers = self.store.claim(tx, [work.claim for work in works if work.claim is not None]) or UNCLAIMED
        for work, answer in zip(works, answers, strict=False):
            self.running = work
            work.verdict, work.outputs, work.claimer = answer.verdict, answer.outputs, answer.worker
            if answer.verdict is Verdict.CONFLICT:  # which claims nothing, so the others can go on
                error = Conflict("another message was handled under its id")
                work.fail(error, decide(error, work.phase, work.retry, work.history, self.store))
            if answer.verdict is Verdict.IN_FLIGHT:
                raise InFlight("another transaction holds its id")
        return answers

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

    def dispatch(self, works: Sequence[Work]) -> Mapping[str, Refusal]:
        """Send what is due, wait for the confirms once, and forget the pending rows of what was confirmed."""
        return self.record(*self.transmit(works))

    def transmit(self, works: Sequence[Work]) -> tuple[Flight, Mapping[str, Refusal]]:
        """Send what is due, and wait for the confirms once; without the database."""
        flight = self._send(works)
        return flight, publish(self.publisher, flight.outputs, self.publish_timeout) if flight.outputs else {}

    def _send(self, works: Sequence[Work]) -> Flight:
        outputs: dict[str, Output] = {}
        stored: list[str] = []
        for work in works:
            for output in work.outputs:
                if output.sendable and output.id not in outputs:  # two copies of a message bring the same outputs
                    outputs[output.id] = output
                    if work.claim is not None:
                        stored.append(output.id)
        flight = Flight(works, list(outputs.values()), stored)
        if outputs and self.publisher is not None:
            with suppress(Exception):  # publish() finds out
                self.publisher.send(flight.outputs)
        return flight

    def record(self, flight: Flight, refused: Mapping[str, Refusal]) -> Mapping[str, Refusal]:
        """Forget the pending rows of what was confirmed, and postpone what was refused."""
        stored = flight.stored
        if not flight.outputs:
            return {}
        try:
            self.scheduler.confirm([id for id in stored if id not in refused] if refused else stored)
            if refused:
                self.scheduler.refuse({id: refused[id] for id in stored if id in refused})
        except Exception as error:  # noqa: BLE001 - they stay pending, so they are sent again
            log("output.unrecorded", error=error)
        for work in flight.works if refused else ():
            refusals = [refused[output.id] for output in work.outputs if output.id in refused]
            if refusals and work.claim is None:
                text = f"the handling is committed, and the broker did not take an output: {refusals[0].reason}"
                undelivered = Undelivered(text, own=all(each.own for each in refusals))
                work.phase = Phase.DISPATCH
                work.fail(undelivered, decide(undelivered, work.phase, work.retry, work.history, self.store))
        return refused

    def settle(self, works: Sequence[Work]) -> Sequence[Work]:
        """Store retries and dead letters, delete rows that are done, and ack once.

        Returns:
            Deliveries that could not be settled because the database went away.
        """
        entries: dict[int, Failed | Row] = {}
        for work in works:
            if work.decision is not None:
                entries[id(work)] = self._failed(work)
            elif work.delivery.row is not None:
                entries[id(work)] = work.delivery.row
        lost = {id(entry) for entry in self._settle_rows(list(entries.values()))} if entries else set()
        held = [work for work in works if lost and id(entries.get(id(work))) in lost]
        kept = {id(work) for work in held} if held else ()
        self._ack([work.delivery for work in works if work.delivery.row is None and id(work) not in kept])
        if self.hook is not None:
            for work in works:
                if id(work) not in kept:
                    self.hook("on_settled", work)
        return held

    def _settle_rows(self, entries: Sequence[Failed | Row]) -> Sequence[Failed | Row]:
        """Store retries and dead letters, delete rows that are done; return those for which the database takes no work."""
        failed = [entry for entry in entries if isinstance(entry, Failed)]
        try:
            self.scheduler.settle(failed, [entry for entry in entries if isinstance(entry, Row)])
        except Exception as error:  # noqa: BLE001 - one of them, or the database
            if not self.store.probe():
                self.obstacle = describe_error(error)
                return entries
            log("delivery.unsettled", error=error)
            return [entry for entry in entries if not self._stored_alone(entry)]
        for each in failed:
            _log(each)
        return []

    def _stored_alone(self, entry: Failed | Row) -> bool:
        """Settle one delivery; one that the database cannot store goes to the broker's queue NAME.unstorable.

        A server may answer one that is too large by closing the connection; so a second loss counts if other work is taken.
        """
        try:
            if isinstance(entry, Row):
                self.scheduler.settle([], [entry])
                return True
            try:
                self.scheduler.settle([entry], [])
            except Exception as error:  # noqa: BLE001
                self.obstacle = describe_error(error)
                outage = self.store.classify(error) is Kind.TRANSIENT or not self.store.probe()
                message = _unstorable(entry.delivery)
                if outage or publish(self.publisher, [message], self.publish_timeout):
                    return False
                log("message.unstorable", queue=message.routing_key, error=error)
                if entry.delivery.row is not None:
                    self.scheduler.settle([], [entry.delivery.row])
            else:
                _log(entry)
        except Exception as error:  # noqa: BLE001 - the worker tries again
            log("delivery.unsettled", error=error)
            return False
        return True

    def _ack(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge deliveries. If that fails, the broker delivers them again."""
        if not deliveries:
            return
        assert self.receiver is not None
        try:
            self.receiver.ack(deliveries)
        except Exception as error:
            if not isinstance(error, Unavailable) and self.store.classify(error) is None:
                raise
            log("delivery.unacked", error=error)

    def _handler_of(self, delivery: Delivery) -> Handler | None:
        type = delivery.properties.get("type")
        if type is None or type == "":
            type = self.default_type
        return self.handlers.get(type) if isinstance(type, str) else None

    def _failed(self, work: Work) -> Failed:
        """Return the retry or dead letter that a failed delivery becomes."""
        decision, error, row = work.decision, work.error, work.delivery.row
        assert decision is not None
        assert error is not None
        attempts = (row.attempts if row else 0) + decision.counted
        delay = decision.delay
        if decision.counted and attempts < work.retry.attempts:
            delay = work.retry.pause(attempts)
        if delay is None:  # hooks see what became of it
            work.decision = replace(decision, action=Action.PARK)
        entry = {"at": time.time(), "rule": decision.rule.name, "phase": work.phase.name.lower(), "times": 1}
        package = str(getattr(work.handler.function, "__module__", "")).partition(".")[0] if work.handler else ""
        entry |= {"error": describe_error(error), "place": describe_place(error, package), "worker": self.worker}
        entry["trace"] = describe_trace(error)
        if work.claim is not None:
            entry["id"] = work.claim.original
        if isinstance(error, TransactionEnded):
            entry["committed"] = error.committed is not False
            if error.committed is not False:  # by which a forced replay finds the claims
                claims = [claim for claim in (work.claim, work.claim and work.claim.former) if claim is not None]
                entry["claims"] = [[claim.consumer, str(claim.key)] for claim in claims]
        return Failed(work.delivery, delay, attempts, 0, _appended(work.history, entry), self._identity(work))

    def _identity(self, work: Work) -> bytes | None:
        """Return the identity of what waits: that of the handling, or before it is known, all that the producer wrote.

        A type that is not opted in has none, because each of its deliveries is to run.
        """
        if work.claim is not None:
            return work.claim.handling(work.delivery.queue)
        return message_digest(work.delivery, "failed") if work.handler is None or work.handler.opted_in else None

    def _moved(self, delivery: Delivery) -> bytes | None:
        """Return the identity of a row that is moved undecoded: none, unless its type is known to be opted in."""
        handler = None if is_event(delivery.properties) else self._handler_of(delivery)
        return message_digest(delivery, "moved") if handler is not None and handler.opted_in else None

    def _most_deaths(self, delivery: Delivery) -> int:
        """Return the deaths alone after which a message is not even claimed any more."""
        handler = None if is_event(delivery.properties) else self._handler_of(delivery)
        handlers = self.handlers.values() if handler is None else (handler,)
        return max((each.policy.retry.attempts for each in handlers), default=RETRY.attempts) + LOOKS


def _unstorable(delivery: Delivery) -> Output:
    """Return a message for the queue NAME.unstorable, without what would let it expire, be refused or be sent elsewhere."""
    properties = {name: value for name, value in delivery.properties.items() if name not in ("expiration", "user_id")}
    if isinstance(headers := properties.get("headers"), Mapping):
        properties["headers"] = {f"was-{name}" if name in ("CC", "BCC") else name: value for name, value in headers.items()}
    return Output("unstorable", "send", "", f"{delivery.queue}.unstorable", properties, delivery.body)


def _log(failed: Failed) -> None:
    if not failed.history:  # a suspect
        return
    properties, last = failed.delivery.properties, failed.history[-1]
    fields = {"type": _short(properties.get("type")), "id": _short(properties.get("message_id"))}
    times = sum(entry["times"] for entry in failed.history)
    fields |= {"rule": last["rule"], "attempts": failed.attempts, "failed": "once" if times == 1 else f"{times} times"}
    fields |= {name: last[name] for name in ("error", "place", "trace")}
    if failed.delay is None:
        log("message.parked", **fields)
    else:
        log("message.retry", **fields, delay=failed.delay)


def _short(value: Any) -> Any:
    return value[:200] if isinstance(value, str) else value


def _call_hook(hook: Callable[..., None], works: Sequence[Work]) -> None:
    for work in works:
        if work.error is None:
            hook("on_duplicate" if work.verdict is Verdict.DUPLICATE else "after_commit", work)


def _park_batch(works: Sequence[Work], ended: HandlerError) -> None:
    """Make dead letters of a batch that its handler has committed: all claims stand, and no output is stored."""
    for work in works:
        if work.verdict is Verdict.CLAIMED:
            work.fail(ended, Decision(RULES["transaction ended"], Action.PARK))


def publish(publisher: Publisher | None, outputs: Sequence[Output], timeout: float) -> dict[str, Refusal]:
    """Send outputs and return the refused ones by id. After COMMIT nothing may escape: any error is a refusal.

    Example:
        >>> publish(None, [Output("1", "send", "", "stock", {}, b"{}")], 1.0)
        {'1': Refusal(reason='there is no publisher', own=False)}
    """
    if publisher is None:
        return dict.fromkeys((output.id for output in outputs), Refusal("there is no publisher"))
    deadline = time.monotonic() + timeout
    try:
        answers = publisher.publish(outputs, timeout)
        return {output.id: answer for output, answer in zip(outputs, answers, strict=True) if answer is not None}
    except Exception as error:  # noqa: BLE001
        refused = dict.fromkeys((output.id for output in outputs), Refusal(describe_error(error)))
    if len(outputs) > 1:  # one of them may be to blame
        for output in outputs:
            if (left := deadline - time.monotonic()) > 0 and not publish(publisher, [output], left):
                del refused[output.id]
    return refused


def _poison(delivery: Delivery) -> Poison:
    alone = delivery.row.deaths_alone if delivery.row else 0
    return Poison(f"{alone} processes ended while they handled this message and nothing else")


def _appended(history: list[dict[str, Any]], entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Append a failure. Those by one rule in a row become one entry; only the last entry keeps its trace."""
    kept = [{key: value for key, value in each.items() if key != "trace"} for each in history]
    if kept and kept[-1]["rule"] == entry["rule"]:
        return [*kept[:-1], {**entry, "first": kept[-1].get("first", kept[-1]["at"]), "times": kept[-1]["times"] + 1}]
    return [*kept[:1], *kept[1:][-LONGEST_HISTORY + 2 :], entry]
