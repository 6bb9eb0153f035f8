"""Engines with the connection settings that the promises need, and the database's errors in idemp's words."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import URL, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from idemp.credentials import without_credentials
from idemp.errors import ConfigurationError, SchemaError, StoreUnavailable, TransientStoreError
from idemp.inbox.sql import failures, pooler
from idemp.inbox.sql.drivers import watch_sqlite
from idemp.inbox.sql.options import Connecting, is_about_options, options_refused
from idemp.inbox.sql.pooling import watch_pool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sqlalchemy import Engine

    from idemp.errors import StoreError

APPLICATION_NAME: Final = "idemp"

_DRIVERS: Final[Mapping[str, str]] = {
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
}
_EXTRAS: Final[Mapping[str, str]] = {"postgresql": "postgres", "mysql": "mysql", "mariadb": "mysql"}

# A client that finds its server gone within 30 seconds: libpq watches the connection from this side, and
# the server from the other (`pooler.prepare`).
_POSTGRESQL_DEFAULTS: Final[Mapping[str, str]] = {
    "application_name": APPLICATION_NAME,
    "connect_timeout": "10",
    "keepalives": "1",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
}
_MYSQL_DEFAULTS: Final[Mapping[str, str]] = {
    "charset": "utf8mb4",
    "connect_timeout": "10",
    "read_timeout": "300",  # longer than any sane statement of a handler; a dead server is found in the end
    "write_timeout": "60",
}
_SQLITE_BUSY_SECONDS: Final = 10
# For who looks on, and shall tell of a lock instead of waiting behind it in silence. What the user has set stays: any
# lock_timeout of PostgreSQL's; on MariaDB and MySQL, where there is always one, what is shorter.
_LOCK_SECONDS = 10.0
_LOCK_HOLDERS: Final[Mapping[str, str]] = {
    "postgresql": "See who, the oldest first: SELECT pid, xact_start, state, query FROM pg_stat_activity "
    "WHERE xact_start IS NOT NULL ORDER BY xact_start",
    "mysql": "See who by SHOW FULL PROCESSLIST, or the oldest transactions first: "
    "SELECT trx_mysql_thread_id, trx_started, trx_query FROM information_schema.innodb_trx ORDER BY trx_started",
}
_PORTS: Final[Mapping[str, int]] = {"postgresql": 5432, "mysql": 3306, "mariadb": 3306}
_SQLITE_SESSION: Final = ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL")

# What no waiting mends: access denied, unknown database; and libpq's words for the same.
_NO_RIGHTS: Final = 1044  # none at all on the database
_REFUSED_CODES: Final = frozenset({_NO_RIGHTS, 1045, 1049, 1698})
_REFUSED_WORDS: Final = (
    "authentication failed",
    "does not exist",
    "no pg_hba.conf entry",
    "no password supplied",
    "unable to open database file",
    "file is not a database",
)


def create_engine_safely(url: str | URL, **options: Any) -> Engine:
    """An engine for `postgresql://`, `mysql://`, `mariadb://` or `sqlite:///`, with settings that the promises need.

    A worker that dies with its machine holds its claim only until the server notices. On PostgreSQL both sides watch
    the connection and give up within 30 seconds; MariaDB and MySQL have no such setting for a session (see
    `tcp_keepalive_time` among the findings of `idemp doctor`). What the URL's query says wins over the defaults here.

    A connection through a pooler such as PgBouncer is recognized: it prepares no named statements, and changes no
    session settings (docs/how-to/poolers.md).

    `pool_pre_ping` stays off: it costs a round trip for each delivery, and a connection found dead is an unavailable
    store for this one delivery, which then runs again on a fresh connection (SQLAlchemy drops the whole pool).

    Args:
        url: the database; its password never appears in an error.
        options: as for `sqlalchemy.create_engine`.

    Raises:
        ConfigurationError: a URL that can't be read, an unknown kind of database, or a driver that isn't installed.

    Example:
        >>> create_engine_safely("sqlite://").dialect.name
        'sqlite'
        >>> create_engine_safely("oracle://scott:tiger@host/db")
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: idemp keeps no inbox in 'oracle'. Use postgresql://, mariadb://, mysql:// ...
    """
    parsed = _with_defaults(_parsed(url))
    family = parsed.get_backend_name()
    if family == "sqlite":
        connect_args = {"timeout": _SQLITE_BUSY_SECONDS, "check_same_thread": False, **options.pop("connect_args", {})}
        options["connect_args"] = connect_args
        if parsed.database in {None, "", ":memory:"}:
            options.setdefault("poolclass", StaticPool)  # one connection: each further one would be another database
    elif is_mysql(family):
        # The default, REPEATABLE READ, locks gaps between keys: claims of different messages would wait for each other.
        options.setdefault("isolation_level", "READ COMMITTED")
    try:
        if parsed.get_dialect().is_async:  # known without its driver, so that no one installs that first
            raise ConfigurationError(
                f"{parsed.drivername!r} is an asynchronous driver.", fix=f"Use {_DRIVERS.get(family, family)}://."
            )
        engine = create_engine(parsed, **options)
    except NoSuchModuleError as error:
        raise _unknown_driver(parsed) from error
    except ModuleNotFoundError as error:
        raise _missing_driver(parsed, error) from error
    except (ArgumentError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"No engine can be made for {shown(parsed)}: {without_credentials(str(error))}"
        ) from None
    if family == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
    elif family == "postgresql":
        keepalives = "tcp_" not in str(parsed.query.get("options", ""))
        event.listen(engine, "connect", partial(pooler.prepare, keepalives=keepalives))
    event.listen(engine, "do_connect", Connecting(shown(engine)))
    watch_pool(engine)
    return engine


def give_up_on_locks(engine: Engine) -> None:
    """Let this engine's new connections wait for locks for ten seconds at most, not for as long as somebody holds them.

    Example:
        >>> give_up_on_locks(create_engine_safely("sqlite://"))
    """
    family = engine.dialect.name
    if family == "postgresql":
        given_up = f"set_config('lock_timeout', '{_LOCK_SECONDS * 1000:.0f}ms', {{local}})"
        pooler.with_settings(engine, f"SELECT CASE current_setting('lock_timeout') WHEN '0' THEN {given_up} END")
    elif is_mysql(family):
        event.listen(engine, "connect", _wait_less_mysql)


def shown(where: URL | Engine) -> str:
    """A URL as it may be shown: without its password, and without a query, which may hold another one.

    Example:
        >>> shown(make_url("postgresql://me:secret@db/shop?sslpassword=too"))
        'postgresql://me:***@db/shop'
    """
    url = where if isinstance(where, URL) else where.url
    return str(url.set(query={}).render_as_string(hide_password=True))


def place_of(engine: Engine) -> str:
    """The same for engines on the same database, as far as their URLs tell; without user and password.

    Example:
        >>> place_of(create_engine_safely("postgresql://me:secret@db/shop"))
        'postgresql://db:5432/shop'
    """
    url, kind = engine.url, engine.url.get_backend_name()
    if kind == "sqlite":
        named = url.database not in {None, "", ":memory:"}
        return f"sqlite:///{url.database}" if named else f"sqlite://#{id(engine):x}"
    return f"{kind}://{url.host or 'localhost'}:{url.port or _PORTS.get(kind, 0)}/{url.database or ''}"


def sqlite_file(engine: Engine) -> Path | None:
    """Return the file of a SQLite database; `None` for one in memory, and for other databases.

    Example:
        >>> sqlite_file(create_engine_safely("sqlite:///inbox.db"))
        PosixPath('inbox.db')
    """
    name = engine.url.database
    if engine.url.get_backend_name() != "sqlite" or not name or name == ":memory:" or name.startswith("file:"):
        return None
    return Path(name)


def missing_file(engine: Engine) -> Path | None:
    """Return the file of a SQLite database if it does not exist: connecting would make it.

    Example:
        >>> missing_file(create_engine_safely("sqlite:////tmp/no-such-inbox.db"))
        PosixPath('/tmp/no-such-inbox.db')
        >>> missing_file(create_engine_safely("sqlite:////no/such/folder/inbox.db")) is None  # connecting fails
        True
    """
    file = sqlite_file(engine)
    return None if file is None or file.exists() or not file.parent.is_dir() else file


def is_mysql(name: str) -> bool:
    """Whether a dialect's name is one of MySQL's family.

    Example:
        >>> is_mysql("mariadb")
        True
    """
    return name in {"mysql", "mariadb"}


def start_error(error: DBAPIError, engine: Engine) -> StoreError | ConfigurationError | None:
    """As `failures.translate`, for what runs at start: there a refused login is a wrong setting, not an outage.

    Example:
        >>> engine = create_engine_safely("sqlite:////no/such/directory/inbox.db")
        >>> try:
        ...     engine.connect()
        ... except DBAPIError as error:
        ...     type(start_error(error, engine)).__name__
        'ConfigurationError'
    """
    original: Any = error.orig
    said = str(original).strip()
    text = failures.said(original)
    line = text.partition("\n")[0]
    code = failures.mysql_code(original)
    if code in _REFUSED_CODES or (error.statement is None and any(word in said for word in _REFUSED_WORDS)):
        granting = ", or grant this user rights on the database (docs/how-to/least-privilege.md)"
        rights = granting if code == _NO_RIGHTS else ""
        return ConfigurationError(
            f"The database {shown(engine)} refuses: {text}", fix=f"Correct the database URL{rights}."
        )
    if failures.is_statement_mode(original):
        return ConfigurationError(
            f"The pooler before the database {shown(engine)} is in statement mode, where no transaction can begin: {line}",
            fix=failures.OTHER_POOL_MODE,
        )
    if is_about_options(error):
        return options_refused(shown(engine), original)
    known = failures.translate(error)
    if failures.is_lock_wait(original):
        kind = "mysql" if is_mysql(engine.dialect.name) else engine.dialect.name
        return TransientStoreError(
            f"In the database {shown(engine)} somebody else holds a lock: {line}", fix=_LOCK_HOLDERS.get(kind, "")
        )
    if isinstance(known, StoreUnavailable) and known.refuses_writes:
        away = StoreUnavailable(
            f"The database {shown(engine)} takes no writes: {line}",
            fix="If this is a replica, correct the database URL; else end its read-only mode, or make room on its disk.",
        )
        away.refuses_writes = True
        return away
    if isinstance(known, StoreUnavailable):
        return StoreUnavailable(
            f"The database {shown(engine)} can't be reached: {text}", fix="Start it, or correct the database URL."
        )
    return known


@contextmanager
def start_errors(engine: Engine) -> Iterator[None]:
    """Raise the database's errors as `start_error` words them.

    Example:
        >>> engine = create_engine_safely("postgresql://me:secret@127.0.0.1:1/shop")
        >>> with start_errors(engine), engine.connect():
        ...     pass
        Traceback (most recent call last):
        ...
        idemp.errors.StoreUnavailable: The database postgresql+psycopg://me:***@127.0.0.1:1/shop... can't be reached...
    """
    try:
        yield
    except IntegrityError:
        raise  # whoever expects one knows what it means
    except SQLAlchemyError as error:
        known = start_error(error, engine) if isinstance(error, DBAPIError) else failures.translate(error)
        if known is None and failures.is_denied(getattr(error, "orig", None)):
            lacking = failures.refused(error)
            known = SchemaError(lacking.message, fix=lacking.fix)
        known = known or failures.refused(error)
        known.says_committed = False
        raise known from error


def _parsed(url: str | URL) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError, TypeError):
        # The URL stays out of message and traceback: where in it the password stands is unknown.
        raise ConfigurationError(
            "The database URL can't be read.", fix="Write it as postgresql://user:password@host/database."
        ) from None
    if "@" in (parsed.host or ""):
        raise ConfigurationError(
            "The database URL can't be read: it has several @, and a part of the password may stand for the host.",
            fix="Escape /, :, @ and # in user and password: %2F %3A %40 %23.",
        )
    if parsed.get_backend_name() not in {*_DRIVERS, "sqlite"}:
        raise ConfigurationError(
            f"idemp keeps no inbox in {parsed.get_backend_name()!r}.",
            fix="Use postgresql://, mariadb://, mysql:// or sqlite:///.",
        )
    return parsed.set(drivername=_DRIVERS.get(parsed.drivername, parsed.drivername))


def _with_defaults(url: URL) -> URL:
    defaults = {"postgresql": _POSTGRESQL_DEFAULTS, "mysql": _MYSQL_DEFAULTS, "mariadb": _MYSQL_DEFAULTS}
    missing = {name: value for name, value in defaults.get(url.get_backend_name(), {}).items() if name not in url.query}
    return url.update_query_dict(missing)


def _unknown_driver(url: URL) -> ConfigurationError:
    family = url.get_backend_name()
    return ConfigurationError(
        f"SQLAlchemy knows no driver {url.drivername!r}.", fix=f"Use {_DRIVERS.get(family, family)}://."
    )


def _missing_driver(url: URL, error: ModuleNotFoundError) -> ConfigurationError:
    """Name the extra only if it brings this driver: another driver is the user's own."""
    family = url.get_backend_name()
    extra = f"`pip install 'idemp[{_EXTRAS[family]}]'`" if family in _EXTRAS else ""
    fix = f"Run {extra}."
    if url.drivername not in _DRIVERS.values():
        fix = f"Install {error.name}, or write {family}://" + (f", whose driver {extra} installs." if extra else ".")
    return ConfigurationError(f"The driver for {url.drivername}:// is not installed ({error}).", fix=fix)


def _wait_less_mysql(connection: Any, _: object) -> None:
    seconds = max(1, round(_LOCK_SECONDS))
    with connection.cursor() as cursor:
        cursor.execute(
            "SET SESSION lock_wait_timeout = LEAST(@@lock_wait_timeout, %s), "
            "SESSION innodb_lock_wait_timeout = LEAST(@@innodb_lock_wait_timeout, %s)",
            [seconds, seconds],
        )


def _prepare_sqlite(connection: Any, record: Any) -> None:
    for statement in _SQLITE_SESSION:
        connection.execute(statement).close()
    _, _, file = connection.execute("PRAGMA database_list").fetchone()
    if file:  # in memory a commit outlives no process
        watch_sqlite(connection, record.info)
