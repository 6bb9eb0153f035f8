"""What makes two deliveries the same message: golden vectors, because stored rows depend on every bit."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemp.canonical import encode
from idemp.errors import InvalidId, MissingId, UnaddressableMessage, UndecodableMessage, UnorderableMessage
from idemp.fingerprint import Fingerprint, fingerprints_conflict
from idemp.identity import Key, effective_id, new_id, output_id, time_of
from idemp.messages import Message, canonical_json, parse_json

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
    ("header", "order-17", "header:x-id", "8cbfd4a9-d270-84ea-8173-c8897ee862e8", "order-17"),
    (
        "header",
        "order-17",
        "orders.Place\x00header:x-id",
        "12f827e5-a745-8a12-b8a9-4d44072a8d16",
        "order-17",
    ),
    ("initiation", "request-1", "", "99c9f600-275f-831d-9b6d-94ebaa6f2062", "request-1"),
    ("initiation", str(UUID7), "", "0192c8a4-7d3e-7a0f-acd5-0038b3aa134a", "0192c8a4-7d3e-7000-8000-000000000001"),
]


@pytest.mark.parametrize(("scope", "value", "message_type", "key", "text"), EFFECTIVE_IDS)
def test_effective_ids(scope: Any, value: Any, message_type: str, key: str, text: str) -> None:
    """A change here is a new version beside the old one, never another value."""
    found = effective_id(scope, value, message_type)
    assert (str(found.key), found.text) == (key, text)


OUTPUT_IDS = [
    ("idemp", "orders", "0192c8a4-7d3e-7000-8000-000000000001", 0, "0192c8a4-7d3e-7677-900e-807ddb35411c"),
    ("idemp", "orders", "0192c8a4-7d3e-7000-8000-000000000001", 1, "0192c8a4-7d3e-7213-9042-0ded8944c7f6"),
    ("idemp", "billing", "0192c8a4-7d3e-7000-8000-000000000001", 0, "0192c8a4-7d3e-7ed3-8a15-dfebdea38807"),
    ("other", "orders", "0192c8a4-7d3e-7000-8000-000000000001", 0, "0192c8a4-7d3e-7c6a-b068-e23b8d392262"),
    ("idemp", "orders", "320c3d4d-cc00-875b-8ec9-32d5f69181c0", 0, "e5566275-13f8-8778-960a-15b659a7c89f"),
    ("idemp", "orders", "320c3d4d-cc00-875b-8ec9-32d5f69181c0", 9999, "029d0c4e-ee48-8686-900c-019a049dea5a"),
]


@pytest.mark.parametrize(("namespace", "consumer", "effective", "ordinal", "expected"), OUTPUT_IDS)
def test_output_ids(namespace: str, consumer: str, effective: str, ordinal: int, expected: str) -> None:
    assert str(output_id(namespace, consumer, UUID(effective), ordinal)) == expected


FINGERPRINTS: list[tuple[Any, Any, str]] = [
    ("all", {"a": 1, "b": [1.0, "é", None]}, "038e3b94ff7b6e91a49b610a951c4b9d83bed0"),
    ("all", [], "028e3b4f53cda18c2baa0c0354bb5f9a3ecbe5"),
    ("all", None, "028e3b74234e98afe7498fb5daf1f36ac2d78a"),
    ("all", 0, "028e3b5feceb66ffc86f38d952786c6d696c79"),
    ("all", 0.0, "038e3b5feceb66ffc86f38d952786c6d696c79"),
    ("all", False, "028e3bfcbcf165908dd18a9e49f7ff27810176"),
    ("all", "", "028e3b12ae32cb1ec02d01eda3581b127c1fee"),
    ({"fields": ["a"]}, {"a": 1, "b": 2}, "02d2c2015abd7f5cc57a2dd94b7590f04ad808"),
    ({"except": ["b"]}, {"a": 1, "b": 2}, "024e1c015abd7f5cc57a2dd94b7590f04ad808"),
    ({"fields": ["a"]}, [1, 2], "02d2c249a64717d5d4cb19952e6eac2946415c"),
]
FORMER_FINGERPRINTS = [
    "018e3bd89d17144e844a6619b375919934b213", "018e3b4f53cda18c2baa0c0354bb5f9a3ecbe5",
    "018e3b74234e98afe7498fb5daf1f36ac2d78a", "018e3b5feceb66ffc86f38d952786c6d696c79",
    "018e3b8aed642bf5118b9d3c859bd4be35ecac", "018e3bfcbcf165908dd18a9e49f7ff27810176",
    "018e3b12ae32cb1ec02d01eda3581b127c1fee", "01d2c2015abd7f5cc57a2dd94b7590f04ad808",
    "014e1c015abd7f5cc57a2dd94b7590f04ad808", "01d2c249a64717d5d4cb19952e6eac2946415c",
]  # fmt: skip


@pytest.mark.parametrize(("spec", "payload", "expected"), FINGERPRINTS)
def test_fingerprints(spec: Any, payload: Any, expected: str) -> None:
    made = Fingerprint.parse(spec).of(payload)
    assert made is not None
    assert made.hex() == expected


@pytest.mark.parametrize(("now", "former"), list(zip(FINGERPRINTS, FORMER_FINGERPRINTS, strict=True)))
def test_fingerprints_of_earlier_releases(now: tuple[Any, Any, str], former: str) -> None:
    """A redelivery of what they handled is no conflict; another payload is one, where they tell it apart."""
    spec, _, text = now
    for one, other in ((former, text), (text, former), (former, former)):
        assert not fingerprints_conflict(bytes.fromhex(one), bytes.fromhex(other))
    another = Fingerprint.parse(spec).of({"a": "another"})
    assert fingerprints_conflict(bytes.fromhex(former), another)


UUID_TEXT = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
SPELLINGS = [
    [1, 1.0], [0, 0.0, -0.0], [-7, -7.0], [10**16, 1e16], [{"a": [1, 2.5]}, {"a": [1.0, 2.5]}],
    [
        UUID_TEXT, UUID_TEXT.upper(), f"{{{UUID_TEXT}}}", UUID_TEXT.replace("-", ""), f"urn:uuid:{UUID_TEXT}",
        f"URN:UUID:{UUID_TEXT.upper()}",
    ],
]  # fmt: skip


@pytest.mark.parametrize("spellings", SPELLINGS)
@pytest.mark.parametrize("spec", ["all", {"fields": ["v"]}, {"except": ["w"]}])
def test_one_value_in_several_spellings_is_one_payload(spellings: list[Any], spec: Any) -> None:
    made = [Fingerprint.parse(spec).of({"v": value}) for value in spellings]
    assert not any(fingerprints_conflict(one, other) for one in made for other in made)
    for other in (1.5, "1", True, "6ba7b810-9dad-11d1-80b4-00c04fd430c9", f"x{UUID_TEXT}", None):
        assert all(fingerprints_conflict(one, Fingerprint.parse(spec).of({"v": other})) for one in made)


def test_all_vectors_are_different_ids() -> None:
    keys = [key for _, _, _, key, _ in EFFECTIVE_IDS]
    assert len(set(keys)) == len(keys)


# Ids


def test_only_the_canonical_text_is_the_uuid() -> None:
    text = str(UUID7)
    assert effective_id("envelope", text).key == UUID7
    assert effective_id("envelope", UUID7).key == UUID7
    for other in (
        text.upper().replace("0192C8A4", "0192C8A4"),
        f"{{{text}}}",
        text.replace("-", ""),
        f"urn:uuid:{text}",
    ):
        assert effective_id("envelope", other).key != UUID7


def test_a_foreign_uuid8_is_digested() -> None:
    """Our own digests live in version 8: nobody shall choose one."""
    foreign = effective_id("envelope", "order-17").key
    assert foreign.version == 8
    assert effective_id("envelope", str(foreign)).key != foreign


def test_time_survives() -> None:
    moment = datetime(2026, 3, 1, 12, 0, 0, 123000, tzinfo=UTC)
    made = new_id(moment)
    assert time_of(made) == moment
    for scope in ("envelope", "body"):
        assert time_of(effective_id(scope, ("tenant", str(made)), "t").key) == moment  # type: ignore[arg-type]
    assert time_of(output_id("idemp", "orders", made, 3)) == moment


def test_times_beyond_the_calendar_are_none() -> None:
    assert time_of(UUID("ffffffff-ffff-7000-8000-000000000001")) is None
    assert effective_id("envelope", "ffffffff-ffff-7000-8000-000000000001").key.version == 7


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Decimal("1.0"), Decimal(1)),
        (Decimal(100), Decimal("1E+2")),
        (Decimal("-0"), Decimal("0.00")),
        (datetime(2026, 1, 1, tzinfo=UTC), datetime.fromisoformat("2026-01-01T00:00:00Z")),
    ],
)
def test_equal_values_are_one_id(one: Any, other: Any) -> None:
    """Key and text: another text under the same key would be taken for a collision."""
    assert effective_id("body", one, "t") == effective_id("body", other, "t")


def test_decimals_are_exact() -> None:
    """Beyond the precision of the context, too."""
    long = Decimal("1." + "0" * 40 + "1")
    assert effective_id("body", long, "t").key != effective_id("body", Decimal(1), "t").key


@pytest.mark.parametrize(
    "value",
    ["", " ", "x" * 256, "é" * 128, "a\x00b", "\ud800", 1.5, None, (), [], {}, b"x", Decimal("NaN"), Decimal("inf")],
)
def test_no_ids(value: Any) -> None:
    with pytest.raises((InvalidId, MissingId)):
        Key.header("x-id").effective(Message(body=b"", headers={"x-id": value}), None, "t")


@pytest.mark.parametrize("scope", ["envelope", "header", "body", "initiation", "prepared"])
@pytest.mark.parametrize("value", ["", " \t", ("a", ""), 1.5, None, b"x", {}, ["a", " "], (), []])
def test_every_id_is_checked_in_one_place(scope: Any, value: Any) -> None:
    with pytest.raises(InvalidId):
        effective_id(scope, value)


@pytest.mark.parametrize("scope", ["envelope", "initiation", "prepared"])
def test_ids_that_are_texts_alone(scope: Any) -> None:
    for value in (5, True, ("a", 5), date(2026, 1, 1), Decimal(1)):
        with pytest.raises(InvalidId, match=r"type \w+ can't be"):
            effective_id(scope, value)


def test_a_header_s_list_of_one_is_not_its_item() -> None:
    key = Key.header("x-id")
    values = [1, [1], "1", ["1"], [1, 2], [2, 1], "1,2"]
    found = [key.effective(Message(body=b"", headers={"x-id": value}), None, "t") for value in values]
    assert len({each.key for each in found}) == len(values)
    assert [each.text for each in found] == ["1", "[1]", "1", "[1]", "1,2", "2,1", "1,2"]
    former = replace(key, by_type=False)  # as earlier releases took it
    assert former.effective(Message(body=b"", headers={"x-id": [1]}), None, "t") == former.effective(
        Message(body=b"", headers={"x-id": 1}), None, "t"
    )


@pytest.mark.parametrize("value", [1.5, [1.5], {"a": 1}])
def test_what_to_do_about_a_header_that_is_no_id(value: Any) -> None:
    """A decimal of AMQP comes as a float: it is no advice to use one."""
    with pytest.raises(InvalidId, match="can't be") as raised:
        Key.header("x-id").effective(Message(body=b"", headers={"x-id": value}), None, "t")
    assert "send the header as text" in str(raised.value)
    assert "decimal" not in str(raised.value)


@pytest.mark.parametrize("text", ["\ufffd", "m-\ufffd", "\ufffd" * 80])
def test_what_was_replaced_is_no_id(text: str) -> None:
    """Bytes that are not UTF-8 all become this character: ids that differ in them would be one."""
    message = Message(body=b"{}", message_id=text, headers={"x-id": text, "cloudEvents_source": "/shop"})
    for key in (Key.message_id(), Key.cloudevent(), Key.header("x-id")):
        with pytest.raises(InvalidId, match="not UTF-8"):
            key.effective(message, {}, "t")
        with pytest.raises(UnorderableMessage, match="not UTF-8"):
            key.order(message, {}, "t")
        with pytest.raises(UnaddressableMessage, match="not UTF-8"):
            key.entity(message, {}, "t")
    assert Key.field("id").effective(message, {"id": text}, "t").text == f"t#{text}", "JSON says what it is"


def test_255_bytes_are_an_id() -> None:
    assert effective_id("envelope", "x" * 255).text == "x" * 255
    assert effective_id("envelope", "é" * 127).text == "é" * 127


KEY_PARTS = st.one_of(
    st.text(max_size=20), st.integers(), st.booleans(), st.uuids(), st.dates(),
    st.datetimes(timezones=st.just(UTC)), st.decimals(allow_nan=False, allow_infinity=False),
)  # fmt: skip


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(type(a) is type(b) and a == b for a, b in zip(one, other, strict=True))


@given(st.lists(KEY_PARTS, min_size=1, max_size=4).map(tuple), st.lists(KEY_PARTS, min_size=1, max_size=4).map(tuple))
def test_encodings_are_injective(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert (encode(one) == encode(other)) is same(one, other)


@given(st.lists(st.text(max_size=5), min_size=1, max_size=4), st.data())
def test_moving_a_border_makes_another_key(parts: list[str], data: st.DataObject) -> None:
    """("a", "bc") is not ("ab", "c")."""
    text = "".join(parts)
    cut = data.draw(st.integers(0, len(text)))
    other = [text[:cut], text[cut:]]
    assert (encode(parts) == encode(other)) is (parts == other)


@given(st.uuids(), st.integers(0, 9999), st.integers(0, 9999))
def test_output_ids_of_one_handling_differ(effective: UUID, one: int, other: int) -> None:
    made = [output_id("idemp", "orders", effective, ordinal) for ordinal in (one, other)]
    assert (made[0] == made[1]) is (one == other)
    assert made[0] != output_id("idemp", "billing", effective, one)
    assert made[0] != output_id("other", "orders", effective, one)


# Payloads

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def shuffled(value: Any) -> Any:
    """The same JSON value with every object's keys in another order."""
    if isinstance(value, dict):
        return {name: shuffled(item) for name, item in reversed(value.items())}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


