"""How a payload is digested, to tell a redelivery from another message under the same id. Versioned, like `identity`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal
from uuid import UUID

from idemp.canonical import encode
from idemp.errors import ConfigurationError
from idemp.exact import has_decimals, read_whole
from idemp.messages import canonical_json

AS_WRITTEN: Final = 1
"""The version of fingerprints of earlier releases: of the payload as it is written."""
PLAIN: Final = 2
"""The version of a payload that is written in one way alone, so that `AS_WRITTEN` has the same digest."""
REWRITTEN: Final = 3
"""The version of a payload whose numbers or UUIDs can be written in several ways: its digest is of one of them."""

_HEX: Final = b"[0-9a-fA-F]"
_OTHER_UUID: Final = re.compile(
    b'"(?![0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")'  # the canonical text stays as it is
    b'((?:[uU][rR][nN]:[uU][uU][iI][dD]:|\\{)?%s{8}-?%s{4}-?%s{4}-?%s{4}-?%s{12}\\}?)"' % ((_HEX,) * 5)
)


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
        compared), sixteen of SHA-256 over the canonical JSON. Values that JSON and RFC 9562 write in several ways count
        as equal: `1` and `1.0`, and a UUID in upper case, in braces or without hyphens.
        """
        if self.mode == "off":
            return None
        if isinstance(payload, Mapping) and self.mode == "fields":
            canonical = canonical_json({name: payload[name] for name in self.names if name in payload})
        elif isinstance(payload, Mapping) and self.mode == "except":
            canonical = canonical_json({name: item for name, item in payload.items() if name not in self.names})
        elif canonical is None:
            canonical = canonical_json(payload)
        rewritten = _rewritten(canonical)
        # Earlier releases rounded such numbers: only REWRITTEN is never compared with AS_WRITTEN.
        version = PLAIN if rewritten == canonical and not has_decimals(payload, canonical) else REWRITTEN
        return bytes([version]) + _choice(self.mode, self.names) + hashlib.sha256(rewritten).digest()[:16]


@cache
def _choice(mode: str, names: tuple[str, ...]) -> bytes:
    return hashlib.sha256(encode((mode, *names))).digest()[:2]


def _rewritten(canonical: bytes) -> bytes:
    """Canonical JSON whose whole numbers are integers, and whose UUIDs are canonical."""
    text = _OTHER_UUID.sub(_canonical_uuid, canonical)
    if b".0" in text or b"e+" in text or b"E+" in text:
        return canonical_json(json.loads(text, parse_float=read_whole))
    return text


def _canonical_uuid(found: re.Match[bytes]) -> bytes:
    return b'"%s"' % str(UUID(found[1].decode().lower())).encode()


def fingerprints_conflict(stored: bytes | None, arriving: bytes | None) -> bool:
    """Whether two fingerprints prove two payloads. Unknown or differently made ones prove nothing.

    Example:
        >>> fingerprints_conflict(None, Fingerprint().of(1))
        False
    """
    if stored is None or arriving is None or stored[1:3] != arriving[1:3]:
        return False
    versions = {stored[0], arriving[0]}
    comparable = versions in ({AS_WRITTEN}, {AS_WRITTEN, PLAIN}) or versions <= {PLAIN, REWRITTEN}
    return comparable and stored[3:] != arriving[3:]
