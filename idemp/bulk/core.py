"""Chunks of rows, each in as few transactions as it can be, by the very steps that deliveries take."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

from idemp.bulk.batch import Batch
from idemp.bulk.report import Came, Parked, Report, came_of
from idemp.bulk.rows import rows_of, work_from
from idemp.bulk.sets import ArrowSet, SqlSet
from idemp.errors import (
    CommitUnknown,
    ConfigurationError,
    LateMessage,
    MessageError,
    StoreError,
    StoreUnavailable,
    TransientStoreError,
    UnknownMessageType,
)
from idemp.handlers import one_at_a_time
from idemp.handling import Member
from idemp.inbox.content import Handling
from idemp.inbox.port import Verdict
from idemp.startup import agree_identities, check_not_per_entity
from idemp.steps import Steps
from idemp.telemetry import UNWATCHED

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa
    from sqlalchemy import Engine

    from idemp.app import App
    from idemp.bulk.rows import Row
    from idemp.bulk.sets import SetHandler
    from idemp.inbox.port import Claim, Claimed, InboxStore, UnitOfWork
    from idemp.messages import Message, Output
    from idemp.work import Consumer, Registration, Work

Dispatch = Literal["relay", "never"]

_WAITS_ALONE: Final = 15
"""How often a row that somebody else holds is waited for, as long each time as its policy's `claim_wait` says."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """What a row came to: `conflict` is what it is parked with, where its policy parks it."""

    came: Came
    outputs: int = 0
    conflict: Exception | None = None


