"""Set handlers: all new rows of a type at once, on PostgreSQL.

    rows ─ COPY ─► stage ─ INSERT … SELECT … ON CONFLICT ─► inbox ─ rows claimed before leave the stage ─ effects, outputs, COMMIT

The stage is a temporary table of the transaction, so that a pooler may give the next one to another connection of the server.
If a transaction fails, its rows run again in halves until the failing row is alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, CursorResult, exc

from idemp.bulk.rows import Answer, Report
from idemp.context import CAUSATION, EXCHANGE, inherit, inherits_id_alone
from idemp.errors import (
    ConfigurationError,
    Conflict,
    InFlight,
    Late,
    TransactionEnded,
    Unavailable,
    Unreadable,
    UnusableOutput,
    describe_error,
    needs,
)
from idemp.failures import Action, Phase, decide
from idemp.handlers import MARK, Handler
from idemp.identity import name_number, output_scope
from idemp.messages import MAX_BODY_BYTES, Delivery, check_list, check_text, parse
from idemp.ports import Claim
from idemp.sql.dialects import CLAIM_SECONDS
from idemp.sql.engine import Database
from idemp.sql.fast import GIVE_BACK, NOW, driver_of, exchange, reported, table_limit, text_literal
from idemp.sql.guard import Unit
from idemp.sql.store import DAY, SqlStore

if TYPE_CHECKING:
    from pyarrow import Table

__all__ = ["SetHandler", "Sets", "SqlSet", "Statements"]

PIECE: Final = 10_000  # rows of a transaction
ADOPTED: Final = 25_000  # rows of a transaction that only claims
FRESH: Final = "{fresh}"
STAGE: Final = "idemp_fresh"
EMITTED: Final = "idemp_emitted"
STAGED: Final = (
    "place int, message_key uuid, original_id bytea, fingerprint bytea, made_at float8, id text, reply_to text, headers jsonb, "
    "body jsonb, inherited json"
)
WAITS: Final = 5  # times that a claim waits for another transaction with its id, two seconds each
HELD: Final = "another transaction has held an id of the chunk for too long: run the chunk again"
LATE: Final = "claims of its age have been deleted, so it may have been handled: adopt it if it was"
COLUMNS: Final = STAGED.count(",") + 1
NULL: Final = b"\xff\xff\xff\xff"
HEAD: Final = Struct("!hiii16si").pack
FLOAT: Final = Struct("!id").pack
LONG_NUMBER: Final = "[0-9.]{17}"
"""Digits that may be a number which no float keeps: numeric has more of them, as the mean of two integers does."""
LENGTH: Final = Struct("!i").pack


@dataclass(frozen=True, kw_only=True)
class SqlSet:
    """A handler in SQL, over all new rows of a type.

    `{fresh}` is a table with a row for each new message: `place` (its number), `id` (of its envelope), `reply_to`, `body` and
    `headers` (`jsonb`), and `made_at` (seconds since 1970). A message that the handler's class refuses is parked before. The
    statements are code: never build them from data that users send.

    Args:
        effects: Statements, run in turn.
        outputs: A SELECT with a row for each output: `place` of the message that it follows from, its `type`, its `body` as JSON, and,
            if it goes to one queue, the queue's name as `queue`; else it is published. Add ORDER BY if a message has several outputs.

    Raises:
        ConfigurationError: A statement does not mention `{fresh}`.

    Example:
        >>> SqlSet(
        ...     effects=["INSERT INTO stock (sku) SELECT body ->> 'sku' FROM {fresh}"],
        ...     outputs="SELECT place, 'stock.Reserved' AS type, body FROM {fresh}",
        ... ).outputs
        "SELECT place, 'stock.Reserved' AS type, body FROM {fresh}"
    """

    effects: Sequence[str] = ()
    outputs: str | None = None

    def __post_init__(self) -> None:
        check_list(self.effects, "effects")
        for statement in (*self.effects, *filter(None, [self.outputs])):
            if FRESH not in statement:
                raise ConfigurationError(f"a set does not mention {FRESH}, so it would see no new row: {statement!r}")


SetHandler = SqlSet | Callable[["Table", Connection], "Table | None"]
"""SQL, or a function of an Arrow table and of a connection for its effects. The table has the columns `place`, `id`, `reply_to`,
`body` (bytes), `headers` (JSON) and `made_at`. The function returns outputs as a table with the columns that `SqlSet.outputs`
selects, or None."""

Staged = tuple[int, Delivery, Claim]


class Statements:
    """SQL statements of a set; the numbers and digits in them are computed here.

    Example:
        >>> Statements.__name__
        'Statements'
    """

    def __init__(self, store: SqlStore, handler: Handler) -> None:
        name = store.database.engine.dialect.identifier_preparer.format_table
        tables = store.database.tables
        inbox, worker = name(tables.inbox), text_literal(store.worker)
        consumer, type = name_number("consumer", handler.consumer), name_number("type", handler.type)
        self.begin = (
            f"SET LOCAL jit=off; {_bounded('idle_in_transaction_session_timeout', '120s')}; "
            f"{table_limit(CLAIM_SECONDS)}; CREATE TEMP TABLE {STAGE} ({STAGED}) ON COMMIT DROP"
        )
        self.copy = f"COPY {STAGE} FROM STDIN (FORMAT BINARY)"
        self.claim = (
            f"WITH ours AS (INSERT INTO {inbox} (consumer_id,message_key,type_id,original_id,fingerprint,claimed_at,worker) "
            f"SELECT {consumer},message_key,{type},original_id,fingerprint,least(greatest({NOW},made_at),{NOW}+{DAY}),{worker} "
            f"FROM {STAGE} ORDER BY message_key ON CONFLICT (consumer_id,message_key) DO NOTHING RETURNING message_key) "
            f"SELECT place FROM {STAGE} LEFT JOIN ours USING (message_key) WHERE ours.message_key IS NULL"
        )
        skips = "true" if getattr(handler.policy, "on_conflict", "") == "skip" else "false"
        same = f"(i.fingerprint=s.fingerprint) IS NOT FALSE OR {skips}"
        self.judge = (
            f"SELECT s.place,i.type_id={type} AND i.original_id=s.original_id AND ({same}),i.worker={worker} FROM {STAGE} s "
            f"JOIN {inbox} i ON i.consumer_id={consumer} AND i.message_key=s.message_key WHERE s.place=ANY(%s)"
        )
        self.leave = f"DELETE FROM {STAGE} WHERE place=ANY(%s)"
        self.withdraw = (
            f"DELETE FROM {inbox} i USING {STAGE} s "
            f"WHERE s.place=ANY(%s) AND i.consumer_id={consumer} AND i.message_key=s.message_key"
        )
        self.emitted = f"CREATE TEMP TABLE {EMITTED} (number int, place int, type text, body text, queue text) ON COMMIT DROP"
        self._consumer, self._scope = consumer, output_scope(handler.consumer)
        self._output, self._pending = name(tables.output), name(tables.pending)

    def store(self, outputs: str, head_start: float | None, *, queues: bool) -> str:
        """Return the statement that stores the outputs of a SELECT under the ids that a handler's would have, and counts them."""
        key, ordinal = "uuid_send(message_key)", "convert_to(ordinal::text,'UTF8')"
        digest = f"sha256('\\x{self._scope.hex()}'::bytea||{key}||int8send(length({ordinal}))||{ordinal})"
        stamp = f"CASE WHEN get_byte({key},6)>>4 IN (7,8) THEN substr({key},1,6) ELSE substr(digest,1,6) END"
        version = "set_byte(set_byte(digest,6,get_byte(digest,6)&15|128),8,get_byte(digest,8)&63|128)"
        id = f"encode({stamp}||substr({version},7,10),'hex')::uuid"
        queue = "queue" if queues else "NULL::text"
        headers = (
            "json_strip_nulls(json_build_object('type',type,'timestamp',round(extract(epoch FROM now())::numeric,3),"
            "'content_type','application/json','correlation_id',coalesce(inherited->>'correlation_id',alone,output_id::text),"
            "'message_id',output_id,'headers',CASE WHEN alone IS NULL THEN inherited->'headers' "
            f"ELSE json_build_object('{CAUSATION}',alone) END))"
        )
        pending = (
            f"INSERT INTO {self._pending} (output_id,consumer_id,message_key,ordinal,due_at) "
            f"SELECT output_id,{self._consumer},message_key,ordinal,{NOW}+{head_start} FROM made"
        )
        return (
            f"WITH chosen AS MATERIALIZED (SELECT *,row_number() OVER () AS number FROM ({outputs}) AS o),"
            f"numbered AS (SELECT message_key,s.inherited,CASE WHEN s.inherited IS NULL THEN s.id END AS alone,c.type,"
            f"convert_to(c.body::jsonb::text,'UTF8') AS body,{queue} AS queue,"
            f"row_number() OVER (PARTITION BY c.place ORDER BY c.number)-1 AS ordinal "
            f"FROM chosen c JOIN {STAGE} s USING (place)),"
            f"digested AS (SELECT *,{digest} AS digest FROM numbered),"
            f"made AS MATERIALIZED (SELECT *,{id} AS output_id FROM digested),"
            f"stored AS (INSERT INTO {self._output} (consumer_id,message_key,ordinal,output_id,kind,exchange,routing_key,mandatory,"
            f"headers,body) SELECT {self._consumer},message_key,ordinal,output_id,"
            f"CASE WHEN queue IS NULL THEN 'publish' ELSE 'send' END,"
            f"CASE WHEN queue IS NULL THEN '{EXCHANGE}' ELSE '' END,coalesce(queue,type),true,convert_to({headers}::text,'UTF8'),body "
            f"FROM made){'' if head_start is None else f',pending AS ({pending})'} "
            "SELECT (SELECT count(*) FROM chosen),count(*),array_agg(DISTINCT type),array_agg(DISTINCT queue),max(length(body)),"
            f"array_agg(body) FILTER (WHERE encode(body,'escape') ~ '{LONG_NUMBER}') FROM made"
        )


