"""Stores that work as long as there is one instance, and as long as each COMMIT succeeds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from idemp.errors import StoreError
from idemp.inbox.memory import MemoryUnit
from idemp.inbox.port import Claim, Claimed, Mark, PendingOutput
from idemp.inbox.small import Content
from idemp.messages import Output
from tests.testing.store_mutants.sound import Store, breaks

# What another instance finds


@breaks(
    "another_instance_sees_what_was_committed",
    "relays_of_two_instances_share_their_work",
    "windows_and_identities_are_known_to_others",
)
class NeverWritten(Store):
    """All of it is in the memory of the process."""

    def reopened(self) -> Store:
        return type(self)(self.clock)


@breaks("another_instance_sees_what_was_committed", "relays_of_two_instances_share_their_work")
class ReadOnce(Store):
    """It is read when it is opened: what others commit afterwards is not seen."""

    def reopened(self) -> Store:
        other = copy(self)
        other.content = deepcopy(self.content)
        return other


class _Forgetful(Store):
    """Another instance begins with some of it empty."""

    forgets: str

    def reopened(self) -> Store:
        other = copy(self)
        other.content = replace(self.content, **{self.forgets: {}})
        return other


@breaks("another_instance_sees_what_was_committed")
class StartsInMemory(_Forgetful):
    """Starts without an end are forgotten with the process that died: those are the ones to be counted."""

    forgets = "starts"


@breaks("another_instance_sees_what_was_committed")
class EffectsInMemory(_Forgetful):
    """Effects are written at some later time."""

    forgets = "data"


@breaks("relays_of_two_instances_share_their_work")
class BeatsInMemory(_Forgetful):
    """Nobody sees the relay of another process."""

    forgets = "relays"


@breaks("windows_and_identities_are_known_to_others")
class IdentitiesInMemory(_Forgetful):
    """A deploy, which is a new process, may change the key in silence."""

    forgets = "identities"


@breaks("windows_and_identities_are_known_to_others")
class WindowsInMemory(_Forgetful):
    """The window starts anew with each process."""

    forgets = "consumed"


@breaks("instances_exclude_each_other")
class LockOfTheProcess(Store):
    """An id is locked among threads, not among processes."""

    def reopened(self) -> Store:
        other = copy(self)
        other.holders = {}
        return other


# Ids


class _NarrowKeys(Store):
    """Of the id's 128 bits some are kept."""

    kept: int

    class unit(MemoryUnit):  # noqa: N801
        def _stored(self, claim: Claim) -> Claim:
            kept: int = self._store.kept  # type: ignore[attr-defined]
            return replace(claim, id=replace(claim.id, key=UUID(int=claim.id.key.int & kept)))

        def claim(self, claim: Claim) -> Claimed:
            return super().claim(self._stored(claim))

        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
            super().store_outputs(self._stored(claim), outputs, relay_after)


@breaks("ids_differ_in_each_byte")
class TwoBytesOfTheKey(_NarrowKeys):
    """The first two bytes."""

    kept = 0xFFFF << 112


@breaks("ids_differ_in_each_byte")
class TimeOfTheKey(_NarrowKeys):
    """The half that holds the time of a UUIDv7."""

    kept = (2**64 - 1) << 64


@breaks("ids_differ_in_each_byte")
class SignedKey(_NarrowKeys):
    """All but the highest bit."""

    kept = 2**127 - 1


@breaks("ids_differ_in_each_byte")
class KeyWithoutItsEnd(_NarrowKeys):
    """All but the last byte."""

    kept = 2**128 - 2**8


# COMMIT


@breaks("failed_commit_is_told_and_leaves_nothing")
class CommitSwallows(Store):
    """A COMMIT that failed is told as done, and the message is acked."""

    class unit(MemoryUnit):  # noqa: N801
        def commit(self) -> None:
            with suppress(StoreError):
                super().commit()


@breaks("failed_commit_is_told_and_leaves_nothing")
class EffectsOutliveTheFailure(Store):
    """COMMIT writes the effects before it fails at the claim."""

    class unit(MemoryUnit):  # noqa: N801
        def commit(self) -> None:
            self.committed.update(self.session.changes())
            super().commit()


@breaks("failed_commit_is_told_and_leaves_nothing")
class MarksSwallowed(Store):
    """Marks that could not be recorded are told as recorded."""

    def record(self, marks: Sequence[Mark]) -> None:
        with suppress(StoreError):
            super().record(marks)


class _InTwoSteps(Store):
    """A COMMIT of two transactions; somebody looks in between."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.looks = threading.Semaphore(0)

    def pending_count(self) -> int:
        found = super().pending_count()
        self.looks.release()
        return found

    def looked_through(self) -> None:
        """Wait until others looked at each part of it."""
        while self.looks.acquire(blocking=False):
            pass
        for _ in range(4):
            if not self.looks.acquire(timeout=0.2):
                break


@breaks("nobody_sees_half_of_a_handling")
class EffectsFirst(_InTwoSteps):
    """The effects are committed, then claim and outputs: a crash in between runs the handler again."""

    class unit(MemoryUnit):  # noqa: N801
        def commit(self) -> None:
            self.committed.update(self.session.changes())
            self._store.looked_through()  # type: ignore[attr-defined]
            super().commit()


@breaks("nobody_sees_half_of_a_handling")
class ClaimFirst(_InTwoSteps):
    """Claim and outputs are committed, then the effects: a crash in between loses them."""

    class unit(MemoryUnit):  # noqa: N801
        def commit(self) -> None:
            self._store.content.handlings.update(self._handlings)
            self._store.looked_through()  # type: ignore[attr-defined]
            super().commit()


# Two at once


class _ReadsThenWrites(Store):
    """Two calls at once both read before either of them writes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.both = threading.Barrier(2)

    def together(self) -> None:
        """Wait until another one is here, too, if there is one."""
        with suppress(threading.BrokenBarrierError):
            self.both.wait(0.3)


@breaks("marks_made_at_once_all_count")
class MarksOverwriteEachOther(_ReadsThenWrites):
    """Marks are written with all that was read before them."""

    def record(self, marks: Sequence[Mark]) -> None:
        read: Content = deepcopy(self.content)
        self.together()
        with self.changing() as content:
            content.handlings.update(read.handlings)
            super().record(marks)


@breaks("relays_never_get_the_same")
class LeasesOverwriteEachOther(_ReadsThenWrites):
    """What is due is read first, and leased then."""

    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        with self.changing() as content:
            read = deepcopy(content)
        self.together()
        with self.changing() as content:
            content.handlings = read.handlings
            return super().take_pending(limit, lease)
