"""Keys, as users write them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from idemp.errors import ConfigurationError, UnaddressableMessage
from idemp.identity import Key
from idemp.messages import Message


def order_of(body: dict[str, Any]) -> object:
    return body["order"]


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("order_id", "field:order_id"), (["a", "b.c"], "field:a,b.c"), ({"header": "x-id"}, "header:x-id"),
        ({"field": "a.b"}, "field:a.b"), ("message_id()", "message_id"), ("digest()", "digest"),
        ("cloudevent()", "cloudevent"), (Key.call(len, "size"), "call:size"), (order_of, "call:tests.test_keys.order_of"),
    ],
)  # fmt: skip
def test_keys_as_they_are_written(written: Any, name: str) -> None:
    assert Key.parse(written).name == name


@pytest.mark.parametrize("written", [7, {"header": "a", "field": "b"}, {"body": "a"}, {}, [1], [], None])
def test_no_keys(written: Any) -> None:
    with pytest.raises(ConfigurationError):
        Key.parse(written)


@pytest.mark.parametrize("function", [id, repr, len, str])
def test_a_function_of_pythons_own_is_no_key(function: Any) -> None:
    """Somebody forgot the quotes; `id` gives each delivery another one."""
    with pytest.raises(ConfigurationError, match=f'Write key="{function.__name__}"'):
        Key.parse(function)


def test_only_ids_of_the_envelope_are_the_same_whatever_the_type() -> None:
    """An id of the envelope belongs to the message; a key of the body or of a header to its type."""
    message = Message(body=b'{"id": 1}', message_id="m", headers={"x-id": "1"})
    for key, apart in (
        (Key.header("x-id"), True),
        (replace(Key.header("x-id"), by_type=False), False),
        (Key.message_id(), False),
        (Key.field("id"), True),
        (Key.digest(), True),
    ):
        made = {key.effective(replace(message), {"id": 1}, name).key for name in ("a.A", "a.B")}
        assert (len(made) == 2) is apart, key.name


def test_an_entity_has_one_name_whatever_the_type_says() -> None:
    """Numbers, texts and UUIDs count as texts; several values can't run into each other."""
    message, one, two = Message(body=b""), Key.field("id"), Key.field("tenant", "id")
    assert one.entity(message, {"id": 7}, "shop.Place") == one.entity(message, {"id": "7"}, "shop.Cancel") == "7"
    names = [
        two.entity(message, {"tenant": a, "id": b}, "shop.Place") for a, b in (("a/b", "c"), ("a", "b/c"), ("a", "b"))
    ]
    assert names == ["a%2Fb/c", "a/b%2Fc", "a/b"]


@pytest.mark.parametrize("body", [{}, {"id": None}, {"id": ""}, {"id": [1.5]}, {"id": "x" * 2000}, {"id": "a\x00"}])
def test_a_message_that_names_no_entity_says_why(body: dict[str, Any]) -> None:
    with pytest.raises(UnaddressableMessage, match=r"shop\.Place.*field:id"):
        Key.field("id").entity(Message(body=b""), body, "shop.Place")
