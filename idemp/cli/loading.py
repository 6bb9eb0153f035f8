"""Apps by `MODULE:APP` on a command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from idemp import loading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemp.app import App


def load_app(where: str) -> App:
    """As `idemp.loading.load_app`; what names no app is a wrong command line.

    Raises:
        typer.BadParameter: it names nothing, or something else; the nearest name is given.
        ConfigurationError: the module can't be imported.
    """
    try:
        return loading.load_app(where)
    except loading.NoSuchApp as error:
        raise typer.BadParameter(error.message) from error


def load_apps(where: Sequence[str]) -> list[App]:
    """Several of them, each consumer once.

    Raises:
        typer.BadParameter: two have the same name, or one can't be found.
    """
    apps = [load_app(item) for item in where]
    names = [app.name for app in apps]
    for name in names:
        if names.count(name) > 1:
            raise typer.BadParameter(f"Two of the apps are consumer {name!r}. Use --threads to run more of one.")
    return apps
