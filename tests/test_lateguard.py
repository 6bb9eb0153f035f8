"""The guard file: what it answers, and which files it refuses to read."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest

from idemp.errors import GuardUnusable
from idemp.lateguard import SEGMENT_BYTES, Guard, Span, places_of, scope_of, segments_for, write

NOW = datetime(2026, 11, 22, 6, tzinfo=UTC)
SPAN = Span(since=NOW - timedelta(days=400), until=NOW, ids=1)
VECTORS = {
    ("shop", "00000000-0000-0000-0000-000000000000"): (19, [3575789, 6028522, 92647]),
}


def made(path: Path, *ids: tuple[str, UUID], segments: int = 1, **spans: Span) -> Guard:
    """A guard of these ids."""
    contents = [bytearray(SEGMENT_BYTES) for _ in range(segments)]
    for consumer, key in ids:
        segment, bits = places_of(scope_of(consumer), key.bytes, segments)
        for bit in bits:
            contents[segment][bit >> 3] |= 1 << (bit & 7)
    write(path, map(bytes, contents), spans or dict.fromkeys({consumer for consumer, _ in ids}, SPAN))
    return Guard(path)


@pytest.mark.parametrize(("id_", "expected"), VECTORS.items())
def test_derivation_is_what_it_was(id_: tuple[str, str], expected: tuple[int, list[int]]) -> None:
    """Golden vectors: files of earlier releases are read."""
    segment, bits = places_of(scope_of(id_[0]), UUID(id_[1]).bytes, 20)
    assert (segment, bits[:3]) == expected
    assert len(set(bits)) == 11


def test_every_id_that_was_put_in_is_known(tmp_path: Path) -> None:
    ids = [("shop", uuid.uuid4()) for _ in range(2000)]
    guard = made(tmp_path / "guard", *ids, segments=3)
    assert all(guard.perhaps(*id_) for id_ in ids)


def test_ids_of_other_consumers_are_others(tmp_path: Path) -> None:
    key = uuid.uuid4()
    guard = made(tmp_path / "guard", ("shop", key), shop=SPAN, billing=SPAN)
    assert guard.perhaps("shop", key)
    assert not guard.perhaps("billing", key)
    assert not guard.perhaps("nobody", key)


@pytest.mark.parametrize(
    ("moment", "purged", "covered"),
    [
        (NOW - timedelta(days=8), NOW, True),
        (NOW - timedelta(days=8), None, True),
        (NOW - timedelta(days=8), NOW + timedelta(seconds=1), False),
        (NOW - timedelta(days=401), NOW, False),
    ],
    ids=["covered", "nothing purged", "purged since", "before it began"],
)
def test_span(tmp_path: Path, moment: datetime, purged: datetime | None, covered: bool) -> None:
    guard = made(tmp_path / "guard", ("shop", uuid.uuid4()))
    assert guard.covers("shop", moment, purged) is covered
    assert guard.covers("billing", moment, purged) is (purged is None)


def test_size_is_two_bytes_an_id() -> None:
    assert [segments_for(ids) for ids in (0, 1, 524_288, 524_289, 10_000_000)] == [1, 1, 1, 2, 20]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[1:],
        lambda content: content[: SEGMENT_BYTES - 7] + content[SEGMENT_BYTES:],
        lambda content: bytes([content[0] ^ 1]) + content[1:],
        lambda content: content[:-14] + bytes([content[-14] ^ 1]) + content[-13:],
        lambda content: content.replace(b'"segments": 1', b'"segments": 2'),
        lambda content: content[:-4] + (99).to_bytes(4, "little"),
    ],
    ids=["empty", "last byte", "first byte", "inside", "a bit", "checksum", "description", "version"],
)
def test_damaged_files_are_refused(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "guard"
    made(path, ("shop", uuid.uuid4()))
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(GuardUnusable, match=r"guard"):
        Guard(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(GuardUnusable, match="can't be read"):
        Guard(tmp_path / "guard")


def test_a_new_file_takes_the_place_of_the_old_one_whole(tmp_path: Path) -> None:
    path, old, new = tmp_path / "guard", uuid.uuid4(), uuid.uuid4()
    before = made(path, ("shop", old))
    after = made(path, ("shop", new))
    assert before.perhaps("shop", old)  # whoever has it open keeps it
    assert after.perhaps("shop", new)
    assert [each.name for each in tmp_path.iterdir()] == ["guard"]


def test_a_file_that_can_not_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path, key = tmp_path / "guard", uuid.uuid4()
    made(path, ("shop", key))
    with pytest.raises(ValueError, match="segment 0 has 3 bytes"):
        write(path, [b"abc"], {"shop": SPAN})
    assert Guard(path).perhaps("shop", key)
    assert [each.name for each in tmp_path.iterdir()] == ["guard"]
