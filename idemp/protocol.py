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

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from idemp.broker.port import Ack, Delivery, Park, Retry, Settlement
from idemp.classification import Action, Phase, Phases, Rule, is_decisive, raised_in
from idemp.dispatch import Shipment, watch_of
from idemp.errors import (
    CommitUnknown,
    DispatchIncomplete,
    HandlerError,
    LateMessage,
    MessageError,
    PayloadConflict,
    StoreError,
    StoreUnavailable,
    TransactionEnded,
    TransientStoreError,
    WorkerDied,
)
from idemp.handling import Handling, Member
from idemp.inbox.port import LONGEST_WAIT, Claimed, Verdict
from idemp.outcome import Outcome
from idemp.plurals import counted
from idemp.settling import IN_FLIGHT_DELAY, UNCONFIRMED_DELAY, attempts_of, settlement_of_failure
from idemp.showing import by_signal, class_of, described, logger
from idemp.steps import Steps
from idemp.suspects import Suspects, Turns
from idemp.telemetry import UNWATCHED
from idemp.work import Consumer, Work, opened, work_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from idemp.bulk.batch import Batch
    from idemp.dispatch import Dispatcher, Refused
    from idemp.handling import CameTo, Ended, Life
    from idemp.inbox.port import StoredOutput
    from idemp.messages import Message, Output
    from idemp.telemetry import Watch

log = logger("idemp.protocol")


