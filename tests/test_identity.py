"""Golden vectors: these values stand in databases and must never change."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemp import Key, Unreadable
from idemp.identity import digest, fingerprint, made_at, message_key, output_id, row_digest, uuid7
from idemp.messages import Delivery, parse

SEVEN = "018f0000-0000-7000-8000-000000000000"
FOUR = "9f2a0000-0000-4000-8000-000000000000"


@pytest.mark.parametrize(
    ("original", "text", "scope", "key"),
    [
        (f"s:{SEVEN}", SEVEN, None, SEVEN),
        (f"s:{FOUR}", FOUR, None, FOUR),
        (f"s:{SEVEN}", SEVEN, "shop.Pay", "018f0000-0000-8919-a3cf-20790d9d7c4d"),  # scoped, and ordered by time
        (f"s:{SEVEN.upper()}", SEVEN.upper(), None, "bc8690bd-ae8b-86f6-90d8-d83871556111"),  # not canonical
        ("s:018f0000-0000-8000-8000-000000000000", "018f0000-0000-8000-8000-000000000000", None, "018f0000-0000-8ae0-a21a-95e6d261ed81"),
        ("s:order-7", "order-7", None, "5ae19f7d-8c30-8c20-a5a4-19cdfa8586bc"),
        ("s:zahl-ü", "zahl-ü", None, "db3b62eb-034c-839d-a89a-fa7be8c2bb02"),
        ("s:7", "7", "shop.Pay", "781463ee-6c03-8da1-a63c-bed6784d787a"),
        ("i:7", "7", "shop.Pay", "db6aa3b9-cba9-8f8c-b3ae-490a2d9a1922"),
        ("b:true", "true", "shop.Pay", "5da998ac-e179-8773-a6d9-0fea66ecfea5"),
        ("i:7", "7", "shop.Pay#x-id", "41972dc1-c4fa-8eae-aa9d-b5ae08c6faeb"),
    ],
)  # fmt: skip
def test_message_keys(original: str, text: str, scope: str | None, key: str) -> None:
    assert message_key(original, text, scope) == UUID(key)


@pytest.mark.parametrize(
    ("key", "original", "stored"),
    [
        (Key.message_id(), f"s:{FOUR}", FOUR),
        (Key.header("x-id"), "i:7", "fb83444c-43d1-8bfe-a335-9ae454d57a18"),
        (Key.digest(), "d:" + fingerprint({"shop": "a", "order": {"id": 7}}).hex(), None),
        ("order.id", "i:7", "b46b5684-716a-8fc2-8c16-24c6fee86246"),
        (("shop", "order.id"), '["s:a", "i:7"]', "3e3ecc73-57fc-80d4-b220-419338140c07"),
    ],
)
def test_keys_are_read_from_properties_and_json(key: Any, original: str, stored: str | None) -> None:
    properties = {"message_id": FOUR, "headers": {"x-id": 7}}
    found = Key.of(key).reader("shop.Pay")(properties, {"shop": "a", "order": {"id": 7}})
    assert found[0] == original
    assert stored is None or str(found[1]) == stored


@pytest.mark.parametrize("value", [None, 1.5, [], ["7"], {}, "", " ", "a\0", "\ufffd", "\ud800", "x" * 256, "ü" * 128, 10**100])
def test_what_is_no_id_is_refused(value: Any) -> None:
    with pytest.raises(Unreadable):
        Key.of("id").reader("shop.Pay")({}, {"id": value})
    with pytest.raises(Unreadable):
        Key.header("id").reader("shop.Pay")({"headers": {"id": value}}, {})


def test_an_envelope_without_an_id_is_refused() -> None:
    for properties in ({}, {"message_id": None}, {"message_id": ""}, {"message_id": 7}):
        with pytest.raises(Unreadable, match="the message id has to be text"):
            Key.message_id().reader("shop.Pay")(properties, {})


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"b":1,"a":[1.0,1e3,true,null,"\xc3\xbc"]}', "6b3786ffb2a0279a791ee26cfbe99098"),
        (b'{"a": [1, 1000, true, null, "\\u00fc"], "b": 1.0}', "6b3786ffb2a0279a791ee26cfbe99098"),
        (b'{"id":"9F2A0000-0000-4000-8000-00000000000A"}', "65faa4e33f21402c210d7c617208b25e"),
        (b'{"id":"9f2a0000-0000-4000-8000-00000000000a"}', "65faa4e33f21402c210d7c617208b25e"),
        (b"[]", "1af56aac003276ad49bae9796bb30fe1"),
        (b'{"price":1.25}', "23c49c073fc6154ef3a87fa694bf15df"),
    ],
)
def test_fingerprints(body: bytes, expected: str) -> None:
    assert fingerprint(parse(body)).hex() == expected


def test_output_ids_depend_on_consumer_key_and_position() -> None:
    assert output_id("billing", UUID(SEVEN), 0) == "018f0000-0000-893c-8a9d-fd6e7c861d12"
    assert output_id("billing", UUID(FOUR), 1) == "bf39d902-948b-83db-a6bb-b161e05b9ec1"
    ids = {output_id(consumer, key, ordinal) for consumer in "ab" for key in map(UUID, (SEVEN, FOUR)) for ordinal in range(3)}
    assert len(ids) == 12


def test_digests_of_rows_depend_on_queue_id_and_body() -> None:
    first = Delivery("billing", {"message_id": "7", "headers": {"x": 1}}, b"{}")
    assert row_digest(first) == bytes.fromhex("59cc2be14449bc988305af58c9d72d93")
    assert digest("a", "bc").hex() == "f657d58ed59382298356d21c95353a31"
    for other in (
        Delivery("shop", first.properties, b"{}"),
        Delivery("billing", {"message_id": "8"}, b"{}"),
        Delivery("billing", {"message_id": "7", "type": "shop.Pay"}, b"{}"),
        Delivery("billing", first.properties, b""),
    ):
        assert row_digest(other) != row_digest(first)


def test_the_time_in_a_uuid7_comes_before_the_timestamp() -> None:
    new = uuid7()
    assert made_at({"message_id": new, "timestamp": 5.0}) == int(new.replace("-", "")[:12], 16) / 1000
    assert made_at({"message_id": FOUR, "timestamp": 5}) == 5.0
    assert made_at({"timestamp": True}) is made_at({"timestamp": "5"}) is None
    assert [made_at({"timestamp": stamp}) for stamp in (float("inf"), float("nan"), 10**400, -1e300)] == [None] * 4


@given(st.lists(st.text() | st.integers() | st.booleans(), min_size=2, max_size=2, unique_by=lambda value: (type(value), value)))
def test_different_ids_have_different_keys(values: list[Any]) -> None:
    read = Key.of("id").reader("shop.Pay")
    try:
        keys = [read({}, {"id": value}) for value in values]
    except Unreadable:
        return
    assert keys[0] != keys[1]
    assert keys[0][1] != keys[1][1]
