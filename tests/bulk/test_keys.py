"""Identities of whole columns are those of single ids."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idemp.errors import MessageError
from idemp.identity import Key, new_id, time_of
from idemp.messages import Message

pa = pytest.importorskip("pyarrow")
pytest.importorskip("numpy")

from idemp.bulk.keys import Keys, in_order, milliseconds  # noqa: E402 - they need both

octets = st.binary(min_size=16, max_size=16)
uuids = octets.map(lambda each: str(uuid.UUID(bytes=each)))
spoilt = st.tuples(uuids, st.integers(0, 35), st.characters(codec="utf-8")).map(
    lambda made: made[0][: made[1]] + made[2] + made[0][made[1] + 1 :]
)
times = st.datetimes(datetime(1971, 1, 1), datetime(9999, 12, 31)).map(
    lambda each: str(new_id(each.replace(tzinfo=UTC)))
)
ids = (
    st.none()
    | st.text(max_size=300)
    | uuids
    | uuids.map(str.upper)
    | spoilt
    | times
    | st.just("ffffffff-ffff-7fff-bfff-ffffffffffff")
)


def single(text: str | None) -> tuple[uuid.UUID, str] | str:
    try:
        found = Key.message_id().effective(Message(body=b"", message_id=text), None, "a.B")
    except MessageError as error:
        return str(error)
    return found.key, found.text


@settings(deadline=None)  # the first array has pyarrow import pandas
@given(st.lists(ids, max_size=20), st.integers(0, 3))
def test_they_are_those_of_single_ids(texts: list[str | None], offset: int) -> None:
    column = pa.array([*["x"] * offset, *texts], pa.string())[offset:]
    keys = Keys(column, "a.B")
    for place, text in enumerate(texts):
        expected = single(text)
        if isinstance(expected, str):
            assert str(keys.errors[place]) == expected
            continue
        key = uuid.UUID(bytes=keys.octets[place].tobytes())
        assert (key, text) == expected
        assert bool(keys.plain[place]) == (str(key) == text)
    assert len(keys.errors) == sum(isinstance(single(text), str) for text in texts)


@settings(deadline=None)
@given(st.lists(octets, max_size=20))
def test_order_and_repeats(made: list[bytes]) -> None:
    """As uuids are compared everywhere, and the first one of each first."""
    keys = Keys(pa.array([str(uuid.UUID(bytes=each)) for each in made + made[:3]], pa.string()))
    order, first = in_order(keys.octets)
    found = [keys.octets[place].tobytes() for place in order]
    assert found == sorted(found)
    assert sorted(order[first].tolist()) == sorted(
        {each: place for place, each in reversed(list(enumerate(found_in(keys))))}.values()
    )


def found_in(keys: Keys) -> list[bytes]:
    return [each.tobytes() for each in keys.octets]


@settings(deadline=None)
@given(st.lists(octets | times.map(lambda each: uuid.UUID(each).bytes), max_size=20))
def test_times_of_keys(made: list[bytes]) -> None:
    keys = Keys(pa.array([str(uuid.UUID(bytes=each)) for each in made], pa.string()))
    for place, found in enumerate(milliseconds(keys.octets).tolist()):
        moment = time_of(uuid.UUID(bytes=keys.octets[place].tobytes()))
        assert found == (-1 if moment is None else round(moment.timestamp() * 1000))
