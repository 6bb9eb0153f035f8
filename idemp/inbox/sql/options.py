"""Options in a database URL that its driver or its server refuses: a wrong setting, which waiting does not change."""

from __future__ import annotations

from ssl import SSLError
from typing import TYPE_CHECKING, Any, Final

from idemp.credentials import without_credentials
from idemp.errors import ConfigurationError
from idemp.inbox.sql import failures

if TYPE_CHECKING:
    from sqlalchemy.engine.interfaces import Dialect
    from sqlalchemy.exc import DBAPIError

__all__ = ["Connecting", "is_about_options", "options_refused"]

# What libpq, PostgreSQL and SQLite say of them, and the error numbers of MySQL and MariaDB.
_WORDS: Final = (
    "connection is bad: invalid",
    "invalid integer value",
    "unrecognized configuration parameter",
    "invalid command-line argument",
    "invalid value for parameter",
    "could not parse network address",
    "definition of service",
    "does not support SSL",
    "no such access mode",
    "no such vfs",
)
_CODES: Final = frozenset({1064, 1115, 1193, 1231, 1273, 2026})
# Not the drivers' own errors: an option has no such name, another kind of value, or names a file that can't be read.
_ERRORS: Final = (TypeError, ValueError, AttributeError, FileNotFoundError, PermissionError, SSLError)


class Connecting:
    """Opens an engine's connections, for SQLAlchemy's event `do_connect`.

    Drivers raise plain Python errors for options that they don't know. Until a first connection was opened, these are about
    the URL; after that they are left as they are.

    Args:
        shown: the database's URL as it may be shown.

    Example:
        >>> from sqlalchemy import create_engine, event
        >>> engine = create_engine("sqlite://", connect_args={"bogus": 1})
        >>> event.listen(engine, "do_connect", Connecting("sqlite://"))
        >>> engine.connect()
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: The database sqlite:// can't be reached with the options of its URL: 'bogus' ...
    """

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._opened = False

    def __call__(self, dialect: Dialect, _: object, arguments: Any, options: Any) -> Any:
        """Open one.

        Raises:
            ConfigurationError: an option is none that the driver takes; nothing was sent to the database.
        """
        try:
            connection = dialect.connect(*arguments, **options)
        except _ERRORS as error:
            if self._opened:
                raise
            raise options_refused(self._shown, error) from error
        self._opened = True
        return connection


def is_about_options(error: DBAPIError) -> bool:
    """Whether no connection was opened because of an option of the URL.

    Example:
        >>> from psycopg import ProgrammingError
        >>> from sqlalchemy.exc import DBAPIError
        >>> is_about_options(DBAPIError(None, None, ProgrammingError('invalid connection option "bogus"')))
        True
    """
    original: Any = error.orig
    if error.statement is not None:
        return False
    if failures.mysql_code(original) in _CODES or any(word in str(original) for word in _WORDS):
        return True
    # What psycopg finds by itself has no SQLSTATE: no server was asked.
    return type(original).__name__ == "ProgrammingError" and getattr(original, "sqlstate", None) is None


def options_refused(shown: str, error: object) -> ConfigurationError:
    """Return the error for an option that is refused.

    Example:
        >>> options_refused("postgresql://db/shop", 'invalid connection option "bogus"').fix
        'Correct what stands behind the question mark of the database URL.'
    """
    said = without_credentials(str(error).strip().partition("\n")[0]).rstrip(".")
    return ConfigurationError(
        f"The database {shown} can't be reached with the options of its URL: {said}.",
        fix="Correct what stands behind the question mark of the database URL.",
    )
