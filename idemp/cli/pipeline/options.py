"""What the verbs of `idemp pipeline` that work on the tables have in common."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from idemp.inbox.sql import SqlStore
    from idemp.spark.archive.reading import Inbox

Master = Annotated[str | None, typer.Option("--master", metavar="URL", help="Spark's; default this machine.")]
Conf = Annotated[
    list[str] | None, typer.Option("--conf", metavar="NAME=VALUE", help="Spark's setting; may be repeated.")
]
UrlFile = Annotated[
    str | None,
    typer.Option("--url-file", metavar="FILE", help="Has the database's URL, on every machine that runs tasks."),
]


def pairs(given: list[str] | None) -> dict[str, str]:
    """Options of the form NAME=VALUE.

    Example:
        >>> pairs(["spark.executor.memory=4g"])
        {'spark.executor.memory': '4g'}
    """
    found = [item.partition("=") for item in given or []]
    for name, equals, _ in found:
        if not name or not equals:
            raise typer.BadParameter(f"{name!r} is no NAME=VALUE.")
    return {name: value for name, _, value in found}


@contextmanager
def place_of(store: SqlStore, url_file: str | None) -> Iterator[Inbox]:
    """Where tasks find this store. Without a file they are told by one that only this user can read, on this machine."""
    from idemp.spark.archive.reading import Inbox
    from idemp.spark.reading.secret import told_by_file

    tables = store.configured_tables
    if url_file is not None:
        yield Inbox(url_file=url_file, schema=tables.schema, prefix=tables.prefix)
        return
    with told_by_file(store.engine.url.render_as_string(hide_password=False)) as file:
        yield Inbox(url_file=str(file), schema=tables.schema, prefix=tables.prefix)
