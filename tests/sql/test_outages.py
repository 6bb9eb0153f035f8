"""PostgreSQL that takes no work: consumption pauses with one line in the log, and resumes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import psycopg
import pytest
from sqlalchemy import make_url

from idemp.sql import postgresql
from tests.servers.postgresql import query
from tests.worker.test_loop import wait_for
from tests.world import World

pytestmark = pytest.mark.parametrize("kind", ["postgresql"], indirect=True)

Break = Callable[[str, str], Iterator[None]]


def end_sessions(url: str, role: str) -> None:
    query(url, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", role)


def restarted(url: str, role: str) -> Iterator[None]:
    end_sessions(url, role)
    query(url, f"ALTER ROLE {role} NOLOGIN")
    yield
    query(url, f"ALTER ROLE {role} LOGIN")


def read_only(url: str, role: str) -> Iterator[None]:
    query(url, f"ALTER ROLE {role} SET default_transaction_read_only = on")
    end_sessions(url, role)
    yield
    query(url, f"ALTER ROLE {role} RESET default_transaction_read_only")
    end_sessions(url, role)


def out_of_connections(url: str, role: str) -> Iterator[None]:
    query(url, f"ALTER ROLE {role} CONNECTION LIMIT 0")
    end_sessions(url, role)
    yield
    query(url, f"ALTER ROLE {role} CONNECTION LIMIT -1")


def privilege_revoked(url: str, role: str) -> Iterator[None]:
    query(url, f"REVOKE INSERT ON idemp_inbox FROM {role}")
    yield
    query(url, f"GRANT INSERT ON idemp_inbox TO {role}")


def outputs_revoked(url: str, role: str) -> Iterator[None]:
    query(url, f"REVOKE INSERT ON idemp_output FROM {role}")
    yield
    query(url, f"GRANT INSERT ON idemp_output TO {role}")


def table_locked(url: str, role: str) -> Iterator[None]:
    with psycopg.connect(make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)) as connection:
        connection.execute("LOCK TABLE idemp_inbox IN ACCESS EXCLUSIVE MODE")
        yield


@pytest.fixture
def role(url: str) -> Iterator[str]:
    name = f"worker_{secrets.token_hex(4)}"
    query(url, f"CREATE ROLE {name} LOGIN")
    yield name
    query(url, f"DROP OWNED BY {name}")
    query(url, f"DROP ROLE {name}")


@pytest.mark.parametrize(
    "how",
    [restarted, read_only, out_of_connections, privilege_revoked, outputs_revoked, table_locked],
    ids=lambda each: each.__name__,
)
def test_consumption_pauses_and_resumes(
    url: str, role: str, how: Break, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "TABLE_SECONDS", 1)
    caplog.set_level("INFO")
    owner = World(url)  # makes the table of the effects
    query(url, f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
    query(url, f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}")
    query(url, f"GRANT ALL ON SCHEMA public TO {role}")
    world = World(make_url(url).set(username=role).render_as_string(hide_password=False))
    worker = world.worker()
    world.send("0")
    world.work(worker)
    with ExitStack() as stack:
        owner.send("1", "2", "3")
        stack.enter_context(contextmanager(how)(url, role))
        for _ in range(3):
            worker.step(poll=0.0)
        assert owner.effects() == {"0": 1}
    wait_for(lambda: worker.step(poll=0.0) == 0 and not owner.rows())
    assert (owner.effects(), owner.dead(), owner.rows()) == ({"0": 1, "1": 1, "2": 1, "3": 1}, [], [])
    seen = [getattr(record, "event", "") for record in caplog.records]
    events = [event for event in seen if event in ("worker.paused", "worker.resumed")]
    assert events == ["worker.paused", "worker.resumed"]
    world.close()
    owner.close()