class Sets:
    """Handles chunks of one type: all new rows together.

    Args:
        handler: The handler of the type, whose policy identifies the messages.
        store: A store on PostgreSQL.
        function: Handler of the new rows; None only claims them.

    Example:
        >>> Sets.supported(Database("sqlite:///shop.db"))
        False
    """

    def __init__(self, handler: Handler, store: SqlStore, function: SetHandler | None) -> None:
        self._handler, self._store, self._function = handler, store, function
        self._statements = Statements(store, handler)
        self._most = ADOPTED if function is None else PIECE

    @staticmethod
    def supported(database: Database) -> bool:
        """Return whether a database takes sets."""
        return database.engine.driver == "psycopg"

    def run(self, rows: Sequence[tuple[int, Delivery]], report: Report) -> None:
        """Handle rows, each with its place in the chunk.

        Raises:
            Unavailable: The database takes no work.
            InFlight: Another transaction has held an id for too long.
        """
        staged: list[Staged] = []
        for place, delivery in rows:
            try:
                claim = self._handler.identify(delivery)
                if self._function is not None:  # a set gets what the handler would get
                    self._handler.decode(delivery)
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - a key may raise anything
                decision = decide(error, Phase.ACCEPT, self._handler.policy.retry, [], self._store)
                report.park(place, Answer.PARKED, decision.rule.name, describe_error(error))
                continue
            assert claim is not None
            staged.append((place, delivery, claim))
        again = False
        while staged:
            first: dict[int, Staged] = {}
            repeats = [each for each in staged if first.setdefault(each[2].key.int, each) is not each]
            ordered = [first[key] for key in sorted(first)]
            for start in range(0, len(ordered), self._most):
                self._run(ordered[start : start + self._most], report, again=again)
            parked, staged, again = {each.place for each in report.parked}, [], True
            for each in repeats:  # judged by the first row of the id
                place, _, claim = first[each[2].key.int]
                if place not in parked and (claim.original, claim.fingerprint) == (each[2].original, each[2].fingerprint):
                    report.counts[Answer.DUPLICATE] += 1
                else:
                    staged.append(each)

    def _run(self, rows: Sequence[Staged], report: Report, *, again: bool = False) -> None:
        """Handle rows of different keys in one transaction; by halves, if that fails."""
        reruns = waits = 0
        while rows:
            piece = _Piece(self._store, self._statements, self._handler, self._function, rows, again=again)
            error = self._failure(piece)
            if error is None:
                rows = piece.left
                report.add(piece.report)
                continue
            decision = decide(error, piece.phase, self._handler.policy.retry, [], self._store, own=piece.own, reruns=reruns)
            if isinstance(error, TransactionEnded) and error.committed is not False:  # all are claimed: nothing can run again
                report.add(piece.report)
                for place, *_ in piece.fresh:
                    report.park(place, Answer.PARKED, decision.rule.name, describe_error(error))
                return
            if decision.action is Action.HOLD:
                raise Unavailable(f"the database takes no work ({describe_error(error)}): run the chunk again") from error
            if decision.action is Action.RERUN:
                reruns += 1
            elif len(rows) > 1:
                middle = len(rows) // 2
                self._run(rows[:middle], report, again=again)
                rows, reruns = rows[middle:], 0
            elif isinstance(error, InFlight) and waits < WAITS:
                waits += 1
            elif isinstance(error, InFlight):
                raise InFlight(HELD) from None
            else:
                report.park(rows[0][0], Answer.PARKED, decision.rule.name, describe_error(error))
                return

    def _failure(self, piece: _Piece) -> Exception | None:
        """Execute a piece; return the error if it failed."""
        try:
            with self._store.connect() as tx:
                try:
                    piece.execute(tx)
                except Exception as error:
                    ended = self._store.ended(tx)
                    piece.own = ended is not None or isinstance(error, InFlight)
                    if ended is not None:
                        raise ended from error
                    raise
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a statement of the user's may fail in any way
            return error
        return None


