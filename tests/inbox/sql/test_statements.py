"""What a statement's text says about the transaction and the session, and how long it takes to find out."""

from __future__ import annotations

import pytest

from idemp.inbox.sql.statements import changes_session, transaction_end
from tests.lanes import mostly_slow

MANY = 100_000

ENDING = [
    ("COMMIT", "postgresql", "COMMIT"),
    ("; ;\n commit", "sqlite", "commit"),
    ("/* a */-- b\n/* c */ Rollback", "sqlite", "Rollback"),
    ("/* a /* nested */ b */ COMMIT", "postgresql", "COMMIT"),
    ("/* a /* not nested */ COMMIT", "sqlite", "COMMIT"),
    ("ROLLBACK PREPARED 'x'", "postgresql", "ROLLBACK"),
    ("start\ttransaction", "mariadb", "start transaction"),
    ("# why\nCOMMIT", "mysql", "COMMIT"),
    ("/*! COMMIT */", "mysql", "COMMIT"),
    ("/*M!100100 DROP TABLE t */", "mariadb", "DROP"),
    ("CREATE   TABLE t (n int)", "mysql", "CREATE"),
    ("XA END 'x'", "mysql", "XA"),
    ("SELECT 1; COMMIT; BEGIN", "postgresql", "COMMIT"),
    ("SELECT ';' /* ; */ -- ;\n ;; /* a */ rollback", "postgresql", "rollback"),
    ("SELECT 'it''s', \"a;b\"; END", "postgresql", "END"),
    (r"SELECT E'\'; COMMIT', 'a\'; ABORT", "postgresql", "ABORT"),
    ("SELECT $1; COMMIT", "postgresql", "COMMIT"),
    ("SELECT 1 AS a$b$; COMMIT; --$b$", "postgresql", "COMMIT"),
    ("DO $$ BEGIN x; END $$; DO $é1$ $$; $é1$; PREPARE TRANSACTION 'x'", "postgresql", "PREPARE TRANSACTION"),
    ("CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; END; END", "postgresql", "END"),
    ("SELECT '\\'; COMMIT', \"`\", `a;b` # ;\n; SELECT 5--1; DROP TABLE t", "mysql", "DROP"),
    ("SELECT 1 /*! ; COMMIT */", "mariadb", "COMMIT"),
    ("SELECT [a;b]; END", "sqlite", "END"),
]
NOT_ENDING = [
    ("", "postgresql"),
    ("-- COMMIT", "postgresql"),
    ("/* COMMIT", "postgresql"),
    ("/* a /* nested */ COMMIT */", "postgresql"),
    ("COMMITTED", "postgresql"),
    ("ROLLBACK WORK TO mine", "postgresql"),
    ("CREATE TABLE t (n int)", "postgresql"),
    ("CREATE    TEMPORARY TABLE t (n int)", "mariadb"),
    ("WITH x AS (SELECT 1) SELECT * FROM x", "postgresql"),
    ("SELECT '; COMMIT', \"; COMMIT\" /* ; COMMIT /* ; */ ; COMMIT */ -- ; COMMIT", "postgresql"),
    ("SELECT 'it''s; COMMIT'; SELECT 1;", "postgresql"),
    (r"SELECT E'\'; COMMIT'; SELECT 1", "postgresql"),
    ("DO $$ BEGIN COMMIT; END $$; DO $a$ $$; COMMIT; $a$", "postgresql"),
    ("SELECT '; COMMIT", "postgresql"),
    ("SELECT $$; COMMIT", "postgresql"),
    ("CREATE FUNCTION f() RETURNS int begin atomic SELECT CASE WHEN true THEN 1 END; SELECT 1; END", "postgresql"),
    ("SELECT 1; ROLLBACK TO SAVEPOINT a; RELEASE a", "postgresql"),
    ("SELECT '\\'; COMMIT', \"; COMMIT\", `; COMMIT` # ; COMMIT\n-- ; COMMIT", "mysql"),
    ("IF 1 THEN SELECT 1; END IF", "mariadb"),
    ("CREATE TRIGGER r AFTER INSERT ON t BEGIN UPDATE t SET n = 1; DELETE FROM u; END", "sqlite"),
    ("SELECT [; COMMIT]", "sqlite"),
]


