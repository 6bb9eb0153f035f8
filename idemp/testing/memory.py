"""What a function remembers between its runs: module globals, closures, defaults, attributes of classes and objects.

A snapshot holds values, not references, so that two of them can be compared. Objects of libraries (engines, loggers, locks,
counters of a metrics library) are taken for what they are for, and not looked into; so is a `functools.lru_cache`.
"""

from __future__ import annotations

import enum
import itertools
import os
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from operator import length_hint
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final
from uuid import UUID

_DEEPEST: Final = 6
_MOST_ITEMS: Final = 1_000
_LIBRARIES: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PLAIN: Final = (str, bytes, int, float, complex, bool, type(None), date, time, timedelta, Decimal, UUID, enum.Enum)

Shape = Any


def snapshot(function: Any) -> dict[str, Shape]:
    """The values that a function, and those of the user's functions that it calls, can remember something in.

    Example:
        >>> counts = {"n": 0}
        >>> def handler(message):
        ...     counts["n"] += 1
        >>> before = snapshot(handler)
        >>> handler({})
        >>> [name.rpartition(".")[2] for name, value in snapshot(handler).items() if before[name] != value]
        ['counts']
    """
    found: dict[str, Shape] = {"os.environ": _shape(dict(os.environ), 0)}
    _Walk(found).function(_plain_function(function), 0)
    return found


class _Walk:
    """From function to function, over the names that they use."""

    def __init__(self, found: dict[str, Shape]) -> None:
        self._found = found
        self._done: set[int] = set()

    def function(self, function: Any, depth: int) -> None:
        if not isinstance(function, FunctionType) or id(function) in self._done or depth > _DEEPEST:
            return
        self._done.add(id(function))
        names = _names(function.__code__)
        for name in names & function.__globals__.keys():
            self._value(_label(function, name), function.__globals__[name], names, depth)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            self._value(name, content, names, depth)
        kept = {"defaults": function.__defaults__, "keyword defaults": function.__kwdefaults__, **vars(function)}
        for name, value in kept.items():
            if value and name != "__wrapped__":
                self._value(f"{function.__qualname__}'s {name}", value, names, depth)

    def _value(self, label: str, value: Any, names: set[str], depth: int) -> None:
        if id(value) in self._done:
            return
        plain = _plain_function(value)
        if isinstance(plain, FunctionType):
            if _is_users(plain.__module__):
                self.function(plain, depth + 1)
        elif isinstance(value, ModuleType):
            if _is_users(value.__name__):
                for name in names & vars(value).keys():
                    self._value(f"{value.__name__}.{name}", vars(value)[name], names, depth + 1)
        elif isinstance(value, type):
            self._class(label, value, names, depth)
        else:
            self._found[label] = _shape(value, 0)
            if _is_users(type(value).__module__):
                self._class(type(value).__name__, type(value), names, depth)

    def _class(self, label: str, cls: type, names: set[str], depth: int) -> None:
        if not _is_users(cls.__module__) or id(cls) in self._done:
            return
        self._done.add(id(cls))
        for name, value in list(vars(cls).items()):
            plain = _plain_function(value)
            if isinstance(plain, FunctionType):
                if name in names or name == "__init__":
                    self.function(plain, depth + 1)
            elif not name.startswith("__") and not hasattr(type(value), "__get__"):
                self._found[f"{label}.{name}"] = _shape(value, 0)


def _plain_function(value: Any) -> Any:
    if isinstance(value, staticmethod | classmethod | MethodType):
        return value.__func__
    return value


def _label(function: FunctionType, name: str) -> str:
    return f"{function.__module__}.{name}" if function.__module__ not in {"__main__", None} else name


def _names(code: CodeType) -> set[str]:
    nested = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*nested)


def _is_users(module: str | None) -> bool:
    """Whether a module is the user's own: neither of the standard library, nor installed, nor of idemp."""
    if module is None or module.partition(".")[0] in {"idemp", "builtins"}:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not file.startswith(_LIBRARIES)


def _shape(value: Any, depth: int) -> Shape:
    """A value that is equal for equal contents, and holds no reference to them."""
    if isinstance(value, _PLAIN):
        return type(value).__name__, repr(value)
    if depth > _DEEPEST:
        return "deep"
    if isinstance(value, Mapping):
        items = itertools.islice(list(value.items()), _MOST_ITEMS)
        return len(value), tuple((_shape(key, depth + 1), _shape(item, depth + 1)) for key, item in items)
    if isinstance(value, list | tuple | deque | bytearray):
        return len(value), tuple(_shape(item, depth + 1) for item in itertools.islice(value, _MOST_ITEMS))
    if isinstance(value, set | frozenset):
        return len(value), frozenset(_shape(item, depth + 1) for item in itertools.islice(value, _MOST_ITEMS))
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, Iterator):
        frame = getattr(value, "gi_frame", None)
        return id(value), frame.f_lasti if frame is not None else None, length_hint(value, -1)
    if isinstance(value, type | FunctionType | BuiltinFunctionType | ModuleType) or not _is_users(
        type(value).__module__
    ):
        return id(value)
    slots = {
        name: getattr(value, name, None) for name in getattr(type(value), "__slots__", ()) if isinstance(name, str)
    }
    return id(type(value)), _shape({**getattr(value, "__dict__", {}), **slots}, depth + 1)