class _Piece:
    """Rows of different keys in one transaction.

    Attributes:
        phase: Phase that the piece has reached.
        own: Whether the error of the piece is idemp's own.
        report: Answers to its rows, valid once the piece is committed.
        fresh: Rows whose claims are new.
        left: Rows that are to run again.
    """

    def __init__(
        self,
        store: SqlStore,
        statements: Statements,
        handler: Handler,
        function: SetHandler | None,
        rows: Sequence[Staged],
        *,
        again: bool,
    ) -> None:
        self._store, self._statements, self._handler, self._function, self._rows = store, statements, handler, function, rows
        self._again = again
        self.phase, self.report = Phase.CLAIM, Report()
        self.own = False
        self.fresh: Sequence[Staged] = ()
        self.left: Sequence[Staged] = ()

    def execute(self, tx: Unit) -> None:
        """Claim the rows, handle the new ones, commit."""
        rows, statements = self._rows, self._statements
        self._store.claim(tx, [])  # begins, and marks the transaction
        connection = tx.connection
        exchange(connection, statements.begin)
        with _copy(connection, statements.copy) as copy:
            copy.write(_packed(rows, self._function))
        theirs = self._claim(connection)
        if self._handler.parks_late:
            theirs |= self._late(connection, [row for row in rows if row[0] not in theirs])
        self.fresh = fresh = [row for row in rows if row[0] not in theirs]
        if fresh:
            if theirs:
                connection.exec_driver_sql(statements.leave, (list(theirs),))
            self.phase = Phase.HANDLER
            tx.claims = [fresh[0][2]]  # lets the store find out whether a transaction that ended below SQLAlchemy was committed
            self.report.outputs = self._handle(connection, fresh)
            self.phase = Phase.FINISH
        # Also without new rows: this COMMIT waits for the disk, because of the temporary table, and so for the claims that were found.
        self._store.finish(tx, [])
        self.report.counts[Answer.NEW] += len(fresh)

    def _claim(self, connection: Connection) -> set[int]:
        """Claim the rows; return the places of those whose ids were claimed before."""
        try:
            places = connection.exec_driver_sql(self._statements.claim).scalars()
        except exc.DBAPIError as error:
            if not self._store.database.dialect.in_flight(error, self._store.database.tables.inbox):
                raise
            raise InFlight("another transaction holds an id of the chunk") from error
        theirs = set(places)
        exchange(connection, f"{GIVE_BACK}; {_bounded('lock_timeout', '60s')}")
        if not theirs:
            return theirs
        judged = set()
        for place, same, of_run in connection.exec_driver_sql(self._statements.judge, (list(theirs),)):
            judged.add(place)
            if same:
                self.report.counts[Answer.REPLAY if of_run and not self._again else Answer.DUPLICATE] += 1
            else:
                conflict = describe_error(Conflict("another message was handled under its id"))
                self.report.park(place, Answer.CONFLICT, "conflict", conflict)
        # A claim that has disappeared since was purged, or its transaction was rolled back.
        self.left = [row for row in self._rows if row[0] in theirs and row[0] not in judged]
        return theirs

    def _late(self, connection: Connection, fresh: Sequence[Staged]) -> set[int]:
        """Withdraw the claims of rows as old as purged claims, and park these rows."""
        handler = self._handler
        purged = self._store.purged_before(connection, handler.consumer, handler.type)
        late = {row[0] for row in fresh if row[2].made_at is not None and row[2].made_at <= purged}
        if late:
            connection.exec_driver_sql(self._statements.withdraw, (list(late),))
        text = describe_error(Late(LATE))
        for place in late:
            self.report.park(place, Answer.PARKED, "late", text)
        return late

    def _handle(self, connection: Connection, fresh: Sequence[Staged]) -> int:
        """Run the function over the new rows, store its outputs, and return how many there are."""
        function = self._function
        if isinstance(function, SqlSet):
            for statement in function.effects:
                _run(connection, statement.replace(FRESH, STAGE))
            outputs = function.outputs.replace(FRESH, STAGE) if function.outputs else None
        else:
            table = None if function is None else function(_table(fresh), connection)
            outputs = None if table is None else _copy_outputs(connection, self._statements.emitted, table)
        if outputs is None:
            return 0
        names = set(_run(connection, f"SELECT * FROM ({outputs}) AS o LIMIT 0").keys())
        if not {"place", "type", "body"} <= names <= {"place", "type", "body", "queue"}:
            raise UnusableOutput(f"outputs have place, type, body and perhaps queue, not {', '.join(sorted(names))}")
        statement = self._statements.store(outputs, self._store.head_start, queues="queue" in names)
        chosen, made, types, addressed, longest, doubtful = tuple(_run(connection, statement).one())
        if chosen != made:
            raise UnusableOutput("an output follows from no new message: select place as it is")
        if (longest or 0) > MAX_BODY_BYTES:
            raise UnusableOutput(f"an output has {longest:,} bytes; at most {MAX_BODY_BYTES:,} are sent")
        _check_outputs(types or (), addressed or (), doubtful or ())
        return int(made)


