"""The settings that decide whether a COMMIT survives a crash of the server, and the statements that set them right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import text

from idemp.diagnosis import Command, Diagnosis, Verdict, statements
from idemp.inbox.sql import checks
from idemp.inbox.sql.engine import is_mysql

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from idemp.inbox.sql.checks import Finding
    from idemp.inbox.sql.tables import Tables

# With one of these a crash may take back what was acked: no promise holds. The other findings only weaken something.
_DECISIVE: Final = frozenset(
    {
        "synchronous_commit",
        "fsync",
        "full_page_writes",
        "innodb_flush_log_at_trx_commit",
        "innodb_doublewrite",
        "sync_binlog",
        "synchronous",
    }
)
_DYNAMIC_ON_MYSQL: Final = {"innodb_flush_log_at_trx_commit": "1", "sync_binlog": "1"}
_SOURCES: Final = text(
    "SELECT name, source FROM pg_settings WHERE name IN ('fsync', 'synchronous_commit', 'full_page_writes')"
)
_WHO: Final = text("SELECT current_database(), current_user")


def look(connection: Connection, tables: Tables) -> list[Diagnosis]:
    """Each setting that matters, as the server has it."""
    findings = checks.findings(connection, tables)
    dialect = connection.dialect.name
    if dialect == "postgresql":
        sources = {row[0]: str(row[1]) for row in connection.execute(_SOURCES)}
        database, user = connection.execute(_WHO).one()
        quote = connection.dialect.identifier_preparer.quote_identifier
        names = (quote(database), quote(user))
        return [_diagnosis(item, *_on_postgresql(item, sources.get(item.name, ""), names)) for item in findings]
    if is_mysql(dialect):
        return [_diagnosis(item, *_on_mysql(item)) for item in findings]
    return [_diagnosis(item, item.fix, ()) for item in findings]


def _diagnosis(finding: Finding, fix: str, commands: Sequence[Command]) -> Diagnosis:
    if finding.level == "ok":
        return Diagnosis("ok", finding.name, finding.value)
    verdict: Verdict = "failed" if finding.name in _DECISIVE else "warning"
    return Diagnosis(verdict, finding.name, f"{finding.value}. {finding.meaning}", fix, tuple(commands))


def _on_postgresql(finding: Finding, source: str, names: tuple[str, str]) -> tuple[str, tuple[Command, ...]]:
    database, user = names
    where = {
        "database": f"ALTER DATABASE {database} RESET {finding.name}",
        "user": f"ALTER ROLE {user} RESET {finding.name}",
        "database user": f"ALTER ROLE {user} IN DATABASE {database} RESET {finding.name}",
    }
    if source in where:
        return f"{finding.fix} It is set for this {source}.", statements([where[source]])
    if source in {"client", "session"}:
        return f"{finding.fix} This connection sets it: look into the options of the database URL.", ()
    if source == "command line":
        return f"{finding.fix} It stands on the server's command line: start it without.", ()
    setting = f"ALTER SYSTEM SET {finding.name} = 'on'"
    return f"{finding.fix} It is the server's configuration.", statements([setting, "SELECT pg_reload_conf()"])


def _on_mysql(finding: Finding) -> tuple[str, tuple[Command, ...]]:
    value = _DYNAMIC_ON_MYSQL.get(finding.name)
    if value is None:
        return finding.fix, ()
    lasting = "Write it into the server's configuration as well: the statement holds until its next start."
    return f"{finding.fix} {lasting}", statements([f"SET GLOBAL {finding.name} = {value}"])
