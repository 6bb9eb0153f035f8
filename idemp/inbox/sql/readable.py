"""Connections whose answers idemp can't read: rows that are no tuples, or times that psycopg can't parse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import event
from sqlalchemy.dialects import postgresql

from idemp.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy import Engine

_USUAL: Final = frozenset({"tuple_row", "namedtuple_row", "Cursor", "SSCursor"})
_TRIED: Final = "idemp_rows"  # in a connection's `info`: what makes its rows, once these were found to be tuples

_NAMES: Final = postgresql.dialect().identifier_preparer  # type: ignore[no-untyped-call]

OTHER_ROWS: Final = "The engine's connections answer rows that are no tuples, which SQLAlchemy can't read."
TUPLES: Final = (
    "Make it without row_factory (psycopg, sqlite3) or cursorclass (PyMySQL), in connect_args and in listeners to "
    "`connect`; ask SQLAlchemy for `.mappings()`."
)


def answers_tuples(driver: Any, info: dict[Any, Any]) -> bool:
    """Whether a driver's connection answers rows as SQLAlchemy reads them; the server is asked only where that is unusual.

    Args:
        driver: of psycopg, PyMySQL or `sqlite3`, outside of a transaction.
        info: SQLAlchemy's notes about it.

    Example:
        >>> import sqlite3
        >>> driver = sqlite3.connect(":memory:")
        >>> def named(cursor, row):
        ...     return dict(zip("ab", row))
        >>> answers_tuples(driver, {}), setattr(driver, "row_factory", named), answers_tuples(driver, {})
        (True, None, False)
        >>> driver.row_factory = sqlite3.Row  # as good as a tuple
        >>> answers_tuples(driver, {}), driver.close()
        (True, None)
    """
    makes = getattr(driver, "row_factory", None) or getattr(driver, "cursorclass", None)
    if makes is None or getattr(makes, "__name__", "") in _USUAL or info.get(_TRIED) is makes:
        return True
    cursor = driver.cursor()
    try:
        cursor.execute("SELECT 1 AS a, 2 AS b")
        first, second = cursor.fetchone()
    except Exception:  # noqa: BLE001 - of the user's own, or too many or too few values
        return False
    finally:
        cursor.close()
        driver.rollback()
    if (first, second) == (1, 2):
        info[_TRIED] = makes
        return True
    return False


def refuse_date_styles(engine: Engine) -> None:
    """Refuse PostgreSQL connections whose DateStyle is not ISO: psycopg parses no `timestamptz` in another one.

    Repeating it is harmless. Engines without idemp's times are left alone: a handler may do with another style.

    Example:
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> refuse_date_styles(create_engine_safely("postgresql://db/shop"))
    """
    if engine.dialect.driver == "psycopg" and not event.contains(engine, "connect", _check_date_style):
        event.listen(engine, "connect", _check_date_style)


def _check_date_style(driver: Any, _record: object) -> None:
    style = driver.info.parameter_status("DateStyle") or "ISO"  # as the server reported it: no round trip
    output, _, order = style.partition(",")
    if output == "ISO":
        return
    database = _NAMES.quote(driver.info.dbname)
    driver.close()
    iso = f"ISO,{order}" if order else "ISO"
    raise ConfigurationError(
        f"The database {database} has the DateStyle {style!r}, in which psycopg can't read times.",
        fix=f"Run ALTER DATABASE {database} SET DateStyle = '{iso}', which keeps how dates are read; or correct it where it "
        "is set for this user (ALTER ROLE) or this process (`options` in the URL, PGDATESTYLE).",
    )
