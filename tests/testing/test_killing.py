"""Every crash point for real: the worker gets a SIGKILL there, and the effects still happen exactly once."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select

from idemp import Message
from idemp.errors import ConfigurationError
from idemp.inbox.sql import create_engine_safely
from idemp.testing.crash_points import CRASH_POINTS
from idemp.testing.killing import Killed, kill_for_real
from tests.testing.killable import SALE

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

LATE_ONLY = {"before claim and store", "after claim and store"}
ALL = [point.name for point in CRASH_POINTS]
SOME = ["after claim", "before claim and store", "after claim and store", "before commit", "after commit"]


def place(number: int) -> Message:
    return Message(body=json.dumps({"id": number}).encode(), type="orders.Place", message_id=f"message-{number}")


def killed(app: str, folder: Path, *, broker: str | None = None, **options: object) -> tuple[list[Killed], list[int]]:
    """What became of the messages, and of which of them there are sales."""
    database = f"sqlite:///{folder / 'shop.db'}"
    found = kill_for_real(
        f"tests.testing.killable:{app}",
        place,
        database=database,
        broker=broker or f"local://{folder / 'queues.db'}",
        tables="tests.testing.killable:METADATA",
        **options,  # type: ignore[arg-type]
    )
    engine = create_engine_safely(database)
    with engine.connect() as connection:
        sold = list(connection.scalars(select(SALE.c.of).order_by(SALE.c.of)))
    engine.dispose()
    return found, sold


@pytest.mark.parametrize(("app", "points", "never"), [("early", ALL, LATE_ONLY), ("late", SOME, {"after claim"})])
def test_effects_exactly_once_whatever_kills(app: str, points: list[str], never: set[str], tmp_path: Path) -> None:
    found, sold = killed(app, tmp_path, points=points)
    assert sold == list(range(len(points)))
    all_is_well(found, never)


def all_is_well(found: list[Killed], never: set[str]) -> None:
    """Each worker died where it should, and what it began was ended by another, under the same ids."""
    committed = {point.name: point.committed for point in CRASH_POINTS}
    for each in found:
        assert each.died == (each.point not in never), each.point
        assert not each.parked
        assert len(each.outputs) == 2, f"{each.point}: two outputs, under one id each"
        assert all(len(set(bodies)) == 1 for bodies in each.outputs.values()), "one id, one body"
        if each.died and not committed[each.point]:
            assert each.outcomes == ("HANDLED",), each.point
        if "settle" in each.point or "record" in each.point:
            assert "HANDLED" not in each.outcomes, each.point
        if each.point in {"after commit", "before publish", "after publish", "before settle"}:
            assert each.outcomes == ("REDISPATCHED",), each.point
        sent_again = each.point in {"after publish", "before settle"}
        assert (max(map(len, each.outputs.values())) > 1) >= sent_again, each.point


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"where": "tests.testing.killable:nobody"}, "'tests.testing.killable:nobody' can't be loaded"),
        ({"where": "tests.testing.killable:METADATA"}, "is neither an App nor what Inbox.wrap answered"),
        ({"database": "sqlite://"}, "A database in memory is gone with the process that is killed"),
    ],
)
def test_what_can_not_be_used_is_refused(changed: dict[str, str], says: str, tmp_path: Path) -> None:
    given = {
        "where": "tests.testing.killable:early",
        "database": f"sqlite:///{tmp_path / 'shop.db'}",
        "tables": "tests.testing.killable:SALE.metadata",
        **changed,
    }
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        kill_for_real(
            given.pop("where"), place, broker=f"local://{tmp_path / 'queues.db'}", points=["after claim"], **given
        )
