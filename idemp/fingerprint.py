"""How a payload is digested, to tell a redelivery from another message under the same id. Versioned, like `identity`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from idemp.canonical import encode
from idemp.errors import ConfigurationError
from idemp.identity import IDENTITY_VERSION
from idemp.messages import canonical_json


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """How a payload is digested, to tell a redelivery from another message under the same id.

    Attributes:
        mode: "all" of a JSON body, "fields" (only those named), "except" (all but those), or "off".
        names: top-level fields, for "fields" and "except".

    Example:
        >>> digest = Fingerprint().of({"a": 1, "b": 2})
        >>> digest == Fingerprint().of({"b": 2, "a": 1}), len(digest)
        (True, 19)
    """

    mode: Literal["all", "fields", "except", "off"] = "all"
    names: tuple[str, ...] = ()

    @classmethod
    def parse(cls, value: object) -> Fingerprint:
        """From "all", "off", `{"fields": [...]}` or `{"except": [...]}`.

        Raises:
            ConfigurationError: nothing of these.
        """
        match value:
            case Fingerprint():
                return value
            case "all":
                return cls()
            case "off":
                return cls("off")
            case {"fields": [*names]}:
                return cls("fields", tuple(sorted(names)))
            case {"except": [*names]}:
                return cls("except", tuple(sorted(names)))
        raise ConfigurationError(
            f"{value!r} is no fingerprint.", fix='Write "all", "off", {fields = [...]} or {except = [...]}.'
        )

    def of(self, payload: Any, canonical: bytes | None = None) -> bytes | None:
        """The fingerprint of a JSON payload, whose `canonical_json` the caller may have; `None` when off.

        One byte of version, two that tell the choice of fields (fingerprints of different choices are never
        compared), sixteen of SHA-256 over the canonical JSON.
        """
        if self.mode == "off":
            return None
        if isinstance(payload, Mapping) and self.mode == "fields":
            canonical = canonical_json({name: payload[name] for name in self.names if name in payload})
        elif isinstance(payload, Mapping) and self.mode == "except":
            canonical = canonical_json({name: item for name, item in payload.items() if name not in self.names})
        elif canonical is None:
            canonical = canonical_json(payload)
        return _beginning(self.mode, self.names) + hashlib.sha256(canonical).digest()[:16]


@cache
def _beginning(mode: str, names: tuple[str, ...]) -> bytes:
    """The version and the choice of fields."""
    return bytes([IDENTITY_VERSION]) + hashlib.sha256(encode((mode, *names))).digest()[:2]


def fingerprints_conflict(stored: bytes | None, arriving: bytes | None) -> bool:
    """Whether two fingerprints prove two payloads. Unknown or differently made ones prove nothing.

    Example:
        >>> fingerprints_conflict(None, Fingerprint().of(1))
        False
    """
    if stored is None or arriving is None or stored[:3] != arriving[:3]:
        return False
    return stored != arriving
