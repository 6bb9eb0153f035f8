"""What a function remembers between its runs: module globals, closures, defaults, attributes of classes and objects.

A snapshot holds values, not references, so that two of them can be compared. Objects of libraries (engines, loggers, locks,
counters of a metrics library) are taken for what they are for, and not looked into; so are a `functools.lru_cache` and what
an enumeration keeps of its members.
"""

from __future__ import annotations

import enum
import functools
import io
import itertools
import os
import queue
import random
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from operator import length_hint
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final
from uuid import UUID

_DEEPEST: Final = 6
_MOST_ITEMS: Final = 1_000
_MOST_BYTES: Final = 1 << 20
_LIBRARIES: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PLAIN: Final = (str, bytes, int, float, complex, bool, type(None), date, time, timedelta, Decimal, UUID, enum.Enum)

_CACHED: Final = type(functools.cache(repr))
PLAIN_NAMES: Final = frozenset({*(cls.__name__ for cls in _PLAIN), "datetime"})
"""What stands before the text of a plain value in a shape."""

Shape = Any


@dataclass(frozen=True, slots=True)
class Kept:
    """What stands in one place that outlives a message.

    Attributes:
        shape: equal for equal contents.
        identity: of the object that stands there.
        empty: whether nothing stands there yet (`None`).
        loadable: whether it may have been made at its first use, to stay: an object, or a `functools.cached_property`. A
            plain value (a number, a text) may come out of the message, and a collection may grow.
    """

    shape: Shape
    identity: int = 0
    empty: bool = False
    loadable: bool = False


_NOTHING: Final = Kept(None, empty=True)
_BeforeAndAfter = tuple[dict[str, Kept], dict[str, Kept]]


def changed(before: dict[str, Kept], after: dict[str, Kept]) -> list[str]:
    """The places where something else stands afterwards."""
    names = sorted({*before, *after})
    return [name for name in names if before.get(name, _NOTHING).shape != after.get(name, _NOTHING).shape]


def _first_made(before: dict[str, Kept], after: dict[str, Kept]) -> dict[str, int]:
    """The places where nothing stood before, and what was put there by its identity: objects made at their first use."""
    empty = {name for name in after if before.get(name, _NOTHING).empty}
    return {name: after[name].identity for name in empty if after[name].loadable}


def remembered(first: _BeforeAndAfter, again: _BeforeAndAfter, *, forgiving: bool = True) -> list[str]:
    """What two runs on one message changed, each as (before, after).

    Args:
        first: of the first run.
        again: of the second.
        forgiving: leave out what the first run made and the second left alone: objects that are made at their first use, to
            stay (settings, a client, a cached property).
    """
    if not forgiving:
        return sorted({*changed(*first), *changed(*again)})
    made, second = _first_made(*first), changed(*again)
    stayed = {
        name
        for name, identity in made.items()
        if name not in second and again[1].get(name, _NOTHING).identity == identity
    }
    parts = [
        name for name in changed(*first) if not any(name == each or name.startswith(f"{each}.") for each in stayed)
    ]
    return sorted({*parts, *second})


def snapshot(function: Any, caches: dict[str, Any] | None = None) -> dict[str, Kept]:
    """The values that a function, and those of the user's functions that it calls, can remember something in.

    Args:
        function: what can be a handler.
        caches: gets each function with a `functools.lru_cache` that it meets.

    Example:
        >>> counts = {"n": 0}
        >>> def handler(message):
        ...     counts["n"] += 1
        >>> before = snapshot(handler)
        >>> handler({})
        >>> [name.rpartition(".")[2] for name, value in snapshot(handler).items() if before[name] != value]
        ['counts']
    """
    found = {"os.environ": Kept(_shape(dict(os.environ), 0))}
    _Walk(found, {} if caches is None else caches).callable(
        getattr(function, "__qualname__", type(function).__qualname__), function
    )
    return found


