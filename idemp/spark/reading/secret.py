"""Where the database is: told to tasks by their own environment or a file, never by what Spark shows."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from idemp.errors import ConfigurationError
from idemp.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from idemp.settings import Settings


def settings_with(url_file: str | None = None, schema: str | None = None, prefix: str | None = None) -> Settings:
    """The settings of this process, with the database that a file names.

    Args:
        url_file: a file with the database's URL and nothing else, such as a mounted secret; without it the settings say
            where the database is (`IDEMP_DATABASE_URL`, `idemp.toml`).
        schema: database schema of idemp's tables.
        prefix: prefix of idemp's tables.

    Raises:
        ConfigurationError: the file can't be read or holds no URL, or a setting is wrong.

    Example:
        >>> settings_with("/no/such/file")
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: The file /no/such/file can't be read (No such file or directory). Put ...
    """
    return load_settings(database_url=_url_in(url_file), schema_name=schema, table_prefix=prefix)


def _url_in(file: str | None) -> str | None:
    if file is None:
        return None
    fix = "Put the database's URL into it, on every machine that runs tasks, readable for them alone."
    try:
        text = Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigurationError(f"The file {file} can't be read ({error.strerror}).", fix=fix) from None
    try:
        make_url(text)
    except (ArgumentError, ValueError):
        raise ConfigurationError(f"The file {file} holds no database URL.", fix=fix) from None
    return text


@contextmanager
def told_by_file(url: str) -> Iterator[Path]:
    """A file with a database's URL that only this user can read, for the time of a block.

    Example:
        >>> with told_by_file("sqlite:///shop.db") as file:
        ...     settings_with(str(file)).database_url
        'sqlite:///shop.db'
    """
    with tempfile.TemporaryDirectory(prefix="idemp-") as folder:  # for its owner alone
        file = Path(folder, "url")
        file.write_text(url, encoding="utf-8")
        yield file
