r"""Classification of a handler's SQL statements by their text: does one end the transaction or change the session?

Each statement of each handler passes through here, so all of it runs in time linear in the statement's length, and the
usual ones (SELECT, INSERT, UPDATE, DELETE) cost about a microsecond.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

__all__ = ["changes_session", "transaction_end"]

_MYSQL: Final = frozenset({"mysql", "mariadb"})
_LETTERS: Final = re.compile(r"[A-Za-z]+")
_BLANKS: Final = re.compile(r"[\s;]+")
_COMMENT_ENDS: Final = re.compile(r"/\*|\*/")
_EXECUTABLE: Final = re.compile(r"/\*M?![0-9]*")  # MySQL runs what stands in such a comment

# What has to be seen to tell the semicolons between statements from those in literals and comments. The body of a function
# (`BEGIN ATOMIC … END`) or of a SQLite trigger has semicolons of its own, and its END ends no transaction.
_MARKS_ON_POSTGRESQL: Final = re.compile(r"[;'\"$]|--|/\*|\bBEGIN\s+ATOMIC\b", re.IGNORECASE)
_MARKS_ON_MYSQL: Final = re.compile(r"[;'\"`#]|--(?=\s|$)|/\*")
_MARKS_ON_SQLITE: Final = re.compile(r"[;'\"`\[]|--|/\*|\bBEGIN\b", re.IGNORECASE)
_CLOSING: Final = {"'": "'", '"': '"', "`": "`", "[": "]"}
_DOLLAR_QUOTE: Final = re.compile(r"\$(?:[^\W\d]\w*)?\$")
_ESCAPED: Final = {quote: re.compile(rf"[^{quote}\\]*(?:\\.[^{quote}\\]*)*", re.DOTALL) for quote in ("'", '"')}

# After `\s+` comes no optional blank: two of them side by side make the time quadratic.
_ENDS_ANYWHERE: Final = re.compile(
    r"(COMMIT|END|ABORT|ROLLBACK(?!\s+(?:WORK\s+|TRANSACTION\s+)?TO\b)|BEGIN|START\s+TRANSACTION"
    r"|PREPARE\s+TRANSACTION|SET\s+(?:SESSION\s+|@@(?:SESSION\.)?)?AUTOCOMMIT)\b",
    re.IGNORECASE,
)
_ENDS_ON_MYSQL: Final = re.compile(
    r"((?:CREATE|DROP)\s+(?!\s|TEMPORARY)|ALTER\s|RENAME\s|TRUNCATE\s|GRANT\s|REVOKE\s|LOCK\s+TABLES?\b"
    r"|UNLOCK\s+TABLES?\b|ANALYZE\s|OPTIMIZE\s|REPAIR\s|FLUSH\s|XA\s)",
    re.IGNORECASE,
)
_ENDING: Final = frozenset({
    "COMMIT", "END", "ABORT", "ROLLBACK", "BEGIN", "START", "PREPARE", "SET", "CREATE", "DROP", "ALTER", "RENAME",
    "TRUNCATE", "GRANT", "REVOKE", "LOCK", "UNLOCK", "ANALYZE", "OPTIMIZE", "REPAIR", "FLUSH", "XA",
})  # fmt: skip

_CHANGING: Final = frozenset({
    "SET", "RESET", "DISCARD", "LISTEN", "UNLISTEN", "PREPARE", "DEALLOCATE", "LOAD", "DO",  # PostgreSQL; `DO $$ … $$`
    "USE", "HANDLER",  # MySQL
    "PRAGMA", "ATTACH", "DETACH",  # SQLite
})  # fmt: skip
_ONLY_THE_TRANSACTION: Final = re.compile(r"SET\s+(?:LOCAL|TRANSACTION|CONSTRAINTS)\b", re.IGNORECASE)
_ONLY_THE_STATEMENT: Final = re.compile(r"SET\s+STATEMENT\b", re.IGNORECASE)  # MariaDB
_TEMPORARY: Final = re.compile(
    r"CREATE\s+(?:OR\s+REPLACE\s+)?(?:(?:LOCAL|GLOBAL)\s+)?TEMP(?:ORARY)?\b(?!.*\bON\s+COMMIT\s+DROP\b)",
    re.IGNORECASE | re.DOTALL,
)
_WITHIN: Final = ("advisory_lock", "get_lock", "into temp", "with hold")
_LOCAL_CONFIG: Final = re.compile(r",\s*(?:true|%\((\w+)\)s(?:::bool(?:ean)?)?)\s*\)")


def transaction_end(statement: str, dialect: str) -> str | None:
    """Return the words by which a text of one or more statements ends the transaction, or `None`.

    Args:
        statement: as it is sent; several are separated by semicolons.
        dialect: SQLAlchemy's name of the database; on MySQL and MariaDB every DDL statement commits.

    Example:
        >>> transaction_end("/* done */ start  transaction", "postgresql")
        'start transaction'
        >>> transaction_end("ROLLBACK TO SAVEPOINT mine", "sqlite")
        >>> transaction_end("DROP TABLE t", "mariadb")
        'DROP'
        >>> transaction_end("SELECT ';'; COMMIT; BEGIN", "postgresql")
        'COMMIT'
    """
    if ";" not in statement:
        return _end_at(statement, _start(statement, 0, dialect), dialect)
    ends = (_end_at(statement, start, dialect) for start, _ in _parts(statement, dialect))
    return next((end for end in ends if end is not None), None)


def _end_at(statement: str, start: int, dialect: str) -> str | None:
    if _word(statement, start) not in _ENDING:
        return None
    found = _ENDS_ANYWHERE.match(statement, start)
    if found is None and dialect in _MYSQL:
        found = _ENDS_ON_MYSQL.match(statement, start)
    return None if found is None else " ".join(found.group(1).split())


def changes_session(statement: str, dialect: str, parameters: Any = None) -> bool:
    """Whether a statement changes its connection beyond the transaction: a setting, role, lock or temporary table.

    PostgreSQL takes most of it back if the transaction is rolled back; MySQL and SQLite do not. What a stored procedure or
    function does is not seen.

    Args:
        statement: as it is sent; several are separated by semicolons.
        dialect: SQLAlchemy's name of the database.
        parameters: of the statement.

    Example:
        >>> [changes_session(f"{verb} search_path = other", "postgresql") for verb in ("SET", "SET LOCAL")]
        [True, False]
        >>> changes_session("SET LOCAL sql_mode = ''", "mysql")  # there LOCAL is another word for SESSION
        True
        >>> changes_session("SELECT set_config('app.tenant', '7', true)", "postgresql")
        False
    """
    if any(_lasts(statement, start, end, dialect) for start, end in _parts(statement, dialect)):
        return True
    folded = statement.lower()
    if any(word in folded for word in _WITHIN) or (":=" in folded and dialect in _MYSQL):
        return True
    settings = folded.count("set_config")
    return settings > 0 and settings > _local_settings(folded, parameters)


def _lasts(statement: str, start: int, end: int, dialect: str) -> bool:
    word = _word(statement, start)
    if word == "SET":
        passing = _ONLY_THE_TRANSACTION if dialect == "postgresql" else _ONLY_THE_STATEMENT
        return passing.match(statement, start) is None
    return word in _CHANGING or (word == "CREATE" and _TEMPORARY.match(statement, start, end) is not None)


def _local_settings(folded: str, parameters: Any) -> int:
    given = parameters if isinstance(parameters, Mapping) else {}
    return sum(1 for found in _LOCAL_CONFIG.finditer(folded) if not found[1] or given.get(found[1]) is True)


def _word(statement: str, start: int) -> str:
    found = _LETTERS.match(statement, start)
    return "" if found is None else found[0].upper()


def _parts(statement: str, dialect: str) -> Iterator[tuple[int, int]]:
    """Yield where each statement of a text begins and ends.

    The END of a body that has semicolons of its own is left out. On MySQL so is each further END: there it is only the end
    of a compound statement.
    """
    start = at = _start(statement, 0, dialect)
    if ";" in statement:
        marks = _marks(dialect)
        in_body = False
        while (found := marks.search(statement, at)) is not None:
            mark, at = found[0], found.end()
            if mark == ";":
                yield start, found.start()
                start = at = _start(statement, at, dialect)
                if _word(statement, start) == "END" and (in_body or dialect in _MYSQL):
                    in_body, start = False, at + len("END")
            elif mark[0] in "Bb":
                in_body = in_body or _word(statement, start) == "CREATE"
            else:
                at = _behind(statement, found.start(), mark, dialect)
    yield start, len(statement)


def _marks(dialect: str) -> re.Pattern[str]:
    if dialect in _MYSQL:
        return _MARKS_ON_MYSQL
    return _MARKS_ON_SQLITE if dialect == "sqlite" else _MARKS_ON_POSTGRESQL


def _behind(statement: str, at: int, mark: str, dialect: str) -> int:
    """Return where a literal, a quoted name or a comment ends that begins here; one without an end takes all the rest."""
    if mark in {"--", "#"}:
        return statement.find("\n", at) + 1 or len(statement)
    if mark == "/*":
        if dialect in _MYSQL and (executable := _EXECUTABLE.match(statement, at)) is not None:
            return executable.end()
        return _comment_end(statement, at, nested=dialect == "postgresql")
    if mark == "$":
        tag = None if _is_in_name(statement, at - 1) else _DOLLAR_QUOTE.match(statement, at)
        if tag is None:
            return at + 1
        end = statement.find(tag[0], tag.end())
        return len(statement) if end < 0 else end + len(tag[0])
    if _has_escapes(statement, at, mark, dialect):
        escaped = _ESCAPED[mark].match(statement, at + 1)
        return len(statement) if escaped is None else escaped.end() + 1
    return statement.find(_CLOSING[mark], at + 1) + 1 or len(statement)  # a doubled quote begins another literal


def _has_escapes(statement: str, at: int, quote: str, dialect: str) -> bool:
    """Whether a backslash in the literal that begins here takes the next character's meaning."""
    if dialect in _MYSQL:
        return quote != "`"
    if dialect != "postgresql" or quote != "'":
        return False
    return at > 0 and statement[at - 1] in "eE" and not _is_in_name(statement, at - 2)


def _is_in_name(statement: str, at: int) -> bool:
    return at >= 0 and (statement[at].isalnum() or statement[at] in "_$")


def _start(statement: str, at: int, dialect: str) -> int:
    """Return where the next word begins, behind blanks, semicolons and comments."""
    while True:
        if (blanks := _BLANKS.match(statement, at)) is not None:
            at = blanks.end()
        if statement.startswith("--", at) or (dialect in _MYSQL and statement.startswith("#", at)):
            at = statement.find("\n", at) + 1 or len(statement)
        elif dialect in _MYSQL and (executable := _EXECUTABLE.match(statement, at)) is not None:
            at = executable.end()
        elif statement.startswith("/*", at):
            at = _comment_end(statement, at, nested=dialect == "postgresql")
        else:
            return at


def _comment_end(statement: str, start: int, *, nested: bool) -> int:
    if not nested:
        end = statement.find("*/", start + 2)
        return len(statement) if end < 0 else end + 2
    depth = 0
    for found in _COMMENT_ENDS.finditer(statement, start):
        depth += 1 if found[0] == "/*" else -1
        if depth == 0:
            return found.end()
    return len(statement)
