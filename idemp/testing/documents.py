"""What every database of documents has to keep. Subclass the suite in a test module and give its fixture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from idemp.documents import Changed, DocumentDatabase, Stored
from idemp.documents.documents import NEVER

__all__ = ["DocumentDatabaseConformance"]


class DocumentDatabaseConformance:
    """A database of documents writes conditionally.

    The fixture `open_documents()` opens another client of the same data.
    """

    def test_a_document_is_read_as_it_was_written(self, open_documents: Callable[[], DocumentDatabase]) -> None:
        database, id = open_documents(), f"cart 7/ü {uuid4()}"
        database.verify()
        assert database.read(id) == Stored({}, None)
        data: dict[str, Any] = {
            "text": "ü\n",
            "number": 1234567890123456,
            "part": 0.1,
            "list": [1, None, True],
            "map": {"a": {}},
        }
        database.write(id, data, Stored({}, None))
        stored = open_documents().read(id)
        assert stored.data == data
        assert stored.revision
        database.write(id, {}, stored)
        again = database.read(id)
        assert (again.data, again.revision == stored.revision) == ({}, False)

    def test_a_write_on_another_version_is_refused(self, open_documents: Callable[[], DocumentDatabase]) -> None:
        one, other, id = open_documents(), open_documents(), f"cart {uuid4()}"
        none = one.read(id)
        one.write(id, {"a": 1}, none)
        first = one.read(id)
        with pytest.raises(Changed):
            other.write(id, {"a": 2}, none)
        other.write(id, {"a": 1}, first)  # the same data is another version
        for stale in (first, none, Stored({}, NEVER)):
            with pytest.raises(Changed):
                one.write(id, {"a": 3}, stale)
        assert one.read(id).data == {"a": 1}
        with pytest.raises(Changed):
            one.write(f"{id} that is none", {}, Stored({}, NEVER))
        assert one.read(f"{id} that is none") == Stored({}, None)

    def test_errors_of_others_are_not_classified(self, open_documents: Callable[[], DocumentDatabase]) -> None:
        assert open_documents().classify(RuntimeError("boom")) is None