@given(JSON, st.sampled_from([None, 0, 2]), st.booleans())
def test_layout_changes_no_fingerprint(value: Any, indent: int | None, ascii_only: bool) -> None:
    layout = json.dumps(shuffled(value), indent=indent, ensure_ascii=ascii_only).encode()
    read = parse_json(Message(body=layout))
    assert canonical_json(read) == canonical_json(value)
    assert Fingerprint().of(read) == Fingerprint().of(value)
    assert parse_json(Message(body=canonical_json(value))) == value


def equal_json(one: Any, other: Any) -> bool:
    """As JSON has it: true is no 1, while 1.0 is; 1e23 is the number that is written so, not the float's."""
    if {type(one), type(other)} == {int, float}:
        return Decimal(repr(one)) == Decimal(repr(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal_json, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal_json(one[name], other[name]) for name in one)
    return (isinstance(one, bool) is isinstance(other, bool)) and one == other


@given(JSON, JSON)
def test_other_payload_other_fingerprint(one: Any, other: Any) -> None:
    differ = not equal_json(one, other)
    assert fingerprints_conflict(Fingerprint().of(one), Fingerprint().of(other)) is differ


@pytest.mark.parametrize(
    "body",
    [b'{"a":1,"a":1}', b"NaN", b"[Infinity]", b"-Infinity", b"1e999", b'"\\ud800"', b"\xff", b"", b"\xef\xbb\xbf{}"],
)
def test_not_strict_json(body: bytes) -> None:
    with pytest.raises(UndecodableMessage):
        parse_json(Message(body=body))


def test_choices_of_fields_are_never_compared() -> None:
    everything, some = Fingerprint().of({"a": 1}), Fingerprint.parse({"fields": ["a"]}).of({"a": 2})
    assert not fingerprints_conflict(everything, some)
    assert Fingerprint.parse({"fields": ["b", "a"]}) == Fingerprint.parse({"fields": ["a", "b"]})
    assert Fingerprint.parse("off").of({"a": 1}) is None


def test_dates_are_no_times() -> None:
    assert effective_id("body", date(2026, 1, 1), "t").key != effective_id("body", datetime(2026, 1, 1), "t").key
    later = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=1)
    assert effective_id("body", later, "t").key != effective_id("body", datetime(2026, 1, 1, tzinfo=UTC), "t").key
