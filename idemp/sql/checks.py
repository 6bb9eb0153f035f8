"""Checks of the database: findings, each with the command or setting that fixes it."""

from __future__ import annotations

import secrets
import time
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, inspect, select

from idemp.identity import name_number
from idemp.ports import Finding
from idemp.sql.engine import Database
from idemp.sql.guard import Unit
from idemp.sql.schema import REVISION, stored_revision
from idemp.sql.store import UNCLAIMED

__all__ = ["check_broker", "check_database", "check_tables"]

SKEW: Final = 30.0  # seconds


def check_database(database: Database) -> list[Finding]:
    """Return what is wrong with the tables, rights, settings of the server, the isolation of the engine and the clock.

    Example:
        >>> [str(finding) for finding in check_database(Database("sqlite:///nowhere.db"))]
        ['the file nowhere.db does not exist: idemp db upgrade']
    """
    found = check_tables(database, writes=True)
    return (
        found if any(finding.level == "red" for finding in found) else [*found, *_check_claims(database), *_check_clock(database)]
    )


def check_tables(database: Database, *, writes: bool = False) -> list[Finding]:
    """Return what is wrong with the tables.

    Args:
        database: Is read, and not changed.
        writes: Whether the rights of a worker are needed; else SELECT is enough.
    """
    if missing := database.missing_files():
        return [Finding("red", f"the file {missing[0]} does not exist", "idemp db upgrade")]
    if writes:
        tables = database.tables
        with database.engine.connect() as connection:
            if missing_rights := database.dialect.check_rights(connection, tables):
                return missing_rights
    for engine in dict.fromkeys((database.engine, database.queue_engine)):
        revision = stored_revision(engine, database)
        if revision is None or revision < REVISION:
            state = "has no tables of idemp" if revision is None else f"has tables of revision {revision}, not {REVISION}"
            return [Finding("red", f"{engine.url.render_as_string()} {state}", "idemp db upgrade")]
    return _check_columns(database)


def check_broker(database: Database, identity: str) -> list[Finding]:
    """Compare the broker with the one that these tables serve, and note the first one.

    Example:
        >>> from idemp.sql.schema import upgrade
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     database = Database(f"sqlite:///{folder}/shop.db")
        ...     upgrade(database)
        ...     check_broker(database, "sql"), [finding.level for finding in check_broker(database, "another")]
        ([], ['red'])
    """
    name = database.tables.name
    with database.short() as connection:
        number = name_number("broker", "")
        connection.execute(database.dialect.insert_new(name, ["id"]), {"id": number, "kind": "broker", "name": identity})
        stored = connection.execute(select(name.c.name).where(name.c.id == number)).scalar()
        if stored != identity:
            text = f"these tables serve the broker {stored!r}, not {identity!r}: outputs would go to the wrong one"
            return [Finding("red", text, "set IDEMP_BROKER_URL, or use another IDEMP_TABLE_PREFIX")]
    return []


def _check_columns(database: Database) -> list[Finding]:
    findings = []
    for engine, metadata in (
        (database.engine, database.tables.metadata),
        (database.queue_engine, database.tables.queue_metadata),
    ):
        with engine.connect() as connection:
            there, names = inspect(connection), [table.name for table in metadata.sorted_tables]
            columns = {
                name: {each["name"] for each in found} for (_, name), found in there.get_multi_columns(filter_names=names).items()
            }
            keys = {
                name: key["constrained_columns"] for (_, name), key in there.get_multi_pk_constraint(filter_names=names).items()
            }
            for table in metadata.sorted_tables:
                if missing := sorted(set(table.c.keys()) - columns.get(table.name, set())):
                    findings.append(
                        Finding("red", f"{table.name} has no {', '.join(missing)}", "restore the table from a backup")
                    )
                elif keys[table.name] != table.primary_key.columns.keys():
                    findings.append(Finding("red", f"{table.name} has another primary key", "restore the table from a backup"))
    return findings


def _check_claims(database: Database) -> list[Finding]:
    """Claim one id twice and roll back: the second has to conflict, and nothing may stay."""
    inbox, dialect = database.tables.inbox, database.dialect
    key = dialect.key(UUID(bytes=secrets.token_bytes(16)))
    row = {"consumer_id": UNCLAIMED, "message_key": key, "type_id": 0, "original_id": b"check", "claimed_at": 0.0, "worker": ""}
    claim = dialect.claim_statement(inbox).values(row)

    def stays(connection: Connection) -> bool:
        return connection.execute(select(inbox.c.type_id).where(inbox.c.message_key == key)).first() is not None

    with database.short() as connection:
        findings = dialect.check(connection, database.tables)
    if any(finding.level == "red" for finding in findings):
        return findings
    with Unit(database) as unit:
        claimed = [dialect.claim(unit.connection, claim, {}) for _ in range(2)]
    with database.short() as connection:
        autocommits = stays(connection)
        connection.execute(inbox.delete().where(inbox.c.consumer_id == UNCLAIMED, inbox.c.message_key == key))
    if autocommits:
        return [Finding("red", "the engine commits each statement", "create it without isolation_level='AUTOCOMMIT'")]
    if claimed != [True, False]:
        return [Finding("red", f"{inbox.name} takes an id twice", "restore its primary key (consumer_id, message_key)")]
    return findings


def _check_clock(database: Database) -> list[Finding]:
    """Compare the clocks. The database's decides; this machine's dates messages."""
    with database.engine.connect() as connection:
        before = time.time()
        ahead = (before + time.time()) / 2 - connection.execute(select(database.dialect.now)).scalar_one()
    if abs(ahead) < SKEW:
        return []
    text = f"the clock of this machine is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} that of the database"
    return [Finding("yellow", f"{text}, so messages are dated wrongly", "timedatectl set-ntp true, on both machines")]
