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
A COMMIT whose answer was lost is resolved by running the delivery again: the claim knows. Where a handler writes to other
databases, too, they prepare before this COMMIT, which decides for all, and commit after it: see `idemp.twophase`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from idemp.broker.port import Ack, Delivery, Park, Retry, Settlement
from idemp.dispatch import Shipment
from idemp.errors import (
    DispatchIncomplete,
    LateMessage,
    LostBeforeCommit,
    PayloadConflict,
    StoreError,
    StoreUnavailable,
    TransactionEnded,
    TransientStoreError,
    WorkerDied,
)
from idemp.handling import Handling, Member
from idemp.inbox.port import Claimed, Verdict
from idemp.outcome import Outcome
from idemp.settling import IN_FLIGHT_DELAY, UNCONFIRMED_DELAY, settlement_of_failure
from idemp.steps import Steps
from idemp.suspects import Suspects, Turns
from idemp.telemetry import UNWATCHED
from idemp.work import Consumer, Work, opened, work_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from idemp.bulk.batch import Batch
    from idemp.dispatch import Dispatcher, Refused
    from idemp.handling import CameTo, Life
    from idemp.messages import Message, Output
    from idemp.telemetry import Watch

log = logging.getLogger("idemp.protocol")


class Protocol(Steps):
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
        super().__init__(consumer, pause=pause)
        self.dispatcher = dispatcher
        self.suspects = Suspects(consumer.store, turns or Turns(solitary=True))
        self._free: list[Watch] = []
        self._attempt = 1  # of the delivery in hand
        self._order: bytes | None = None  # of the one that arrived last

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
        handling = self.arrive(delivery)
        if handling.member is not None:
            handling.joined(None)
        return handling

    def arrive(self, delivery: Delivery) -> Handling:
        """`begin` up to where its transaction begins, which it may share with others: see `idemp.bulk.batch`."""
        handling = Handling(self._life(delivery))
        handling.order = self._order
        return handling

    def _life(self, delivery: Delivery) -> Life:
        with self._watched(delivery) as watch:
            try:
                member = Member(self._decoded(delivery), watch, redelivered=delivery.redelivered)
                outcome = self._came_to(member, (yield from self._meanwhile(member)))
                if isinstance(outcome, Shipment):
                    outcome = outcome.outcome((yield from self._meanwhile(outcome)))
                settlement = self.settlement(outcome)
            except StoreUnavailable as error:
                if not error.in_handler or not self.writable():
                    raise
                outcome, settlement = self.settle_failure(replace(delivery, attempt=self._attempt), error)
            except (LostBeforeCommit, MemoryError):
                raise
            except Exception as error:  # noqa: BLE001 - a handler may raise anything
                outcome, settlement = self.settle_failure(replace(delivery, attempt=self._attempt), error)
            watch.ended(outcome, settlement)
            return outcome, settlement

    def _meanwhile(self, stop: Member | Shipment) -> Generator[Member | Shipment, Any, Any]:
        """Others of this thread may come before it goes on."""
        watch, attempt = self.watch, self._attempt
        answer = yield stop
        self.watch, self._attempt = watch, attempt
        return answer

    def _came_to(self, member: Member, came_to: CameTo) -> Outcome | Shipment:
        """What became of it in its batch; without one it runs alone."""
        if came_to is None:
            return self.suspects.run(member.work, self._live, redelivered=member.redelivered)
        if isinstance(came_to, Exception):
            raise came_to
        return came_to

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
            outcome = self.suspects.run(self._decoded(delivery), self._live, redelivered=False)
            if isinstance(outcome, Shipment):
                outcome = outcome.outcome(self.dispatcher.dispatch(outcome))
            watch.ended(outcome, None)
            return outcome

    @contextmanager
    def _watched(self, delivery: Delivery) -> Iterator[Watch]:
        """Each delivery has a watch of its own, since others may come before its end."""
        watch = self._free.pop() if self._free else self.consumer.telemetry.watch(self.consumer)
        self.watch = seeing = watch if watch.looks() else UNWATCHED
        try:
            with seeing.delivery(delivery):
                yield seeing
        finally:
            self._free.append(watch)

    def _decoded(self, delivery: Delivery) -> Work:
        self._attempt, self._order = delivery.attempt, None
        open_ = opened(self.consumer, delivery)
        self._order = open_.order
        work = work_of(self.consumer, delivery, open_)
        self.watch.decoded(work)
        return work

    def _live(self, work: Work) -> Outcome | Shipment:
        self._attempt = work.attempt  # deaths included
        return self.repeated(lambda: self._way(work)(work), [self.watch])

    def _way(self, work: Work) -> Callable[[Work], Outcome | Shipment]:
        if work.deaths and work.attempt > work.policy.attempts:
            return self._exhausted
        if not work.policy.idempotent:
            return self._unstored
        if work.policy.databases:
            return self._in_two_phases
        return self._late if work.policy.claim == "late" else self._early

    # The ways through -----------------------------------------------------------------------------------------------

    def _early(self, work: Work) -> Outcome | Shipment:
        return self.after_claim(work, *self.claimed_early(work))

    def _in_two_phases(self, work: Work) -> Outcome | Shipment:
        assert self.consumer.coordinator is not None  # noqa: S101 - there is one where a policy names databases
        return self.after_claim(work, *self.claimed_in_two_phases(work, self.consumer.coordinator))

    def _late(self, work: Work) -> Outcome | Shipment:
        try:
            with self.watch.transaction(), self.store.begin(work.claims, late=True) as unit:
                outputs = self.run_handler(unit, work)
                # The present id first: where it is taken, the outputs are found under it and not under a former name.
                claimed = unit.claim_and_store(work.claims[0], outputs, self.consumer.relay_after)
                if claimed.verdict is Verdict.CLAIMED:
                    claimed = self._claim(unit, work.claims[1:])
                if claimed.verdict is Verdict.CLAIMED:
                    self.check_age(work, unit)
                    self.check_alive(work)
                    unit.commit()
        except (StoreError, TransactionEnded, LateMessage):
            raise
        except Exception:
            # Perhaps it failed on its own earlier effect ("out of stock"): then the claim says DUPLICATE.
            claimed = self._look(work)
            if claimed.verdict is Verdict.CLAIMED:
                raise
            return self.not_claimed(work, claimed)
        return self.after_claim(work, claimed, outputs)

    def _unstored(self, work: Work) -> Outcome | Shipment:
        with self.watch.transaction(), self.store.begin() as unit:
            outputs = self.run_handler(unit, work)
            self.check_alive(work)
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
            return self.not_claimed(work, claimed)
        raise WorkerDied(
            f"{work.deaths} processes ended while this message's handler ran; it was not started again.",
            attempts=work.attempt - 1,
            fix="Look for the reason (memory, a crash in native code, an exit) in the logs of host and workers.",
        )

    # Their steps ----------------------------------------------------------------------------------------------------

    def together(self, batch: Batch[CameTo]) -> list[CameTo]:
        """Run a batch of deliveries, beside the handlers of other threads; what became of each."""
        with suppress(TransientStoreError), self.suspects.company():
            batch.run()
        return batch.came_to

    def ended(self, member: Member, claimed: Claimed, outputs: Sequence[Output]) -> Outcome | Shipment | Exception:
        """What follows for a delivery of a batch."""
        try:
            return self.after_claim(member.work, claimed, outputs)
        except PayloadConflict as conflict:
            return conflict

    def after_claim(self, work: Work, claimed: Claimed, outputs: Sequence[Output]) -> Outcome | Shipment:
        """What follows once the transaction has ended.

        Raises:
            PayloadConflict: the id was handled with another payload.
        """
        if claimed.verdict is Verdict.CLAIMED:
            messages = [output for output in outputs if not output.is_effect]
            if len(messages) < len(outputs):
                self.store.announce_effects()
            return self._shipment(work, messages, lambda refused: Outcome.PENDING if refused else Outcome.HANDLED)
        return self.not_claimed(work, claimed)

    def not_claimed(self, work: Work, claimed: Claimed) -> Outcome | Shipment:
        """What follows where somebody else has, or had, the id.

        Raises:
            PayloadConflict: with another payload.
            BranchUnfinished: it is committed, and in another database it will only be.
        """
        is_committed = claimed.verdict is not Verdict.IN_FLIGHT
        if is_committed and work.policy.databases and self.consumer.coordinator is not None:
            self.consumer.coordinator.finish(claimed.of or work.claims[0])
        self.watch.not_claimed(claimed)
        if not is_committed:
            return Outcome.IN_FLIGHT
        if (conflict := self.conflict(work, claimed)) is not None:
            raise conflict
        return self._redispatch(work, claimed)

    def _redispatch(self, work: Work, claimed: Claimed) -> Shipment:
        stored = [item for item in claimed.outputs if not item.output.is_effect]  # no duplicate runs an effect again
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

        return self._shipment(work, outputs, outcome, redelivered=claimed)

    def _shipment(
        self,
        work: Work,
        outputs: Sequence[Output],
        outcome: Callable[[Refused], Outcome],
        *,
        redelivered: Claimed | None = None,
    ) -> Shipment:
        return Shipment(
            outputs=outputs,
            timeout=work.policy.dispatch_timeout,
            outcome=outcome,
            claim=(redelivered and redelivered.of) or next(iter(work.claims), None),
            redelivered=redelivered is not None,
            watch=self.watch,
        )
