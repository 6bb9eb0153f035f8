"""Making, upgrading and scripting idemp's tables, and keeping the user's own migrations away from them.

Two adjacent releases can share the tables: revisions are numbered (`0001`, `0002`, …) and only ever add tables, indexes and
columns that nobody has to fill. So a release works on a newer revision than it knows, as long as all that it needs itself
is there; and the tables are upgraded first, the workers one by one after them.

Alembic is imported where tables are made, and nowhere else: every worker checks them when it starts, and importing
Alembic takes a third of that start.
"""

from __future__ import annotations

import io
import re
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import column, inspect, select, table

from idemp.errors import ConfigurationError, SchemaError
from idemp.inbox.sql import checks, places, pooler, rights, unfinished
from idemp.inbox.sql.engine import missing_file, shown, sqlite_file, start_errors
from idemp.inbox.sql.locating import located
from idemp.inbox.sql.locks import cluster_lock
from idemp.inbox.sql.readable import refuse_date_styles
from idemp.inbox.sql.short import Short
from idemp.inbox.sql.tables import DEFAULT_PREFIX, shared_tables
from idemp.showing import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from alembic.config import Config
    from sqlalchemy import Connection, Engine

    from idemp.inbox.sql.checks import SchemaReport
    from idemp.inbox.sql.tables import Tables

UPGRADE_COMMAND: Final = "idemp db upgrade"
_LOCK_SECONDS: Final = 60
_PACKAGE: Final = Path(__file__).parents[2]
_NUMBERED: Final = re.compile(r"[0-9]{4}")
_DIALECTS: Final = ("postgresql", "mariadb", "mysql", "sqlite")

log = logger(__name__)


def upgrade(engine: Engine, tables: Tables, revision: str = "head") -> None:
    """Bring the tables to a revision; at the latest one, also make anew what was dropped by hand.

    Several processes may call it at once: one works, the others wait and find it done. Never downgrades: tables of a
    newer version, even of a later release's, are left as they are.

    Raises:
        SchemaError: the database has a version that is neither this release's nor a later one.
        StoreUnavailable: the database can't be reached.

    Example:
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.tables import Tables
        >>> engine = create_engine_safely("sqlite://")
        >>> upgrade(engine, Tables())
        >>> check(engine, Tables()).revision
        '0011'
    """
    if engine.dialect.name == "sqlite":
        if tables.configured_schema is not None:
            raise ConfigurationError(
                "SQLite has no schemas to create.", fix="Leave the schema out and choose a prefix."
            )
        tables = shared_tables(None, tables.prefix)  # its indexes can't be made by a schema's name
    else:
        tables = located(engine, tables)

    def work(connection: Connection) -> None:
        with cluster_lock(connection, tables, "upgrade", wait_seconds=_LOCK_SECONDS) as locked:
            if not locked:
                raise SchemaError(
                    "Another process has been upgrading these tables for a minute.", fix="Try again later."
                )
            version = _readable_version(connection, tables)
            if _is_newer(version):
                log.info(
                    "the tables %s* are of a later release's version %s: nothing to do",
                    tables.prefix,
                    version,
                    extra={"event": "tables_newer", "version": version},
                )
                return
            _migrate(connection, tables, revision)
            if revision == "head":
                _make_dropped_ones(connection, tables)

    Short(engine, at_start=True).run(work)


