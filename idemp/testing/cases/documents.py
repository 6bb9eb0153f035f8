# ruff: noqa: S101, PLR2004 - this module is made of assertions
"""Cases of the document port: revisions, conflicts, races, sizes, scans."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

import pytest

from idemp.inbox.document.port import OWN, DocumentTooLarge, RevisionConflict, size_of
from idemp.testing.store_bench import Background

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemp.inbox.document.port import Document, Documents

LARGE = 300_000
"""Bytes of a large document, where the store takes so many."""


class BesideTheBody:
    """How a test stores something with a document that is no part of its body, past the port, as other programs do."""

    def put_beside(self, documents: Documents, id: str) -> None:
        """Store something with this document that is no part of its body, past the port, as other programs do.

        An attachment of CouchDB, an attribute of DynamoDB. A subclass must say it; `pass` where a store has no such place.
        """
        raise NotImplementedError(f"Store something beside the body of {id!r}; `pass` where that is impossible.")

    def beside(self, documents: Documents, id: str) -> object:
        """All that `put_beside` stored with this document, read past the port, to be compared with a later answer."""
        raise NotImplementedError(f"Return what is stored beside the body of {id!r}.")


class DocumentCases(BesideTheBody):
    """What a conditional write promises. A subclass gives the fixture `documents`."""

    patience: ClassVar[float] = 30.0

    @pytest.fixture
    def name(self) -> str:
        """What the ids of one test begin with."""
        return f"conformance-{uuid4().hex[:12]}/"

    def reopen(self, documents: Documents) -> Documents:
        """Another instance on the same collection, as another process opens it; default: the same one."""
        return documents

    # Reading and writing

    def test_verify_accepts_it(self, documents: Documents) -> None:
        """A collection that is ready says so."""
        documents.verify()
        assert documents.largest > 0

    def test_what_was_written_is_read(self, documents: Documents, name: str) -> None:
        """At once, with the revision that the write answered; also by another instance."""
        assert documents.read(f"{name}cart") is None
        first = documents.write(f"{name}cart", {"items": 1, "note": "x"}, None)
        second = documents.write(f"{name}cart", {"items": 2}, first)
        for instance in (documents, self.reopen(documents)):
            found = _found(instance, f"{name}cart")
            assert (found.id, found.body, found.revision) == (f"{name}cart", {"items": 2}, second)
        assert documents.read(f"{name}car") is None

    def test_every_json_value_comes_back(self, documents: Documents, name: str) -> None:
        """Texts of all kinds, numbers as they were, what is empty, and names that an adapter could use itself."""
        body: dict[str, Any] = {
            "texts": ["", " ", "ü✓ 漢字 🛒", 'it\'s "so" \\ %s', "line\nbreak\ttab", "null", "9" * 1000],
            "numbers": [0, -1, 2**53 - 1, 0.1, -2.5, 1e-7, 1.7976931348623157e308],
            "others": [True, False, None, [], {}, [[]], {"": {"": None}}],
            "ключ ✓": 1,
            "id": 7,
            "revision": "mine",
            "body": {"value": [1, {"a": [None]}]},
            "empty": "",
        }
        documents.write(f"{name}all", body, None)
        found = _found(documents, f"{name}all").body
        assert found == body
        assert [type(each) for each in found["numbers"]] == [type(each) for each in body["numbers"]]
        assert [type(each) for each in found["others"]] == [type(each) for each in body["others"]]

    def test_ids_of_all_kinds_are_apart(self, documents: Documents, name: str) -> None:
        """Blanks, case, slashes, and what stands for something in an address."""
        ids = [name + text for text in ("a", "A", "a ", "a/b", "a%2Fb", "a?b=c&d", "a#b", "a+b", "ä ✓", "x" * 200)]
        for number, id_ in enumerate(ids):
            documents.write(id_, {"n": number}, None)
        assert [_found(documents, id_).body["n"] for id_ in ids] == list(range(len(ids)))
        assert sorted(document.id for document in _all(documents, name)) == sorted(ids)

    def test_what_was_read_is_a_copy(self, documents: Documents, name: str) -> None:
        """Nobody changes a document by changing an object."""
        body = {"items": [1]}
        documents.write(f"{name}cart", body, None)
        body["items"].append(2)
        found = _found(documents, f"{name}cart").body
        assert found == {"items": [1]}
        found["items"].append(3)
        assert _found(documents, f"{name}cart").body == {"items": [1]}

    def test_what_is_beside_the_body_stays(self, documents: Documents, name: str) -> None:
        """A write replaces the body alone, wherever its revision came from: a read, a write, a scan, or a text."""
        id_ = f"{name}cart"
        documents.write(id_, {"n": 0, "dropped": True}, None)
        self.put_beside(documents, id_)
        kept = self.beside(documents, id_)

        def scanned() -> str:
            self._comes_to(lambda: [each.revision for each in _all(documents, id_)], [_found(documents, id_).revision])
            return _all(documents, id_)[0].revision

        def written(expected: str, number: int) -> str:
            revision = documents.write(id_, {"n": number}, expected)
            assert self.beside(documents, id_) == kept
            assert _found(self.reopen(documents), id_).body == {"n": number}
            return revision

        revision = written(written(_found(documents, id_).revision, 1), 2)
        written(scanned(), 3)
        written(str(_found(documents, id_).revision), 4)
        with pytest.raises(RevisionConflict):
            documents.write(id_, {"n": 5}, str(revision))

    # Revisions

    def test_revisions_never_repeat(self, documents: Documents, name: str) -> None:
        """Not for the same content, and not after a deletion."""
        seen, id_ = [], f"{name}cart"
        for _ in range(3):
            seen.append(documents.write(id_, {"n": 1}, None))
            for number in (1, 2, 1):
                seen.append(documents.write(id_, {"n": number}, seen[-1]))
            documents.delete(id_, seen[-1])
        assert len(set(seen)) == 12
        last = documents.write(id_, {"n": 1}, None)
        for former in seen:
            with pytest.raises(RevisionConflict):
                documents.write(id_, {"n": 9}, former)
        assert _found(documents, id_).revision == last

    def test_conflict_changes_nothing(self, documents: Documents, name: str) -> None:
        """An old revision, one where there is no document, none where there is one."""
        id_ = f"{name}cart"
        first = documents.write(id_, {"n": 1}, None)
        second = documents.write(id_, {"n": 2}, first)
        attempts: list[Callable[[], object]] = [
            lambda: documents.write(id_, {"n": 3}, first),
            lambda: documents.write(id_, {"n": 3}, None),
            lambda: documents.write(f"{name}other", {"n": 3}, second),
            lambda: documents.delete(id_, first),
            lambda: documents.delete(f"{name}other", second),
        ]
        for attempt in attempts:
            with pytest.raises(RevisionConflict) as conflict:
                attempt()
            assert conflict.value.committed == "no"
        found = _found(documents, id_)
        assert (found.body, found.revision) == ({"n": 2}, second)
        assert documents.read(f"{name}other") is None

    def test_delete(self, documents: Documents, name: str) -> None:
        """It is gone, once, and can be made anew; what expected the former one does not reach the new one."""
        id_ = f"{name}cart"
        former = documents.write(id_, {"n": 1}, None)
        documents.delete(id_, former)
        assert documents.read(id_) is None
        with pytest.raises(RevisionConflict):
            documents.delete(id_, former)
        with pytest.raises(RevisionConflict):
            documents.write(id_, {"n": 2}, former)
        documents.write(id_, {"n": 3}, None)
        assert _found(documents, id_).body == {"n": 3}

    # Races

    def test_racing_creators(self, documents: Documents, name: str) -> None:
        """One of them makes it."""
        for number in range(5):
            id_, start = f"{name}{number}", threading.Barrier(4)

            def create(own: int, id_: str = id_, start: threading.Barrier = start) -> bool:
                start.wait(self.patience)
                return _wins(lambda: documents.write(id_, {"own": own}, None))

            racers = [Background(lambda own=own, create=create: create(own)) for own in range(4)]  # type: ignore[misc]
            won = [own for own, racer in enumerate(racers) if racer.result(self.patience)]
            assert len(won) == 1
            assert _found(documents, id_).body == {"own": won[0]}

    def test_racing_writers(self, documents: Documents, name: str) -> None:
        """Of those that have read one version, one writes the next."""
        id_, ready = f"{name}counter", threading.Barrier(4)
        documents.write(id_, {"n": 0}, None)

        def count() -> int:
            won = 0
            for _ in range(5):
                found = _found(documents, id_)
                ready.wait(self.patience)
                body = {"n": found.body["n"] + 1}
                won += _wins(lambda: documents.write(id_, body, found.revision))  # noqa: B023 - at once
                ready.wait(self.patience)
            return won

        racers = [Background(count) for _ in range(4)]
        assert sum(racer.result(self.patience) for racer in racers) == 5
        assert _found(documents, id_).body == {"n": 5}

    # Sizes

    def test_large_document(self, documents: Documents, name: str) -> None:
        """Up to the size that it names, nearly."""
        text = "é" * (min(LARGE, documents.largest - 1_000) // 2)
        documents.write(f"{name}large", {"text": text}, None)
        assert _found(documents, f"{name}large").body == {"text": text}

    def test_too_large_document(self, documents: Documents, name: str) -> None:
        """It is refused by an error that says so, and what was there stays."""
        id_ = f"{name}large"
        revision = documents.write(id_, {"n": 1}, None)
        body = {"text": "x" * documents.largest}
        assert size_of(body) > documents.largest
        with pytest.raises(DocumentTooLarge):
            documents.write(id_, body, revision)
        assert _found(documents, id_).revision == revision

    # Scans

    def test_scan_finds_all(self, documents: Documents, name: str) -> None:
        """Page by page, each once, with body and revision; and nothing whose id begins otherwise."""
        revisions = {
            f"{name}a/{number}": documents.write(f"{name}a/{number}", {"n": number}, None) for number in range(25)
        }
        for neighbour in (f"{name}a", f"{name}b/1", f"{name}a0", f"{name}A/1", f"{OWN}{name}a/1"):
            documents.write(neighbour, {}, None)
        self._comes_to(lambda: {each.id: each.revision for each in _all(documents, f"{name}a/")}, revisions)
        found: list[Document] = []
        pages = 0
        cursor: str | None = None
        while pages == 0 or cursor is not None:
            page, cursor = documents.scan(f"{name}a/", cursor, 10)
            assert len(page) <= 10
            found += page
            pages += 1
        assert sorted(each.body["n"] for each in found) == list(range(25))
        assert pages >= 3

    def test_scan_of_what_changed(self, documents: Documents, name: str) -> None:
        """After a while: the new versions, and none that is gone."""
        revisions = [documents.write(f"{name}{number}", {"n": 0}, None) for number in range(4)]
        documents.delete(f"{name}0", revisions[0])
        changed = documents.write(f"{name}1", {"n": 1}, revisions[1])
        expected = {f"{name}1": changed, f"{name}2": revisions[2], f"{name}3": revisions[3]}
        self._comes_to(lambda: {each.id: each.revision for each in _all(documents, name)}, expected)

    def test_scan_of_nothing(self, documents: Documents, name: str) -> None:
        """An empty page is the last."""
        assert _all(documents, name) == []

    def _comes_to(self, look: Callable[[], object], expected: object) -> None:
        deadline = time.monotonic() + self.patience
        while (found := look()) != expected:
            assert time.monotonic() < deadline, f"{found} is not {expected}"


def _found(documents: Documents, id: str) -> Document:
    found = documents.read(id)
    assert found is not None
    return found


def _all(documents: Documents, prefix: str) -> list[Document]:
    found: list[Document] = []
    cursor: str | None = None
    while True:
        page, cursor = documents.scan(prefix, cursor)
        found += page
        if cursor is None:
            return found


def _wins(write: Callable[[], object]) -> bool:
    try:
        write()
    except RevisionConflict:
        return False
    return True
