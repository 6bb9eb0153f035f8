"""A database that turned read-only under a running worker, as after a failover."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import text

from idemp import Context, Idempotent, Outcome, Policy
from idemp.errors import StoreUnavailable
from tests.house import SELL, sql_house


@pytest.mark.parametrize("policy", [Idempotent(attempts=1), Idempotent(attempts=1, claim="late"), Policy(attempts=1)])
def test_deliveries_are_held_and_none_is_parked(postgresql_url: str, policy: Policy) -> None:
    """Case 36: it is no handler's fault, though the connection is fine."""
    with sql_house(postgresql_url) as house:

        def sell(message: dict[str, Any], ctx: Context) -> None:
            house.effects.write(ctx, "sale")  # type: ignore[arg-type]

        house.app.handler(dict, type=SELL, policy=policy)(sell)
        engine = house.store.inner.engine
        name = engine.url.database

        def turn(state: str) -> None:
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text("SET default_transaction_read_only = off"))
                connection.execute(text(f'ALTER DATABASE "{name}" SET default_transaction_read_only = {state}'))
            engine.dispose()

        turn("on")
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                house.handle()
        turn("off")
        assert house.handle()[0] is Outcome.HANDLED
        assert house.sales() == 1


@pytest.mark.parametrize(
    ("server", "read_only"),
    [
        ("postgresql_url", "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"),
        ("mariadb_url", "SET SESSION TRANSACTION READ ONLY"),
    ],
)
@pytest.mark.parametrize("policy", [Idempotent(attempts=1), Idempotent(attempts=1, claim="late"), Policy(attempts=1)])
def test_sessions_that_stay_read_only_are_left(
    request: pytest.FixtureRequest, server: str, read_only: str, policy: Policy
) -> None:
    """After a failover the old server may answer for ever, to connections that were opened before."""
    with sql_house(request.getfixturevalue(server)) as house, ExitStack() as stack:

        def sell(message: dict[str, Any], ctx: Context) -> None:
            house.effects.write(ctx, "sale")  # type: ignore[arg-type]

        house.app.handler(dict, type=SELL, policy=policy)(sell)
        engine = house.store.inner.engine
        for connection in [stack.enter_context(engine.connect()) for _ in range(3)]:
            connection.exec_driver_sql(read_only)
            connection.commit()
        stack.close()
        assert house.handle()[0] is Outcome.HANDLED
        assert house.sales() == 1
