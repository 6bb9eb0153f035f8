"""What a task does with a database that takes nothing at the moment; no JVM is started."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text

from idemp import App, Idempotent, Settings
from idemp.bulk import Answer, Bulk, Row
from idemp.errors import ConfigurationError, Unavailable
from idemp.spark import sink
from idemp.spark.task import patient
from tests.spark.shop import Keyed
from tests.worker.test_loop import wait_for


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_a_budget_of_connections_is_waited_for(url: str, caplog: pytest.LogCaptureFixture) -> None:
    role = f"few_{os.getpid()}"
    owner = create_engine(url)
    with owner.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 1"))
        connection.execute(text(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}"))
        connection.execute(text(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}"))
    limited = make_url(url).set(username=role)
    app = App("shop", settings=Settings(database_url=limited.render_as_string()))
    app.handler(Keyed, policy=Idempotent(key="order_id"))(lambda message: None)
    tries, answers = [], []

    def work() -> None:
        tries.append(1)
        with Bulk(app) as bulk:
            answers.append(bulk.run([Row(b'{"order_id": 7}', type="shop.Keyed")]).counts)

    other = create_engine(limited)
    with other.connect():
        thread = threading.Thread(target=patient, args=(work, 0.0))
        thread.start()
        wait_for(lambda: len(tries) > 2)
        assert not answers
    other.dispose()
    thread.join(60)
    assert answers == [{Answer.NEW: 1}]
    assert [record.event for record in caplog.records if record.name == "idemp"] == ["task.waiting"]  # said once
    with owner.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {role}; DROP ROLE {role}"))
    owner.dispose()


def test_a_database_that_is_away_is_not_waited_for_without_end() -> None:
    def work() -> None:
        raise Unavailable("the database takes no work")

    with pytest.raises(Unavailable):
        patient(work, 0.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"parked": "p[1]"}, "is a pattern for Spark"),
        ({"parked": "p", "run": "ä" * 80}, "has more than 200 characters"),
        ({"parked": "p", "tasks": 0}, "1 or more"),
    ],
)
def test_arguments_with_which_rows_could_not_be_kept_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        sink("tests.spark.shop:app", **arguments)
