"""Memory of a function between its runs: globals, closures, defaults, attributes of its objects and classes.

Objects of libraries (engines, loggers, metrics, `functools.lru_cache`) are taken for what they are for, and not looked into.
"""

from __future__ import annotations

import dis
import enum
import functools
import itertools
import os
import queue
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final
from unittest.mock import NonCallableMock
from uuid import UUID

from idemp.handlers import function_name

__all__ = ["Memory", "memory", "shape"]

DEEPEST: Final = 6
MOST: Final = 1_000  # items of a collection
PLAIN: Final = (str, bytes, int, float, complex, bool, type(None), date, time, timedelta, Decimal, UUID, enum.Enum)
COLLECTIONS: Final = (Mapping, list, tuple, set, frozenset, deque, bytearray)
LIBRARIES: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
NAMING: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
SETS: Final = frozenset({"set", "frozenset"})


@dataclass
class Memory:
    """A snapshot.

    Attributes:
        places: What each place holds, as values that can be compared.
        uses_sets: Whether any function makes a set, whose order differs between processes.

    Example:
        >>> Memory({"shop.counter": 1}).changed(Memory({"shop.counter": 2}))
        ['shop.counter']
    """

    places: dict[str, Any] = field(default_factory=dict)
    uses_sets: bool = False

    def changed(self, after: Memory) -> list[str]:
        """Return the places that another snapshot finds changed."""
        names = sorted({*self.places, *after.places})
        return [name for name in names if self.places.get(name) != after.places.get(name)]


def memory(function: Callable[..., Any]) -> Memory:
    """Return what a function, and those of the user's functions that it calls, can remember.

    Example:
        >>> handled = []
        >>> def handler(message: str) -> None:
        ...     handled.append(message)
        >>> before = memory(handler)
        >>> handler("7")
        >>> [name.rpartition(".")[2] for name in before.changed(memory(handler))]
        ['handled']
    """
    walk = _Walk(Memory({"os.environ": shape(dict(os.environ))}))
    walk.value(function_name(function), function, set(), 0)
    return walk.found


class _Walk:
    """Goes from function to function, over the names that they use."""

    def __init__(self, found: Memory) -> None:
        self.found = found
        self._done: set[int] = set()

    def value(self, label: str, value: Any, names: set[str], depth: int) -> None:
        """Look at a value, or into it."""
        if depth > DEEPEST or id(value) in self._done:
            return
        if isinstance(value, FunctionType):
            self._function(value, depth)
        elif parts := _parts(label, value):
            for name, part in parts:
                self.value(name, part, names, depth)
        elif isinstance(value, ModuleType):
            for name in _names_in(value, names):
                self.value(f"{value.__name__}.{name}", vars(value)[name], names, depth + 1)
        elif isinstance(value, type):
            self._class(label, value, depth)
        elif _is_own_object(value):
            self._done.add(id(value))
            self.found.places[label] = id(type(value))
            for name, content in list(_attributes(value).items()):
                self.value(f"{label}.{name}", content, names, depth + 1)
            self._class(type(value).__name__, type(value), depth)
        else:
            self.found.places[label] = shape(value)

    def _function(self, function: FunctionType, depth: int) -> None:
        if depth and not _is_users(function.__module__):
            return
        self._done.add(id(function))
        names, self.found.uses_sets = _names(function.__code__), self.found.uses_sets or _uses_sets(function.__code__)
        for name in names & function.__globals__.keys():
            self.value(f"{function.__module__}.{name}", function.__globals__[name], names, depth + 1)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            self.value(f"{name} of {function.__qualname__}", content, names, depth + 1)
        kept = {"defaults": function.__defaults__, "keyword defaults": function.__kwdefaults__, **vars(function)}
        for name, content in kept.items():
            if content and name != "__wrapped__":
                self.value(f"{name} of {function.__qualname__}", content, names, depth + 1)

    def _class(self, label: str, cls: type, depth: int) -> None:
        if not _is_users(cls.__module__) or id(cls) in self._done or issubclass(cls, enum.Enum):
            return
        self._done.add(id(cls))
        for name, content in list(vars(cls).items()):
            plain = content.func if isinstance(content, functools.cached_property) else content
            plain = plain.fget if isinstance(plain, property) else plain
            if isinstance(plain, FunctionType | staticmethod | classmethod):
                self.value(f"{label}.{name}", plain, set(), depth + 1)
            elif not name.startswith("_") and not hasattr(type(content), "__get__"):
                self.found.places.setdefault(f"{label}.{name}", shape(content))


def _names_in(module: ModuleType, names: set[str]) -> set[str]:
    return names & vars(module).keys() if _is_users(module.__name__) else set()


def _parts(label: str, value: Any) -> list[tuple[str, Any]]:
    """Return what a callable is made of, if it is made of another one."""
    if isinstance(value, staticmethod | classmethod):
        return [(label, value.__func__)]
    if isinstance(value, functools.partial):
        arguments = enumerate([*value.args, *value.keywords.values()], start=1)
        return [(label, value.func), *((f"argument {number} of {label}", each) for number, each in arguments)]
    if isinstance(value, MethodType):
        return [(label, value.__func__), (type(value.__self__).__name__, value.__self__)]
    if callable(value) and hasattr(value, "__wrapped__") and not isinstance(value, NonCallableMock):  # decorated, or with a cache
        return [(label, value.__wrapped__)]
    return []


def _names(code: CodeType) -> set[str]:
    nested = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*nested)


def _uses_sets(code: CodeType) -> bool:
    """Return whether code makes a set, or has one for a constant."""
    made = any(
        each.opname == "BUILD_SET" or (each.opname in NAMING and each.argval in SETS) or isinstance(each.argval, frozenset)
        for each in dis.get_instructions(code)
    )
    return made or any(_uses_sets(each) for each in code.co_consts if isinstance(each, CodeType))


def _is_users(module: str | None) -> bool:
    """Return whether a module is the user's own: neither of the standard library, nor installed, nor of idemp."""
    if module is None or module.partition(".")[0] in {"idemp", "builtins"}:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not file.startswith(LIBRARIES)


def _is_own_object(value: Any) -> bool:
    return not isinstance(value, (*PLAIN, *COLLECTIONS)) and _is_users(type(value).__module__)


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}


def shape(value: Any, depth: int = 0) -> Any:
    """Return a value that is equal for equal contents, and holds no reference to them.

    Example:
        >>> shape({"sku": [7]}) == shape({"sku": [8]})
        False
    """
    if isinstance(value, PLAIN):
        return type(value).__name__, str(value)
    if depth > DEEPEST:
        return "deep"
    if isinstance(value, Mapping):
        items = itertools.islice(list(value.items()), MOST)
        return len(value), tuple((shape(key, depth + 1), shape(item, depth + 1)) for key, item in items)
    if isinstance(value, COLLECTIONS):
        shapes = [shape(item, depth + 1) for item in itertools.islice(value, MOST)]
        return len(value), frozenset(shapes) if isinstance(value, set | frozenset) else tuple(shapes)
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, queue.Queue):
        return shape(value.queue, depth + 1)
    if isinstance(value, NonCallableMock):  # remembers its calls
        return len(value.mock_calls)
    if _is_own_object(value):
        return id(type(value)), tuple((name, shape(each, depth + 1)) for name, each in _attributes(value).items())
    return id(value)