class _Walk:
    """From function to function, over the names that they use."""

    def __init__(self, found: dict[str, Kept], caches: dict[str, Any]) -> None:
        self._found = found
        self._caches = caches
        self._done: set[int] = set()

    def callable(self, label: str, value: Any, depth: int = 0) -> None:
        """Whatever can be a handler: a function, a method with its object, a partial with its arguments, an object."""
        if isinstance(value, functools.partial):
            label = getattr(value.func, "__qualname__", label)
            self.callable(label, value.func, depth + 1)
            for number, argument in enumerate([*value.args, *value.keywords.values()], start=1):
                self._value(f"argument {number} of {label}", argument, set(), depth)
        elif isinstance(value, MethodType):
            self.function(value.__func__, depth)
            self._value(type(value.__self__).__name__, value.__self__, _names(_code(value)), depth)
        elif isinstance(_plain_function(value), FunctionType):
            self.function(_plain_function(value), depth)
        else:
            self._value(label, value, set(), depth)

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
        if isinstance(value, MethodType | functools.partial) and depth <= _DEEPEST:
            self.callable(label, value, depth + 1)
        elif isinstance(plain, FunctionType):
            if is_users(plain.__module__):
                self.function(plain, depth + 1)
        elif isinstance(value, ModuleType):
            if is_users(value.__name__):
                for name in names & vars(value).keys():
                    self._value(f"{value.__name__}.{name}", vars(value)[name], names, depth + 1)
        elif isinstance(value, type):
            self._class(label, value, depth)
        elif _is_own_object(value):
            self._object(label, value, names, depth)
        else:
            self._plain(label, value)

    def _plain(self, label: str, value: Any) -> None:
        if isinstance(value, _CACHED) and is_users(value.__module__):
            self._caches[label] = value
        self._found[label] = _kept(value)

    def _object(self, label: str, value: Any, names: set[str], depth: int) -> None:
        """An object of the user's, attribute by attribute: a finding says which."""
        self._done.add(id(value))
        self._found[label] = Kept(id(type(value)), id(value), loadable=True)
        cached = _cached_properties(type(value))
        for name, content in list(_attributes(value).items()):
            if depth < _DEEPEST and (_is_own_object(content) or isinstance(content, MethodType | functools.partial)):
                self._value(f"{label}.{name}", content, names, depth + 1)
            else:
                self._found[f"{label}.{name}"] = _kept(content, cached=name in cached)
        self._class(type(value).__name__, type(value), depth)

    def _class(self, label: str, cls: type, depth: int) -> None:
        if not is_users(cls.__module__) or id(cls) in self._done or issubclass(cls, enum.Enum):
            return
        self._done.add(id(cls))
        for name, value in list(vars(cls).items()):
            plain = _plain_function(value)
            if isinstance(plain, FunctionType):
                if is_users(plain.__module__):  # what a library made is its own
                    self.function(plain, depth + 1)
            elif isinstance(value, functools.cached_property):
                self.function(value.func, depth + 1)
            elif isinstance(value, _CACHED):
                self._caches[f"{label}.{name}"] = value
            elif not name.startswith("__") and not hasattr(type(value), "__get__"):
                self._found.setdefault(f"{label}.{name}", _kept(value))  # an object's own stands before its class's


def _plain_function(value: Any) -> Any:
    if isinstance(value, staticmethod | classmethod | MethodType):
        return value.__func__
    return value


def _code(method: MethodType) -> CodeType | None:
    return getattr(method.__func__, "__code__", None)


def _label(function: FunctionType, name: str) -> str:
    return f"{function.__module__}.{name}" if function.__module__ not in {"__main__", None} else name


def _names(code: CodeType | None) -> set[str]:
    if code is None:  # written in C
        return set()
    nested = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*nested)


def is_users(module: str | None) -> bool:
    """Whether a module is the user's own: neither of the standard library, nor installed, nor of idemp."""
    if module is None or module.partition(".")[0] in {"idemp", "builtins"}:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not file.startswith(_LIBRARIES)


def _of_iterator(iterator: Iterator[Any]) -> Any:
    frame = getattr(iterator, "gi_frame", None)
    return id(iterator), frame.f_lasti if frame is not None else None, length_hint(iterator, -1)


def _of_file(file: io.IOBase) -> int:
    """A file's own contents are looked at elsewhere, where what is still in its buffer could not be seen."""
    with suppress(Exception):  # closed, or for reading
        file.flush()
    return id(file)


