"""What a handler has set in its own transaction and idemp's statements after it meet: a role without rights, read-only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import exc, text

from idemp.errors import HandlerError, StoreError
from idemp.inbox.sql import failures, rights
from idemp.inbox.sql.short import Short

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from idemp.inbox.sql.tables import Tables

_READ_ONLY: Final = text("SHOW transaction_read_only")


def blamed(engine: Engine, tables: Tables, error: StoreError) -> HandlerError | None:
    """Return what a handler did if only its own transaction refuses what idemp writes; `None` if others do as well.

    Asks in a transaction of its own, so after the handler's has ended.

    Args:
        engine: where the tables are.
        tables: idemp's.
        error: what a statement of idemp's own met after the handler had returned.
    """
    driver_error = getattr(error.__cause__, "orig", None)
    denied = failures.is_denied(driver_error)
    if engine.dialect.name == "sqlite" or not (denied or failures.is_read_only(driver_error)):
        return None

    def is_local(connection: Connection) -> bool:
        if denied:
            return not rights.explain(connection, tables, str(driver_error))
        return connection.dialect.name == "postgresql" and connection.scalar(_READ_ONLY) == "off"

    try:
        if not Short(engine).run(is_local):
            return None
    except (StoreError, exc.SQLAlchemyError):
        return None
    what, fix = (
        ("a role without idemp's rights", "`SET LOCAL ROLE NONE`")
        if denied
        else ("read-only mode", "set it inside of begin_nested(), whose end takes it back")
    )
    line = failures.first_line(driver_error)
    return HandlerError(
        f"The handler left its transaction in {what}: idemp's own statements failed ({line}), and all was rolled back.",
        fix=f"Reset what was set (SET, SET LOCAL) before the handler returns: {fix}.",
    )
