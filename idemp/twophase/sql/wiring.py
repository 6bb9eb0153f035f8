"""From what an app says of its other databases to its coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from idemp.errors import ConfigurationError
from idemp.inbox.sql import SqlStore, create_engine_safely
from idemp.twophase.coordinator import Coordinator
from idemp.twophase.sql.database import SqlDatabase
from idemp.twophase.sql.decisions import SqlDecisions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from idemp.inbox.port import InboxStore


def coordinator_of(store: InboxStore, given: Mapping[str, Any]) -> Coordinator:
    """The coordinator of an inbox and other databases: URLs, engines, or sessionmakers that are bound to one.

    Raises:
        ConfigurationError: an inbox that is in no SQL database, a database that can't prepare transactions, or one twice.

    Example:
        >>> from idemp.inbox.memory import InMemoryStore
        >>> coordinator_of(InMemoryStore(), {"ledger": "postgresql://db/ledger"})
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: An InMemoryStore can't decide about other databases: it is in no SQL database...
    """
    if not isinstance(store, SqlStore):
        raise ConfigurationError(
            f"An {type(store).__name__} can't decide about other databases: it is in no SQL database itself.",
            fix="Keep the inbox in a SQL database, or send a message to a consumer that has its inbox in the other one.",
        )
    databases = {name: _database(name, each) for name, each in given.items()}
    decisions = SqlDecisions(store)
    places = {decisions.place: "the inbox's own database, where handlers write by ctx.session"}
    for name, database in databases.items():
        if database.place in places:
            raise ConfigurationError(
                f"The database {name!r} ({database.place}) is {places[database.place]}.",
                fix="Within one database no two-phase commit is needed: leave it out.",
            )
        places[database.place] = f"the database {name!r}, too"
    return Coordinator(store, decisions, databases)


def _database(name: str, given: Any) -> SqlDatabase:
    if isinstance(given, str):
        return SqlDatabase(name, create_engine_safely(given), owned=True)
    if isinstance(given, Engine):
        return SqlDatabase(name, given)
    if isinstance(given, sessionmaker):
        engine = given.kw.get("bind")
        if isinstance(engine, Engine):
            return SqlDatabase(name, engine, session_factory=given)
    raise ConfigurationError(
        f"The database {name!r} is a {type(given).__name__}.",
        fix="Give a URL, an engine, or a sessionmaker that is bound to an engine.",
    )
