"""What every document store must do, as pytest classes: subclass them, and give them a collection of documents.

```python
class TestMyDocuments(DocumentStoreConformance):
    @pytest.fixture
    def documents(self):
        return MyDocuments("my://localhost")

class TestMyInbox(DocumentInboxConformance):
    @pytest.fixture
    def documents(self):
        return MyDocuments("my://localhost")
```
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from idemp.errors import StoreUnavailable
from idemp.inbox.document import DocumentInbox
from idemp.inbox.document.collector import scanned
from idemp.inbox.document.port import OWN
from idemp.testing.cases.documents import DocumentCases
from idemp.testing.cases.instances import InstanceUpkeepCases
from idemp.testing.cases.retention import RetentionCases
from idemp.testing.store_conformance import EntityStoreConformance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from idemp.inbox.document.port import Documents
    from idemp.inbox.port import InboxStore, UnitOfWork
    from idemp.testing.clock import FakeClock

__all__ = ["DocumentEffects", "DocumentInboxConformance", "DocumentStoreConformance"]

_EFFECTS = "effects"


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
    """The cases of the document port. A subclass gives the fixture `documents`, and may give `reopen(documents)`.

    The collection need not be empty; cases write under names of their own.

    Attributes:
        patience: seconds after which a scan shows what was written, at the latest.

    Example:
        >>> [case for case in dir(DocumentStoreConformance) if "repeat" in case]
        ['test_revisions_never_repeat']
    """


class DocumentInboxConformance(EntityStoreConformance, RetentionCases, InstanceUpkeepCases):
    """The cases of the store port over a `DocumentInbox`. A subclass gives the fixture `documents`, an empty collection.

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
        assert isinstance(store, DocumentInbox)  # noqa: S101
        other = type(store)(store.states, store.own, clock=store.clock)
        other.close = lambda: None  # type: ignore[method-assign] # the documents are the first one's
        return other

    def failing_commits(self, store: InboxStore) -> AbstractContextManager[object]:
        """No write arrives."""
        assert isinstance(store, DocumentInbox)  # noqa: S101
        return _away(store.states)


@contextmanager
def _away(documents: Documents) -> Iterator[None]:
    away = StoreUnavailable("The test says: away.")
    with patch.object(documents, "write", side_effect=away), patch.object(documents, "delete", side_effect=away):
        yield
