"""How a broker carries a prepared message: its body as it is, and all else as one text beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import UUID

from idemp.messages import Output
from idemp.prepared.port import Prepared, Record, State, Taken

if TYPE_CHECKING:
    from datetime import datetime

CARRIED_HEADER: Final = "idemp-prepared"
"""What the text is called: a header, or an attribute."""
LONGEST_REASON: Final = 500
"""Bytes of a reason, as JSON, that are kept, so that a copy is never much larger than what was prepared."""


@dataclass(frozen=True, slots=True)
class Carried:
    """A prepared message and how far its checks are, as it stands in a queue.

    Attributes:
        prepared: the message.
        checks: how often the checker was asked, and did not know.
        reason: why it was postponed or parked the last time; `None` if it never was.

    Example:
        >>> from idemp.messages import Message, OutputKind
        >>> id = UUID("0192c8a4-7d3e-7000-8000-000000000001")
        >>> output = Output(id=id, ordinal=0, kind=OutputKind.SEND, exchange="", routing_key="stock",
        ...                 message=Message(body=b"{}", type="stock.Reserve", message_id=str(id)))
        >>> carried = Carried(Prepared.of(output), checks=2, reason="nobody knows")
        >>> Carried.read(carried.text(), b"{}") == carried
        True
    """

    prepared: Prepared
    checks: int = 0
    reason: str | None = None

    def text(self) -> str:
        """All but the body, in ASCII: not every broker takes every character."""
        output = self.prepared.output
        values: dict[str, Any] = {
            "id": str(output.id),
            "ordinal": output.ordinal,
            "kind": output.kind.value,
            "exchange": output.exchange,
            "routing_key": output.routing_key,
            "envelope": output.envelope(),
            "fingerprint": self.prepared.fingerprint.hex(),
            "checks": self.checks,
        }
        if self.reason is not None:
            values["reason"] = _shortened(self.reason)
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def read(cls, text: object, body: bytes) -> Self:
        """What `text` said.

        Raises:
            ValueError: somebody else wrote it.
        """
        try:
            values = json.loads(text)  # type: ignore[arg-type]
            output = Output.restored(
                UUID(values["id"]),
                values["ordinal"],
                values["kind"],
                values["exchange"],
                values["routing_key"],
                values["envelope"],
                body,
            )
            fingerprint = bytes.fromhex(values["fingerprint"])
            return cls(Prepared(output, fingerprint), int(values["checks"]), values.get("reason"))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"no prepared message: {error!r}") from error

    def taken(self, tag: object) -> Taken:
        """The same, in the hands of a checker."""
        return Taken(self.prepared.output, self.prepared.fingerprint, checks=self.checks, tag=tag)

    def record(self, state: State, prepared_at: datetime | None = None) -> Record:
        """The same, for people."""
        return Record(self.prepared, state, self.checks, reason=self.reason, prepared_at=prepared_at)


def _shortened(reason: str) -> str:
    kept = reason[:LONGEST_REASON]
    while len(json.dumps(kept)) > LONGEST_REASON:
        kept = kept[: len(kept) * 3 // 4]
    return kept