def check(engine: Engine, tables: Tables, *, writes: bool = True) -> SchemaReport:
    """Make sure that tables, unique keys, isolation and server can keep the promises; what is only weak is reported.

    Writes probes and rolls them back, unless nobody is going to write. Tables that a later release has upgraded pass when
    they still fit this one; a finding `schema_revision` says so.

    Raises:
        SchemaError: tables or keys are missing, altered or of another version, or this user may not write; says which
            command mends them.
        GuaranteeError: the server, its version, a pooler before it or the engine's settings can't keep the promises.
        ConfigurationError: the database refuses this user, or doesn't exist.
        StoreUnavailable: it can't be reached.

    Example:
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.tables import Tables
        >>> check(create_engine_safely("sqlite://"), Tables())
        Traceback (most recent call last):
        ...
        idemp.errors.SchemaError: The database sqlite:// has no idemp tables with prefix 'idemp_'. Run `idemp db ...
    """
    if missing_file(engine) is not None:  # who only checks makes none
        raise _no_tables(engine, tables)
    refuse_date_styles(engine)
    with start_errors(engine), rights.granted(engine, tables):
        with engine.connect() as connection:
            version = checks.server_version(connection)
            pooler.refuse_prepared_statements(connection)
            isolation = checks.isolation(connection)
            revision = _checked_version(connection, tables)
            with _newer_explained(revision, tables):
                rights.check_reading(connection, tables)
                checks.columns_and_keys(connection, tables)
                if writes:
                    rights.check_parts(connection, tables)
                places.check_guards(connection, tables)
            findings = (*_revision_findings(revision), *checks.findings(connection, tables))
        if writes:
            with _newer_explained(revision, tables):
                checks.probe(engine, tables)
                unfinished.probe(engine, tables)
    return checks.SchemaReport(
        dialect=engine.dialect.name,
        server_version=version,
        isolation=isolation,
        revision=revision,
        findings=findings,
    )


def versions(connection: Connection, tables: Tables) -> tuple[str | None, str, bool]:
    """The version of the tables (`None` without any), the one that this release makes, and whether the former will do.

    Raises:
        SchemaError: it is neither this release's nor an earlier or later one's.
    """
    found, latest = _readable_version(connection, tables), _revisions()[0]
    return found, latest, found == latest or _is_newer(found)


def sql(dialect_name: str, tables: Tables, since: str | None = None) -> str:
    """The script that creates the tables on an empty database, for those who let nobody but a DBA do so.

    Args:
        dialect_name: "postgresql", "mariadb", "mysql" or "sqlite".
        tables: with their schema and prefix.
        since: the version that the database has already, such as "0001": the script then upgrades it.

    Raises:
        ConfigurationError: another dialect, or a version that this release doesn't know.

    Example:
        >>> from idemp.inbox.sql.tables import Tables
        >>> "CREATE TABLE IF NOT EXISTS billing_inbox" in sql("postgresql", Tables(prefix="billing_"))
        True
    """
    if dialect_name not in _DIALECTS:
        raise ConfigurationError(
            f"There is no script for {dialect_name!r}.", fix=f"Choose among {', '.join(_DIALECTS)}."
        )
    from alembic import command
    from alembic.util import CommandError

    config = _config(tables)
    config.attributes["dialect_name"] = dialect_name
    config.output_buffer = io.StringIO()
    try:
        command.upgrade(config, f"{since}:head" if since else "head", sql=True)
    except CommandError as error:
        raise ConfigurationError(
            f"There is no script that begins at version {since!r}.",
            fix="`idemp db check` says which one the tables are of.",
        ) from error
    return config.output_buffer.getvalue()


def include_object(tables: Tables) -> Callable[[Any, str | None, str, bool, Any], bool]:
    """A hook for the `env.py` of your own Alembic migrations: with it, autogenerate ignores idemp's tables.

    Example:
        >>> from idemp.inbox.sql.tables import Tables
        >>> hook = include_object(Tables())  # in env.py: context.configure(..., include_object=hook)
        >>> hook(Tables().inbox, "idemp_inbox", "table", True, None)
        False
    """

    def include(item: Any, name: str | None, kind: str, reflected: bool, compare_to: Any) -> bool:
        del reflected, compare_to
        ours = (
            kind == "table"
            and name is not None
            and tables.is_ours(name)
            and tables.configured_schema in {None, item.schema}
        )
        return not ours

    return include


def _scripts() -> Path:
    shipped = _PACKAGE / "_alembic"
    return shipped if shipped.is_dir() else _PACKAGE.parent / "alembic"


def _config(tables: Tables) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_scripts()))
    config.set_main_option("path_separator", "os")
    config.attributes["tables"] = tables
    return config


def _migrate(connection: Connection, tables: Tables, revision: str) -> None:
    from alembic import command

    config = _config(tables)
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def _version(connection: Connection, tables: Tables) -> str | None:
    """What Alembic noted; `None` before it did."""
    if not inspect(connection).has_table(tables.version_table, schema=tables.schema):
        return None
    noted = table(tables.version_table, column("version_num"), schema=tables.schema)
    return connection.scalar(select(noted.c.version_num))


