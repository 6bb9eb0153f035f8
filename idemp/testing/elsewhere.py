"""Runs of a handler in other processes, whose sets have another order.

The other process imports the function and the message class by their names. It is started early, imports while others run, and
waits for its message on the standard input.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from idemp.handlers import Handler
from idemp.messages import Delivery
from idemp.policy import Policy
from idemp.testing.conditions import Conditions

__all__ = ["Elsewhere", "name_of"]


def name_of(value: Callable[..., Any]) -> str | None:
    """Return the name by which another process imports a function or a class; None if it cannot.

    Example:
        >>> name_of(name_of)
        'idemp.testing.elsewhere:name_of'
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module in (None, "__main__") or name is None or "<" in name:
        return None
    try:
        found: Any = sys.modules[module]
        for part in name.split("."):
            found = getattr(found, part)
    except (AttributeError, KeyError):
        return None
    return f"{module}:{name}" if found == value else None


class Elsewhere:
    """Another process.

    Args:
        handler: Runs there.
        seed: Of its sets' order.

    Example:
        >>> Elsewhere.__name__
        'Elsewhere'
    """

    def __init__(self, handler: Handler, seed: int) -> None:
        names = [name_of(handler.function), name_of(handler.model), handler.consumer]
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "idemp.testing.elsewhere", *map(str, names)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)  # noqa: S603 - ourselves

    def run(self, delivery: Delivery, given: Conditions, url: str, prefix: str) -> dict[str, Any] | None:
        """Return the outputs and the error of a run there; None if the handler could not be imported."""
        asked = {"properties": delivery.properties, "body": delivery.body.decode(), "url": url, "prefix": prefix}
        out, _ = self._process.communicate(json.dumps({**asked, "conditions": asdict(given)}), timeout=60)
        answer = out.rpartition("\0")[2]
        found: dict[str, Any] | None = json.loads(answer) if self._process.returncode == 0 else None
        return found

    def end(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()
        self._process.communicate()


def _main(function: str, model: str, consumer: str) -> None:
    from idemp.testing.runs import Runner

    handler = Handler(consumer, _found(model), _found(function), Policy())
    asked = json.loads(sys.stdin.read())
    runner = Runner(handler, asked["url"], asked["prefix"])
    run = runner.run(Delivery(consumer, asked["properties"], asked["body"].encode()), Conditions(**asked["conditions"]))
    runner.close()
    print("\0" + json.dumps({"outputs": run.outputs, "error": repr(run.error) if run.error else None}))  # noqa: T201


def _found(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


if __name__ == "__main__":
    _main(*sys.argv[1:])
