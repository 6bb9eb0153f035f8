"""The steps that all ways through the protocol share, and what each of their failures means."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID

from idemp.classification import Action, Phase, Phases, Rule, is_decisive, repeats_after, rule_for
from idemp.context import BatchContext, Context
from idemp.emitting import Emitter
from idemp.errors import (
    BranchUnavailable,
    BranchUnfinished,
    ConfigurationError,
    HandlerError,
    IdempError,
    LateMessage,
    LostBeforeCommit,
    PayloadConflict,
    StoreError,
    StoreUnavailable,
    TransactionEnded,
    TransientStoreError,
)
from idemp.forking import call_once
from idemp.identity import EffectiveId, new_id, output_id
from idemp.inbox.port import Claim, Claimed, Verdict
from idemp.messages import FORCED_HEADER
from idemp.showing import described, guarded, logger
from idemp.telemetry import UNWATCHED, Watch
from idemp.work import Consumer, Work

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from datetime import datetime, timedelta

    from idemp.handling import Member
    from idemp.inbox.port import UnitOfWork
    from idemp.messages import Message, Output
    from idemp.twophase import Branches, Coordinator

log = logger("idemp.protocol")

T = TypeVar("T")


class Steps:
    """What `Protocol` is made of; one per worker thread.

    Args:
        consumer: what all deliveries share.
        pause: waits between immediate retries, seconds.

    Attributes:
        relay_after: how long stored outputs wait before a relay takes them; `None` if nobody is to send them.
    """

    def __init__(self, consumer: Consumer, *, pause: Callable[[float], object] | None = None) -> None:
        self.consumer = consumer
        self.store = consumer.store
        self.relay_after: timedelta | None = consumer.relay_after
        self.watch = UNWATCHED  # of the delivery in hand
        self._pause = pause or threading.Event().wait

    def _claim(self, unit: UnitOfWork, claims: Sequence[Claim]) -> Claimed:
        """Claim an id and its former names; the first that is not ours decides."""
        for claim in claims:
            claimed = unit.claim(claim)
            if claimed.verdict is not Verdict.CLAIMED:
                return replace(claimed, of=claim)
        return Claimed(Verdict.CLAIMED)

    def _look(self, work: Work) -> Claimed:
        """Whose the id is; nothing stays claimed."""
        with self.store.begin(work.claims) as unit:
            return self._claim(unit, work.claims)

    def claimed_early(self, work: Work) -> tuple[Claimed, Sequence[Output]]:
        """A transaction of its own: claim, handler, outputs, COMMIT; the claim's answer, and what was emitted.

        Raises:
            LateMessage: nobody has the id, and nobody knows any more whether somebody had.
            Exception: what the handler raised, or what that means where the database was the reason.
        """
        outputs: Sequence[Output] = ()
        with Phases() as phases, self.watch.transaction(), self.store.begin(work.claims) as unit:
            phases.now = Phase.CLAIM
            claimed = self._claim(unit, work.claims)
            if claimed.verdict is Verdict.CLAIMED:
                self.check_age(work, unit)
                phases.now = Phase.HANDLER
                outputs = self.run_handler(unit, work)
                phases.now = Phase.STORE
                self.store_outputs(unit, work, outputs)
                self.check_alive(work)
                phases.now = Phase.COMMIT
                unit.commit()
        return claimed, outputs

    def claimed_in_two_phases(self, work: Work, coordinator: Coordinator) -> tuple[Claimed, Sequence[Output]]:
        """As `claimed_early`, and other databases commit if and only if this transaction does; see `idemp.twophase`.

        Raises:
            BranchUnfinished: it is committed, and one of the others will only be.
            Exception: as of `claimed_early`.
        """
        outputs: Sequence[Output] = ()
        with Phases() as phases, coordinator.branches(work.claims, work.policy.databases) as branches:
            with self.watch.transaction(), self.store.begin(work.claims) as unit:
                phases.now = Phase.CLAIM
                claimed = self._claim(unit, work.claims)
                if claimed.verdict is Verdict.CLAIMED:
                    self.check_age(work, unit)
                    phases.now = Phase.HANDLER
                    outputs = self.run_handler(unit, work, branches)
                    phases.now = Phase.STORE
                    self.store_outputs(unit, work, outputs)
                    self.check_alive(work)
                    phases.now = Phase.COMMIT
                    branches.prepare(unit)
                    branches.decide(unit)
            branches.carry_out()
        return claimed, outputs

    def store_outputs(self, unit: UnitOfWork, work: Work, outputs: Sequence[Output]) -> None:
        """Store a handling's outputs under its id, and copies of them under its former ids."""
        unit.store_outputs(work.claims[0], outputs, self.relay_after)
        self.store_copies(unit, work, outputs)

    def store_copies(self, unit: UnitOfWork, work: Work, outputs: Sequence[Output]) -> None:
        """Store outputs under former ids, too: a worker of the former release knows no other id.

        A redelivery that it gets would otherwise find a claim without outputs, and be acked while they have no confirm.
        """
        if outputs and not self.store.per_entity:
            for former in work.claims[1:]:
                unit.store_outputs(former, outputs, None)

    def run_handler(self, unit: UnitOfWork, work: Work, branches: Branches | None = None) -> list[Output]:
        """The handler alone, in a unit of work that somebody else ends; what it emitted.

        Raises:
            Exception: what the handler raised, or what that means where the database was the reason.
        """
        context, emitter = self._context(unit, work, branches)
        self.watch.handler_begins()
        body = work.body()
        try:
            result = call_once(work.registration.handler, body, context)
            emitter.emit_returned(result, replies=work.registration.replies)
            unit.flush()
            if branches is not None:
                branches.flush()
        except Exception as error:
            raise self.meaning(error, unit, branches) from error
        finally:
            self.watch.handler_ended()
            outputs = emitter.close()
        return outputs

    def run_batch_handler(self, unit: UnitOfWork, members: Sequence[Member]) -> list[list[Output]]:
        """`run_handler` for a handler that takes several messages of its type at once; what it emitted for each.

        Raises:
            Exception: as `run_handler` says; nobody knows of which message.
        """
        contexts, emitters = [], []
        for member in members:
            with self.turn_of(member):
                context, emitter = self._context(unit, member.work)
                member.watch.handler_begins()
            contexts.append(context)
            emitters.append(emitter)
        registration, together = members[0].work.registration, BatchContext(contexts)
        assert registration.batch_handler is not None  # noqa: S101
        bodies = [member.work.body() for member in members]
        try:
            result = call_once(registration.batch_handler, bodies, together)
            for emitter, own in zip(emitters, together.split(result), strict=True):
                emitter.emit_returned(own, replies=registration.replies)
            unit.flush()
        except Exception as error:
            raise self.meaning(error, unit) from error
        finally:
            for member in members:
                member.watch.handler_ended()
            outputs = [emitter.close() for emitter in emitters]
        return outputs

    def turn_of(self, member: Member) -> AbstractContextManager[None]:
        """What is done now is about one of several deliveries."""
        self.watch = member.watch
        return member.turn()

    def _context(self, unit: UnitOfWork, work: Work, branches: Branches | None = None) -> tuple[Context, Emitter]:
        emitter = self.emitter(work.effective, work.message, stored=work.policy.idempotent)
        context = Context(
            message=work.message,
            message_id=work.effective.text if work.effective else None,
            attempt=work.attempt,
            unit=unit,
            emitter=emitter,
            databases=branches,
        )
        return context, emitter

    def conflict(self, work: Work, claimed: Claimed) -> PayloadConflict | None:
        """Return the error that parks a message whose id was handled with another payload or type, or `None`."""
        if claimed.verdict is not Verdict.CONFLICT or (work.policy.on_conflict != "park" and not claimed.collision):
            return None
        told = work.claims[0].id.text
        if claimed.collision:
            return PayloadConflict(
                f"The id {told!r} of this {work.registration.message_type!r} belongs to another message: {claimed.detail}.",
                fix="Nothing was executed. Find out which producer reuses ids; a renamed type needs its former name among "
                "its aliases.",
            )
        return PayloadConflict(
            f"A message with id {told!r} was handled before with another payload: {claimed.detail}.",
            fix="Nothing was executed. Find out which producer reuses ids, or narrow the type's fingerprint.",
        )

    def check_age(self, work: Work, unit: UnitOfWork | None = None) -> None:
        """Refuse what nobody claimed, but which is so old that its claim may have been purged.

        `unit` is the one that claimed it; without one, nobody has.
        """
        moment = work.made_at
        if moment is None or work.message.headers.get(FORCED_HEADER):
            return
        horizon = self.store.late_before(self.consumer.name, work.policy.retention, work.claims)
        if moment >= horizon:
            return
        if work.policy.late == "handle":
            log.warning(
                "handled, though claims of its time may have been purged: it may have been handled before",
                extra={"event": "late_message_handled", **work.log_fields},
            )
            return
        why = "whether it was handled is no longer known"
        if work.policy.late == "guard":
            found = self._guarded(work, unit, moment)
            if found is None:
                return
            why = found
        raise LateMessage(
            f"The message is from {moment.isoformat()}, and claims from before {horizon.isoformat()} are not kept: {why}.",
            fix="Replay it with --force if it was not handled, or set late='handle' in the type's policy.",
        )

    def _guarded(self, work: Work, unit: UnitOfWork | None, moment: datetime) -> str | None:
        """Why a late message may have been handled; `None` if the guard says that it certainly was not."""
        guard = self.consumer.guard
        if guard is None:
            return "there is no guard"
        if unit is not None:
            return guard.objection(unit, work.claims, moment)
        with self.store.begin(work.claims) as looking:
            return guard.objection(looking, work.claims, moment)

    def check_alive(self, work: Work) -> None:
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
            trace=None if self.watch is UNWATCHED and cause is not None else self.consumer.telemetry.trace_headers(),
            encode_effect=self.consumer.encode_effect,
            now=self.consumer.clock.now(),
        )

    def repeated(self, life: Callable[[], T], watches: Sequence[Watch]) -> T:
        """Run everything again, with a fresh unit of work, when the database (not the handler) was the reason."""
        for retry in itertools.count():
            try:
                return life()
            except (TransientStoreError, StoreUnavailable) as error:
                if retry >= repeats_after(error):
                    raise
                for watch in watches:
                    watch.repeats(error)
                self._pause(0.01 * 3**retry * (0.5 + random.random()))  # noqa: S311 - jitter, not a secret
        raise AssertionError("unreachable")

    def meaning(self, error: Exception, unit: UnitOfWork, branches: Branches | None = None) -> Exception:
        """What a handler's exception means: its own failure, or the database's, after which the delivery runs again."""
        error = HandlerError.if_closed(error)
        # What the driver's error is made of may be the handler's own: where that can't be looked at, it is its failure.
        return guarded(lambda: self._meaning(error, unit, branches), lambda _: error)

    def _meaning(self, error: Exception, unit: UnitOfWork, branches: Branches | None) -> Exception:
        if (is_decisive(error) or _says_committed(error)) and not _raised_by(unit, branches, error):
            return HandlerError.of(error)
        lost = branches.meaning(error) if branches is not None else None
        if lost is not None:
            return lost
        meaning = self.store.translate(error)
        if not isinstance(meaning, StoreUnavailable) or meaning.used_up or not unit.usable():
            return meaning or error
        if meaning.refuses_writes and self.obstacle() is not None:
            return meaning
        # Another database, or a statement that no server takes.
        return HandlerError.of(error) if error is meaning else error

    def rule_for(self, error: Exception) -> Rule:
        """The rule that decides about a delivery which failed.

        Raises:
            StoreUnavailable: the store can take no handling at all: hold what is in hand until it can.
        """
        found: list[StoreError | ConfigurationError] = []

        def asked() -> bool:
            found.extend(obstacle for obstacle in (self.obstacle(),) if obstacle is not None)
            return bool(found)

        rule = rule_for(error, asked)
        if rule.action is not Action.HOLD:
            return rule
        if isinstance(error, StoreUnavailable):
            raise error
        raise StoreUnavailable(f"The store can take no handling: {found[0].message}", fix=found[0].fix) from error

    def obstacle(self) -> StoreError | ConfigurationError | None:
        """Why the store can take no handling at all, asked on another connection; `None` if it can.

        It is away, it is a read-only replica, or a table of idemp's own is missing, altered, or not this user's to write.
        """
        probe = UUID(int=0)
        try:
            self.store.note_start(self.consumer.name, probe)
            self.store.note_end(self.consumer.name, probe)
            self.store.verify()
        except (StoreError, ConfigurationError) as error:
            return error
        except Exception as error:  # noqa: BLE001 - of a driver, which the store did not translate
            return StoreError(f"The store can't be asked: {described(error)}")
        return None

    def _relay_alive(self) -> bool:
        try:
            return self.store.relay_alive()
        except StoreError:  # then nothing is known of a relay, and the message comes again
            return False


def _says_committed(error: Exception) -> bool:
    """Whether its text is about a COMMIT, perhaps, which can't be this handling's: its handler has only just raised it."""
    return isinstance(error, IdempError) and error.says_committed and error.committed != "no"


def _raised_by(unit: UnitOfWork, branches: Branches | None, error: Exception) -> bool:
    """Whether an error of idemp's own is about this handling, and not another one that its handler has begun, say."""
    if branches is not None and branches.raised(error):
        return True
    raised = getattr(unit, "raised", None)
    if raised is None or not unit.usable():  # a store of others, perhaps: it knows no better
        theirs = isinstance(error, StoreError | TransactionEnded)
        return theirs and not isinstance(error, BranchUnavailable | BranchUnfinished)
    return bool(raised(error))
