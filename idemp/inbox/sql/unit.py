"""One database transaction: the claim, the handler's effects and the outputs, all or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import exc
from sqlalchemy.orm import Session
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from idemp.errors import (
    CommitUnknown,
    ConfigurationError,
    HandlerError,
    IdempError,
    StoreError,
    StoreUnavailable,
    TransactionEnded,
    TransientStoreError,
)
from idemp.inbox.port import Claimed, Verdict
from idemp.inbox.sql import drivers, failures, leftovers
from idemp.inbox.sql.answers import verdict_of
from idemp.inbox.sql.claiming import AnotherTransaction, HeldByAnother, StillWriting, by_size
from idemp.inbox.sql.due import Due
from idemp.inbox.sql.guard import UNIT_OPTION
from idemp.inbox.sql.held import HeldTransaction, left_open
from idemp.inbox.sql.places import names_ours
from idemp.inbox.sql.translating import Translated
from idemp.showing import logger, text_of

if TYPE_CHECKING:
    from datetime import datetime, timedelta
    from types import TracebackType
    from uuid import UUID

    from sqlalchemy import Connection, Row, Transaction
    from sqlalchemy.orm import sessionmaker

    from idemp.inbox.port import Claim
    from idemp.inbox.sql.store import SqlStore
    from idemp.messages import Output

log = logger("idemp.inbox")

_CLAIM_ATTEMPTS = 5
_MOST_CLAIMED = 2_000  # by one statement: servers have limits, and a chunk has more
_MOST_READ = 500  # keys in one list
_IN_MEMORY = (SingletonThreadPool, StaticPool)


class SqlUnit(HeldTransaction):
    """The SQL unit of work. Made by `SqlStore.begin`, used by one thread, never twice.

    `session` and `connection` are for handlers: they are the claim's own transaction, and refuse to end it.
    """

    def __init__(self, store: SqlStore, *, late: bool = False, unclaimed: bool = False) -> None:
        super().__init__()
        self._store = store
        self._committed = False
        self._to_be_marked, self._marked = unclaimed, False
        self._handled = False  # by the handler, whose settings may be in the way of what follows
        self._proven = False  # right before COMMIT, which can't be asked twice
        self._was_sent = self._was_refused = False  # the COMMIT
        self._token: object | None = None
        self._stored: object | None = None
        self._last_message: str | None = None
        self._rows: Sequence[Mapping[str, Any]] = ()  # what is claimed
        dialect = store.dialect  # looks the tables up at its first use, on a connection: there may be a single one
        try:
            self._connection, self._transaction = self._open()
            self._reported = dialect.reported_settings(self._connection)
            self._hold()
            try:
                store.dialect.begin(self._connection)
                self._begun = store.dialect.token(self._connection) if late else None
            except BaseException:
                self._leave()
                raise
        except exc.SQLAlchemyError as error:
            raise failures.translate(error) or failures.denied(error) or error from error
        self.ending = False

    # As a handler's ------------------------------------------------------------------------------------------------

    @property
    def _session_factory(self) -> sessionmaker[Any]:
        return self._store.session_factory

    def _refusal(self, what: str) -> TransactionEnded:
        return TransactionEnded(
            f"The handler issued {what} on the transaction that holds its claim; its work was rolled back.",
            fix=f"Leave {what} to idemp: return to commit, raise to roll back; use begin_nested() for a part of the work.",
        )

    def _foreign_session(self) -> ConfigurationError:
        return ConfigurationError(
            "The session factory made a session on another engine than the inbox's.",
            fix="Give Inbox or App the sessionmaker of the same engine, without binds=.",
        )

    def _had_ended(self) -> TransactionEnded:
        return ended()

    def sends_commit(self) -> None:
        """SQLAlchemy is about to send COMMIT."""
        self._was_sent = True
        if self._last_message is None:
            return
        last_message, self._last_message = self._last_message, None
        try:
            self._store.dialect.commit_with(self._connection, last_message)
        except AnotherTransaction as error:
            self._proven, self._was_refused = False, True
            self._broken = self._asked_again or ended()
            raise self._broken from error
        except exc.SQLAlchemyError as error:
            self._was_refused = True
            # Triggers of the handler's own tables that wait for COMMIT may lack a right as well: that is its affair.
            known: StoreError | None = failures.denied(error) if names_ours(error, self._store.tables) else None
            if failures.is_read_only(getattr(error, "orig", None)):
                known = failures.translate(error)
            if known is not None:  # the server has answered: no COMMIT took place
                raise known from error
            raise

    def uses_connection(self) -> None:
        """Mark the transaction, unless it is claims that prove it."""
        if self._to_be_marked:
            self._to_be_marked = False
            self._marked = self._store.dialect.mark(self._connection)

    def commit_failed(self) -> None:
        """The database, or the way to it, did not take the COMMIT, as far as one can see."""
        self._was_refused = True

    # For the protocol -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """As of any held transaction: what fails after it are statements of idemp's own."""
        super().flush()
        self._handled = True

    def claim(self, claim: Claim) -> Claimed:
        """Insert the id; the conflict is the answer."""
        return self._answer(claim, (), None)

    def claim_and_store(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta) -> Claimed:
        """Claim, and if the id is ours store the outputs."""
        self._check_handler()
        return self._answer(claim, outputs, relay_after)

    def claim_all(self, claims: Sequence[Claim], wait: timedelta) -> Sequence[Claimed]:
        """Insert several ids; those that are taken are read together."""
        store, now = self._store, self._store.clock.now()
        answers: dict[UUID, Claimed] = {}
        left = sorted(claims, key=lambda claim: claim.id.key.int)
        if any(store.was_ended(store.key_row(claim)) for claim in claims):
            raise TransientStoreError("A handler of one of them committed on its own: they run one by one.")
        with self._translated():
            for _ in range(_CLAIM_ATTEMPTS):
                try:
                    ours = self._insert_all([store.inbox_row(claim, now) for claim in left], wait)
                except HeldByAnother as held:
                    in_flight = held.keys or [claim.id.key for claim in claims]
                    answers.update(dict.fromkeys(in_flight, Claimed(Verdict.IN_FLIGHT)))
                    return [answers.get(claim.id.key, Claimed(Verdict.CLAIMED)) for claim in claims]
                if store.dialect.rolls_back_before_reading and len(ours) < len(left):
                    self._start_over()
                    ours = frozenset()
                answers.update(dict.fromkeys(ours, Claimed(Verdict.CLAIMED)))
                answers.update(self._found([claim for claim in left if claim.id.key not in ours]))
                left = [claim for claim in left if claim.id.key not in answers]
                if not left:
                    return [answers[claim.id.key] for claim in claims]
        raise TransientStoreError("Claims' conflicts had gone when they were read; the batch starts over.")

    def look_all(self, claims: Sequence[Claim]) -> Sequence[Claimed]:
        """By reading: nobody who claims them meanwhile waits for this."""
        with self._translated():
            found = self._found(claims)
        return [found.get(claim.id.key, Claimed(Verdict.CLAIMED)) for claim in claims]

    def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
        """Keep the outputs, pending until the broker confirms them."""
        self.store_all([(claim, outputs)], relay_after)

    def store_all(self, handled: Sequence[tuple[Claim, Sequence[Output]]], relay_after: timedelta | None) -> None:
        """Keep the outputs of several handlings."""
        store = self._store
        stored = [(store.key_row(claim), outputs) for claim, outputs in handled if outputs]
        if not stored:
            return
        if self._broken is not None:
            raise self._broken
        due = None if relay_after is None else Due.after(store.clock.now(), relay_after, store.broker_id)
        outputs_of = {row["message_key"]: outputs for row, outputs in stored}
        placed = [
            (place, [(row, outputs_of[row["message_key"]]) for row in rows])
            for place, rows in store.places.by_place([row for row, _ in stored])
        ]
        with self._translated():
            if self._last_message is None:
                literally = [place.stored_literally(own, due) for place, own in placed]
                if None not in literally:
                    said = "".join(part or "" for part in literally)
                    self._last_message = self._ending_with(said)
                if self._last_message is not None:
                    return
            for place, own in placed:
                for part in by_size(own):
                    self._stored = place.store_outputs(self._connection, part, due)

    def purged_before(self, consumer: str) -> datetime | None:
        """Up to which moment claims of this consumer have been deleted; asked after the claim."""
        store = self._store
        with self._translated():
            return store.purged.read_after_claim(self._connection, store.names.id("consumer", consumer))

    def forget(self) -> bool:
        """Empty the session, which is flushed; return whether the database session is as the handler found it."""
        self._check_handler()
        if self._store.dialect.is_over(self._connection):
            self._broken = self._asked_again or ended()
            raise self._broken
        if self._session is not None:
            self._session.expunge_all()
        return not self._session_changed

    def commit(self) -> None:
        """Prove that the transaction is still the claim's, then commit."""
        self._check_connection()
        if self._broken is not None:
            raise self._broken
        with self._translated():
            self._prove()
        self._proven = True
        self.ending = True
        try:
            if self._session is not None:
                self._session.commit()  # so that the user's own listeners are called
            if self._transaction.is_active:
                self._transaction.commit()
            self._committed = True
        except Exception as error:
            took_place = (
                self._was_sent and not self._was_refused and self._store.dialect.was_committed(self._connection)
            )
            if took_place is None:
                raise _unknown(f"a listener failed beside it: {text_of(error)}") from error
            if took_place:
                self._committed = True
                log.exception(
                    "a listener of SQLAlchemy's after_commit failed; the handling is committed all the same",
                    extra={
                        "event": "after_commit_failed",
                        "message_key": ", ".join(str(row["message_key"]) for row in self._rows),
                    },
                )
                return
            if not isinstance(error, exc.SQLAlchemyError):
                raise  # of a listener that is called before COMMIT, and prevents it
            meaning = failures.translate(error)
            if isinstance(meaning, StoreUnavailable):
                raise _unknown(f"it has no answer that tells more: {meaning.message}") from error
            raise meaning or error from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ending = True
        if not self._committed:
            self._give_up_connection()
        suspicious = not self._committed and self._rolled_back(failed=error is not None)
        with suppress(exc.SQLAlchemyError):  # whatever it was, it is rolled back by the server
            # After a COMMIT that failed, be it by a listener, SQLAlchemy gives the connection back without a ROLLBACK.
            left_open = self._proven and not self._committed
            if (self._broken is not None or left_open) and not self._connection.closed:
                # What SQLAlchemy thinks of the transaction no longer counts: end it with its connection.
                self._end_unasked()
            if self._session is not None:
                Session.close(self._session)
        with suppress(exc.SQLAlchemyError):
            self._leave()
        if suspicious and self._rows:
            self._take_back(error)
        if isinstance(error, Exception) and self._broken is not error and isinstance(self._broken, IdempError):
            raise self._broken from error  # the handler swallowed it, and failed of its consequences
        if self._handled and isinstance(error, StoreUnavailable):
            handlers = leftovers.blamed(self._store.engine, self._store.tables, error)
            if handlers is not None:
                raise handlers from error

    def _take_back(self, error: BaseException | None) -> None:
        """A handler may have committed the claims, and they must not pass for handled."""
        told = self._broken is not None
        try:
            if self._store.withdraw(self._rows, told=told):
                self._broken = ended()
        except (StoreUnavailable, TransientStoreError) as away:
            if not told and isinstance(error, Exception):
                raise away from error  # nothing is known against the handler but that the database has gone
        except StoreError:
            self._broken = self._broken or ended()

    def _prove(self) -> None:
        """Or have it proven in the message that commits."""
        self._check_handler()
        if self._last_message is None and self._claimed() is not None:
            self._last_message = self._ending_with()
        dialect = self._store.dialect
        if self._last_message is None and self._marked and not dialect.is_over(self._connection):
            self._last_message = dialect.last_marked(self._connection)
        try:
            is_same = self._last_message is not None or (not self._marked and self._is_same_transaction())
        except StillWriting as error:
            self._session_changed = True
            self._broken = left_open("a statement (`INSERT … RETURNING`) whose rows were not read to their end")
            raise self._broken from error
        if not is_same:
            self._broken = self._asked_again or ended()
            raise self._broken

    def _check_handler(self) -> None:
        if self._store.dialect.is_aborted(self._connection):
            raise went_on()

    def _ending_with(self, stored: str = "") -> str | None:
        """The message that stores these outputs, proves and commits, where there is such a one."""
        return self._store.dialect.last_message(self._connection, self._claimed(), stored)

    def _claimed(self) -> object | None:
        """The transaction's token, since it holds a claim or is to hold one."""
        return self._begun if self._begun is not None else self._token

    def _is_same_transaction(self) -> bool:
        claimed = self._claimed()
        stored = self._stored if self._stored is not None or self._begun is None else self._token
        return self._store.dialect.is_same_transaction(self._connection, claimed, stored)

    def _rolled_back(self, *, failed: bool) -> bool:
        """After a failure: whether the handler may have committed behind our back, so that its claim is to be looked for."""
        if not self.usable():
            return False
        dialect = self._store.dialect
        provable = self._rows or self._begun is not None or dialect.proves_from_start
        try:
            if not failed or not provable or self._proven:
                dialect.roll_back(self._connection)
                return False
            spoilt = isinstance(self._broken, TransactionEnded) or dialect.is_aborted(self._connection)
            if spoilt or self._asked_again is not None:  # a deadlock may have ended it: nothing proves it any more
                dialect.roll_back(self._connection)
                return True
            if dialect.is_same_rolled_back(self._connection, self._claimed()):
                return False
        except StillWriting:
            self._session_changed = True  # the rows that are left would be in the way of the next transaction
            self._end_unasked()
            return False
        except (exc.SQLAlchemyError, StoreError):
            return failed
        self._broken = self._broken or ended()
        return True

    def _open(self) -> tuple[Connection, Transaction]:
        connection = self._store.engine.connect().execution_options(**{UNIT_OPTION: self})
        try:
            return connection, connection.begin()
        except BaseException:
            connection.close()
            raise

    def _leave(self) -> None:
        if self._connection.closed:
            return
        drivers.release(self._connection)
        changed = self._session_changed or (
            self.usable() and self._store.dialect.reported_settings(self._connection) != self._reported
        )
        # Later deliveries must not find what a handler set. A database in memory would be gone with its connection.
        if changed and not isinstance(self._connection.engine.pool, _IN_MEMORY):
            log.debug("a handler changed its session; the connection is closed", extra={"event": "session_changed"})
            self._connection.invalidate()
        self._connection.close()

    def _end_unasked(self) -> None:
        if self._connection.dialect.name == "sqlite":
            driver = self._connection.connection.dbapi_connection
            if driver is not None:
                driver.rollback()  # a database in memory would be gone with its connection
        else:
            self._connection.invalidate()

    # Claiming -------------------------------------------------------------------------------------------------------

    def _answer(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> Claimed:
        if self._broken is not None:
            raise self._broken
        store = self._store
        row: dict[str, Any] = store.inbox_row(claim, store.clock.now())
        place = store.places.of(row["consumer_id"], claim.id.key)
        if store.was_ended(row, forget=True):
            raise ended()
        with self._translated():
            for _ in range(_CLAIM_ATTEMPTS):
                try:
                    if relay_after is None:
                        token = place.claim(self._connection, row, claim.wait)
                    else:
                        due = Due.after(store.clock.now(), relay_after, store.broker_id)
                        token = place.claim_and_store(self._connection, row, outputs, due, claim.wait)
                        self._stored = token if outputs else None
                except HeldByAnother:
                    return Claimed(Verdict.IN_FLIGHT)
                if token is not None:
                    self._token = token
                    self._rows = [*self._rows, row]
                    return Claimed(Verdict.CLAIMED)
                if store.dialect.rolls_back_before_reading:
                    self._start_over()
                found = self._connection.execute(place.read, store.key_row(claim)).all()
                if found:
                    return verdict_of(claim, found)
                # Nobody has it: a purge was faster, or the INSERT was ignored for another reason. Not a duplicate.
                if store.dialect.rolls_back_before_reading:
                    raise TransientStoreError("A claim's conflict had gone when it was read; the delivery starts over.")
        raise StoreError(
            f"The claim of {claim.id.text!r} was neither accepted nor found, {_CLAIM_ATTEMPTS} times.",
            fix="Look for triggers or rules on the inbox table, and run `idemp db check`.",
        )

    def _insert_all(self, rows: Sequence[Mapping[str, Any]], wait: timedelta) -> frozenset[UUID]:
        """The keys that are ours now; none where some are not, and it is not known which."""
        all_ours: frozenset[UUID] = frozenset()
        for place, own in self._store.places.by_place(rows):
            for part in _parts(own, _MOST_CLAIMED):
                token, ours = place.claim_all(self._connection, part, wait)
                if token is not None:
                    self._token = token
                self._rows = [*self._rows, *(row for row in part if ours is None or row["message_key"] in ours)]
                all_ours |= ours or frozenset()
        return all_ours

    def _found(self, claims: Sequence[Claim]) -> dict[UUID, Claimed]:
        """Those of the claims that somebody has."""
        found: dict[UUID, list[Row[Any]]] = {}
        for place, own in self._store.places.by_place([self._store.key_row(claim) for claim in claims]):
            for part in _parts(own, _MOST_READ):
                keys = {"consumer_id": part[0]["consumer_id"], "message_keys": [row["message_key"] for row in part]}
                for row in self._connection.execute(place.read_all, keys):
                    found.setdefault(row.message_key, []).append(row)
        return {claim.id.key: verdict_of(claim, found[claim.id.key]) for claim in claims if claim.id.key in found}

    def _start_over(self) -> None:
        """A fresh transaction, whose snapshot shows the winner; what was done in this one is given up."""
        self.ending = True
        if self._session is not None:
            Session.close(self._session)
            self._session = None
        if self._transaction.is_active:
            self._transaction.rollback()
        self._transaction = self._connection.begin()
        self._store.dialect.begin(self._connection)
        self._token, self._rows = None, ()
        self.ending = False

    def _translated(self) -> Translated:
        return Translated(self._store.places)


def _parts(rows: Sequence[Mapping[str, Any]], most: int) -> Iterator[Sequence[Mapping[str, Any]]]:
    return (rows[start : start + most] for start in range(0, len(rows), most))


def _unknown(why: str) -> CommitUnknown:
    return CommitUnknown(
        f"The outcome of COMMIT is unknown: {why}",
        fix="The delivery is run again. If its type is opted in, its claim tells whether it was committed.",
    )


def went_on() -> HandlerError:
    """What a handling fails of in whose transaction a statement had failed before its end."""
    return HandlerError(
        "A statement of the handler failed and the handler went on; its work was rolled back.",
        fix="Let the error out, or use begin_nested() around a statement that may fail.",
    )


def ended() -> TransactionEnded:
    """What a handling is parked with whose transaction was not the same at its end."""
    return TransactionEnded(
        "The handling's transaction had ended before idemp ended it: by a commit or rollback behind "
        "SQLAlchemy's back, or by a statement that commits implicitly. What came after was rolled back.",
        committed="unknown",
        fix="See whether the handler's effects are there, mend the handler, then replay or discard the message.",
    )
