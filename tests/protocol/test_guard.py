"""Case 15, with a guard: late messages of which it is certain that they were not handled are, and no others."""

from __future__ import annotations

import logging
import uuid
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from idemp import Idempotent, Message, Outcome, Previous
from idemp.errors import ConfigurationError, LateMessage
from idemp.identity import new_id
from idemp.lateguard import Span
from idemp.lateness import LateGuard
from tests.house import SELL, House, memory_house, sale, sql_house
from tests.test_lateguard import made

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from uuid import UUID

FAR_PAST = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.fixture(params=["memory", "sqlite"])
def house(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[House]:
    """A service with a guard, whose file is still missing."""
    with _house(request.param, guard=tmp_path / "guard") as house:
        yield house


@contextmanager
def _house(kind: str, **settings: Any) -> Iterator[House]:
    if kind == "memory":
        yield memory_house(**settings)
    else:
        with sql_house(**settings) as house:
            yield house


@pytest.fixture
def handled(house: House) -> Message:
    """A message that was handled, and whose claim is purged."""
    house.sells(retention="5m", late="guard")
    message = sale(str(new_id(house.clock.now())))
    assert house.deliver(message) is Outcome.HANDLED
    house.restart()
    house.relay()
    house.consume_for_ten_minutes()
    assert house.app.store.upkeep.purge("shop", {SELL: timedelta(minutes=5)}, 10) == 1
    return message


def old(house: House, **properties: Any) -> Message:
    """A message as old as that one, which nobody has handled."""
    return sale(str(new_id(house.clock.now() - timedelta(minutes=8))), **properties)


def key_of(message: Message) -> UUID:
    return uuid.UUID(message.message_id)


def guard_of(house: House, path: Path, *ids: UUID, **span: datetime) -> None:
    """A guard with these ids of the shop's, as far as its claims are purged."""
    until = span.get("until", house.clock.now())
    spans = {"shop": Span(since=span.get("since", FAR_PAST), until=until, ids=len(ids))}
    made(path, *(("shop", each) for each in ids), **spans)


class TestWithAFile:
    def test_late_duplicate_is_parked(self, house: House, handled: Message, tmp_path: Path) -> None:
        guard_of(house, tmp_path / "guard", key_of(handled))
        with pytest.raises(LateMessage, match="by its guard it was probably handled"):
            house.deliver(handled)
        assert house.sales() == 1

    def test_late_message_that_was_not_handled_is(self, house: House, handled: Message, tmp_path: Path) -> None:
        guard_of(house, tmp_path / "guard", key_of(handled))
        message = old(house)
        assert house.deliver(message) is Outcome.HANDLED
        assert house.deliver(message) is Outcome.REDISPATCHED
        assert house.sales() == 2

    def test_file_that_is_older_than_the_purge_counts_for_nothing(
        self, house: House, handled: Message, tmp_path: Path
    ) -> None:
        """It knows nothing of what was purged since: a copy that lags behind on some machine, say."""
        guard_of(house, tmp_path / "guard", until=FAR_PAST + timedelta(days=1))
        for message in (handled, old(house)):
            with pytest.raises(LateMessage, match="does not reach there"):
                house.deliver(message)
        assert house.sales() == 1

    def test_message_from_before_the_archive_began(self, house: House, handled: Message, tmp_path: Path) -> None:
        guard_of(house, tmp_path / "guard", since=house.clock.now())
        with pytest.raises(LateMessage, match="does not reach there"):
            house.deliver(old(house))

    def test_former_names_count(self, house: House, handled: Message, tmp_path: Path) -> None:
        message = old(house, type="shop.Return")
        spans = {name: Span(FAR_PAST, house.clock.now(), 1) for name in ("shop", "old-shop")}
        made(tmp_path / "guard", ("old-shop", key_of(message)), **spans)
        policy = Idempotent(retention="5m", late="guard", previous=[Previous(consumer="old-shop")])
        house.app.handler(dict, type="shop.Return", policy=policy)(lambda message: None)
        house.restart()
        with pytest.raises(LateMessage, match="by its guard it was probably handled"):
            house.deliver(message)
        assert house.deliver(old(house, type="shop.Return")) is Outcome.HANDLED

    def test_archive_is_asked_where_the_file_says_perhaps(self, house: House, handled: Message, tmp_path: Path) -> None:
        twin = old(house)
        guard_of(house, tmp_path / "guard", key_of(handled), key_of(twin))  # as if they shared all of their bits
        asked: list[tuple[str, UUID]] = []

        def ask(consumer: str, key: UUID) -> bool:
            asked.append((consumer, key))
            return key == key_of(handled)

        house.app._guard = LateGuard(tmp_path / "guard", ask=ask)
        house.restart()
        with pytest.raises(LateMessage, match="by the archive it was handled"):
            house.deliver(handled)
        assert house.deliver(twin) is Outcome.HANDLED
        assert house.deliver(old(house)) is Outcome.HANDLED
        assert asked == [("shop", key_of(handled)), ("shop", key_of(twin))]

    def test_in_a_batch(self, house: House, handled: Message, tmp_path: Path) -> None:
        guard_of(house, tmp_path / "guard", key_of(handled))
        policy = Idempotent(retention="5m", late="guard", batch=10)
        house.app.handler(dict, type="shop.Count", policy=policy)(lambda message: None)
        house.restart()
        message = old(house, type="shop.Count")
        assert [outcome for outcome, _ in house.together(message)] == [Outcome.HANDLED]

    def test_a_new_file_is_read(self, house: House, handled: Message, tmp_path: Path) -> None:
        guard_of(house, tmp_path / "guard")
        first, second = old(house), old(house)
        assert house.deliver(first) is Outcome.HANDLED
        guard_of(house, tmp_path / "guard", key_of(second))
        with pytest.raises(LateMessage, match="probably handled"):
            house.deliver(second)

    def test_messages_inside_the_window_do_not_ask(self, house: House, tmp_path: Path) -> None:
        house.sells(retention="5m", late="guard")
        house.consume_for_ten_minutes()
        message = sale(str(new_id(house.clock.now())))
        guard_of(house, tmp_path / "guard", key_of(message))
        assert house.deliver(message) is Outcome.HANDLED


class TestWithoutAFile:
    @pytest.mark.parametrize("content", [None, b"no guard"], ids=["missing", "damaged"])
    def test_late_messages_are_parked_and_it_is_said_once(
        self, house: House, handled: Message, tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        if content is not None:
            (tmp_path / "guard").write_bytes(content)
        with caplog.at_level(logging.INFO, "idemp.protocol"):
            for message in (handled, old(house)):
                with pytest.raises(LateMessage, match="not known"):
                    house.deliver(message)
        events = [record.event for record in caplog.records]  # type: ignore[attr-defined]
        assert events == ["guard_unusable"]
        assert house.sales() == 1

    def test_refused_at_start_if_nobody_says_where_it_is(self) -> None:
        house = memory_house()
        house.sells(late="guard")
        with pytest.raises(ConfigurationError, match=r"'shop\.Sell' ask a guard .*IDEMP_GUARD"):
            house.app.start()
