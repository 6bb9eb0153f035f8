"""The same handler in other processes, whose sets have another order, and which think that they are on another host.

A child gets the module's name, the handler's name and the message, and runs it on a copy of the database (SQLite) or on the
database itself, rolled back. That takes a handler that can be imported: one inside of another function has no name there,
and a script that has no `if __name__ == "__main__":` would run once more.
"""

from __future__ import annotations

import ast
import dis
import functools
import gc
import importlib
import importlib.util
import json
import os
import platform
import socket
import sqlite3
import subprocess
import sys
import tempfile
from base64 import b64decode, b64encode
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from idemp.messages import Message
    from idemp.testing.execution import ToldOutput
    from idemp.testing.harness import Harness
    from idemp.work import Work

_SEEDS: Final = (1, 2, 3, 4)  # of two elements, five processes have the same order once in sixteen times
_AT_ONCE: Final = 2
_SECONDS: Final = 60.0
_OF_SETS: Final = {"BUILD_SET", "SET_ADD", "SET_UPDATE"}
_NAMES_OF_SETS: Final = {"set", "frozenset"}
_NAMES_OF_PROCESSES: Final = {"hash", "getpid", "gethostname", "getfqdn", "uname", "getnode"}


def answers(harness: Harness, message: Message) -> Iterator[dict[str, Any]]:
    """The key and the outputs of processes with other hash seeds; none where nothing could differ, or nobody can tell."""
    declared = harness.registry.find(message)
    handler = harness.registry.declared[declared.message_type]
    if _uses(handler.function, set(), _makes_sets) or declared.policy.key.name.startswith("call:"):
        seeds: tuple[int, ...] = _SEEDS
    elif tells_processes_apart(harness, message):
        seeds = _SEEDS[:1]
    else:
        return
    yield from _ask(harness, message, seeds, "which uses sets or what differs between processes", {})


def of_a_new_process(harness: Harness, message: Message, at: datetime) -> dict[str, Any] | None:
    """What another process says that draws other random values at another time; `None` if nobody can tell."""
    told = {"at": at.isoformat(), "chance": "another process"}
    answers = _ask(harness, message, _SEEDS[:1], "which sends or writes what outlives a message", told)
    return next((answer for answer in answers if not answer["failed"]), None)


def _ask(
    harness: Harness, message: Message, seeds: tuple[int, ...], why: str, more: dict[str, str]
) -> Iterator[dict[str, Any]]:
    declared = harness.registry.find(message)
    handler = harness.registry.declared[declared.message_type]
    module = sys.modules.get(getattr(_function(handler.function), "__module__", ""))
    name = name_of(handler.function)
    if module is None or "<locals>" in name or (module.__name__ == "__main__" and not _is_guarded(module)):
        harness.not_seen(
            f"Whether other processes do the same as {name.rpartition('<locals>.')[2]}, {why}: they can't import it. "
            "Move it to the top of a module."
        )
        return
    with tempfile.TemporaryDirectory() as scratch:
        told = {
            "module": module.__name__,
            "file": getattr(module, "__file__", None),
            "function": name,
            "dicts": handler.cls is dict,
            "key": declared.policy.key.name,
            "database": _database(harness, Path(scratch)),
            "type": message.type,
            "message_id": message.message_id,
            "body": b64encode(message.body).decode(),
            "headers": dict(message.headers),
            **more,
        }
        for begin in range(0, len(seeds), _AT_ONCE):  # whoever has seen enough asks no more of them
            some = seeds[begin : begin + _AT_ONCE]
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                for answer in pool.map(partial(_asked, told), some):
                    if answer is None:
                        harness.not_seen(f"What {name} does in another process: it failed there, or took too long.")
                    else:
                        yield answer


def tells_processes_apart(harness: Harness, message: Message) -> bool:
    """Whether the handler uses what differs from process to process: `hash`, its id, the name of its host."""
    function = harness.registry.declared[harness.registry.find(message).message_type].function
    return _uses(function, set(), lambda code: bool(_NAMES_OF_PROCESSES & set(code.co_names)))


