"""Golden vectors: these values stand in databases and must never change."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemp import Key, Unreadable
from idemp.identity import digest, event_id, fingerprint, made_at, message_digest, message_key, name_number, output_id, uuid7
from idemp.messages import Delivery, parse
from idemp.ports import Claim

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
    absent, wrong = "the message has no message_id: let its producer set one", "the message id has to be text"
    for properties, reason in (
        ({}, absent),
        ({"message_id": None}, absent),
        ({"message_id": ""}, wrong),
        ({"message_id": 7}, wrong),
    ):
        with pytest.raises(Unreadable, match=reason):
            Key.message_id().reader("shop.Pay")(properties, {})


@pytest.mark.parametrize(
    ("key", "document", "reason"),
    [
        ("customer.id", {"total": 1, "customer": {"name": "A"}}, "no field 'customer.id', .*: its 'customer' has name"),
        ("customer.id", {"customer": 7}, "no field 'customer.id', .*: its 'customer' is an integer, not an object"),
        ("customer.id", {"total": 1}, "no field 'customer.id', which its key names: the body has total"),
        (("shop", "order"), {"shop": 1, "id": 2}, "no field 'order', which its key names: the body has id, shop"),
        (("shop", "order"), {"shop": 1, "order": None}, "field 'order' is null, which is not a usable id"),
        ("id", {str(number) * 9: 1 for number in range(10**5, 10**5 + 99)}, "the body has 1000.{395}…$"),
        ("id", {"id": 10**100}, "field 'id' is an integer of more than 100 digits"),
        (Key.header("x-id"), {}, "no header 'x-id', which its key names: there are headers a, b"),
    ],
)
def test_a_missing_id_says_which_and_what_is_there(key: Any, document: Any, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        Key.of(key).reader("shop.Pay")({"headers": {"b": 1, "a": 2}}, document)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"b":1,"a":[1.0,1e3,true,null,"\xc3\xbc"]}', "6b3786ffb2a0279a791ee26cfbe99098"),
        (b'{"a": [1, 1000, true, null, "\\u00fc"], "b": 1.0}', "6b3786ffb2a0279a791ee26cfbe99098"),
        (b'{"id":"9F2A0000-0000-4000-8000-00000000000A"}', "65faa4e33f21402c210d7c617208b25e"),
        (b'{"id":"9f2a0000-0000-4000-8000-00000000000a"}', "65faa4e33f21402c210d7c617208b25e"),
        (b"[]", "1af56aac003276ad49bae9796bb30fe1"),
        (b'{"price":1.25}', "23c49c073fc6154ef3a87fa694bf15df"),
        (b'{"9F2A0000-0000-4000-8000-00000000000A":1,"a":2}', "e4579921749b916b0f29ca438996c7e4"),
        (b'{"9f2a0000-0000-4000-8000-00000000000a":1,"a":2}', "e4579921749b916b0f29ca438996c7e4"),
        (b'["x\\"9F2A0000-0000-4000-8000-00000000000A"]', "35d211cde0346e50634cbba2d51cf7f9"),
        (b'["x\\"9f2a0000-0000-4000-8000-00000000000a"]', "03cd7d8ca1aa1f45391e052054b0da53"),
    ],
)
def test_fingerprints(body: bytes, expected: str) -> None:
    assert fingerprint(parse(body)).hex() == expected


def test_output_ids_depend_on_consumer_key_and_position() -> None:
    assert output_id("billing", UUID(SEVEN), 0) == "018f0000-0000-893c-8a9d-fd6e7c861d12"
    assert output_id("billing", UUID(FOUR), 1) == "bf39d902-948b-83db-a6bb-b161e05b9ec1"
    ids = {output_id(consumer, key, ordinal) for consumer in "ab" for key in map(UUID, (SEVEN, FOUR)) for ordinal in range(3)}
    assert len(ids) == 12


def test_what_waits_undecoded_is_identified_by_all_that_its_producer_wrote() -> None:
    first = Delivery("billing", {"message_id": "7", "headers": {"x": 1}}, b"{}")
    known = message_digest(first, "failed")
    assert known == bytes.fromhex("4e0718b295baa07b1856b87329e35503")
    assert digest("a", "bc").hex() == "f657d58ed59382298356d21c95353a31"
    for other in (
        Delivery("shop", first.properties, b"{}"),
        Delivery("billing", {**first.properties, "message_id": "8"}, b"{}"),
        Delivery("billing", {**first.properties, "type": "shop.Pay"}, b"{}"),
        Delivery("billing", {**first.properties, "headers": {"x": 2}}, b"{}"),
        Delivery("billing", {**first.properties, "headers": {"x": 1, "cloudEvents_source": "/a"}}, b"{}"),
        Delivery("billing", first.properties, b""),
    ):
        assert message_digest(other, "failed") != known
    assert message_digest(first, "moved") != known
    bare = Delivery("billing", {"message_id": "7"}, b"{}")
    for empty in ({}, {"headers": {}}, {"headers": {"x-delivery-count": 1}}):  # a quorum queue adds that to a redelivery
        assert message_digest(Delivery("billing", {"message_id": "7", **empty}, b"{}"), "failed") == message_digest(
            bare, "failed"
        )
    for content in ("application/cloudevents+json", "application/cloudevents+json ; charset=utf-8"):
        assert message_digest(Delivery("billing", {"content_type": content}, b"{}"), "failed") is not None
    assert message_digest(Delivery("billing", {"headers": {"ce-id": "7", "ce-type": "x"}}, b"{}"), "failed") is not None
    added = {"x": 1, "x-delivery-count": 2, "x-death": [{"count": 1}], "x-first-death-queue": "a"}
    assert message_digest(Delivery("billing", {**first.properties, "headers": added}, b"{}"), "failed") == known
    assert message_digest(Delivery("billing", {}, b"{}"), "failed") is None


def test_what_waits_for_a_handling_is_identified_by_its_claim() -> None:
    first = Claim("billing", "shop.Pay", UUID(int=7), "i:7", b"f" * 16, 1.0)
    known = first.waiting_identity("billing")
    assert replace(first, made_at=2.0, resends="always").waiting_identity("billing") == known
    others: list[dict[str, Any]] = [{"consumer": "shop"}, {"type": "shop.Order"}, {"key": UUID(int=8)}, {"original": "s:7"}]
    others.append({"fingerprint": b"g" * 16})
    found = {known, first.waiting_identity("shop"), *(replace(first, **other).waiting_identity("billing") for other in others)}
    assert len(found) == 7


def test_numbers_follow_from_names() -> None:
    assert name_number("consumer", "billing") == 174019997
    found = {name_number(kind, f"name {number}") for kind in ("consumer", "type") for number in range(1000)}
    assert len(found) == 2000
    assert all(0 < number < 2**31 for number in found)


DRAFT = "0625a3d8-9bc1-7000-8000-000000000000"  # an earlier layout of version 7: 36 bits of seconds
MD5 = "9e107d9d-372b-7682-8bd8-1d3542a419d6"
OLD_MD5 = "00000d9d-372b-7682-8bd8-1d3542a419d6"


def test_a_message_is_as_old_as_it_plausibly_says() -> None:
    new = uuid7()
    at = int(new.replace("-", "")[:12], 16) / 1000
    for stamp in (5.0, 1.7e9, None):
        assert made_at({"message_id": new, "timestamp": stamp}) == made_at({"message_id": new.upper()}) == at
    for id in (FOUR, DRAFT, MD5, OLD_MD5, "7"):
        assert made_at({"message_id": id, "timestamp": 1_700_000_000}) == 1.7e9
        assert made_at({"message_id": id}) is None
    assert made_at({"timestamp": 1_700_000_000_500}) == 1_700_000_000.5  # milliseconds
    tomorrow = time.time() + 86_000
    assert made_at({"timestamp": tomorrow}) == tomorrow
    nowhere = (True, "5", 5, -1, tomorrow + 2_000, tomorrow * 1e6, float("inf"), float("nan"), 10**400, -1e300)
    assert [made_at({"timestamp": stamp}) for stamp in nowhere] == [None] * len(nowhere)


@pytest.mark.parametrize(
    "texts",
    [
        ["3.3e+23", "330000000000000000000000", "33E22", "330000000000000000000000.0"],
        ["1e23", "100000000000000000000000"],
        ["12345678901234567890.0", "12345678901234567890"],
        ["9007199254740993", "9007199254740993.0", "9.007199254740993e15"],
        ["-0.0", "0", "0e5"],
        ["1.5", "15e-1"],
    ],
)
def test_equal_numbers_are_one_value_to_each_rule(texts: list[str]) -> None:
    bodies = [f'{{"id": {text}, "paid": true}}'.encode() for text in texts]
    documents = list(map(parse, bodies))
    assert len(set(map(fingerprint, documents))) == 1
    assert len({Key.digest().reader("shop.Pay")({}, document) for document in documents}) == 1
    assert len({str(document["id"]) for document in documents}) == 1
    if "1.5" not in texts:
        assert len({Key.of("id").reader("shop.Pay")({}, document) for document in documents}) == 1


@pytest.mark.parametrize(
    "text", ["1E-9999999999999999999", "1E9999999999999999999", "1e400", "0.1000000000000000055511151231257827"]
)
def test_a_number_that_no_float_keeps_is_unreadable(text: str) -> None:
    with pytest.raises(Unreadable, match="the body is not JSON"):
        parse(f"[{text}]".encode())


def test_uuids_that_differ_in_case_are_one_id() -> None:
    for id in (SEVEN, FOUR, "018f0000-0000-8b07-9e79-a122c92d4bfb"):
        for read in (Key.of("id").reader("shop.Pay"), Key.header("id").reader("shop.Pay"), Key.message_id().reader("shop.Pay")):
            small, capital = [read({"message_id": each, "headers": {"id": each}}, {"id": each}) for each in (id, id.upper())]
            assert small == capital
        assert event_id("/shop", id) == event_id("/shop", id.upper())
    assert Key.of("id").reader("shop.Pay")({}, {"id": "ABC"}) != Key.of("id").reader("shop.Pay")({}, {"id": "abc"})


@given(st.lists(st.text() | st.integers() | st.booleans(), min_size=2, max_size=2, unique_by=lambda value: (type(value), value)))
def test_different_ids_have_different_keys(values: list[Any]) -> None:
    read = Key.of("id").reader("shop.Pay")
    try:
        keys = [read({}, {"id": value}) for value in values]
    except Unreadable:
        return
    assert keys[0] != keys[1]
    assert keys[0][1] != keys[1][1]
