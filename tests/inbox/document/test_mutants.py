"""Each case of `DocumentStoreConformance`, and of handlings at once, can fail: a store with that fault is noticed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from idemp.errors import StoreUnavailable
from idemp.inbox.document import Document, DocumentInbox, DocumentTooLarge, DocumentUnit, InMemoryDocuments
from idemp.inbox.document.port import size_of
from idemp.inbox.port import Claim
from idemp.testing.cases.optimistic import OptimisticCases
from idemp.testing.clock import FakeClock
from idemp.testing.document_conformance import DocumentEffects, DocumentInboxConformance, DocumentStoreConformance
from idemp.testing.store_bench import Bench
from tests.inbox.document.test_memory import Beside
from tests.testing.mutants import Mutant, Table, cases_of, failure

pytestmark = pytest.mark.slow

TABLE, INBOXES = Table(), Table()


class Quick(Beside, DocumentStoreConformance):
    patience = 0.2


def fails(case: str, made: type[InMemoryDocuments]) -> BaseException | None:
    @contextmanager
    def fixtures() -> Iterator[Mapping[str, Any]]:
        yield {"documents": made(largest=100_000), "name": "conformance/"}

    return failure(Quick(), case, fixtures)


@TABLE.breaks("verify_accepts_it")
class NotReady(InMemoryDocuments):
    """It is not there."""

    def verify(self) -> None:
        raise StoreUnavailable("away")


@TABLE.breaks("what_was_written_is_read")
class Stale(InMemoryDocuments):
    """Reads answer with the version before the last."""

    def __init__(self, largest: int = 100_000) -> None:
        super().__init__(largest)
        self.former: dict[str, Document | None] = {}

    def write(self, id: str, body: Mapping[str, Any], expected: str | None) -> str:
        self.former[id] = super().read(id)
        return super().write(id, body, expected)

    def read(self, id: str) -> Document | None:
        return self.former.get(id) or super().read(id)


@TABLE.breaks("every_json_value_comes_back")
class Floats(InMemoryDocuments):
    """All numbers are floating-point ones."""

    def read(self, id: str) -> Document | None:
        found = super().read(id)
        return found and Document(id, json.loads(json.dumps(found.body), parse_int=float), found.revision)


@TABLE.breaks("what_is_beside_the_body_stays")
class WholeItems(InMemoryDocuments):
    """A write replaces all that is there."""

    def write(self, id: str, body: Mapping[str, Any], expected: str | None) -> str:
        revision = super().write(id, body, expected)
        self.beside.pop(id, None)
        return revision


@TABLE.breaks("ids_of_all_kinds_are_apart")
class CaseBlind(InMemoryDocuments):
    """Ids are compared without case."""

    def write(self, id: str, body: Mapping[str, Any], expected: str | None) -> str:
        return super().write(id.lower(), body, expected)

    def read(self, id: str) -> Document | None:
        return super().read(id.lower())


@TABLE.breaks("what_was_read_is_a_copy")
class Shared(InMemoryDocuments):
    """Its objects are handed out."""

    def __init__(self, largest: int = 100_000) -> None:
        super().__init__(largest)
        self.bodies: dict[str, Mapping[str, Any]] = {}

    def write(self, id: str, body: Mapping[str, Any], expected: str | None) -> str:
        self.bodies[id] = body
        return super().write(id, body, expected)

    def read(self, id: str) -> Document | None:
        found = super().read(id)
        return found and Document(id, self.bodies[id], found.revision)


@TABLE.breaks("revisions_never_repeat")
class ByContent(InMemoryDocuments):
    """A revision is a digest of what was written."""

    def write(self, id: str, body: Mapping[str, Any], expected: str | None) -> str:
        super().write(id, body, expected)
        text, _ = self._kept[id]
        self._kept[id] = (text, revision := str(hash(text)))
        return revision


@TABLE.breaks("conflict_changes_nothing", "delete", "racing_writers")
class LastWins(InMemoryDocuments):
    """There is no conflict."""

    def _check(self, id: str, expected: str | None) -> None:
        pass

    def delete(self, id: str, expected: str) -> None:
        if id in self._kept:
            super().delete(id, expected)


@TABLE.breaks("racing_creators")
class CreatesTwice(InMemoryDocuments):
    """A document that exists is made anew."""

    def _check(self, id: str, expected: str | None) -> None:
        if expected is not None:
            super()._check(id, expected)


@TABLE.breaks("large_document")
class Truncates(InMemoryDocuments):
    """What is long is cut off."""

    def write(self, id: str, body: Mapping[str, Any], expected: str | None) -> str:
        return super().write(id, {n: v[:1_000] if isinstance(v, str) else v for n, v in body.items()}, expected)


@TABLE.breaks("too_large_document")
class TakesAll(InMemoryDocuments):
    """It writes what it can't keep, and says so afterwards."""

    def __init__(self, largest: int = 100_000) -> None:
        super().__init__()
        self.named, self.largest = largest, largest

    def write(self, id: str, body: Mapping[str, Any], expected: str | None) -> str:
        self.largest = 1 << 30
        revision = super().write(id, body, expected)
        self.largest = self.named
        if size_of(body) > self.largest:
            raise DocumentTooLarge.of(id, size_of(body), self.largest)
        return revision


