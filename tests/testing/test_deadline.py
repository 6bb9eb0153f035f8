"""A handler that blocks is interrupted, the failure shows where it stood, and the process can be used afterwards."""

from __future__ import annotations

import signal
import threading
from typing import Any

import psycopg
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from sqlalchemy import make_url

from idemp import App, Context, Idempotent
from idemp.errors import ConfigurationError
from idemp.testing import HandlerHangs, assert_idempotent, redeliver, redelivery_machine, replay

DO = "blocks.Do"
BY_ID = Idempotent(key="id")
ONE: dict[str, Any] = {"message": dict, "type": DO, "policy": BY_ID}
never = threading.Event()


def blocks(message: dict[str, Any], ctx: Context) -> None:
    try:
        waits_for_an_answer()
    except Exception as error:  # what a handler catches does not stop the interruption
        raise LookupError from error


def waits_for_an_answer() -> None:
    never.wait()


def app_of(handler: Any) -> App:
    app = App("blocks")
    app.handler(dict, type=DO, policy=BY_ID)(handler)
    return app


def returns(message: dict[str, Any], ctx: Context) -> None: ...


@pytest.mark.parametrize("crash_at", [(), "before commit"])
def test_a_handler_that_blocks(crash_at: Any) -> None:
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(
        HandlerHangs, match=r"(?s)blocks did not return within 0.2 s.*in waits_for_an_answer\n"
    ) as found:
        assert_idempotent(blocks, {"id": 1}, **ONE, crash_at=crash_at, deadline=0.2)
    assert "idemp/testing" not in str(found.value)
    assert found.value.__notes__[0].startswith("Tested: blocks.Do")
    assert_idempotent(returns, {"id": 1}, **ONE, crash_at=crash_at, deadline=5)
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert "deadline of a handler" not in {thread.name for thread in threading.enumerate()}


def test_without_detectors_and_step_by_step() -> None:
    with pytest.raises(HandlerHangs):
        assert_idempotent(blocks, {"id": 1}, **ONE, detect=(), deadline=0.1)
    with pytest.raises(HandlerHangs):
        redeliver(app_of(blocks), {"id": 1}, type=DO, deadline=0.1)
    with pytest.raises(ConfigurationError, match="deadline=0 is no time"):
        assert_idempotent(returns, {"id": 1}, **ONE, deadline=0)


def test_in_another_thread_than_the_main_one() -> None:
    def spins(message: dict[str, Any], ctx: Context) -> None:
        while not never.is_set():
            pass

    raised: list[BaseException] = []

    def works() -> None:
        try:
            redeliver(app_of(spins), {"id": 1}, type=DO, deadline=0.1)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=works)
    thread.start()
    thread.join(20)
    assert [type(error) for error in raised] == [HandlerHangs]


def test_a_machine_tells_the_story() -> None:
    machine = redelivery_machine(
        app_of(blocks), messages={DO: st.fixed_dictionaries({"id": st.integers(0, 3)})}, rehearse=False, deadline=0.1
    )
    case: Any = machine.TestCase
    case.settings = settings(max_examples=3, database=None)
    with pytest.raises(HandlerHangs) as found:
        case("runTest").runTest()
    case.tearDownClass()
    assert found.value.__notes__[0].startswith("What happened:")
    with pytest.raises(HandlerHangs):
        replay(app_of(blocks), [("publish", DO, '{"id":1}'), ("deliver",)], deadline=0.1)


def test_a_lock_in_the_database(postgresql_url: str) -> None:
    """The statement is cancelled, so that the connection is free, too."""
    url = make_url(postgresql_url).set(drivername="postgresql").render_as_string(hide_password=False)

    def locks(message: dict[str, Any], ctx: Context) -> None:
        ctx.connection.exec_driver_sql("SELECT pg_advisory_xact_lock(7)")

    with psycopg.connect(url) as other:
        other.execute("SELECT pg_advisory_xact_lock(7)")
        with pytest.raises(HandlerHangs, match="in locks\n"):
            assert_idempotent(locks, {"id": 1}, **ONE, crash_at=(), deadline=0.5, database=postgresql_url)
    assert_idempotent(locks, {"id": 1}, **ONE, crash_at=(), database=postgresql_url)
