# ruff: noqa: S101 - this module is made of assertions
"""What every document store must do, as pytest classes: subclass them, and give them a collection of documents.

```python
class Beside:
    def put_beside(self, documents, id):  # what other programs store with a document, such as an attachment
        attach("my://localhost", id, "photo.jpg", b"...")

    def beside(self, documents, id):
        return attachments("my://localhost", id)

class TestMyDocuments(Beside, DocumentStoreConformance):
    @pytest.fixture
    def documents(self):
        return MyDocuments("my://localhost")

class TestMyInbox(Beside, DocumentInboxConformance):
    @pytest.fixture
    def documents(self):
        return MyDocuments("my://localhost")
```
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from idemp.errors import CommitUnknown, StoreUnavailable
from idemp.inbox.document import DocumentInbox
from idemp.inbox.document.attempts import ATTEMPTS
from idemp.inbox.document.collector import scanned
from idemp.inbox.document.port import OWN
from idemp.inbox.port import Mark
from idemp.testing.cases.documents import BesideTheBody, DocumentCases
from idemp.testing.cases.instances import InstanceUpkeepCases
from idemp.testing.cases.resending import ResendingCases
from idemp.testing.cases.retention import RetentionCases
from idemp.testing.store_bench import MESSAGE_TYPE, make_outputs
from idemp.testing.store_conformance import EntityStoreConformance

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from idemp.inbox.document.port import Documents
    from idemp.inbox.port import InboxStore, UnitOfWork
    from idemp.testing.clock import FakeClock
    from idemp.testing.store_bench import Bench

__all__ = ["DocumentEffects", "DocumentInboxConformance", "DocumentStoreConformance"]

_EFFECTS = "effects"
_WINDOW = timedelta(minutes=5)


class DocumentEffects:
    """Effects in the documents of entities: how often each had one of some name.

    Example:
        >>> from idemp.inbox.document import InMemoryDocuments
        >>> DocumentEffects(InMemoryDocuments()).count("sale")
        0
    """

    def __init__(self, states: Documents) -> None:
        self._states = states

    def on(self, store: Any) -> DocumentEffects:
        """The same through another inbox's documents."""
        return DocumentEffects(store.states)

    def write(self, unit: UnitOfWork, name: str) -> None:
        """Count one more in the document of the unit's entity."""
        effects = unit.session.document.setdefault(_EFFECTS, {})
        effects[name] = effects.get(name, 0) + 1

    def count(self, name: str) -> int:
        """Sum them up."""
        found = (each for each in scanned(self._states, "") if not each.id.startswith(OWN))
        return sum(each.body.get(_EFFECTS, {}).get(name, 0) for each in found)

    def clash(self, unit: UnitOfWork) -> None:
        """A document has no constraints: any error of the handler's own will do."""
        del unit
        raise KeyError("taken")


class DocumentStoreConformance(DocumentCases):
    """The cases of the document port.

    A subclass gives the fixture `documents`, and what other programs store beside a document's body: `put_beside(documents,
    id)` and `beside(documents, id)`. It may give `reopen(documents)`.

    The collection need not be empty; cases write under names of their own.

    Attributes:
        patience: seconds after which a scan shows what was written, at the latest.

    Example:
        >>> [case for case in dir(DocumentStoreConformance) if "repeat" in case]
        ['test_revisions_never_repeat']
    """