@TABLE.breaks("scan_finds_all")
class OnePage(InMemoryDocuments):
    """A scan ends with its first page."""

    def scan(self, prefix: str, cursor: str | None = None, limit: int = 500) -> tuple[Sequence[Document], str | None]:
        return super().scan(prefix, cursor, min(limit, 20))[0], None


@TABLE.breaks("scan_of_what_changed")
class Remembers(InMemoryDocuments):
    """A scan has what is gone."""

    def delete(self, id: str, expected: str) -> None:
        text, _ = self._kept[id]
        super().delete(id, expected)
        self._kept[id] = (text, expected)


@TABLE.breaks("scan_of_nothing")
class HalfAPage(InMemoryDocuments):
    """There is always something."""

    def scan(self, prefix: str, cursor: str | None = None, limit: int = 500) -> tuple[Sequence[Document], str | None]:
        page, cursor = super().scan(prefix, cursor, limit)
        return page or [Document(prefix, {}, "0")], cursor


@pytest.mark.parametrize("mutant", TABLE.mutants, ids=str)
def test_mutant_is_noticed(mutant: Mutant) -> None:
    assert fails(mutant.case, mutant.made), f"{mutant.case} does not notice: {mutant.breaks}"


@pytest.mark.parametrize("case", sorted(cases_of(DocumentStoreConformance)))
def test_sound_documents_pass(case: str) -> None:
    """The same way of calling: it is the fault that is noticed."""
    assert fails(case, InMemoryDocuments) is None


def test_each_case_has_a_mutant() -> None:
    assert TABLE.cases == cases_of(DocumentStoreConformance)


# Handlings that run at once -------------------------------------------------------------------------------------------


@INBOXES.breaks("both_run_and_the_first_commit_wins", "other_message_of_the_same_entity")
class LastCommitWins(DocumentInbox):
    """COMMIT takes whatever revision is there."""

    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> DocumentUnit:
        class Unit(DocumentUnit):
            def commit(self) -> None:
                found = self._inbox.states.read(self.state().id)
                self.state().revision = found.revision if found is not None else None
                super().commit()

        return Unit(self, claims)


@INBOXES.breaks("first_rolls_back_and_the_second_does_not_notice")
class RollsBackAll(DocumentInbox):
    """A rollback takes back what is there, whoever wrote it."""

    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> DocumentUnit:
        class Unit(DocumentUnit):
            def __exit__(self, *error: object) -> None:
                if error[0] is not None and self._state is not None:
                    found = self._inbox.states.read(self._state.id)
                    if found is not None:
                        self._inbox.states.delete(found.id, found.revision)

        return Unit(self, claims)


@pytest.mark.parametrize("mutant", INBOXES.mutants, ids=str)
def test_mutant_of_an_inbox_is_noticed(mutant: Mutant) -> None:
    @contextmanager
    def fixtures() -> Iterator[Mapping[str, Any]]:
        clock, documents = FakeClock(), InMemoryDocuments()
        store = mutant.made(documents, clock=clock)
        yield {"bench": Bench(store, DocumentEffects(documents), clock, "shop", asks_again=True, patience=1)}

    assert failure(DocumentInboxConformance(), mutant.case, fixtures), mutant.breaks


def test_each_case_of_handlings_at_once_has_a_mutant() -> None:
    assert INBOXES.cases == cases_of(OptimisticCases)
