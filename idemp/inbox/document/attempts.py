"""Attempts: one document for the outputs of each run of a handler, written before it is known whether the run counts."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote
from uuid import UUID

from idemp.inbox.document.port import OWN
from idemp.inbox.port import StoredOutput
from idemp.messages import Output

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from idemp.inbox.document.port import Document
    from idemp.inbox.port import Claim, Mark

ATTEMPTS: Final = f"{OWN}attempt/"


def prefix_of(consumer: str) -> str:
    """What the ids of a consumer's attempts begin with.

    Example:
        >>> prefix_of("orders/eu")
        'idemp/attempt/orders%2Feu/'
    """
    return f"{ATTEMPTS}{quote(consumer, safe='')}/"


def document_id(claim: Claim, attempt: str) -> str:
    """The id of an attempt's document."""
    return f"{prefix_of(claim.consumer)}{claim.id.key}/{attempt}"


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a handling is going to have sent, if the state document comes to name it.

    Attributes:
        id: the document's.
        state: the id of the state document.
        path: where in it ids are kept.
        expects: the revision that its write of the state document expects, `None` for none: once that is another one, and
            does not name this attempt, it never will.
        consumer: whose it is.
        key: of the message.
        message_type: the message's.
        claimed_at: when the message was claimed.
        tried_at: when somebody last said that an output was refused.
        outputs: in emission order.
        revision: of this document, where it was read.
    """

    id: str
    state: str
    path: str
    expects: str | None
    consumer: str
    key: UUID
    message_type: str
    claimed_at: datetime
    tried_at: datetime
    outputs: Sequence[StoredOutput] = field(default=())
    revision: str = ""

    @classmethod
    def restored(cls, document: Document) -> Attempt:
        """One that was read back."""
        values = document.body
        return cls(
            id=document.id,
            state=values["state"],
            path=values["path"],
            expects=values["expects"],
            consumer=values["consumer"],
            key=UUID(values["key"]),
            message_type=values["type"],
            claimed_at=datetime.fromisoformat(values["at"]),
            tried_at=datetime.fromisoformat(values["tried"]),
            outputs=tuple(_restored(ordinal, each) for ordinal, each in enumerate(values["outputs"])),
            revision=document.revision,
        )

    @property
    def name(self) -> str:
        """What the state document calls it."""
        return self.id.rpartition("/")[2]

    @property
    def pending(self) -> int:
        """How many outputs have no confirm."""
        return sum(stored.pending for stored in self.outputs)

    @property
    def counted(self) -> bool:
        """Whether a confirm was recorded, which means that the state document named this attempt."""
        return any(not stored.pending for stored in self.outputs)

    def body(self) -> dict[str, Any]:
        """Its document."""
        return {
            "state": self.state,
            "path": self.path,
            "expects": self.expects,
            "consumer": self.consumer,
            "key": str(self.key),
            "type": self.message_type,
            "at": self.claimed_at.isoformat(),
            "tried": self.tried_at.isoformat(),
            "outputs": [_stored(each) for each in self.outputs],
        }

    def marked(self, mark: Mark, now: datetime) -> Attempt:
        """With what a mark says: confirmed outputs no longer pend, and refused ones were tried now."""
        return replace(self.confirmed(mark.confirmed), tried_at=now if mark.refused else self.tried_at)

    def confirmed(self, ids: Collection[UUID]) -> Attempt:
        """With outputs that no longer pend."""
        outputs = tuple(replace(each, pending=each.pending and each.output.id not in ids) for each in self.outputs)
        return replace(self, outputs=outputs)


def _stored(stored: StoredOutput) -> dict[str, Any]:
    output = stored.output
    return {
        "id": str(output.id),
        "kind": output.kind.value,
        "exchange": output.exchange,
        "routing_key": output.routing_key,
        "envelope": output.envelope(),
        "pending": stored.pending,
        **_body(output.message.body),
    }


def _body(body: bytes) -> dict[str, str]:
    """As text where a person can read it, which every JSON store gives back as it was."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = "\0"
    return {"text": text} if text.isprintable() else {"base64": b64encode(body).decode()}


def _restored(ordinal: int, values: Mapping[str, Any]) -> StoredOutput:
    body = values["text"].encode() if "text" in values else b64decode(values["base64"])
    output = Output.restored(
        UUID(values["id"]),
        ordinal,
        values["kind"],
        values["exchange"],
        values["routing_key"],
        values["envelope"],
        body,
    )
    return StoredOutput(output, pending=values["pending"])
