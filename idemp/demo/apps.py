"""What the demo's worker processes run: the example in `examples/orders`, with a note outside of the transaction.

Each run of a handler is noted in a file before the handler begins. The note stays when the transaction goes: so it can be
seen that handlers ran more often than they committed. `python -m idemp.demo.apps create|drop` makes or drops the
example's own tables.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import idemp
from idemp.demo import environment

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemp.app import App


def _example() -> Any:
    try:
        return importlib.import_module("idemp._examples.orders")
    except ModuleNotFoundError:  # a checkout
        sys.path.insert(0, str(Path(idemp.__file__).parent.parent))
        return importlib.import_module("examples.orders")


def _noted(function: Callable[..., Any], folder: str) -> Callable[..., Any]:
    file = os.open(Path(folder) / str(os.getpid()), os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    @functools.wraps(function)
    def handle(message: Any, ctx: Any) -> Any:
        os.write(file, f"{function.__name__} {message.order_id}\n".encode())
        return function(message, ctx)

    return handle


def _with_notes(app: App, folder: str | None) -> App:
    if folder is not None:
        declared = app.registry.declared
        for name, handler in declared.items():
            declared[name] = replace(handler, function=_noted(handler.function, folder))
    return app


_orders = _example()
orders: App = _with_notes(_orders.app, os.environ.get(environment.NOTES))
stock: App = _with_notes(_orders.stock, os.environ.get(environment.NOTES))


def _main(verb: str) -> None:
    from idemp.inbox.sql import create_engine_safely

    engine = create_engine_safely(os.environ[environment.DATABASE])
    {"create": _orders.create_tables, "drop": _orders.drop_tables}[verb](engine)


if __name__ == "__main__":
    _main(sys.argv[1])