class Bulk:
    """Handles chunks of rows on an app's inbox, with its handlers. For one thread.

    Args:
        app: the consumer: its name, policies and handlers.
        engine: the database; default the app's own. Its URL may hold a password: keep it out of whatever is shown.
        store: the inbox, instead of one on an engine; its end is its caller's.
        sets: handlers of all new rows of a type at once, by message class or type name; the type has a handler in the app
            all the same, whose policy says what identifies its messages.
        dispatch: "relay" leaves outputs to a relay; "never" stores them as if they had been sent.
        adopt: claim only: what is there counts as handled, and no handler runs.
        dry_run: say what would become of each row; nothing is claimed, no handler runs.

    Raises:
        ConfigurationError: a set handler for a type that the app doesn't know, or that is not opted in.

    Example:
        >>> from idemp import App, Idempotent
        >>> from idemp.bulk import Row
        >>> from idemp.inbox.memory import InMemoryStore
        >>> app = App("stock", store=InMemoryStore(), broker="local://stock.db")
        >>> @app.handler(dict, type="stock.Reserve", policy=Idempotent())
        ... def reserve(message: dict[str, str]) -> None: ...
        >>> rows = [Row(id="m-1", type="stock.Reserve", body=b"{}"), Row(id="m-2", type="stock.Reserve", body=b"{")]
        >>> report = Bulk(app).run(rows)
        >>> report.counts[Came.NEW], [(each.row.id, each.error) for each in report.parked]
        (1, [('m-2', 'UndecodableMessage')])
    """

    def __init__(
        self,
        app: App,
        *,
        engine: Engine | None = None,
        store: InboxStore | None = None,
        sets: Mapping[type | str, SetHandler] | None = None,
        dispatch: Dispatch = "relay",
        adopt: bool = False,
        dry_run: bool = False,
    ) -> None:
        self._app = app
        self._own = app.store_on(engine) if engine is not None else None
        self._store: InboxStore = self._own or store or app.store
        self._adopt = adopt
        self._dry_run = dry_run
        self._leaves_to_relay = dispatch == "relay"
        self._handlers: dict[str, SetHandler] = {}
        self._instead = self._others(sets or {})
        self._consumer = replace(app.consumer, store=self._store, find=self._find)
        self._steps = _ChunkSteps(self._consumer, adopt=adopt)
        self._steps.relay_after = timedelta(0) if self._leaves_to_relay else None
        self._started = False

    def start(self) -> None:
        """Check what can be checked before the first chunk; the first `run` does it otherwise.

        Raises:
            ConfigurationError: schema or identities are not as they must be.
            StoreUnavailable: the database can't be reached.
        """
        if self._started:
            return
        app, registrations = self._app, self._app.registry.registrations()
        for store in (app.store, self._store):  # the app's, even where another is given: its claims are there
            check_not_per_entity(store, "Chunks", "Send the messages to the app's queue.")
        self._store.verify()
        self._store.prepare(app.name, [item.message_type for item in registrations])
        if not self._dry_run:
            agree_identities(self._store, app.name, app.queue, app.registry)
        self._store.refresh_horizons(app.name, app.retentions().values())
        self._started = True

    def run(self, chunk: pa.Table | Sequence[Row]) -> Report:
        """Handle a chunk; what fails is found by running the others without it, and parked.

        Run a chunk again, whole, whenever it raised: what was done of it before is then a REPLAY or a DUPLICATE.

        Args:
            chunk: rows, or an Arrow table with columns named as a `Row`'s fields; some 10,000 at a time.

        Returns:
            What became of each row, counted, and the rows that were parked: they are the caller's to keep.

        Raises:
            StoreError: the database is away, or somebody has held an id of the chunk for too long; nothing is lost.
            ConfigurationError: as `start` says; or a table's columns mean nothing here.
        """
        self.start()
        report = Report()
        if not isinstance(chunk, Sequence):
            chunk = self._setwise(chunk, report)
        report.add(self._one_by_one(rows_of(chunk)))
        if report.outputs and self._leaves_to_relay and not self._dry_run:
            self._store.announce_pending()
            self._store.announce_effects()
        report.counts = +report.counts  # without zeros
        return report

    def _setwise(self, chunk: pa.Table, report: Report) -> pa.Table:
        """Handle what can be handled without an object per row; what is left of the chunk."""
        from idemp.bulk.arrow import taken  # pyarrow is an extra
        from idemp.bulk.setwise import Setwise

        sets = {name: each for name, each in self._handlers.items() if isinstance(each, SqlSet | ArrowSet)}
        setwise = Setwise(self._steps, sets, adopt=self._adopt, dry_run=self._dry_run)
        setwise.run(chunk)
        report.counts.update(setwise.counts)
        report.outputs += setwise.outputs
        errors = sorted(setwise.errors.items())
        report.counts[Came.PARKED] += len(errors)
        for row, (_, error) in zip(rows_of(taken(chunk, sorted(setwise.errors))), errors, strict=True):
            report.parked.append(Parked.of(row, error))
        return taken(chunk, sorted(setwise.left))

    def _one_by_one(self, rows: Sequence[Row]) -> Report:
        """Handle rows by the steps of deliveries."""
        results: list[_Ended | Exception | None] = [None] * len(rows)
        members: dict[int, Member] = {}
        for place, row in enumerate(rows):
            try:
                members[place] = Member(work_from(self._consumer, row, adopt=self._adopt), UNWATCHED)
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - the app's own functions for keys may raise anything
                results[place] = error
        handle = self._looked if self._dry_run else self._handled
        for place, result in zip(members, handle(list(members.values())), strict=True):
            results[place] = result
        return _report(rows, results)

    def close(self) -> None:
        """End what it opened itself; the app and the engine are their owners'."""
        if self._own is not None:
            self._own.close()

    # Handling -------------------------------------------------------------------------------------------------------

    def _handled(self, members: Sequence[Member]) -> list[_Ended | Exception]:
        """What became of each. Who looks for former identities as well runs alone, as in a worker."""
        sharing = [place for place, member in enumerate(members) if len(member.work.claims) == 1]
        batch = Batch[_Ended](self._steps, [members[place] for place in sharing], self._ended)
        came_to = dict(zip(sharing, batch.run(), strict=True))
        return [came_to.get(place) or self._alone(member) for place, member in enumerate(members)]

    def _alone(self, member: Member) -> _Ended | Exception:
        try:
            for _ in range(_WAITS_ALONE):
                claimed, outputs = self._steps.repeated(lambda: self._steps.claimed_early(member.work), [])
                if claimed.verdict is not Verdict.IN_FLIGHT:
                    return self._ended(member, claimed, outputs)
        except (CommitUnknown, TransientStoreError, MemoryError):
            raise
        except Exception as error:
            if isinstance(error, StoreError) and not isinstance(error, StoreUnavailable):
                raise
            self._steps.rule_for(error)  # raises where it is the store's
            return error
        raise TransientStoreError(
            f"Somebody else has held the id {member.work.claims[0].id.text!r} for too long; it was not handled.",
            fix="Run the chunk again: what was done of it counts as done.",
        )

    def _ended(self, member: Member, claimed: Claimed, outputs: Sequence[Output]) -> _Ended:
        came = came_of(member.work.claims[0], claimed)
        return _Ended(came, len(outputs), self._steps.conflict(member.work, claimed))

    # Looking --------------------------------------------------------------------------------------------------------

    def _looked(self, members: Sequence[Member]) -> list[_Ended | Exception]:
        """What would become of each. Those whose ids come twice are judged by the first, if that would be new."""
        answers = iter(self._answers([claim for member in members for claim in member.work.claims]))
        first: dict[object, Handling] = {}
        return [
            self._would_end(member, [(claim, next(answers)) for claim in member.work.claims], first)
            for member in members
        ]

    def _answers(self, claims: Sequence[Claim]) -> list[Claimed]:
        """What each would be answered now: ids that come twice are asked for one after the other."""
        rounds: dict[tuple[str, int], list[int]] = {}
        seen: Counter[object] = Counter()
        for place, claim in enumerate(claims):
            key = (claim.consumer, claim.id.key)
            rounds.setdefault((claim.consumer, seen[key]), []).append(place)
            seen[key] += 1
        found: dict[int, Claimed] = {}
        for places in rounds.values():
            own = [claims[place] for place in places]
            with self._store.begin(own) as unit:
                found.update(zip(places, unit.look_all(own), strict=True))
        return [found[place] for place in range(len(claims))]

    def _would_end(
        self, member: Member, answers: Sequence[tuple[Claim, Claimed]], first: dict[object, Handling]
    ) -> _Ended | Exception:
        for claim, answer in answers:
            known = first.get((claim.consumer, claim.id.key))
            claimed = known.answer(claim) if known is not None else answer
            if claimed.verdict is not Verdict.CLAIMED:
                return self._ended(member, claimed, ())
        try:
            self._steps.check_age(member.work)
        except LateMessage as error:
            return error
        for claim, _ in answers:
            first[claim.consumer, claim.id.key] = Handling(claim, self._consumer.clock.now())
        return _Ended(Came.NEW)

    # Wiring ---------------------------------------------------------------------------------------------------------

    def _find(self, message: Message) -> Registration:
        registration = self._app.registry.find(message)
        if self._adopt:
            return _adopting(registration)
        found = self._instead.get(registration.message_type, registration)
        if found.policy is not registration.policy:  # more is claimed since the start
            found = self._instead[registration.message_type] = replace(found, policy=registration.policy)
        if found.policy.databases and found is registration:
            raise MessageError(
                f"The handler of {found.message_type!r} writes to several databases (TwoPhase), and a chunk commits in one.",
                fix="Send such messages to the app's queue, or leave them out of the chunk.",
            )
        return found

    def _others(self, sets: Mapping[type | str, SetHandler]) -> dict[str, Registration]:
        """The registrations of types whose new rows are handled all at once."""
        app = self._app
        app.registry.build(app.settings.messages)
        instead = {}
        for name, handler in sets.items():
            found = _known(app, name if isinstance(name, str) else app.registry.types.name_of(name))
            if not found.policy.idempotent:
                raise ConfigurationError(
                    f"{found.message_type!r} has a set handler, and is not opted in.",
                    fix="Say policy=Idempotent(…): duplicates are taken out of a chunk before its handler sees it.",
                )
            self._handlers[found.message_type] = handler
            instead[found.message_type] = _taking_all(found, handler.handle)
        return instead


