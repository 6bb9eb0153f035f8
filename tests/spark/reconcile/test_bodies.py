"""What a log's bodies say, without Spark: the same as what the online consumer claims."""

from __future__ import annotations

import json
from uuid import UUID

import pytest

from idemp.errors import ConfigurationError
from idemp.fingerprint import Fingerprint
from idemp.identity import effective_id
from idemp.messages import UNSTORED_HEADER, Message
from idemp.spark.reconcile.bodies import Read, load, read_envelope, read_row, reader_of

pytestmark = pytest.mark.slow

SHOP = "tests.spark.reconcile.shop"
ORDER_ID = UUID("3b8d6b4e-6d3e-4d5c-9a7e-0d6d1f3f8b11")


def read(type: str | None, body: object, **columns: object) -> Read | None:
    """One row of a log, as the app reads it."""
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    row = {"id": None, "source": None, "headers": None, **columns}
    return read_row(reader_of(load(f"{SHOP}:app")), type=type, body=encoded, **row)  # type: ignore[arg-type]


def test_a_field_of_the_body_is_read_as_its_type_says() -> None:
    found = read("shop.OldOrder", {"order_id": str(ORDER_ID), "sku": "A"})
    expected = effective_id("body", (ORDER_ID,), "shop.Order")
    assert found is not None
    assert (found.type, found.key, found.text) == ("shop.Order", expected.key.bytes, f"shop.Order#{ORDER_ID}")
    assert found.fingerprint == Fingerprint().of({"sku": "A", "order_id": str(ORDER_ID)})


def test_headers_events_and_digests() -> None:
    payment = read("shop.Payment", {}, headers='{"x-payment": "p-1"}')
    event = read("shop.Event", {"at": 1}, id="1", source="/shop")
    count = read("shop.Count", {"n": 1})
    assert payment is not None
    assert payment.key == effective_id("header", "p-1", "shop.Payment\x00header:x-payment").key.bytes
    assert event is not None
    assert event.key == effective_id("envelope", ("/shop", "1")).key.bytes
    assert event.fingerprint == Fingerprint.parse({"except": ["at"]}).of({"at": 2})
    assert count is not None
    assert (count.fingerprint, count.fault) == (None, None)


@pytest.mark.parametrize("type", ["shop.Ping", "billing.Invoice"])
def test_what_the_inbox_knows_nothing_of_is_left_out(type: str) -> None:
    assert read(type, {}) is None


@pytest.mark.parametrize(
    ("type", "body", "fault"),
    [
        ("shop.Order", b"no json", "UndecodableMessage"),
        ("shop.Order", {"order_id": "x"}, "UndecodableMessage"),
        ("shop.Payment", {}, "MissingId"),
        ("shop.Event", {}, "MissingId"),
        (None, {}, "UnknownMessageType"),
    ],
)
def test_what_a_consumer_parks_has_a_fault(type: str | None, body: object, fault: str) -> None:
    found = read(type, body)
    assert found is not None
    assert (found.key, found.fault) == (None, fault)


@pytest.mark.parametrize("headers", ["{", "[]", '"text"', "1"])
def test_headers_that_are_no_object_are_a_fault_of_their_row(headers: str) -> None:
    found = read("shop.Event", {}, id="1", headers=headers)
    assert found is not None
    assert (found.text, found.fault) == ("1", "UndecodableMessage")


def test_without_an_app_other_bodies_than_json_differ_from_each_other() -> None:
    first, second = (read_envelope(Message(body=body, message_id="1")) for body in (b"\x00", b"\x01"))
    assert first.fingerprint != second.fingerprint
    assert (first.fault, first.text) == (None, "1")


def test_outputs_that_may_be_worded_otherwise_have_no_fingerprint() -> None:
    assert read_envelope(Message(body=b"{}", message_id="1", headers={UNSTORED_HEADER: 1})).fingerprint is None


@pytest.mark.parametrize(
    ("name", "words"),
    [("nowhere:app", "nowhere"), (f"{SHOP}:order", "is no App"), (f"{SHOP}:renamed", "under two ids")],
)
def test_apps_that_can_not_be_used(name: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        load(name)
