"""The same handler in other processes, whose sets have another order.

A child gets the module's name, the handler's name and the message, and runs it on a copy of the database (SQLite) or on the
database itself, rolled back. That takes a handler that can be imported: one inside of another function has no name there.
"""

from __future__ import annotations

import dis
import gc
import importlib
import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from base64 import b64decode, b64encode
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from idemp.messages import Message
    from idemp.testing.execution import ToldOutput
    from idemp.testing.harness import Harness
    from idemp.work import Work

_SEEDS: Final = (1, 2, 3, 4)  # of two elements, five processes have the same order once in sixteen times
_SECONDS: Final = 60.0
_OF_SETS: Final = {"BUILD_SET", "SET_ADD", "SET_UPDATE"}
_NAMES_OF_SETS: Final = {"set", "frozenset"}


def answers(harness: Harness, message: Message) -> list[dict[str, Any]]:
    """The key and the outputs of processes with other hash seeds; none where nothing could differ, or nobody can tell."""
    declared = harness.registry.find(message)
    function = harness.registry.declared[declared.message_type].function
    module = sys.modules.get(getattr(function, "__module__", ""))
    name = getattr(function, "__qualname__", "<locals>")
    if module is None or "<locals>" in name:
        return []
    if not (_uses_sets(function, set()) or declared.policy.key.name.startswith("call:")):
        return []
    with tempfile.TemporaryDirectory() as scratch:
        told = {
            "module": module.__name__,
            "file": getattr(module, "__file__", None),
            "function": name,
            "database": _database(harness, Path(scratch)),
            "type": message.type,
            "message_id": message.message_id,
            "body": b64encode(message.body).decode(),
            "headers": dict(message.headers),
        }
        with ThreadPoolExecutor(len(_SEEDS)) as pool:
            return [answer for answer in pool.map(partial(_asked, told), _SEEDS) if answer is not None]


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


def _uses_sets(function: Any, done: set[int]) -> bool:
    """Whether a function, or one of its module that it calls, makes sets."""
    if not isinstance(function, FunctionType) or id(function) in done:
        return False
    done.add(id(function))
    if _makes_sets(function.__code__):
        return True
    called = [function.__globals__.get(name) for name in _all_names(function.__code__)]
    kept = [value for value in called if isinstance(value, set | frozenset)]
    return bool(kept) or any(
        _uses_sets(value, done) for value in called if getattr(value, "__module__", None) == function.__module__
    )


def _makes_sets(code: CodeType) -> bool:
    if any(instruction.opname in _OF_SETS for instruction in dis.get_instructions(code)):
        return True
    if any(isinstance(constant, frozenset) for constant in code.co_consts):  # `for item in {"a", "b"}`
        return True
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return bool(_NAMES_OF_SETS & set(code.co_names)) or any(_makes_sets(each) for each in nested)


def _all_names(code: CodeType) -> set[str]:
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names}.union(*(_all_names(each) for each in nested))


# The child ----------------------------------------------------------------------------------------------------------


def main() -> None:
    """Read what to do, run the handler once, roll back, and tell its outputs."""
    from idemp.app import App
    from idemp.broker.port import Delivery
    from idemp.messages import Message
    from idemp.testing.detectors import Rehearsal
    from idemp.testing.harness import Harness
    from idemp.work import decode

    told = json.load(sys.stdin)
    _imported(told["module"], told["file"])
    # Wherever the module keeps it: in a variable, in a list, in an object of its own.
    apps = [value for value in gc.get_objects() if isinstance(value, App)]
    app = next(app for app in apps if _has(app, told["function"]))
    message = Message(
        body=b64decode(told["body"]), type=told["type"], message_id=told["message_id"], headers=told["headers"]
    )
    with Harness(app, database=told["database"], keep=True) as harness:
        key = key_of(decode(harness.consumer, Delivery(message=message, queue="")))
        run = Rehearsal(harness, message).run()
    sys.stdout.write(f"{json.dumps({'key': key, 'outputs': as_json(run.outputs)})}\n")


def _has(app: Any, function: str) -> bool:
    return any(getattr(item.function, "__qualname__", "") == function for item in app.registry.declared.values())


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