def _check_outputs(types: Sequence[str], queues: Sequence[str | None], doubtful: Sequence[bytes]) -> None:
    """Refuse what a handler could not send, either."""
    for type in types:
        check_text(type, "the type of an output", UnusableOutput)
    for queue in queues:
        if queue is not None:
            check_text(queue, "the queue of an output", UnusableOutput)
    for body in doubtful:
        try:
            parse(body)
        except Unreadable as error:
            raise UnusableOutput(f"an output cannot be read back: {error}; round its numbers, or send them as text") from None


def _bounded(setting: str, value: str) -> str:
    """Return the statement that sets a server timeout for the transaction, unless one is set already."""
    current = f"current_setting('{setting}')"
    return f"SELECT set_config('{setting}',CASE {current} WHEN '0' THEN '{value}' ELSE {current} END,true)"


def _run(connection: Connection, statement: str) -> CursorResult[Any]:
    return connection.exec_driver_sql(statement, execution_options={"no_parameters": True})


@contextmanager
def _copy(connection: Connection, statement: str) -> Iterator[Any]:
    driver: Any = driver_of(connection)
    with reported(connection, statement), driver.cursor() as cursor, cursor.copy(statement) as copy:
        yield copy


def _copy_outputs(connection: Connection, make: str, table: Table) -> str:
    """Copy outputs of a function to the server, and return the SELECT that names them."""
    exchange(connection, make)
    names = [name for name in table.column_names if name != "number"]
    columns = ",".join(f'"{name}"' for name in ["number", *names])
    statement = f"COPY {EMITTED} ({columns}) FROM STDIN"
    with _copy(connection, statement) as copy:
        for number, values in enumerate(zip(*(table[name].to_pylist() for name in names), strict=True)):
            copy.write_row((number, *(value.decode() if isinstance(value, bytes) else value for value in values)))
    return f"SELECT {','.join(names)} FROM {EMITTED} ORDER BY number"


