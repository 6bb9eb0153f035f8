"""Stores that record the wrong things beside the handling."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any
from uuid import UUID

from idemp.errors import StoreError, TransientStoreError
from idemp.inbox.memory import MemoryUnit
from idemp.inbox.port import Mark
from tests.testing.store_mutants.sound import Store, breaks

# Confirms


@breaks("record_clears_exactly_the_confirmed", "record_of_many_handlings_at_once")
class OneConfirmForAll(Store):
    """One confirm counts for all outputs of its handling."""

    def record(self, marks: Sequence[Mark]) -> None:
        for mark in marks:
            handling = self.content.handlings.get((mark.claim.consumer, mark.claim.id.key))
            if handling is not None and mark.confirmed:
                super().record([replace(mark, confirmed=tuple(item.output.id for item in handling.sendings))])


@breaks("record_clears_exactly_the_confirmed")
class ConfirmedAreDeleted(Store):
    """A confirmed output is gone: nobody can send it again."""

    def record(self, marks: Sequence[Mark]) -> None:
        super().record(marks)
        for mark in marks:
            handling = self.content.handlings.get((mark.claim.consumer, mark.claim.id.key))
            if handling is not None:
                handling.sendings = [item for item in handling.sendings if item.output.id not in mark.confirmed]


@breaks("record_clears_exactly_the_confirmed", "relays_see_what_is_committed")
class SentIsConfirmed(Store):
    """Outputs count as sent from COMMIT on, not from their confirm."""

    class unit(MemoryUnit):  # noqa: N801
        def commit(self) -> None:
            for handling in self._handlings.values():
                for item in handling.sendings:
                    item.pending = False
            super().commit()


@breaks("record_of_refusals")
class RefusalIsAConfirm(Store):
    """An output that the broker refused counts as sent."""

    def record(self, marks: Sequence[Mark]) -> None:
        told = [
            replace(mark, confirmed=mark.confirmed + tuple(output_id for output_id, _ in mark.refused))
            for mark in marks
        ]
        super().record(told)


@breaks("record_of_refusals")
class RefusalBeatsConfirm(Store):
    """A refusal that is told again makes a confirmed output pending again."""

    def record(self, marks: Sequence[Mark]) -> None:
        super().record(marks)
        refused = {output_id for mark in marks for output_id, _ in mark.refused}
        for handling in self.content.handlings.values():
            for item in handling.sendings:
                item.pending |= item.output.id in refused


@breaks("record_of_many_handlings_at_once")
class FirstMarkOnly(Store):
    """Of a batch of marks only the first is recorded."""

    def record(self, marks: Sequence[Mark]) -> None:
        super().record(marks[:1])


@breaks("record_of_what_is_gone")
class MarksNeedARow(Store):
    """A mark for a handling that was purged is an error, and the batch with it is lost."""

    def record(self, marks: Sequence[Mark]) -> None:
        if any((mark.claim.consumer, mark.claim.id.key) not in self.content.handlings for mark in marks):
            raise StoreError("There is no such claim.")
        super().record(marks)


@breaks("record_of_what_is_gone")
class MarksMakeRows(Store):
    """A mark for a handling that was purged leaves a claim behind (an upsert)."""

    def record(self, marks: Sequence[Mark]) -> None:
        for mark in marks:
            if (mark.claim.consumer, mark.claim.id.key) not in self.content.handlings:
                with self.begin() as unit:
                    unit.claim(mark.claim)
                    unit.commit()
        super().record(marks)


# Starts without an end


@breaks("starts_are_counted_until_an_end")
class StartsAreAFlag(Store):
    """It remembers that there was a start, not how many."""

    def note_start(self, consumer: str, key: UUID) -> int:
        return min(1, super().note_start(consumer, key))


@breaks("a_start_is_taken_back", "rollback_does_not_take_the_start_away")
class EndsAreIgnored(Store):
    """Starts are never forgotten."""

    def note_end(self, consumer: str, key: UUID, left: int = 0) -> None:
        """Nothing."""


@breaks("a_start_is_taken_back")
class EndsForgetAll(Store):
    """An end forgets those starts, too, that it should leave."""

    def note_end(self, consumer: str, key: UUID, left: int = 0) -> None:
        super().note_end(consumer, key)


@breaks("a_start_is_taken_back")
class EndsSetTheCount(Store):
    """What an end leaves is taken for the count, also where there are fewer starts, or none."""

    def note_end(self, consumer: str, key: UUID, left: int = 0) -> None:
        super().note_end(consumer, key)
        for _ in range(left):
            self.note_start(consumer, key)


@breaks("starts_are_each_messages_own_at_each_consumer")
class StartsOfAllConsumers(Store):
    """A death at one consumer counts against another's copy of the message."""

    def note_start(self, consumer: str, key: UUID) -> int:
        return super().note_start("", key)

    def note_end(self, consumer: str, key: UUID, left: int = 0) -> None:
        super().note_end("", key, left)


@breaks("starts_are_each_messages_own_at_each_consumer")
class StartsOfAllMessages(Store):
    """A death counts against each message of the consumer."""

    def note_start(self, consumer: str, key: UUID) -> int:
        return super().note_start(consumer, UUID(int=0))

    def note_end(self, consumer: str, key: UUID, left: int = 0) -> None:
        super().note_end(consumer, UUID(int=0), left)


@breaks("racing_starts_are_all_counted")
class StartsAreLostInRaces(Store):
    """It reads the count, and writes it one higher: two at once write the same."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.looked = threading.Barrier(2)

    def note_start(self, consumer: str, key: UUID) -> int:
        earlier, _ = self.content.starts.get((consumer, key), (0, None))
        self.looked.wait(10)
        super().note_start(consumer, key)
        return earlier


@breaks("rollback_does_not_take_the_start_away")
class StartsRollBack(Store):
    """The start is recorded in the handling's own transaction."""

    class unit(MemoryUnit):  # noqa: N801
        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            for key in self._handlings:
                self._store.content.starts.pop(key, None)
            super().__exit__(kind, error, trace)


@breaks("rollback_does_not_take_the_start_away")
class CommitEndsStarts(Store):
    """COMMIT takes the start away, though the handler's end is told by `note_end`."""

    class unit(MemoryUnit):  # noqa: N801
        def commit(self) -> None:
            for key in self._handlings:
                self._store.content.starts.pop(key, None)
            super().commit()


@breaks("start_is_seen_by_others_at_once")
class StartsAreEachThreadsOwn(Store):
    """The start is not committed: only the connection that wrote it sees it."""

    def note_start(self, consumer: str, key: UUID) -> int:
        return super().note_start(f"{consumer} {threading.get_ident()}", key)


# Errors


@breaks("own_unique_violation_is_no_duplicate")
class EveryErrorIsTheStores(Store):
    """The handler's own errors are taken for the database's."""

    def translate(self, error: BaseException) -> StoreError | None:
        return TransientStoreError(str(error))


@breaks("our_own_errors_stay_what_they_are")
class ErrorsTranslatedTwice(Store):
    """An error of the store's own is wrapped once more."""

    def translate(self, error: BaseException) -> StoreError | None:
        return TransientStoreError(str(error)) if isinstance(error, StoreError) else None
