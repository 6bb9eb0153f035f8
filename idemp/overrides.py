"""Policies from the settings: they go before what the code says, option by option."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from idemp.errors import ConfigurationError
from idemp.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Sequence

_MISSPELT: Final = 0.75


def merged_policy(message_type: str, code: Policy | None, *overrides: Mapping[str, Any]) -> Policy:
    """One policy from what the code says, then file, then environment; later ones win option by option.

    Raises:
        ConfigurationError: an unknown option (the nearest valid one is named) or a wrong value.

    Example:
        >>> from idemp import Idempotent
        >>> merged_policy("orders.Place", Idempotent(key="id"), {"retention": "1d"}, {"claim": "late"}).claim
        'late'
        >>> merged_policy("orders.Place", None, {"retentoin": "1d"})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: Message type 'orders.Place': Policy: unknown option 'retentoin'. Did you...
    """
    values: dict[str, Any] = {}
    if code is not None:
        values.update({name: getattr(code, name) for name in code.model_fields_set})
        values["idempotent"] = code.idempotent
    for override in overrides:
        values.update(override)
    try:
        return Policy(**values)
    except ConfigurationError as error:
        raise ConfigurationError(f"Message type {message_type!r}{_whose(code, overrides)}: {error.message}") from error


def _whose(code: Policy | None, overrides: Sequence[Mapping[str, Any]]) -> str:
    """Who has said what is wrong, where that is not the settings alone."""
    if code is None:
        return ""
    for override in overrides:
        try:
            _entry(override)
        except ConfigurationError:
            return ""
    return ", what the code and the settings say together"


def check_override(message_type: str, options: Mapping[str, Any], where: str, *, toml: bool = True) -> None:
    """See that one entry of the setting `messages` can be a policy, whether it has a handler here or not.

    Classes that `retry_on` and `refuse_on` name are not imported: they may be another app's.

    Args:
        message_type: the entry's name.
        options: what it says.
        where: file or variable, for errors.
        toml: whether it stands in a TOML file.

    Raises:
        ConfigurationError: an unknown option, a wrong value, or a message type's name that TOML took apart.

    Example:
        >>> check_override("billing", {"TakePayment": {"attempts": 3}}, "idemp.toml")
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: Message type 'billing': write [messages."billing.TakePayment"], with quotes...
    """
    for name, value in options.items():
        if name in Policy.model_fields or not isinstance(value, Mapping):
            continue
        if difflib.get_close_matches(name, Policy.model_fields, cutoff=_MISSPELT):
            continue
        whole = _whole_name(f"{message_type}.{name}", value)
        wanted = f'write [messages."{whole}"], with quotes' if toml else f'write {{"{whole}": {{…}}}}'
        raise ConfigurationError(f"Message type {message_type!r}: {wanted}, in {where}")
    place = f'{where} [messages."{message_type}"]'
    try:
        _entry({name: value for name, value in options.items() if not _imports(name, value)})
    except ConfigurationError as error:
        raise ConfigurationError(f"{place}: {error.message.removeprefix('Policy: ')}") from error


def _entry(options: Mapping[str, Any]) -> Policy:
    """A policy of what one entry says; the code may have opted the type in."""
    return Policy(**{"idempotent": True, **options})


def _whole_name(name: str, table: Mapping[str, Any]) -> str:
    """A type name of several parts is a table in a table in a table."""
    if len(table) == 1:
        ((inner, value),) = table.items()
        if inner not in Policy.model_fields and isinstance(value, Mapping):
            return _whole_name(f"{name}.{inner}", value)
    return name


def _imports(name: str, value: object) -> bool:
    if name not in {"retry_on", "refuse_on"}:
        return False
    items = value if isinstance(value, list) else [value]
    return any(isinstance(item, str) and "." in item for item in items)
