"""Versions of folds: a digest of everything that a fold computes with, as far as that can be seen.

A snapshot is used by the version of its fold that has made it, and by no other.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from idemp.identity import digest

__all__ = ["name_of", "version_of"]

LONGEST: Final = 200  # characters of a name
PARTS: Final[dict[type, tuple[str, ...]]] = {
    CodeType: (
        *("co_code", "co_consts", "co_names", "co_varnames", "co_freevars", "co_flags", "co_exceptiontable"),
        *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount"),
    ),
    FunctionType: ("__code__", "__defaults__", "__kwdefaults__"),
    MethodType: ("__func__", "__self__"),
    cached_property: ("func",),
    classmethod: ("__func__",),
    partial: ("func", "args", "keywords"),
    property: ("fget",),
    staticmethod: ("__func__",),
    type(lru_cache(len)): ("__wrapped__",),
}
"""Attributes that say what a value does; nothing here depends on comments or on places in a file."""
ADDRESS: Final = re.compile(" at 0x[0-9a-fA-F]+")


def name_of(fold: Any) -> str:
    """Return the name of a function that stands at the top level of a module or of a class; empty for others.

    Example:
        >>> name_of(version_of), name_of(lambda state, event: state)
        ('idemp.streams.versions.version_of', '')
    """
    if type(fold) is not FunctionType:
        return ""
    name = f"{fold.__module__}.{fold.__qualname__}"
    return "" if "<" in name or len(name) > LONGEST else name


def version_of(fold: Callable[..., Any], initial: str, version: str) -> str:
    """Return a digest of a fold, of its initial state, and of the version that its author gives it.

    Example:
        >>> version_of(name_of, "0", "") == version_of(name_of, "0", "2")
        False
    """
    seen = _Seen(fold.__module__).of(fold)
    return digest(f"{version}\0{initial}\0{seen}".encode()).hex()


class _Seen:
    """One walk through the functions, classes and values that a fold uses.

    Args:
        module: The fold's.
    """

    def __init__(self, module: str) -> None:
        self._package = module.partition(".")[0]
        self._met: dict[int, tuple[int, Any]] = {}  # with the value, whose id is not given again as long as it lives

    def of(self, value: Any) -> str:
        """Return what can be seen of a value."""
        kind = type(value)  # isinstance would ask a proxy for what it stands for
        if kind in (tuple, frozenset, CodeType):  # of which equal ones may be one, or not
            return self._all(kind, [getattr(value, name) for name in PARTS[kind]] if kind is CodeType else value)
        if kind is ModuleType:
            return f"module {value.__name__}"
        if (kind is FunctionType or issubclass(kind, type)) and not self._is_ours(value.__module__):
            return f"{value.__module__}.{value.__qualname__}"
        if kind in (list, set, dict) or kind in PARTS or issubclass(kind, type):
            if id(value) in self._met:
                return f"again {self._met[id(value)][0]}"
            self._met[id(value)] = len(self._met), value
            if issubclass(kind, type):
                own = {name: each for name, each in vars(value).items() if name[:2] != "__" or type(each) in PARTS}
                return self._all(kind, [value.__qualname__, value.__bases__, sorted(own.items())])
            if kind in PARTS:
                parts = [getattr(value, name) for name in PARTS[kind]]
                return self._all(kind, [*parts, *(_used_by(value) if kind is FunctionType else ())])
            return self._all(kind, value.items() if kind is dict else value)
        return f"{self.of(kind)} {ADDRESS.sub('', repr(value))}"

    def _all(self, kind: type, values: Iterable[Any]) -> str:
        found = [self.of(value) for value in values]
        return f"{kind.__name__}({', '.join(sorted(found) if kind in (set, frozenset) else found)})"

    def _is_ours(self, module: str | None) -> bool:
        """Return whether a module belongs to the fold's package, or at least is not installed, as libraries are."""
        package = (module or "").partition(".")[0]
        file = getattr(sys.modules.get(module or ""), "__file__", None) or "-packages"
        return package == self._package or (package not in sys.stdlib_module_names and "-packages" not in file)


def _used_by(function: FunctionType) -> tuple[Any, ...]:
    """Return what a function finds in its closure, in its globals, and in the modules among them."""
    names, used = sorted(_names(function.__code__)), dict[str, Any]()
    for name in names:
        if name in function.__globals__:
            used[name] = found = function.__globals__[name]
            if type(found) is ModuleType:
                used |= {f"{name}.{each}": vars(found)[each] for each in names if each in vars(found)}
    return [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()], used


def _names(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(each) for each in code.co_consts if type(each) is CodeType))