@pytest.mark.parametrize(("statement", "dialect", "words"), ENDING)
def test_what_ends_the_transaction(statement: str, dialect: str, words: str) -> None:
    assert transaction_end(statement, dialect) == words


@pytest.mark.parametrize(("statement", "dialect"), NOT_ENDING)
def test_what_does_not_end_it(statement: str, dialect: str) -> None:
    assert transaction_end(statement, dialect) is None


@pytest.mark.parametrize(
    ("statement", "dialect"),
    [
        ("USE other", "mysql"),
        ("HANDLER t OPEN", "mariadb"),
        ("SET @a = 1", "mysql"),
        ("SET TRANSACTION READ ONLY", "mysql"),
        ("CREATE OR REPLACE TEMPORARY TABLE t (n int)", "mariadb"),
        ("ATTACH 'x.db' AS x", "sqlite"),
        ("RESET ROLE", "postgresql"),
        ("SELECT pg_try_advisory_lock_shared(1)", "postgresql"),
        ("SELECT set_config('a.b', '1', true), set_config('c.d', '1', false)", "postgresql"),
        ("/* a; b */ SET search_path = public", "postgresql"),
        ("SELECT ';'; CREATE TEMP TABLE t (n int); SELECT 'ON COMMIT DROP'", "postgresql"),
    ],
)
def test_what_changes_the_session(statement: str, dialect: str) -> None:
    assert changes_session(statement, dialect)


@pytest.mark.parametrize(
    ("statement", "dialect"),
    [
        ("UPDATE t SET a = ';' WHERE b = 'x'", "postgresql"),
        ("UPDATE t SET a = '; SET b = 1'", "postgresql"),
        ("SET STATEMENT max_statement_time = 1 FOR SELECT 1", "mariadb"),
        ("SET TRANSACTION READ ONLY", "postgresql"),
        ("CREATE TABLE t (n int)", "sqlite"),
        ("SELECT set_config('a.b', current_setting('c.d'), true)", "postgresql"),
        ("SAVEPOINT a; RELEASE SAVEPOINT a", "postgresql"),
    ],
)
def test_what_does_not_change_it(statement: str, dialect: str) -> None:
    assert not changes_session(statement, dialect)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dialect", mostly_slow(["postgresql", "mysql", "sqlite"]))
@pytest.mark.parametrize(
    "hostile",
    [
        "/**/" * MANY,
        "-- a\n" * MANY,
        "/*" * MANY,
        "/* */ -- \n ;" * MANY + "SELECT 1",
        "DROP" + " " * MANY + "TEMPORARY",
        "ROLLBACK" + " " * MANY + "T",
        "CREATE TEMP TABLE t; " + "ON COMMIT " * MANY,
        "set_config(, " * MANY,
        ", " * MANY + "set_config",
        ";" * MANY,
        "/*!" * MANY,
        "SET" + "\n" * MANY,
        "; SELECT 1" * MANY,
        "; CREATE TEMP TABLE t" * MANY,
        "; -- a\n" * MANY,
        "; '" * MANY,
        "'\\" * MANY + ";",
        "".join(f"$a{number}$ ;" for number in range(MANY // 4)),
        "$" * MANY + ";",
        "; /*" * MANY,
        ";" + "BEGIN " * MANY,
        "CREATE BEGIN ATOMIC; END;" * (MANY // 4),
    ],
    ids=lambda text: repr(text[:12]),
)
def test_a_hostile_statement_takes_no_longer_than_its_length(hostile: str, dialect: str) -> None:
    transaction_end(hostile, dialect)
    changes_session(hostile, dialect)
