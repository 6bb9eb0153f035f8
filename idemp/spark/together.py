"""Which messages have to meet in one task: those that may have the same effective id.

Two tasks that claim one id at the same time are safe, and slow: the second waits for the first one's COMMIT.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import Column

    from idemp.handlers import Registry
    from idemp.identity import Key
    from idemp.work import Registration


def together(registry: Registry) -> Column:
    """An expression over the columns of messages: equal, and never NULL, where the effective ids are equal.

    It is coarser than the effective id, and where that can't be told by SQL (a function as key) it is the message id.
    """
    from pyspark.sql import functions as f

    own = by_type(registry, lambda item: _of_key(item.policy.key))
    return f.coalesce(own, f.col("id"), f.xxhash64("body").cast("string"))


def by_type(registry: Registry, text: Callable[[Registration], Column]) -> Column:
    """An expression over the columns of messages that is another one for each type; NULL for types without a handler."""
    from pyspark.sql import functions as f

    message_type = f.coalesce(f.col("type"), f.lit(registry.default_type))
    cases = [(message_type.isin(item.message_type, *item.aliases), text(item)) for item in registry.registrations()]
    return reduce(lambda rest, case: f.when(case[0], case[1]).otherwise(rest), cases, f.lit(None).cast("string"))


def header_of(key: Key) -> Column:
    """The value of a key that stands in a header, as text."""
    from pyspark.sql import functions as f

    return f.get_json_object("headers", json_path([key.name.removeprefix("header:")]))


def fields_of(key: Key) -> list[Column]:
    """The values of a key's fields, as texts."""
    from pyspark.sql import functions as f

    body = f.col("body").cast("string")
    return [f.get_json_object(body, json_path(path.split("."))) for path in key.fields]


def _of_key(key: Key) -> Column:
    from pyspark.sql import functions as f

    if key.scope == "header":
        return header_of(key)
    if key.fields:
        return f.concat(*(part for value in fields_of(key) for part in (value, f.lit("\x1f"))))
    if key.name == "digest":
        return f.xxhash64("body").cast("string")
    return f.col("id")


def json_path(names: Sequence[str]) -> str:
    """The path of a member, as `get_json_object` takes it.

    Example:
        >>> json_path(["order", "id"])
        "$['order']['id']"
    """
    return "$" + "".join(f"['{name}']" for name in names)
