"""The types of idemp's columns, the same on each kind of database as far as it goes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from sqlalchemy import BINARY, BigInteger, DateTime, Integer, LargeBinary, String, Text
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.types import TypeDecorator, TypeEngine

if TYPE_CHECKING:
    from sqlalchemy.engine import Dialect

_NAME_BYTES: Final = 255


class KeyType(TypeDecorator[UUID]):
    """Sixteen bytes: `uuid` on PostgreSQL, `BINARY(16)` or a blob elsewhere."""

    impl = BINARY
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """The database's own type."""
        if dialect.name == "postgresql":
            return dialect.type_descriptor(postgresql.UUID(as_uuid=True))
        return dialect.type_descriptor(BINARY(16))

    def process_bind_param(self, value: UUID | None, dialect: Dialect) -> Any:
        """To the driver."""
        if value is None or dialect.name == "postgresql":
            return value
        return value.bytes

    def process_result_value(self, value: Any, dialect: Dialect) -> UUID | None:
        """From the driver."""
        del dialect
        if value is None or isinstance(value, UUID):
            return value
        return UUID(bytes=bytes(value))


class Moment(TypeDecorator[datetime]):
    """A point in time with microseconds, kept in UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """The database's own type."""
        if dialect.name in {"mysql", "mariadb"}:
            return dialect.type_descriptor(mysql.DATETIME(fsp=6))
        return dialect.type_descriptor(DateTime(timezone=dialect.name == "postgresql"))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """To the driver."""
        if value is None or dialect.name == "postgresql":
            return value
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """From the driver."""
        del dialect
        if value is None:
            return None
        return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)


# Names differ by case, as they do in Python: the default collations of MySQL would fold it. (Outer blanks
# are refused earlier.)
NAME = String(_NAME_BYTES).with_variant(mysql.VARCHAR(_NAME_BYTES, collation="utf8mb4_bin"), "mysql", "mariadb")
BODY = LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
TEXT = Text().with_variant(mysql.LONGTEXT(collation="utf8mb4_bin"), "mysql", "mariadb")
FINGERPRINT = LargeBinary().with_variant(mysql.VARBINARY(32), "mysql", "mariadb")
SERIAL = BigInteger().with_variant(Integer(), "sqlite")
