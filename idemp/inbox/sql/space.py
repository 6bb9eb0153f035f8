"""Whether a database server has room for what handlings store; for people, not at each start."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Final

from sqlalchemy import insert
from sqlalchemy.exc import DBAPIError

from idemp.diagnosis import Diagnosis
from idemp.inbox.sql.engine import start_error
from idemp.inbox.sql.failures import refused

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from idemp.inbox.sql.tables import Tables

_PROBE_BYTES: Final = 1024 * 1024
_PROBE_CONSUMER: Final = 0


def look(engine: Engine, tables: Tables) -> Diagnosis | None:
    """Store an output of 1 MiB and roll it back; `None` for SQLite, which writes at COMMIT only.

    A small claim fits into the free part of a page when nothing else does any more.

    Example:
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.tables import Tables
        >>> look(create_engine_safely("sqlite://"), Tables()) is None
        True
    """
    if engine.dialect.name == "sqlite":
        return None
    row = {
        "output_id": uuid.uuid4(),
        "message_key": uuid.uuid4(),
        "consumer_id": _PROBE_CONSUMER,
        "ordinal": 0,
        "kind": "send",
        "exchange": "",
        "routing_key": "",
        "envelope": "{}",
        "body": os.urandom(_PROBE_BYTES),  # which no server compresses
    }
    with engine.connect() as connection, connection.begin() as transaction:
        try:
            connection.execute(insert(tables.output), row)
        except DBAPIError as error:
            known = start_error(error, engine) or refused(error)
            return Diagnosis("failed", "disk", known.message, known.fix)
        transaction.rollback()
    return Diagnosis("ok", "disk", "an output of 1 MiB was stored, and rolled back")
