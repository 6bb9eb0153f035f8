"""The spool's tables: offsets without gaps, in the order of commits, on every database."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from sqlalchemy import text

from idemp.columns import Columns
from idemp.errors import ConfigurationError, OffsetsLost, StoreUnavailable
from idemp.inbox.sql import create_engine_safely
from idemp.spool import Level, SpoolStore

Opened = Callable[[str], SpoolStore]
MOMENT = datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)


def row(number: int, body: bytes = b"{}") -> Columns:
    return Columns(f"m-{number}", "shop.Order", body, None, None, "")


@pytest.fixture
def store(database_url: str, opened: Opened) -> SpoolStore:
    made = opened(database_url)
    made.create("orders")
    return made


def ids(store: SpoolStore, queue: str = "orders") -> list[str | None]:
    level = store.level(queue)
    return [each.id for each in store.read(queue, level.first, level.next)]


def test_row_comes_back_as_it_went_in(store: SpoolStore) -> None:
    rows = [
        Columns("É-1", "shop.Order", b"\x00\xff", '{"a": "\\u0000"}', MOMENT, ""),
        Columns(None, None, b"", None, None, ""),
    ]
    assert store.append("orders", rows)
    assert list(store.read("orders", 0, 2)) == [
        each._replace(position=f"orders#{offset}") for offset, each in enumerate(rows)
    ]


def test_queues_have_spools_of_their_own(store: SpoolStore) -> None:
    for queue in ("returns", "Orders"):
        store.create(queue)
        store.create(queue)
    assert store.append("orders", [row(1), row(2)])
    assert store.append("returns", [row(3)])
    assert [ids(store, queue) for queue in ("orders", "returns", "Orders")] == [["m-1", "m-2"], ["m-3"], []]


def test_made_by_several_at_once(database_url: str, opened: Opened) -> None:
    failed: list[BaseException] = []

    def make() -> None:
        try:
            opened(database_url).create("orders")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failed == []
    assert opened(database_url).level("orders") == Level(0, 0, 0)


def test_full_spool_takes_nothing_and_an_empty_one_takes_anything(store: SpoolStore) -> None:
    assert store.append("orders", [row(1), row(2)], most_messages=1)
    assert not store.append("orders", [row(3)], most_messages=2)
    assert store.append("orders", [row(3)], most_messages=3, most_bytes=6)
    assert not store.append("orders", [row(4)], most_bytes=6)
    assert store.level("orders") == Level(0, 3, 6)


def test_released_rows_are_gone_and_make_room(store: SpoolStore) -> None:
    assert store.append("orders", [row(number, b"x" * number) for number in range(10)])
    assert store.release("orders", 4) == 4
    assert store.level("orders") == Level(4, 10, 4 + 5 + 6 + 7 + 8 + 9)
    assert ids(store) == [f"m-{number}" for number in range(4, 10)]
    assert store.release("orders", 4) == 0
    assert store.release("orders", 1000) == 6
    assert store.level("orders") == Level(10, 10, 0)
    with pytest.raises(OffsetsLost, match="keeps nothing before offset 10, and offset 4 is next"):
        list(store.read("orders", 4, 10))


def test_release_goes_in_short_transactions(store: SpoolStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idemp.spool.store._RELEASED_AT_ONCE", 3)
    assert store.append("orders", [row(number) for number in range(10)])
    assert store.release("orders", 8) == 8
    assert ids(store) == ["m-8", "m-9"]


def test_whoever_sees_an_offset_sees_all_before_it(database_url: str, store: SpoolStore, opened: Opened) -> None:
    """Three write at once, in transactions of different length, one fails now and then; a reader never misses any."""
    writing, sizes = threading.Barrier(4), (1, 7, 40)
    failed: list[BaseException] = []

    def write(size: int) -> None:
        mine = opened(database_url)
        writing.wait()
        try:
            for turn in range(12):
                mine.append("orders", [row(turn) for _ in range(size)], most_messages=None if turn % 3 else 1)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(size,)) for size in sizes]
    for each in threads:
        each.start()
    writing.wait()
    seen = 0
    while any(each.is_alive() for each in threads) or seen < store.level("orders").next:
        end = store.level("orders").next
        seen += len(list(store.read("orders", seen, end)))
        assert seen == end
    assert failed == []
    assert seen >= 8 * sum(sizes)


def test_without_a_spool(store: SpoolStore) -> None:
    with pytest.raises(ConfigurationError, match=r"no spool of 'returns'.*idemp pipeline spool returns"):
        store.level("returns")


def test_queue_with_a_name_too_long_for_positions(store: SpoolStore) -> None:
    with pytest.raises(ConfigurationError, match="240 bytes"):
        store.create("q" * 240)


def test_database_that_is_away() -> None:
    store = SpoolStore(create_engine_safely("postgresql://me:secret@127.0.0.1:1/shop"))
    with pytest.raises(StoreUnavailable, match=r"can't be reached") as raised:
        store.append("orders", [row(1)])
    assert "secret" not in str(raised.value)


def test_user_who_may_make_no_tables(postgresql_url: str, opened: Opened) -> None:
    engine = create_engine_safely(postgresql_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE ROLE spool_reader_of_test LOGIN PASSWORD 'x'"))
    try:
        url = engine.url.set(username="spool_reader_of_test", password="x").render_as_string(hide_password=False)
        with pytest.raises(
            ConfigurationError, match=r"can't be made(.|\n)*permission denied(.|\n)*who may make tables"
        ):
            opened(url).create("orders")
    finally:
        with engine.begin() as connection:
            connection.execute(text("DROP ROLE spool_reader_of_test"))
        engine.dispose()
