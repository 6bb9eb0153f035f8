"""Which messages have to meet in one task: those that may have the same effective id.

Two tasks that claim one id at the same time are safe, and slow: the second waits for the first one's COMMIT.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column

    from idemp.handlers import Registry
    from idemp.identity import Key


def together(registry: Registry) -> Column:
    """An expression over the columns of messages: equal, and never NULL, where the effective ids are equal.

    It is coarser than the effective id, and where that can't be told by SQL (a function as key) it is the message id.
    """
    from pyspark.sql import functions as f

    message_type = f.coalesce(f.col("type"), f.lit(registry.default_type))
    by_type = [
        (message_type.isin(item.message_type, *item.aliases), _of_key(item.policy.key))
        for item in registry.registrations()
    ]
    own = reduce(lambda rest, case: f.when(case[0], case[1]).otherwise(rest), by_type, f.lit(None).cast("string"))
    return f.coalesce(own, f.col("id"), f.xxhash64("body").cast("string"))


def _of_key(key: Key) -> Column:
    from pyspark.sql import functions as f

    if key.scope == "header":
        return f.get_json_object("headers", json_path([key.name.removeprefix("header:")]))
    if key.fields:
        body = f.col("body").cast("string")
        values = [f.get_json_object(body, json_path(path.split("."))) for path in key.fields]
        return f.concat(*(part for value in values for part in (value, f.lit("\x1f"))))
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
