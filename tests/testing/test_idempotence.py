"""`assert_idempotent` finds the classic faults, and says nothing of what is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from idemp import Idempotent, Policy
from idemp.testing import NotIdempotent, assert_idempotent
from tests.testing import classic, idioms

FOUND: Any = {"tables": classic.Base.metadata, "policy": Idempotent()}
RIGHT: Any = {
    "tables": idioms.Base.metadata,
    "policy": Idempotent(),
    "setup": idioms.setup,
    "properties": {"reply_to": "shop"},
}


def name(value: Any) -> str:
    return getattr(value, "__name__", "")


@pytest.fixture(autouse=True)
def upload() -> None:
    classic.FOLDER.mkdir(exist_ok=True)
    (classic.FOLDER / "upload.txt").touch()


@pytest.mark.parametrize(("handler", "kind", "words"), classic.CLASSIC, ids=name)
def test_a_classic_fault_is_found(handler: Callable[..., Any], kind: str, words: str) -> None:
    with pytest.raises(NotIdempotent, match=f"(?s){handler.__name__} is not idempotent.*Cure: .*Not looked at") as raised:
        assert_idempotent(handler, classic.MESSAGE, **FOUND)
    (cause,) = [each.cause for each in raised.value.findings if each.kind == kind]
    assert words in cause
    assert {each.kind for each in raised.value.findings} - {kind} <= {"file", "connection"} - {kind}, raised.value


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_on_another_database(url: str) -> None:
    with pytest.raises(NotIdempotent, match="it wrote on another connection: INSERT INTO"):  # on SQLite, it waits for itself
        assert_idempotent(classic.initiates_inside, classic.MESSAGE, database=url)
    for handler, kind, words in (each for each in classic.CLASSIC if each[1] in ("race", "commit", "swallowed")):
        with pytest.raises(NotIdempotent, match=words) as raised:
            assert_idempotent(handler, classic.MESSAGE, database=url, **FOUND)
        assert [each.kind for each in raised.value.findings] == [kind]
    for idiom in idioms.IDIOMS:
        assert_idempotent(idiom, idioms.MESSAGE, database=url, **RIGHT)


@pytest.mark.parametrize(("handler", "kind", "words"), classic.PLAIN, ids=name)
def test_a_fault_of_a_handler_that_is_not_opted_in_is_found(handler: Callable[..., Any], kind: str, words: str) -> None:
    with pytest.raises(NotIdempotent, match=words) as raised:
        assert_idempotent(handler, classic.MESSAGE, tables=classic.Base.metadata, policy=Policy())
    assert [each.kind for each in raised.value.findings] == [kind]


@pytest.mark.parametrize("handler", idioms.IDIOMS, ids=name)
def test_nothing_is_said_of_what_is_right(handler: Callable[..., Any]) -> None:
    report = assert_idempotent(handler, idioms.MESSAGE, **RIGHT)
    assert report.runs > 7
    assert len(report.not_looked_at) == 2
