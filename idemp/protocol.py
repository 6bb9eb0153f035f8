"""The protocol: one delivery's life, from decoding to its settlement. Everything else is an adapter around it.

```
delivery ── decode ── which type? ── not opted in ───────────────► handler ─► publish (confirmed) ─► ack
                        │ opted in
                        ▼
              BEGIN; claim (consumer, id, fingerprint)
      ┌─────────────────┼──────────────────┬──────────────────────┐
   CLAIMED          DUPLICATE          IN_FLIGHT              CONFLICT
  handler          read outputs       back via a            dead letter,
  store outputs                       delay tier            nothing executed
  COMMIT
      └────────┬────────┘
               ▼
   dispatch, wait for each confirm ─► record dispatched (in batches) ─► ack
```

A crash before COMMIT leaves nothing: the broker redelivers. After COMMIT the redelivery is a DUPLICATE, which redispatches.
A COMMIT whose answer was lost is resolved by running the delivery again: the claim knows.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC
from typing import TYPE_CHECKING, Final
from uuid import UUID

from idemp.broker.port import Ack, Delivery, Park, Retry, Settlement
from idemp.context import Context, Emitter
from idemp.dispatch import Shipment
from idemp.errors import (
    DispatchIncomplete,
    HandlerError,
    LateMessage,
    LostBeforeCommit,
    PayloadConflict,
    StoreError,
    StoreUnavailable,
    TransactionEnded,
    TransientStoreError,
    WorkerDied,
)
from idemp.handling import Handling
from idemp.identity import EffectiveId, new_id, output_id, time_of
from idemp.inbox.port import Claim, Claimed, Verdict
from idemp.messages import FORCED_HEADER
from idemp.outcome import Outcome
from idemp.settling import IN_FLIGHT_DELAY, UNCONFIRMED_DELAY, settlement_of_failure
from idemp.suspects import Suspects, Turns
from idemp.telemetry import Watch
from idemp.work import Consumer, Work, decode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from idemp.dispatch import Dispatcher, Refused
    from idemp.handling import Life
    from idemp.inbox.port import StoredOutput, UnitOfWork
    from idemp.messages import Message, Output

log = logging.getLogger("idemp.protocol")

_STORE_RETRIES: Final = 5


class Protocol:
    """Runs deliveries of one consumer. One per worker thread.

    Args:
        consumer: what all deliveries share.
        dispatcher: sends outputs, on this thread's own connection.
        pause: waits between immediate retries, seconds.
        turns: shared by the threads of the process; without them this thread is the only one.
    """

    def __init__(
        self,
        consumer: Consumer,
        dispatcher: Dispatcher,
        *,
        pause: Callable[[float], object] | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.consumer = consumer
        self.store = consumer.store
        self.dispatcher = dispatcher
        self.watch = Watch()  # of the delivery in hand
        self._free: list[Watch] = []
        self._pause = pause or threading.Event().wait
        self._suspects = Suspects(consumer.store, turns or Turns(solitary=True))
        self._attempt = 1  # of the delivery in hand

    # One delivery and how it ends -----------------------------------------------------------------------------------

    def handle(self, delivery: Delivery) -> tuple[Outcome, Settlement]:
        """Run a delivery, wait for the confirms of its outputs, and say how to settle it.

        Raises:
            StoreUnavailable: the database is away: hold the delivery until it is back, then run it again.
            LostBeforeCommit: nothing was done, and the delivery can't be settled; it comes again.
            MemoryError: no fault of the message: let it return.
        """
        handling = self.begin(delivery)
        if handling.shipment is None:
            return handling.ended
        return handling.confirmed(self.dispatcher.dispatch(handling.shipment))

    def begin(self, delivery: Delivery) -> Handling:
        """`handle` up to where outputs are sent, which is the caller's: others may begin before the confirms are there.

        Raises:
            Exception: as `handle` says.
        """
        return Handling(self._life(delivery))

    def _life(self, delivery: Delivery) -> Life:
        with self._watched(delivery) as watch:
            try:
                outcome = self._run(delivery)
                if isinstance(outcome, Shipment):
                    attempt = self._attempt
                    refused = yield outcome
                    self.watch, self._attempt = watch, attempt  # other deliveries may have come in between
                    outcome = outcome.outcome(refused)
                settlement = self.settlement(outcome)
            except StoreUnavailable as error:
                if not error.in_handler or not self._writable():
                    raise
                outcome, settlement = self.settle_failure(replace(delivery, attempt=self._attempt), error)
            except (LostBeforeCommit, MemoryError):
                raise
            except Exception as error:  # noqa: BLE001 - a handler may raise anything
                outcome, settlement = self.settle_failure(replace(delivery, attempt=self._attempt), error)
            watch.ended(outcome, settlement)
            return outcome, settlement

    def settlement(self, outcome: Outcome) -> Settlement:
        """How a delivery that did not fail is settled."""
        match outcome:
            case Outcome.IN_FLIGHT:
                return Retry(IN_FLIGHT_DELAY, counted=False)
            case Outcome.PENDING if not self._relay_alive():
                return Retry(UNCONFIRMED_DELAY, counted=False)
        return Ack()

    def settle_failure(self, delivery: Delivery, error: Exception) -> tuple[Outcome, Settlement]:
        """How a delivery that failed is settled: parked, or retried, which counts if the handler failed."""
        self.watch.failed(error)
        settlement = settlement_of_failure(self.consumer, delivery, error)
        return Outcome.PARKED if isinstance(settlement, Park) else Outcome.RETRIED, settlement

    def process(self, message: Message, *, attempt: int = 1) -> Outcome:
        """One delivery's life, up to but without its settlement.

        Raises:
            MessageError: the message can't be handled, ever.
            StoreUnavailable: the database is away.
            DispatchIncomplete: outputs of a type that is not opted in have no confirm.
            Exception: whatever the handler raised; its work was rolled back.
        """
        delivery = Delivery(message=message, queue="", attempt=attempt)
        with self._watched(delivery) as watch:
            outcome = self._run(delivery)
            if isinstance(outcome, Shipment):
                outcome = outcome.outcome(self.dispatcher.dispatch(outcome))
            watch.ended(outcome, None)
            return outcome

    @contextmanager
    def _watched(self, delivery: Delivery) -> Iterator[Watch]:
        """Each delivery has a watch of its own, since others may come before its end."""
        self.watch = watch = self._free.pop() if self._free else self.consumer.telemetry.watch(self.consumer)
        try:
            with watch.delivery(delivery):
                yield watch
        finally:
            self._free.append(watch)

    def _run(self, delivery: Delivery) -> Outcome | Shipment:
        self._attempt = delivery.attempt
        work = decode(self.consumer, delivery)
        self.watch.decoded(work)
        return self._suspects.run(work, self._live, redelivered=delivery.redelivered)

    def _live(self, work: Work) -> Outcome | Shipment:
        self._attempt = work.attempt  # deaths included
        return self._repeated(self._way(work), work)

    def _way(self, work: Work) -> Callable[[Work], Outcome | Shipment]:
        if work.deaths and work.attempt > work.policy.attempts:
            return self._exhausted
        if not work.policy.idempotent:
            return self._unstored
        return self._late if work.policy.claim == "late" else self._early

    # The ways through -----------------------------------------------------------------------------------------------

    def _early(self, work: Work) -> Outcome | Shipment:
        with self.watch.transaction(), self.store.begin(work.claims) as unit:
            claimed = self._claim(unit, work.claims)
            if claimed.verdict is Verdict.CLAIMED:
                self._check_age(work)
                outputs = self.run_handler(unit, work)
                unit.store_outputs(work.claims[0], outputs, self.consumer.relay_after)
                self._check_alive(work)
                unit.commit()
        if claimed.verdict is Verdict.CLAIMED:
            return self._dispatch(work, outputs)
        return self._not_claimed(work, claimed)

    def _late(self, work: Work) -> Outcome | Shipment:
        try:
            with self.watch.transaction(), self.store.begin(work.claims, late=True) as unit:
                outputs = self.run_handler(unit, work)
                # The present id first: where it is taken, the outputs are found under it and not under a former name.
                claimed = unit.claim_and_store(work.claims[0], outputs, self.consumer.relay_after)
                if claimed.verdict is Verdict.CLAIMED:
                    claimed = self._claim(unit, work.claims[1:])
                if claimed.verdict is Verdict.CLAIMED:
                    self._check_age(work)
                    self._check_alive(work)
                    unit.commit()
        except (StoreError, TransactionEnded, LateMessage):
            raise
        except Exception:
            # Perhaps it failed on its own earlier effect ("out of stock"): then the claim says DUPLICATE.
            claimed = self._look(work)
            if claimed.verdict is Verdict.CLAIMED:
                raise
        if claimed.verdict is Verdict.CLAIMED:
            return self._dispatch(work, outputs)
        return self._not_claimed(work, claimed)

    def _unstored(self, work: Work) -> Outcome | Shipment:
        with self.watch.transaction(), self.store.begin() as unit:
            outputs = self.run_handler(unit, work)
            self._check_alive(work)
            unit.commit()

        def outcome(refused: Refused) -> Outcome:
            if refused:
                raise DispatchIncomplete(
                    f"{len(refused)} of {len(outputs)} outputs have no confirm.",
                    committed="yes",
                    reasons=[refusal.kind for _, refusal in refused],
                    fix="The message is delivered again; its type is not opted in, so its handler runs again.",
                )
            return Outcome.HANDLED

        return self._shipment(work, outputs, outcome)

    def _exhausted(self, work: Work) -> Outcome | Shipment:
        """Its handler ended the process as often as it may run: parked, unless the message was handled after all."""
        claimed = self._look(work) if work.claims else Claimed(Verdict.CLAIMED)
        if claimed.verdict is not Verdict.CLAIMED:
            return self._not_claimed(work, claimed)
        raise WorkerDied(
            f"{work.deaths} processes ended while this message's handler ran; it was not started again.",
            attempts=work.attempt - 1,
            fix="Look for the reason (memory, a crash in native code, an exit) in the logs of host and workers.",
        )

    # Their steps ----------------------------------------------------------------------------------------------------

    def _claim(self, unit: UnitOfWork, claims: Sequence[Claim]) -> Claimed:
        """Claim an id and its former names; the first that is not ours decides."""
        for claim in claims:
            claimed = unit.claim(claim)
            if claimed.verdict is not Verdict.CLAIMED:
                return claimed
        return Claimed(Verdict.CLAIMED)

    def _look(self, work: Work) -> Claimed:
        """Whose the id is; nothing stays claimed."""
        with self.store.begin(work.claims) as unit:
            return self._claim(unit, work.claims)

    def run_handler(self, unit: UnitOfWork, work: Work) -> list[Output]:
        """The handler alone, in a unit of work that somebody else ends; what it emitted.

        Raises:
            Exception: what the handler raised, or what that means where the database was the reason.
        """
        emitter = self.emitter(work.effective, work.message, stored=work.policy.idempotent)
        context = Context(
            message=work.message,
            message_id=work.effective.text if work.effective else None,
            attempt=work.attempt,
            unit=unit,
            emitter=emitter,
        )
        self.watch.handler_begins()
        try:
            result = work.registration.handler(work.body(), context)
            emitter.emit_returned(result, replies=work.registration.replies)
            unit.flush()
        except Exception as error:
            raise self._meaning(error, unit) from error
        finally:
            self.watch.handler_ended()
            outputs = emitter.close()
        return outputs

    def _not_claimed(self, work: Work, claimed: Claimed) -> Outcome | Shipment:
        self.watch.not_claimed(claimed)
        conflict = claimed.verdict is Verdict.CONFLICT
        if claimed.verdict is Verdict.IN_FLIGHT:
            return Outcome.IN_FLIGHT
        if conflict and (work.policy.on_conflict == "park" or claimed.collision):
            raise PayloadConflict(
                f"A message with id {work.claims[0].id.text!r} was handled before with another payload: {claimed.detail}.",
                fix="Nothing was executed. Find out which producer reuses ids, or narrow the type's fingerprint.",
            )
        return self._redispatch(work, claimed.outputs)

    def _dispatch(self, work: Work, outputs: Sequence[Output]) -> Shipment:
        return self._shipment(work, outputs, lambda refused: Outcome.PENDING if refused else Outcome.HANDLED)

    def _redispatch(self, work: Work, stored: Sequence[StoredOutput]) -> Shipment:
        pending = {
            item.output.id for item in stored if item.pending and not self.dispatcher.is_confirmed(item.output.id)
        }
        # A redispatched copy ends here unless something is still unconfirmed: no ripple, no second endless chain.
        everything = work.policy.redispatch == "always" and not work.message.redispatched
        outputs = [item.output.marked_redispatched() for item in stored if everything or item.output.id in pending]

        def outcome(refused: Refused) -> Outcome:
            if any(output.id in pending for output, _ in refused):
                return Outcome.PENDING
            return Outcome.REDISPATCHED if outputs else Outcome.SKIPPED

        return self._shipment(work, outputs, outcome, redelivered=True)

    def _shipment(
        self,
        work: Work,
        outputs: Sequence[Output],
        outcome: Callable[[Refused], Outcome],
        *,
        redelivered: bool = False,
    ) -> Shipment:
        return Shipment(
            outputs=outputs,
            timeout=work.policy.dispatch_timeout,
            outcome=outcome,
            claim=work.claims[0] if work.claims else None,
            redelivered=redelivered,
            watch=self.watch,
        )

    def _check_age(self, work: Work) -> None:
        """Refuse what nobody claimed, but which is so old that its claim may have been purged."""
        moment = time_of(work.claims[0].id.key) or work.message.timestamp
        if moment is None or work.message.headers.get(FORCED_HEADER):
            return
        horizon = self.store.late_before(self.consumer.name, work.policy.retention)
        if moment.replace(tzinfo=moment.tzinfo or UTC) >= horizon:
            return
        if work.policy.late == "handle":
            log.warning(
                "handled, though it is from before the retention window's start: it may have been handled before",
                extra={"event": "late_message_handled", **work.log_fields},
            )
        else:
            raise LateMessage(
                f"The message is from {moment.isoformat()}, before the retention window's start {horizon.isoformat()}; "
                "whether it was handled is no longer known.",
                fix="Replay it with --force if it was not, or set late='handle' in the type's policy.",
            )

    def _check_alive(self, work: Work) -> None:
        """Right before COMMIT: is the delivery lost to us, so that the broker delivers it again?"""
        if work.alive():
            return
        if not work.claims:
            raise LostBeforeCommit(
                "The connection that brought the delivery was lost while the handler ran; its work was rolled back.",
                fix="Nothing is lost: the broker delivers the message again.",
            )
        # Committed all the same: the claim makes the next delivery a duplicate, and a handler that always takes longer
        # than its connection lives would otherwise never come to an end.
        log.warning(
            "the connection that brought the delivery is lost; committed, and the next delivery is a duplicate",
            extra={"event": "delivery_lost", **work.log_fields},
        )

    # Around it ------------------------------------------------------------------------------------------------------

    def emitter(self, effective: EffectiveId | None, cause: Message | None, *, stored: bool) -> Emitter:
        """Collects outputs whose ids are derived from the effective id; without one, from a fresh one."""
        key = effective.key if effective else new_id(self.consumer.clock.now())
        return Emitter(
            types=self.consumer.types,
            exchange=self.consumer.exchange,
            derive_id=lambda ordinal: output_id(self.consumer.namespace, self.consumer.name, key, ordinal),
            cause=cause,
            causation_id=(cause.message_id if cause else None) or (effective.text if effective else None),
            stored=stored,
            max_body_bytes=self.consumer.max_body_bytes,
            wire=self.consumer.wrap,
            trace=self.consumer.telemetry.trace_headers(),
        )

    def _repeated(self, life: Callable[[Work], Outcome | Shipment], work: Work) -> Outcome | Shipment:
        """Run a whole delivery again, with a fresh unit of work, when the database (not the handler) was the reason."""
        for retry in range(_STORE_RETRIES):
            try:
                return life(work)
            except (TransientStoreError, StoreUnavailable) as error:
                self.watch.repeats(error)
                self._pause(0.01 * 3**retry * (0.5 + random.random()))  # noqa: S311 - jitter, not a secret
        return life(work)

    def _meaning(self, error: Exception, unit: UnitOfWork) -> Exception:
        """What a handler's exception means: its own failure, or the database's, after which the delivery runs again."""
        meaning = self.store.translate(error)
        if isinstance(meaning, StoreUnavailable):
            # Another database, or a statement that no server takes.
            if unit.usable() and (not meaning.refuses_writes or self._writable()):
                return HandlerError(f"The handler failed: {error}") if error is meaning else error
            meaning.in_handler = True
        return meaning or error

    def _writable(self) -> bool:
        """Whether the database takes writes of ours: not while it is away, nor while it is a read-only replica."""
        probe = UUID(int=0)
        try:
            self.store.note_start(self.consumer.name, probe)
            self.store.note_end(self.consumer.name, probe)
        except StoreError:
            return False
        return True

    def _relay_alive(self) -> bool:
        try:
            return self.store.relay_alive()
        except StoreError:  # then nothing is known of a relay, and the message comes again
            return False