def _table(fresh: Sequence[Staged]) -> Table:
    with needs("spark"):
        import pyarrow as pa

    properties = [delivery.properties for _, delivery, _ in fresh]
    headers = [json.dumps(each["headers"]) if "headers" in each else None for each in properties]
    return pa.table({
        "place": pa.array([row[0] for row in fresh], pa.int32()),
        "id": pa.array([each.get("message_id") for each in properties], pa.string()),
        "reply_to": pa.array([each.get("reply_to") for each in properties], pa.string()),
        "body": pa.array([delivery.body.removeprefix(MARK) for _, delivery, _ in fresh], pa.binary()),
        "headers": pa.array(headers, pa.string()),
        "made_at": pa.array([row[2].made_at for row in fresh], pa.float64()),
    })  # fmt: skip


def _packed(rows: Sequence[Staged], function: SetHandler | None) -> bytes:
    """Return rows in the format of a binary COPY, with the columns that a set handler needs."""
    bodies = isinstance(function, SqlSet)
    emits = bool(function.outputs) if isinstance(function, SqlSet) else function is not None
    packed = [b"PGCOPY\n\xff\r\n\0" + bytes(8)]
    for place, delivery, claim in rows:
        original = claim.original.encode()
        packed += (HEAD(COLUMNS, 4, place, 16, claim.key.bytes, len(original)), original, _field(claim.fingerprint))
        packed.append(NULL if claim.made_at is None else FLOAT(8, claim.made_at))
        properties = delivery.properties
        packed.append(_text(properties.get("message_id")) if bodies or emits else NULL)
        if bodies:
            headers = properties.get("headers")
            packed += (
                _text(properties.get("reply_to")),
                _field(b"\1" + json.dumps(headers).encode() if headers else None),
                _field(b"\1" + delivery.body.removeprefix(MARK)),
            )
        else:
            packed.append(3 * NULL)
        if emits and not inherits_id_alone(properties):
            inherited: dict[str, Any] = {}
            inherit(properties, inherited, {})
            packed.append(_field(json.dumps(inherited).encode()))
        else:
            packed.append(NULL)
    packed.append(b"\xff\xff")
    return b"".join(packed)


def _text(value: Any) -> bytes:
    return NULL if value is None else _field(str(value).encode())


def _field(value: bytes | None) -> bytes:
    return NULL if value is None else LENGTH(len(value)) + value
