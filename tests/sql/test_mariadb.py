"""MariaDB that takes no work, and errors of its own: consumption pauses with one line in the log, and resumes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import make_url, text

from idemp import Context, Idempotent, Retry
from tests.servers.databases import query
from tests.worker.test_loop import wait_for
from tests.world import Order, World, insert_and_send

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", ["mariadb"], indirect=True)]


@pytest.fixture
def user(url: str) -> Iterator[str]:
    """A user with the rights of a worker, table by table."""
    name = f"worker_{secrets.token_hex(4)}"
    World(url).close()  # makes the table of the effects
    query(url, f"CREATE USER {name}")
    for (table,) in query(url, "SHOW TABLES"):
        query(url, f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {name}")
    yield name
    query(url, f"DROP USER {name}")


def end_sessions(url: str, user: str) -> None:
    for (number,) in query(url, "SELECT id FROM information_schema.processlist WHERE user = %s", user):
        query(url, f"KILL {number}")


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("ALTER USER {user} ACCOUNT LOCK", "ALTER USER {user} ACCOUNT UNLOCK"),
        ("SET GLOBAL read_only = 1", "SET GLOBAL read_only = 0"),
        ("REVOKE INSERT ON idemp_inbox FROM {user}", "GRANT INSERT ON idemp_inbox TO {user}"),
        ("REVOKE INSERT ON idemp_output FROM {user}", "GRANT INSERT ON idemp_output TO {user}"),
        ("RENAME TABLE idemp_pending TO moved", "RENAME TABLE moved TO idemp_pending"),
    ],
    ids=["locked", "read-only", "claims refused", "outputs refused", "no table"],
)
def test_consumption_pauses_and_resumes(url: str, user: str, begin: str, end: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    owner, world = World(url), World(make_url(url).set(username=user).render_as_string(hide_password=False))
    worker = world.worker()
    world.send("0")
    world.work(worker)
    owner.send("1", "2", "3")
    query(url, begin.format(user=user))
    try:
        end_sessions(url, user)
        for _ in range(3):
            worker.step(poll=0.0)
        assert owner.effects() == {"0": 1}
    finally:
        query(url, end.format(user=user))
    wait_for(lambda: worker.step(poll=0.0) == 0 and not owner.rows())
    assert (owner.effects(), owner.dead(), owner.rows()) == ({"0": 1, "1": 1, "2": 1, "3": 1}, [], [])
    seen = [getattr(record, "event", "") for record in caplog.records]
    assert [event for event in seen if event in ("worker.paused", "worker.resumed")] == ["worker.paused", "worker.resumed"]
    world.close()
    owner.close()


def killed(url: str, ctx: Context) -> None:
    query(url, f"KILL {ctx.connection.scalar(text('SELECT CONNECTION_ID()'))}")
    insert_and_send(Order(order_id="bad"), ctx)


def swallows_a_deadlock(url: str, ctx: Context) -> None:
    """The server has rolled back, so that what comes behind it has no claim."""
    ctx.connection.connection.driver_connection.rollback()  # type: ignore[union-attr]
    insert_and_send(Order(order_id="bad"), ctx)


@pytest.mark.parametrize(("spoil", "rule"), [(killed, "connection lost"), (swallows_a_deadlock, "rolled back")])
def test_a_message_with_a_bad_handler_holds_up_no_other(url: str, spoil: Callable[[str, Context], None], rule: str) -> None:
    def handle(message: Order, ctx: Context) -> Any:
        insert_and_send(message, ctx)
        if message.order_id == "bad":
            spoil(url, ctx)

    world = World(url, handle, Idempotent(key="order_id", retry=Retry(attempts=2, delays=(0.0,))))
    world.send("1", "bad", "2")
    worker = world.worker()
    while world.rows() and not world.dead():
        world.work(worker)
        world.pass_time(10)
    assert world.effects() == {"1": 1, "2": 1}
    assert world.runs["bad"] >= 2
    assert [(dead["rule"], dead["attempts"]) for dead in world.dead()] == [(rule, 2)]
    world.close()
