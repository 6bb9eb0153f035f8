"""Keys, as users write them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from idemp.errors import ConfigurationError
from idemp.identity import Key
from idemp.messages import Message

UUID7 = UUID("0192c8a4-7d3e-7000-8000-000000000001")

EFFECTIVE_IDS: list[tuple[str, Any, str, str, str]] = [
    ("envelope", "order-17", "", "0e65e5d9-662b-863d-b09a-b0b4d1c8c2fe", "order-17"),
    ("envelope", str(UUID7), "", "0192c8a4-7d3e-7000-8000-000000000001", "0192c8a4-7d3e-7000-8000-000000000001"),
    (
        "envelope",
        "0192C8A4-7D3E-7000-8000-000000000001",
        "",
        "d2a1f114-4b98-8ac5-ac2f-41945c44a0a0",
        "0192C8A4-7D3E-7000-8000-000000000001",
    ),
    (
        "envelope",
        "6ba7b810-9dad-11d1-80b4-00c04fd430c8",
        "",
        "6ba7b810-9dad-11d1-80b4-00c04fd430c8",
        "6ba7b810-9dad-11d1-80b4-00c04fd430c8",
    ),
    (
        "envelope",
        "320c3d4d-cc00-875b-8ec9-32d5f69181c0",
        "",
        "009d8a20-3cb6-819a-bac4-0269b97ae807",
        "320c3d4d-cc00-875b-8ec9-32d5f69181c0",
    ),
    ("envelope", ("/shop", "1"), "", "7e55c32d-b5c2-81b6-aea2-9eb31eb817ef", "/shop,1"),
    (
        "envelope",
        ("/shop", str(UUID7)),
        "",
        "0192c8a4-7d3e-729f-be82-0c16012a81a6",
        "/shop,0192c8a4-7d3e-7000-8000-000000000001",
    ),
    ("envelope", "Größe ✓", "", "91205dee-d8c3-8b70-9f35-8fa999450c03", "Größe ✓"),
    ("envelope", "1", "", "1fdfd589-ad8a-8c52-b51c-5689dfb86a09", "1"),
    ("body", "1", "orders.Place", "ea426b9e-bcd7-8eab-a0f9-76252981bed7", "orders.Place#1"),
    ("body", 1, "orders.Place", "8eb8b115-303a-8cb7-9017-99823e907b0a", "orders.Place#1"),
    ("body", True, "orders.Place", "7862c3e0-caf4-80ca-bb6f-680f3f855129", "orders.Place#True"),
    ("body", 1, "orders.Cancel", "aae80d27-9736-80a0-a8c4-6b00fb0af709", "orders.Cancel#1"),
    ("body", ("a", "bc"), "orders.Place", "b0580cee-3692-8ad9-9e80-248aa2858c7a", "orders.Place#a,bc"),
    ("body", ("ab", "c"), "orders.Place", "4c73fde9-4230-841f-b202-2534c3eea4cf", "orders.Place#ab,c"),
    (
        "body",
        UUID7,
        "orders.Place",
        "0192c8a4-7d3e-76d4-b4e1-863203ebcabc",
        "orders.Place#0192c8a4-7d3e-7000-8000-000000000001",
    ),
    (
        "body",
        str(UUID7),
        "orders.Place",
        "0192c8a4-7d3e-70bd-bbe3-7e63f78b4068",
        "orders.Place#0192c8a4-7d3e-7000-8000-000000000001",
    ),
    ("body", date(2026, 1, 1), "orders.Place", "87883be4-0a5b-822f-ae4d-630fdfd7e169", "orders.Place#2026-01-01"),
    (
        "body",
        datetime(2026, 1, 1, 12, 0, tzinfo=UTC),
        "orders.Place",
        "d8562cdc-4500-82c0-b20d-878b90225359",
        "orders.Place#2026-01-01T12:00:00+00:00",
    ),
    ("body", Decimal("12.50"), "orders.Place", "0636892b-832a-8cd2-bfc6-e861fbc833e8", "orders.Place#125E-1"),
    (
        "body",
        -1180591620717411303424,
        "orders.Place",
        "8ca87b13-d345-8795-ab2d-b1d5236f193d",
        "orders.Place#-1180591620717411303424",
    ),
    ("initiation", "request-1", "", "99c9f600-275f-831d-9b6d-94ebaa6f2062", "request-1"),
    ("initiation", str(UUID7), "", "0192c8a4-7d3e-7a0f-acd5-0038b3aa134a", "0192c8a4-7d3e-7000-8000-000000000001"),
]


# Keys as they are written


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("order_id", "field:order_id"), (["a", "b.c"], "field:a,b.c"), ({"header": "x-id"}, "header:x-id"),
        ({"field": "a.b"}, "field:a.b"), ("message_id()", "message_id"), ("digest()", "digest"),
        ("cloudevent()", "cloudevent"), (Key.call(len, "size"), "call:size"), (len, "call:builtins.len"),
    ],
)  # fmt: skip
def test_keys_as_they_are_written(written: Any, name: str) -> None:
    assert Key.parse(written).name == name


@pytest.mark.parametrize("written", [7, {"header": "a", "field": "b"}, {"body": "a"}, {}, [1], [], None])
def test_no_keys(written: Any) -> None:
    with pytest.raises(ConfigurationError):
        Key.parse(written)


def test_header_ids_are_the_same_whatever_the_type() -> None:
    """An id of the envelope belongs to the message; a key of the body to its type."""
    message = Message(body=b'{"id": 1}', message_id="m", headers={"x-id": "1"})
    for key, apart in (
        (Key.header("x-id"), False),
        (Key.message_id(), False),
        (Key.field("id"), True),
        (Key.digest(), True),
    ):
        made = {key.effective(replace(message), {"id": 1}, name).key for name in ("a.A", "a.B")}
        assert (len(made) == 2) is apart, key.name
