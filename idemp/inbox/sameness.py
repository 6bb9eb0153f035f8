"""Whether two values are the same one: Python also takes values for equal that are not, such as 1, 1.0 and true."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["is_same"]


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values have the same class and the same content, to the last field.

    What a class of the user's says of equality does not count: it may leave fields out.

    Example:
        >>> is_same({"a": [1]}, {"a": [1]}), is_same({"a": [1]}, {"a": [True]}), is_same(0.0, -0.0)
        (True, False, False)
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return (
            one.keys() == other.keys() and _are_same(one, other) and all(is_same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, set | frozenset):
        return bool(one == other) and _are_same(one, other)
    fields = _fields(one)
    if fields:
        return is_same(fields, _fields(other))
    return bool(one == other) and repr(one) == repr(other)


def _are_same(some: Iterable[object], others: Iterable[object]) -> bool:
    """Return whether equal keys, or elements, are the same: 1 and true are equal."""
    return sorted(map(repr, some)) == sorted(map(repr, others))


def _fields(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots included."""
    slots = [name for cls in type(value).__mro__ for name in _names(cls.__dict__.get("__slots__", ()))]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def _names(slots: str | Sequence[str]) -> Sequence[str]:
    return [slots] if isinstance(slots, str) else [name for name in slots if name not in {"__dict__", "__weakref__"}]
