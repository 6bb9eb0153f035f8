"""Exit codes, and the handling of errors on the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from traceback import print_exception
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from idemp.errors import ConfigurationError, IdempError, Unavailable, describe_error
from idemp.settings import Settings

if TYPE_CHECKING:
    from idemp.sql.engine import Database

__all__ = ["AsJson", "Exit", "exits", "fail", "open_database"]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Exit(IntEnum):
    """Exit codes. Supervisors need not restart a process after 2 and 3.

    Example:
        >>> Exit(3).name
        'REFUSED'
    """

    OK = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    UNREACHABLE = 4
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        """Description of the code."""
        return {
            Exit.OK: "done",
            Exit.FAILED: "the command failed, or a check has a finding",
            Exit.USAGE: "the command line is wrong",
            Exit.REFUSED: "settings, policies or tables are refused; a restart does not help",
            Exit.UNREACHABLE: "the database or the broker cannot be reached",
            Exit.INTERRUPTED: "interrupted; for a worker, a second time while it was stopping",
        }[self]


@contextmanager
def exits(*, traceback: bool = False) -> Iterator[None]:
    """Turn errors into one line and an exit code.

    Args:
        traceback: Whether the traceback of an app that cannot be imported comes before the line.

    Example:
        >>> with exits():
        ...     raise ConfigurationError("lease: …")
        Traceback (most recent call last):
        SystemExit: 3
    """
    from sqlalchemy.exc import DBAPIError

    try:
        yield
    except ConfigurationError as error:
        if traceback and error.__cause__ is not None:
            print_exception(error.__cause__)
        fail(Exit.REFUSED, str(error))
    except (Unavailable, DBAPIError) as error:
        fail(Exit.UNREACHABLE, describe_error(error))
    except IdempError as error:
        fail(Exit.FAILED, describe_error(error))
    except UnicodeEncodeError:
        fail(Exit.USAGE, "an argument is not UTF-8")
    except KeyboardInterrupt:
        fail(Exit.INTERRUPTED, "interrupted")


def fail(code: Exit, text: str) -> NoReturn:
    """End the process with a line on standard error.

    Example:
        >>> fail(Exit.USAGE, "name dead letters, or use --all")
        Traceback (most recent call last):
        SystemExit: 2
    """
    print(f"idemp: {text}", file=sys.stderr)
    raise SystemExit(int(code))


def open_database() -> Database:
    """Return the database of the settings, after a check of its tables. This needs no privilege but SELECT.

    Raises:
        ConfigurationError: A check has a red finding.

    Example:
        >>> open_database()
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: the file idemp.db does not exist: idemp db upgrade
    """
    from idemp.process import raise_red
    from idemp.sql.checks import check_tables
    from idemp.sql.engine import Database

    settings = Settings()
    database = Database(settings.database_url, settings.table_prefix)
    raise_red(check_tables(database))
    return database