def is_reordered(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists of outputs hold the same, in another order."""
    return Counter(_leaves(one)) == Counter(_leaves(other))


def _leaves(outputs: Any) -> list[str]:
    if isinstance(outputs, dict):
        return [leaf for item in outputs.items() for leaf in _leaves(list(item))]
    if isinstance(outputs, list):
        return [leaf for item in outputs for leaf in _leaves(item)]
    if isinstance(outputs, str) and outputs[:1] in {"{", "["}:
        try:
            return _leaves(json.loads(outputs))
        except ValueError:
            pass
    return [repr(outputs)]


def difference(one: list[Any], other: list[Any]) -> str:
    """What differs between two lists of outputs, for people."""
    if Counter(map(str, one)) == Counter(map(str, other)):
        return f"{len(one)} outputs changed places"
    differing = next((a for a, b in zip(one, other, strict=False) if a != b), one)
    return f"{str(differing)[:120]}"


def key_of(work: Work) -> str:
    """What the message is counted by, as text."""
    return str(work.effective.key) if work.effective is not None else ""


def as_json(outputs: list[ToldOutput]) -> list[Any]:
    """Outputs as they are told between processes."""
    return [[place, name, body.decode(errors="replace"), headers] for place, name, body, headers in outputs]


def _asked(told: dict[str, Any], seed: int) -> dict[str, Any] | None:
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "idemp.testing.elsewhere"],
            input=json.dumps(told),
            env=environment,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return None
    return answer


def _database(harness: Harness, scratch: Path) -> str:
    url = harness.engine.url
    if url.get_backend_name() != "sqlite":
        return url.render_as_string(hide_password=False)
    copied = scratch / "copy.db"
    with harness.engine.connect() as connection:
        source: Any = connection.connection.driver_connection
        target = sqlite3.connect(copied)
        source.backup(target)
        target.close()
    return f"sqlite:///{copied}"


def _function(handler: Any) -> Any:
    """The function of a method, a partial or an object that can be called."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if isinstance(handler, MethodType):
        return handler.__func__
    return handler if isinstance(handler, FunctionType) else vars(type(handler)).get("__call__", handler)


def name_of(handler: Any) -> str:
    """The qualified name of a handler's function; with `<locals>` in it where no other process can find it."""
    return getattr(_function(handler), "__qualname__", f"<locals>.{type(handler).__qualname__}")


def _is_guarded(module: Any) -> bool:
    """Whether a script can be imported without running: all that runs stands under `if __name__ == …`."""
    try:
        parsed = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    except (AttributeError, TypeError, OSError, ValueError, SyntaxError):
        return False
    tests = [node.test for node in parsed.body if isinstance(node, ast.If)]
    return any(isinstance(node, ast.Name) and node.id == "__name__" for test in tests for node in ast.walk(test))


def _uses(handler: Any, done: set[int], wanted: Callable[[CodeType], bool]) -> bool:
    """Whether a function, or one of its module that it calls, has code that is wanted; or keeps a set."""
    function = _function(handler)
    if not isinstance(function, FunctionType) or id(function) in done:
        return False
    done.add(id(function))
    if any(wanted(code) for code in _all_code(function.__code__)):
        return True
    called = [function.__globals__.get(name) for name in _all_names(function.__code__)]
    if wanted is _makes_sets and any(isinstance(value, set | frozenset) for value in called):
        return True
    if isinstance(handler, MethodType):
        called += [getattr(handler, name, None) for name in _all_names(function.__code__) if not name.startswith("__")]
    return any(
        _uses(value, done, wanted) for value in called if getattr(value, "__module__", None) == function.__module__
    )


def _makes_sets(code: CodeType) -> bool:
    steps = list(dis.get_instructions(code))
    if any(step.opname in _OF_SETS for step in steps):
        return True
    # `for item in {"a", "b"}`; asking `item in {"a", "b"}` has no order
    if any(isinstance(one.argval, frozenset) and then.opname != "CONTAINS_OP" for one, then in pairwise(steps)):
        return True
    return bool(_NAMES_OF_SETS & set(code.co_names))


def _all_code(code: CodeType) -> list[CodeType]:
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [code, *(each for inner in nested for each in _all_code(inner))]


def _all_names(code: CodeType) -> set[str]:
    return {name for each in _all_code(code) for name in each.co_names}


# The child ----------------------------------------------------------------------------------------------------------


def main() -> None:
    """Read what to do, run the handler once, roll back, and tell its outputs."""
    from idemp.broker.port import Delivery
    from idemp.messages import Message
    from idemp.testing.carried import texts
    from idemp.testing.chance import Chance
    from idemp.testing.detectors import Rehearsal
    from idemp.testing.harness import Harness
    from idemp.work import decode

    told = json.load(sys.stdin)
    _move_house()
    app = _app(_imported(told["module"], told["file"]), told)
    message = Message(
        body=b64decode(told["body"]), type=told["type"], message_id=told["message_id"], headers=told["headers"]
    )
    with Harness(app, database=told["database"], keep=True) as harness:
        work = decode(harness.consumer, Delivery(message=message, queue=""))
        key = (
            key_of(work) if work.registration.policy.key.name == told["key"] else ""
        )  # an app of the user's may have another one
        at = datetime.fromisoformat(told["at"]) if "at" in told else None
        run = Rehearsal(harness, message).run(at=at, chance=Chance(told["chance"]) if "chance" in told else None)
    said = sorted(texts(run.seen.writes, run.outputs))
    answer = {"key": key, "outputs": as_json(run.outputs), "said": said, "failed": run.error is not None}
    sys.stdout.write(f"{json.dumps(answer)}\n")


def _move_house() -> None:
    """To a host of another name."""
    network, system, name = socket, platform, "another-host"
    for module, function in ((network, "gethostname"), (network, "getfqdn"), (system, "node")):
        setattr(module, function, lambda *_: name)


def _app(module: Any, told: dict[str, Any]) -> Any:
    """The app that has the handler, wherever its module keeps it: in a variable, in a list; or one with the function."""
    from idemp.app import App
    from idemp.policy import Idempotent

    apps = [value for value in gc.get_objects() if isinstance(value, App)]
    for app in apps:
        if any(_is_told(item, told, module) for item in app.registry.declared.values()):
            return app
    function = functools.reduce(getattr, told["function"].split("."), module)
    app = App("tests")
    app.handler(*([dict] if told["dicts"] else []), type=told["type"], policy=Idempotent())(function)
    return app


def _is_told(handler: Any, told: dict[str, Any], module: Any) -> bool:
    function = _function(handler.function)
    return bool(name_of(handler.function) == told["function"] and function.__module__ == module.__name__)


def _imported(name: str, file: str | None) -> Any:
    if name != "__main__":
        return importlib.import_module(name)
    specification = importlib.util.spec_from_file_location("handlers_under_test", file or "")
    if specification is None or specification.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