class DocumentInboxConformance(
    BesideTheBody, EntityStoreConformance, RetentionCases, InstanceUpkeepCases, ResendingCases
):
    """The cases of the store port over a `DocumentInbox`.

    A subclass gives the fixture `documents`, an empty collection, and what `DocumentStoreConformance` asks for: `put_beside`
    and `beside`.

    Example:
        >>> [case for case in dir(DocumentInboxConformance) if "pending" in case]
        ['test_purge_never_touches_pending']
    """

    purges_bare = False

    @pytest.fixture
    def store(self, documents: Documents, clock: FakeClock) -> DocumentInbox:
        """An inbox on the documents."""
        return DocumentInbox(documents, clock=clock)

    @pytest.fixture
    def effects(self, documents: Documents) -> DocumentEffects:
        """Effects in the entities' documents."""
        return DocumentEffects(documents)

    def reopen(self, store: InboxStore) -> InboxStore:
        """Another inbox, which knows nothing but the documents."""
        assert isinstance(store, DocumentInbox)
        other = type(store)(store.states, store.own, clock=store.clock)
        other.close = lambda: None  # type: ignore[method-assign] # the documents are the first one's
        return other

    def failing_commits(self, store: InboxStore) -> AbstractContextManager[object]:
        """No write arrives."""
        assert isinstance(store, DocumentInbox)
        return _away(store.states)

    def test_nothing_of_others_is_changed(self, bench: Bench, documents: Documents) -> None:
        """Handlings, marks, the fence and the purge leave what is beside the body, and fields that no handler touches."""
        texts: dict[str, Any] = {
            "name": "ü✓",
            "idemp-like": {"shop": {"ids": {}}},
            "empty": {},
            "n": [1, 0.1, None, ""],
        }
        bench.consume(timedelta(0))
        first, lost, last = (replace(bench.claim(), entity="cart") for _ in range(3))
        documents.write("cart", texts, None)
        self.put_beside(documents, "cart")
        kept = self.beside(documents, "cart")

        def unchanged() -> bool:
            found = documents.read("cart")
            others = {name: value for name, value in (found.body if found else {}).items() if name in texts}
            return (others, self.beside(documents, "cart")) == (texts, kept)

        outputs = make_outputs(2)
        bench.handle(first, outputs, effect="sale")
        assert unchanged(), "a handling changed it"
        bench.store.record([Mark(first, tuple(output.id for output in outputs))])
        with _states_lost(documents), pytest.raises(CommitUnknown):
            bench.handle(lost, make_outputs(1))
        bench.consume(_WINDOW + timedelta(seconds=1))
        revision = _revision(documents, "cart")
        assert bench.store.upkeep.purge(bench.consumer, {MESSAGE_TYPE: _WINDOW}, 10) == 1
        assert unchanged(), "the collector changed it"
        assert _revision(documents, "cart") != revision
        assert [each.id for each in scanned(documents, ATTEMPTS)] == [], "the one that was lost is fenced and deleted"
        bench.handle(last)
        assert unchanged(), "a handling after the purge changed it"

    @pytest.mark.parametrize("recorded", [True, False], ids=["confirms recorded", "confirms not recorded"])
    def test_deleted_entity_is_not_revived(self, bench: Bench, documents: Documents, recorded: bool) -> None:
        """By the collector, whose fence would be a document that its owner deleted."""
        bench.consume(timedelta(0))
        claim, outputs = replace(bench.claim(), entity="cart"), make_outputs(1)
        bench.handle(claim, outputs)
        if recorded:
            bench.store.record([Mark(claim, (outputs[0].id,))])
        documents.delete("cart", _revision(documents, "cart"))
        bench.consume(3 * _WINDOW)
        assert bench.store.upkeep.purge(bench.consumer, {MESSAGE_TYPE: _WINDOW}, 10) == 0
        assert documents.read("cart") is None
        left = [each.id for each in scanned(documents, ATTEMPTS)]
        assert len(left) == (0 if recorded else 1), "what counted for certain goes with its entity"


@contextmanager
def _states_lost(documents: Documents) -> Iterator[None]:
    """The writes of state documents get no answer, and change nothing."""
    write = documents.write

    def lost(id: str, body: Mapping[str, Any], expected: str | None) -> str:
        if id.startswith(OWN):
            return write(id, body, expected)
        raise CommitUnknown("The test says: the answer was lost.")

    with patch.object(documents, "write", side_effect=lost):
        yield


def _revision(documents: Documents, id: str) -> str:
    found = documents.read(id)
    assert found is not None
    return found.revision


@contextmanager
def _away(documents: Documents) -> Iterator[None]:
    away = StoreUnavailable("The test says: away.")
    with patch.object(documents, "write", side_effect=away), patch.object(documents, "delete", side_effect=away):
        yield