@dataclass(slots=True)
class _Decision:
    """What follows for a delivery that failed.

    Attributes:
        error: of what; `None` while it has not failed.
        came_to: how it is settled, or why it can't be settled now.
    """

    error: Exception | None = None
    came_to: Ended | Exception | None = None

    def ended(self) -> Ended:
        """How it is settled.

        Raises:
            Exception: it can't be settled now.
        """
        assert self.came_to is not None  # noqa: S101 - it was decided
        if isinstance(self.came_to, Exception):
            raise self.came_to
        return self.came_to


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
            StoreUnavailable: the store can take no handling: hold the delivery until it can, then run it again.
            LostBeforeCommit: nothing was done, and the delivery can't be settled; it comes again.
            MemoryError: the process is to end; the delivery comes again.
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
        decision = _Decision()
        with self._watched(delivery) as watch:
            try:
                with Phases() as phases:
                    phases.now = Phase.DECODE
                    member = Member(self._decoded(delivery), watch, redelivered=delivery.redelivered)
                    phases.now = Phase.BEGIN
                    came_to = yield from self._meanwhile(member)
                    outcome = self._came_to(member, came_to, lambda error: self._decide(delivery, error, decision))
                    phases.now = Phase.DISPATCH
                    if isinstance(outcome, Shipment):
                        outcome = outcome.outcome((yield from self._meanwhile(outcome)))
                    settlement = self.settlement(outcome)
            except Exception as error:  # noqa: BLE001 - a handler may raise anything
                self._decide(delivery, error, decision)
                outcome, settlement = decision.ended()
            watch.ended(outcome, settlement)
            return outcome, settlement

    def _decide(self, delivery: Delivery, error: Exception, decision: _Decision) -> None:
        """Decide once what follows for a delivery that failed. What it failed of may not like to be looked at."""
        if decision.error is error:
            return
        failed = replace(delivery, attempt=self._attempt)
        decision.error = error
        try:
            decision.came_to = self._failed(failed, error)
        except StoreUnavailable as held:
            decision.came_to = held
        except BaseException as failure:
            if failure is error:
                decision.came_to = error
                return
            if by_signal(failure):
                raise
            unseen = f"The handler raised {class_of(error)}, and a look at it raised {described(failure)}."
            decision.came_to = self._failed(failed, HandlerError(unseen))

    def _failed(self, delivery: Delivery, error: Exception) -> Ended:
        """Settle a delivery that failed, or raise what says why it can't be settled now."""
        rule = self.rule_for(error)
        if rule.action is Action.LEAVE:
            raise error
        return self.settle_failure(delivery, error, rule)

    def _meanwhile(self, stop: Member | Shipment) -> Generator[Member | Shipment, Any, Any]:
        """Others of this thread may come before it goes on."""
        watch, attempt = self.watch, self._attempt
        answer = yield stop
        self.watch, self._attempt = watch, attempt
        return answer

    def _came_to(self, member: Member, came_to: CameTo, settle: Callable[[Exception], object]) -> Outcome | Shipment:
        """What became of it in its batch; without one it runs alone."""
        if came_to is None:
            return self.suspects.run(member.work, self._live, redelivered=member.redelivered, settle=settle)
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

    def settle_failure(self, delivery: Delivery, error: Exception, rule: Rule | None = None) -> Ended:
        """How a delivery that failed is settled: parked, or retried, which counts if the handler failed."""
        self.watch.failed(error)
        settlement = settlement_of_failure(self.consumer, delivery, error, rule)
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
        watch = self._free.pop() if self._free else self._new_watch()
        self.watch = seeing = watch if watch.looks() else UNWATCHED
        try:
            with seeing.delivery(delivery):
                yield seeing
        finally:
            self._free.append(watch)

    def _new_watch(self) -> Watch:
        return watch_of(self.consumer.telemetry, self.consumer, self.dispatcher.publisher)

    def _decoded(self, delivery: Delivery) -> Work:
        self._attempt, self._order = delivery.attempt, None
        try:
            open_ = opened(self.consumer, delivery)
            self._order = open_.order
            work = work_of(self.consumer, delivery, open_)
        except BaseException as error:
            deaths = self.suspects.died_undecoded(self.consumer.name, delivery.message, error)
            if deaths and deaths >= attempts_of(self.consumer, delivery.message):
                raise WorkerDied(
                    f"Decoding this message ended {counted(deaths, 'process', 'processes')}: {described(error)}.",
                    attempts=deaths,
                    fix="Look at its size, and at what its model and its key do when they are read.",
                ) from error
            if isinstance(error, Exception) and is_decisive(error) and not isinstance(error, MessageError):
                raise HandlerError.of(error) from error  # of a key, or of a message class
            raise
        self.watch.decoded(work)
        return work

    def _live(self, work: Work) -> Outcome | Shipment:
        self._attempt = work.attempt  # deaths included
        try:
            return self.repeated(lambda: self._way(work)(work), [self.watch])
        except CommitUnknown as error:
            if not work.claims or self.obstacle() is not None:
                raise
            claimed = self._look(work)
            if claimed.verdict is not Verdict.CLAIMED:
                return self.not_claimed(work, claimed)
            lost = StoreUnavailable(
                f"COMMIT failed, time and again, and did not take place. {error.message}",
                fix="Look at what the database says; if it says nothing, for timeouts of the database or of a pooler that "
                "are shorter than the handler.",
            )
            raised_in(Phase.COMMIT, lost)
            raise lost from error

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
            with Phases() as phases, self.watch.transaction(), self.store.begin(work.claims, late=True) as unit:
                phases.now = Phase.HANDLER
                outputs = self.run_handler(unit, work)
                phases.now = Phase.STORE
                # The present id first: where it is taken, the outputs are found under it and not under a former name.
                claimed = unit.claim_and_store(work.claims[0], outputs, self.consumer.relay_after)
                if claimed.verdict is Verdict.CLAIMED:
                    claimed = self._claim(unit, work.claims[1:])
                if claimed.verdict is Verdict.CLAIMED:
                    self.store_copies(unit, work, outputs)
                    self.check_age(work, unit)
                    self.check_alive(work)
                    phases.now = Phase.COMMIT
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
        with Phases() as phases, self.watch.transaction(), self.store.begin() as unit:
            phases.now = Phase.HANDLER
            outputs = self.run_handler(unit, work)
            phases.now = Phase.COMMIT
            self.check_alive(work)
            unit.commit()

        def outcome(refused: Refused) -> Outcome:
            if refused:
                raise DispatchIncomplete(
                    f"{len(refused)} of {counted(len(outputs), 'output')} got no confirm.",
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
            f"The handler was started {counted(work.deaths, 'time')} for this message and never came to an end: its process "
            "ended, or its delivery was lost meanwhile. It was not started again.",
            attempts=work.attempt - 1,
            fix="Look for the reason in the logs of host, workers and broker: memory, a crash in native code, an exit, or a "
            "handler that takes longer than the broker's consumer_timeout.",
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
        copy = work.message.redispatched
        left = {item.output.id for item in stored if copy and self._in_work(claimed, item)} & pending
        sent = pending - left
        everything = work.policy.redispatch == "always" and not copy
        outputs = [item.output.marked_redispatched() for item in stored if everything or item.output.id in sent]

        def outcome(refused: Refused) -> Outcome:
            if left or any(output.id in pending for output, _ in refused):
                return Outcome.PENDING
            return Outcome.REDISPATCHED if outputs else Outcome.SKIPPED

        return self._shipment(work, outputs, outcome, redelivered=claimed)

    def _in_work(self, claimed: Claimed, item: StoredOutput) -> bool:
        """Whether its own dispatcher or a relay is at work on a pending output, or has a confirm to be recorded."""
        due_at = item.due_at
        if due_at is None and claimed.claimed_at is not None:
            due_at = claimed.claimed_at + self.consumer.relay_after
        # What is due later than any output waits is due by a clock that was wrong, or in quarantine.
        longest = max(LONGEST_WAIT, self.consumer.relay_after)
        return due_at is not None and timedelta(0) < due_at - self.consumer.clock.now() <= longest

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
