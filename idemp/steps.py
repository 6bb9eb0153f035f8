"""The steps that all ways through the protocol share, and what each of their failures means."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC
from typing import TYPE_CHECKING, Final, TypeVar
from uuid import UUID

from idemp.context import BatchContext, Context
from idemp.emitting import Emitter
from idemp.errors import (
    HandlerError,
    LateMessage,
    LostBeforeCommit,
    PayloadConflict,
    StoreError,
    StoreUnavailable,
    TransientStoreError,
    text_of,
)
from idemp.identity import EffectiveId, new_id, output_id, time_of
from idemp.inbox.port import Claim, Claimed, Verdict
from idemp.messages import FORCED_HEADER
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

log = logging.getLogger("idemp.protocol")

_STORE_RETRIES: Final = 5

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
        with self.watch.transaction(), self.store.begin(work.claims) as unit:
            claimed = self._claim(unit, work.claims)
            if claimed.verdict is Verdict.CLAIMED:
                self.check_age(work, unit)
                outputs = self.run_handler(unit, work)
                unit.store_outputs(work.claims[0], outputs, self.relay_after)
                self.check_alive(work)
                unit.commit()
        return claimed, outputs

    def claimed_in_two_phases(self, work: Work, coordinator: Coordinator) -> tuple[Claimed, Sequence[Output]]:
        """As `claimed_early`, and other databases commit if and only if this transaction does; see `idemp.twophase`.

        Raises:
            BranchUnfinished: it is committed, and one of the others will only be.
            Exception: as of `claimed_early`.
        """
        outputs: Sequence[Output] = ()
        with coordinator.branches(work.claims, work.policy.databases) as branches:
            with self.watch.transaction(), self.store.begin(work.claims) as unit:
                claimed = self._claim(unit, work.claims)
                if claimed.verdict is Verdict.CLAIMED:
                    self.check_age(work, unit)
                    outputs = self.run_handler(unit, work, branches)
                    unit.store_outputs(work.claims[0], outputs, self.relay_after)
                    self.check_alive(work)
                    branches.prepare(unit)
                    branches.decide(unit)
            branches.carry_out()
        return claimed, outputs

    def run_handler(self, unit: UnitOfWork, work: Work, branches: Branches | None = None) -> list[Output]:
        """The handler alone, in a unit of work that somebody else ends; what it emitted.

        Raises:
            Exception: what the handler raised, or what that means where the database was the reason.
        """
        context, emitter = self._context(unit, work, branches)
        self.watch.handler_begins()
        try:
            result = work.registration.handler(work.body(), context)
            emitter.emit_returned(result, replies=work.registration.replies)
            unit.flush()
            if branches is not None:
                branches.flush()
        except Exception as error:
            lost = branches.meaning(error) if branches is not None else None
            raise lost or self.meaning(error, unit) from error
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
        try:
            result = registration.batch_handler([member.work.body() for member in members], together)
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
        """What a message is parked with whose id was handled with another payload, unless its policy says otherwise."""
        if claimed.verdict is not Verdict.CONFLICT or (work.policy.on_conflict != "park" and not claimed.collision):
            return None
        return PayloadConflict(
            f"A message with id {work.claims[0].id.text!r} was handled before with another payload: {claimed.detail}.",
            fix="Nothing was executed. Find out which producer reuses ids, or narrow the type's fingerprint.",
        )

    def check_age(self, work: Work, unit: UnitOfWork | None = None) -> None:
        """Refuse what nobody claimed, but which is so old that its claim may have been purged.

        `unit` is the one that claimed it; without one, nobody has.
        """
        moment = time_of(work.claims[0].id.key) or work.message.timestamp
        if moment is None or work.message.headers.get(FORCED_HEADER):
            return
        moment = moment.replace(tzinfo=moment.tzinfo or UTC)
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
        )

    def repeated(self, life: Callable[[], T], watches: Sequence[Watch]) -> T:
        """Run everything again, with a fresh unit of work, when the database (not the handler) was the reason."""
        for retry in range(_STORE_RETRIES):
            try:
                return life()
            except (TransientStoreError, StoreUnavailable) as error:
                for watch in watches:
                    watch.repeats(error)
                self._pause(0.01 * 3**retry * (0.5 + random.random()))  # noqa: S311 - jitter, not a secret
        return life()

    def meaning(self, error: Exception, unit: UnitOfWork) -> Exception:
        """What a handler's exception means: its own failure, or the database's, after which the delivery runs again."""
        meaning = self.store.translate(error)
        if isinstance(meaning, StoreUnavailable):
            # Another database, or a statement that no server takes.
            if unit.usable() and (not meaning.refuses_writes or self.writable()):
                return HandlerError(f"The handler failed: {text_of(error)}") if error is meaning else error
            meaning.in_handler = True
        return meaning or error

    def writable(self) -> bool:
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