_TOLD_BY: Final[tuple[tuple[Any, Callable[[Any], Any]], ...]] = (
    (itertools.count, repr),
    (random.Random, lambda value: hash(value.getstate())),
    (queue.Queue, lambda value: list(value.queue)),
    (queue.SimpleQueue, lambda value: value.qsize()),
    (ContextVar, lambda value: value.get(None)),
    (threading.local, vars),  # as they are in this thread, which runs the handler
    (io.StringIO | io.BytesIO, lambda value: (id(value), value.closed or hash(value.getvalue()))),
    (io.IOBase, _of_file),
    (Iterator, _of_iterator),
)
"""What objects are compared by whose contents are no attributes."""


def _is_own_object(value: Any) -> bool:
    """Whether it is an object of a class of the user's, to be looked into attribute by attribute."""
    others = (type, FunctionType, ModuleType, Mapping, list, tuple, set, frozenset, deque, queue.Queue, Iterator)
    if isinstance(value, (*_PLAIN, *others)) or not is_users(type(value).__module__):
        return False
    return hasattr(value, "__dict__") or hasattr(type(value), "__slots__")


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for cls in type(value).__mro__ for name in _slots(cls) if hasattr(value, name)]
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}


def _slots(cls: type) -> list[str]:
    told = vars(cls).get("__slots__", ())
    return [name for name in ([told] if isinstance(told, str) else told) if not name.startswith("__")]


def _cached_properties(cls: type) -> set[str]:
    members = [item for base in cls.__mro__ for item in vars(base).items()]
    return {name for name, member in members if isinstance(member, functools.cached_property)}


def _kept(value: Any, *, cached: bool = False) -> Kept:
    if isinstance(value, ContextVar):
        return _of_context(value)
    grows = isinstance(value, (*_PLAIN, Mapping, list, tuple, set, frozenset, deque, bytearray, queue.Queue, Iterator))
    return Kept(_shape(value, 0), id(value), empty=value is None, loadable=cached or not grows)


def _of_context(variable: ContextVar[Any]) -> Kept:
    """What is set anew for each message, the id that log lines show, say, is no memory; what counts or grows is."""
    content = variable.get(None)
    if not isinstance(content, _PLAIN):
        return _kept(content)
    shape = _shape(content, 0)
    return Kept(shape, hash(shape), empty=True, loadable=True)


def shape_of(value: Any) -> Shape:
    """A value as it stands in a snapshot."""
    return _shape(value, 0)


def _shape(value: Any, depth: int) -> Shape:
    """A value that is equal for equal contents, and holds no reference to them."""
    if isinstance(value, _PLAIN):
        return type(value).__name__, repr(value) if isinstance(value, bytes) else str(value)
    if depth > _DEEPEST:
        return "deep"
    if isinstance(value, Mapping):
        items = itertools.islice(list(value.items()), _MOST_ITEMS)
        return len(value), tuple((_shape(key, depth + 1), _shape(item, depth + 1)) for key, item in items)
    if isinstance(value, list | tuple | deque | bytearray):
        return len(value), tuple(_shape(item, depth + 1) for item in itertools.islice(value, _MOST_ITEMS))
    if isinstance(value, set | frozenset):
        return len(value), frozenset(_shape(item, depth + 1) for item in itertools.islice(value, _MOST_ITEMS))
    for types, told in _TOLD_BY:
        if isinstance(value, types):
            return _shape(told(value), depth + 1)
    content = _of_buffer(value)
    if content is not None:
        return id(value), content
    if isinstance(value, type | FunctionType | BuiltinFunctionType | ModuleType) or not is_users(
        type(value).__module__
    ):
        return id(value)
    return id(type(value)), _shape(_attributes(value), depth + 1)


def _of_buffer(value: Any) -> int | None:
    """The bytes of an array of numpy, `array` or `ctypes`, or of shared memory, as long as they are not too many."""
    with suppress(Exception):  # it has none
        shared = value.get_obj() if type(value).__module__ == "multiprocessing.sharedctypes" else value
        with memoryview(shared) as view:
            return hash(view.tobytes()) if view.nbytes <= _MOST_BYTES else None
    return None
