"""Runs of a handler in other processes, whose sets have another order.

An interpreter per order of sets imports idemp once and forks for each run; the child imports the function and the message class by
their names. The interpreters end with this process.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, Final

from idemp.handlers import Handler
from idemp.messages import Delivery
from idemp.policy import Policy
from idemp.testing.conditions import Conditions

__all__ = ["Elsewhere", "name_of"]

LONGEST: Final = 60.0  # seconds of a run


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


class _Interpreter:
    """An interpreter that forks for each run."""

    def __init__(self, seed: int) -> None:
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command, pipe = [sys.executable, "-m", "idemp.testing.elsewhere"], subprocess.PIPE
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=quiet, text=True)  # noqa: S603 - ourselves
        self._lock = Lock()
        atexit.register(self.end)

    def ask(self, asked: dict[str, Any]) -> Any:
        """Return the answer of a child; None if it died."""
        read, write = self._process.stdout, self._process.stdin
        assert read is not None
        assert write is not None
        with self._lock:
            write.write(json.dumps(asked) + "\n")
            write.flush()
            if not select.select([read], [], [], LONGEST)[0]:
                _interpreter.cache_clear()
                self.end()
                raise TimeoutError(f"in another process, {asked['function']} has not ended within {LONGEST:.0f} s")
            return json.loads(read.readline())

    def end(self) -> None:
        """Kill it."""
        atexit.unregister(self.end)
        self._process.kill()
        self._process.communicate()


@cache
def _interpreter(seed: int, _pid: int) -> _Interpreter:
    return _Interpreter(seed)


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
        self._names = {"function": name_of(handler.function), "model": name_of(handler.model), "consumer": handler.consumer}
        self._interpreter = _interpreter(seed, os.getpid())

    def run(self, delivery: Delivery, given: Conditions, url: str, prefix: str) -> dict[str, Any] | None:
        """Return the outputs and the error of a run there; None if the handler could not be imported."""
        here = {"environment": dict(os.environ), "folder": str(Path.cwd()), "path": sys.path}
        asked = {"properties": delivery.properties, "body": delivery.body.decode(), "url": url, "prefix": prefix}
        found: dict[str, Any] | None = self._interpreter.ask({**self._names, **here, **asked, "conditions": asdict(given)})
        return found


def _serve() -> None:
    from idemp.testing import runs  # noqa: F401 - children find it imported

    answers, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)  # a handler may print
    for line in sys.stdin:
        child, status = os.fork(), 1
        if not child:
            try:
                os.dup2(nothing, 0)
                answer = _run(**json.loads(line))
                with os.fdopen(answers, "w") as file:
                    file.write(json.dumps(answer) + "\n")
                status = 0
            finally:
                os._exit(status)
        if os.waitpid(child, 0)[1]:
            os.write(answers, b"null\n")


def _run(
    function: str,
    model: str,
    consumer: str,
    environment: dict[str, str],
    folder: str,
    path: list[str],
    properties: dict[str, Any],
    body: str,
    url: str,
    prefix: str,
    conditions: dict[str, Any],
) -> dict[str, Any]:
    from idemp.testing.runs import Runner

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path
    handler = Handler(consumer, _found(model), _found(function), Policy())
    runner = Runner(handler, url, prefix)
    run = runner.run(Delivery(consumer, properties, body.encode()), Conditions(**conditions))
    runner.close()
    return {"outputs": run.outputs, "error": repr(run.error) if run.error else None}


def _found(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


if __name__ == "__main__":
    _serve()
