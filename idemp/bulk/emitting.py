"""What functions of Arrow tables get and answer where no message is an object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

import pyarrow as pa

from idemp.bulk.arrow import in_one_piece
from idemp.bulk.staging import binary_copy
from idemp.context import BatchContext
from idemp.errors import OutputError, UndecodableMessage
from idemp.messages import parse_body

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from idemp.inbox.sql.sets_postgresql import SetUnit

_KINDS: Final[dict[str, Any]] = {"place": pa.int32(), "type": pa.string(), "body": pa.binary(), "queue": pa.string()}


class RowByRow(Exception):
    """What is asked for is there only where each message is handled as a delivery."""


class SetContext(BatchContext):
    """What a function of a table gets beside it: the transaction. A context for each message is there row by row only.

    Args:
        unit: whose transaction it is.
    """

    def __init__(self, unit: SetUnit) -> None:
        self._unit = unit
        self._asked = False

    @property
    def session(self) -> Session:
        """As `Context.session`."""
        return self._unit.session

    @property
    def connection(self) -> Connection:
        """As `Context.connection`."""
        return self._unit.connection

    def check(self) -> None:
        """See that nothing was asked for that is not here, even if its error was swallowed.

        Raises:
            RowByRow: it was.
        """
        if self._asked:
            raise RowByRow

    def __getattr__(self, name: str) -> NoReturn:
        """Of `each`, which `BatchContext` would have."""
        if name != "each":
            raise AttributeError(name)
        self._asked = True
        raise RowByRow


def as_copy(outputs: pa.Table) -> bytes:
    """Outputs, numbered, as the bytes of a binary COPY.

    Raises:
        OutputError: one is no JSON.
        RowByRow: one has headers.
    """
    given: dict[str, Any] = {name: in_one_piece(outputs.column(name)) for name in outputs.column_names}
    if "headers" in given and given["headers"].null_count < len(outputs):
        raise RowByRow
    columns = {
        name: given[name].cast(kind) if name in given else pa.nulls(len(outputs), kind) for name, kind in _KINDS.items()
    }
    for body in columns["body"].to_pylist():
        try:
            parse_body(body or b"")
        except UndecodableMessage as error:
            raise OutputError(f"An output is no JSON: {error.message}") from error
    return binary_copy([pa.array(range(len(outputs)), pa.int32()), *columns.values()])