class _ChunkSteps(Steps):
    """The steps of deliveries, for rows."""

    def __init__(self, consumer: Consumer, *, adopt: bool) -> None:
        super().__init__(consumer)
        self._adopt = adopt

    def check_age(self, work: Work, unit: UnitOfWork | None = None) -> None:
        """What is adopted was handled, however long ago."""
        if not self._adopt:
            super().check_age(work, unit)


def _known(app: App, name: str) -> Registration:
    try:
        return app.registry.find_by_name(name)
    except UnknownMessageType as error:
        raise ConfigurationError(
            f"There is a set handler for type {name!r}, of which {app.name!r} knows nothing: {error.message}",
            fix="Declare a handler for it, too: its policy says what identifies the messages.",
        ) from error


def _taking_all(registration: Registration, function: Any) -> Registration:
    return replace(registration, handler=one_at_a_time(function), batch_handler=function, most=sys.maxsize)


def _adopting(registration: Registration) -> Registration:
    return _taking_all(registration, lambda _messages, _ctx: None)


def _report(rows: Sequence[Row], results: Sequence[_Ended | Exception | None]) -> Report:
    counts: Counter[Came] = Counter()
    report = Report(counts=counts)
    for row, result in zip(rows, results, strict=True):
        if isinstance(result, _Ended):
            counts[result.came] += 1
            report.outputs += result.outputs
            parked_with = result.conflict
        else:
            counts[Came.PARKED] += 1
            parked_with = result
        if parked_with is not None:
            report.parked.append(Parked.of(row, parked_with))
    return report