@cache
def _revisions() -> tuple[str, ...]:
    """Those of this release, the latest first: each script's name begins with its revision."""
    return tuple(sorted((file.name[:4] for file in _scripts().glob("versions/[0-9]*.py")), reverse=True))


def _is_newer(version: str | None) -> bool:
    """Whether a later release has upgraded the tables."""
    return version is not None and _NUMBERED.fullmatch(version) is not None and version > _revisions()[0]


def _readable_version(connection: Connection, tables: Tables) -> str | None:
    version = _version(connection, tables)
    if version is not None and version not in _revisions() and not _is_newer(version):
        raise SchemaError(
            f"The tables {tables.prefix}* are of version {version!r}, which this release does not know.",
            fix="Upgrade idemp (`pip install --upgrade idemp`), or see who else keeps tables under this prefix.",
        )
    return version


def _checked_version(connection: Connection, tables: Tables) -> str:
    version = _readable_version(connection, tables)
    head = _revisions()[0]
    where = _place_of(tables)
    mend = f"Run `{_upgrade_command(connection.engine, tables)}`."
    if version is None:
        raise _no_tables(connection.engine, tables)
    if version != head and not _is_newer(version):
        raise SchemaError(f"The tables with {where} are of version {version!r}; {head!r} is needed.", fix=mend)
    return version


def _no_tables(engine: Engine, tables: Tables) -> SchemaError:
    return SchemaError(
        f"The database {shown(engine)} has no idemp tables with {_place_of(tables)}.",
        fix=make_tables(engine, f"`{_upgrade_command(engine, tables)}`"),
    )


def make_tables(engine: Engine, command: str) -> str:
    """What to do where there are no tables: a file without them may be new, or in the place of the one that had them."""
    if sqlite_file(engine) is None:
        return f"Run {command}."
    return (
        f"If this inbox is new, run {command}. If it was in use, its file was moved, deleted or replaced: put the right "
        "file in its place first, since with an empty one messages that were handled are handled again."
    )


def _place_of(tables: Tables) -> str:
    schema = tables.configured_schema
    return f"prefix {tables.prefix!r}" + (f" in schema {schema!r}" if schema else "")


@contextmanager
def _newer_explained(version: str, tables: Tables) -> Iterator[None]:
    """What is wrong with tables of a later release is not mended by this one's commands."""
    try:
        yield
    except SchemaError as error:
        if not _is_newer(version):
            raise
        raise SchemaError(
            f"The tables {tables.prefix}* are of version {version!r}, newer than this release's {_revisions()[0]!r}, "
            f"and this release can't work on them: {error.message}",
            fix="Upgrade idemp: `pip install --upgrade idemp`.",
        ) from error


def _revision_findings(version: str) -> tuple[checks.Finding, ...]:
    if not _is_newer(version):
        return ()
    meaning = (
        f"A later release has upgraded the tables; this one, of version {_revisions()[0]}, finds all that it needs."
    )
    return (checks.Finding("ok", "schema_revision", version, meaning),)


def _upgrade_command(engine: Engine, tables: Tables) -> str:
    """The command for this very database; only its password has to be filled in."""
    options = [f"--database '{shown(engine)}'"]
    options += [f"--schema {tables.configured_schema}"] if tables.configured_schema else []
    options += [f"--prefix {tables.prefix}"] if tables.prefix != DEFAULT_PREFIX else []
    return " ".join((UPGRADE_COMMAND, *options))


def _make_dropped_ones(connection: Connection, tables: Tables) -> None:
    existing = set(inspect(connection).get_table_names(schema=tables.schema))
    missing = [table for table in tables.metadata.sorted_tables if table.name not in existing]
    if missing:
        names = [table.name for table in missing]
        log.warning(
            "made anew, empty, after they had been dropped: %s",
            ", ".join(names),
            extra={"event": "tables_made_anew", "tables": names},
        )
        tables.metadata.create_all(connection, tables=missing)
