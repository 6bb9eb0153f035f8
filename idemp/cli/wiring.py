"""From command line options to settings, stores and brokers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from idemp.broker.making import make_broker, missing_file
from idemp.cli.loading import load_apps
from idemp.errors import ConfigurationError
from idemp.settings import Settings, load_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemp.app import App
    from idemp.broker.port import Broker
    from idemp.inbox.sql import SqlStore, Tables


NO_FILE: Final = (
    "Name the app (MODULE:APP), or the broker: --broker URL, IDEMP_BROKER_URL, or broker_url in idemp.toml. "
    "An embedded broker's file is made by the first worker."
)


def settings_of(
    database: str | None = None,
    broker: str | None = None,
    schema: str | None = None,
    prefix: str | None = None,
    **others: Any,
) -> Settings:
    """The settings of file and environment, with what the command line says on top.

    Raises:
        ConfigurationError: a wrong setting.
    """
    return load_settings(database_url=database, broker_url=broker, schema_name=schema, table_prefix=prefix, **others)


def configured_apps(
    where: Sequence[str],
    database: str | None = None,
    broker: str | None = None,
    schema: str | None = None,
    prefix: str | None = None,
    **others: Any,
) -> list[App]:
    """Apps by `MODULE:APP`; options of the command line win over what their code says.

    Raises:
        ConfigurationError: an app can't be imported, or a setting is wrong.
    """
    apps = load_apps(where)
    given = {"database": database, "broker": broker, "schema": schema, "prefix": prefix, **others}
    if any(value is not None for value in given.values()):
        settings = settings_of(**given)
        for app in apps:
            app.configure(settings, database=database is not None, broker=broker is not None)
    return apps


def configured_app(where: str, **options: Any) -> App:
    """One app; see `configured_apps`."""
    return configured_apps([where], **options)[0]


def open_store(settings: Settings) -> SqlStore:
    """The inbox that the settings name. Nothing is read or checked yet.

    Raises:
        ConfigurationError: a URL that can't be read, a schema or prefix that is none.
    """
    from idemp.inbox.sql import SqlStore, create_engine_safely

    engine = create_engine_safely(settings.database_url)
    return SqlStore(engine, tables=tables_of(settings), broker=settings.broker_name)


def tables_of(settings: Settings) -> Tables:
    """The tables that the settings name."""
    from idemp.inbox.sql import shared_tables

    return shared_tables(settings.schema_name, settings.table_prefix)


def open_broker(settings: Settings) -> Broker:
    """The broker that the settings name."""
    return make_broker(settings.broker_url, settings)


def existing_broker(found: App | Settings) -> Broker:
    """The broker of an app or of settings, for commands that must not make one.

    Raises:
        ConfigurationError: it is an embedded one whose file does not exist.
    """
    if found.broker_url is not None and (path := missing_file(found.broker_url)) is not None:
        raise ConfigurationError(f"The embedded broker's file {path} does not exist.", fix=NO_FILE)
    return open_broker(found) if isinstance(found, Settings) else found.broker
