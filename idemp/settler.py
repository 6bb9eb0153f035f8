"""The settler: ends each delivery in exactly one of done, retry and dead letter, and then acks it.

A row that the database cannot store becomes a message in the queue NAME.unstorable, once the broker has confirmed that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from idemp.dispatcher import Dispatcher, publish
from idemp.errors import TransactionEnded, Unavailable, describe_error, describe_place, describe_trace
from idemp.events import log
from idemp.failures import Action
from idemp.handlers import Handlers
from idemp.handling import Handling
from idemp.identity import message_digest
from idemp.messages import Delivery, MessageRow, Output
from idemp.ports import Kind, NewRow, Receiver, Scheduler, Store

__all__ = ["Settler"]

LONGEST_HISTORY: Final = 20


@dataclass
class Settler:
    """Stores retries and dead letters as rows, deletes rows that are done, and acks what is committed.

    Attributes:
        handlers: Handlers of the consumer.
        store: Says what an error of the database means, and whether it takes work.
        scheduler: Keeps the rows.
        dispatcher: Sends what the database cannot store to the queue NAME.unstorable.
        receiver: Acknowledges deliveries.
        hook: Calls a hook by its name, on all that the app has.
        worker: Name of this process, which is noted in the history of a failure.

    Example:
        >>> Settler(Handlers(), None, None, None, None).settle([])
        []
    """

    handlers: Handlers
    store: Store[Any]
    scheduler: Scheduler
    dispatcher: Dispatcher
    receiver: Receiver
    hook: Callable[..., None] | None = None
    worker: str = ""
    _obstacle: str = field(default="", init=False)

    def settle(self, handlings: Sequence[Handling]) -> list[Handling]:
        """Store retries and dead letters, delete rows that are done, and ack once.

        Returns:
            Deliveries that could not be settled because the database went away.
        """
        entries: dict[int, NewRow | MessageRow] = {}
        for handling in handlings:
            if handling.decision is not None:
                entries[id(handling)] = self._failed(handling)
            elif handling.delivery.row is not None:
                entries[id(handling)] = handling.delivery.row
        lost = {id(entry) for entry in self._settle_rows(list(entries.values()))} if entries else ()
        acked, unsettled = [], []
        for handling in handlings:
            if lost and id(entries.get(id(handling))) in lost:
                handling.obstacle = self._obstacle
                unsettled.append(handling)
            elif handling.delivery.row is None:
                acked.append(handling.delivery)
        self._ack(acked)
        if self.hook is not None:
            for handling in handlings:
                if handling not in unsettled:
                    self.hook("on_settled", handling)
        return unsettled

    def set_aside(self, redelivered: Sequence[Delivery]) -> list[Delivery]:
        """Move deliveries whose process may have died of them into rows, undecoded; these count the deaths.

        Returns:
            Deliveries that could not be moved because the database went away.
        """
        lost = self._settle_rows(
            [NewRow(each, delay=0.0, deaths=1, identity=self._identity_undecoded(each)) for each in redelivered]
        )
        kept = {id(each.delivery) for each in lost if isinstance(each, NewRow)}
        self._ack([delivery for delivery in redelivered if id(delivery) not in kept])
        return [delivery for delivery in redelivered if id(delivery) in kept]

    # Rows

    def _settle_rows(self, entries: Sequence[NewRow | MessageRow]) -> Sequence[NewRow | MessageRow]:
        """Store retries and dead letters, delete rows that are done; return those for which the database takes no work."""
        failed = [entry for entry in entries if isinstance(entry, NewRow)]
        try:
            self.scheduler.settle(failed, [entry for entry in entries if isinstance(entry, MessageRow)])
        except Exception as error:  # noqa: BLE001 - one of them, or the database
            if not self.store.probe():
                self._obstacle = describe_error(error)
                return entries
            log("delivery.unsettled", error=error)
            return [entry for entry in entries if not self._stored_alone(entry)]
        for each in failed:
            _log(each)
        return []

    def _stored_alone(self, entry: NewRow | MessageRow) -> bool:
        """Settle one delivery; one that the database cannot store goes to the broker's queue NAME.unstorable.

        A server may answer one that is too large by closing the connection; so a second loss counts if other work is taken.
        """
        try:
            if isinstance(entry, MessageRow):
                self.scheduler.settle([], [entry])
                return True
            try:
                self.scheduler.settle([entry], [])
            except Exception as error:  # noqa: BLE001
                self._obstacle = describe_error(error)
                outage = self.store.classify(error) is Kind.TRANSIENT or not self.store.probe()
                message = _unstorable(entry.delivery)
                if outage or publish(self.dispatcher.publisher, [message], self.dispatcher.timeout):
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
        """Acknowledge deliveries. If that fails, the broker delivers them again; that of `sql://` is a database itself."""
        if not deliveries:
            return
        try:
            self.receiver.ack(deliveries)
        except Exception as error:
            if not isinstance(error, Unavailable) and self.store.classify(error) is None:
                raise
            log("delivery.unacked", error=error)

    # What a row says

    def _failed(self, handling: Handling) -> NewRow:
        """Return the retry or dead letter that a failed delivery becomes."""
        decision, error, row = handling.decision, handling.error, handling.delivery.row
        assert decision is not None
        assert error is not None
        attempts = (row.attempts if row else 0) + decision.counted
        delay = decision.delay
        if decision.counted and attempts < handling.retry.attempts:
            delay = handling.retry.pause(attempts)
        if delay is None:  # hooks see what became of it
            handling.decision = replace(decision, action=Action.PARK)
        history = _appended(handling.history, self._entry(handling, error, decision.rule.name))
        return NewRow(handling.delivery, delay, attempts, 0, history, self._identity(handling))

    def _entry(self, handling: Handling, error: Exception, rule: str) -> dict[str, Any]:
        """Return an entry of the history: what failed, where, and in which process."""
        package = str(getattr(handling.handler.function, "__module__", "")).partition(".")[0] if handling.handler else ""
        entry = {"at": time.time(), "rule": rule, "phase": handling.phase.name.lower(), "times": 1}
        entry |= {"error": describe_error(error), "place": describe_place(error, package), "worker": self.worker}
        entry["trace"] = describe_trace(error)
        if handling.claim is not None:
            entry["id"] = handling.claim.original
        if isinstance(error, TransactionEnded):
            entry["committed"] = error.committed is not False
            if error.committed is not False:  # by which a forced replay finds the claims
                claims = [claim for claim in (handling.claim, handling.claim and handling.claim.former) if claim is not None]
                entry["claims"] = [[claim.consumer, str(claim.key)] for claim in claims]
        return entry

    def _identity(self, handling: Handling) -> bytes | None:
        """Return the identity of what waits: that of the handling, or before it is known, all that the producer wrote.

        A type that is not opted in has none, because each of its deliveries is to run.
        """
        if handling.claim is not None:
            return handling.claim.waiting_identity(handling.delivery.queue)
        return message_digest(handling.delivery, "failed") if handling.handler is None or handling.handler.opted_in else None

    def _identity_undecoded(self, delivery: Delivery) -> bytes | None:
        """Return the identity of a row that is moved undecoded: none, unless its type is known to be opted in."""
        handler = self.handlers.of_undecoded(delivery)
        return message_digest(delivery, "moved") if handler is not None and handler.opted_in else None


def _unstorable(delivery: Delivery) -> Output:
    """Return a message for the queue NAME.unstorable, without what would let it expire, be refused or be sent elsewhere."""
    properties = {name: value for name, value in delivery.properties.items() if name not in ("expiration", "user_id")}
    if isinstance(headers := properties.get("headers"), Mapping):
        properties["headers"] = {f"was-{name}" if name in ("CC", "BCC") else name: value for name, value in headers.items()}
    return Output("unstorable", "send", "", f"{delivery.queue}.unstorable", properties, delivery.body)


def _log(failed: NewRow) -> None:
    if not failed.history:  # it was set aside
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


def _appended(history: list[dict[str, Any]], entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Append a failure. Those by one rule in a row become one entry; only the last entry keeps its trace."""
    kept = [{key: value for key, value in each.items() if key != "trace"} for each in history]
    if kept and kept[-1]["rule"] == entry["rule"]:
        return [*kept[:-1], {**entry, "first": kept[-1].get("first", kept[-1]["at"]), "times": kept[-1]["times"] + 1}]
    return [*kept[:1], *kept[1:][-LONGEST_HISTORY + 2 :], entry]
