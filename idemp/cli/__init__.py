"""The command line, one file a verb group."""

from __future__ import annotations

import atexit
import gc
from typing import Annotated, NoReturn

import typer

from idemp.cli import broker, db, dead, demo, describe, doctor, inbox, pipeline, prepared, recover, worker
from idemp.cli.command import Commands
from idemp.cli.exits import exit_codes_text
from idemp.deadletter import idemp_version

__all__ = ["main", "root"]

root = typer.Typer(
    name="idemp",
    cls=Commands,
    help="Effects exactly once in your database, outputs at least once under one id.",
    epilog=exit_codes_text(),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(idemp_version())  # noqa: T201
        raise typer.Exit


@root.callback()
def _root(
    *,
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")] = False,
) -> None:
    del version


for _verbs in (demo, worker, doctor, describe, recover):
    _verbs.add_to(root)
for _group in (db, inbox, dead, prepared, broker, pipeline):
    root.add_typer(_group.commands)


def main() -> NoReturn:
    """The entry point of `idemp`."""
    # At its end an interpreter searches all modules for garbage: a quarter of a second, for nothing.
    atexit.register(gc.freeze)
    root()
    raise SystemExit(0)
