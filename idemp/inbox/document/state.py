"""State documents: what their users keep in them, and idemp's ids beside it, in one JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeGuard
from uuid import UUID

from idemp.errors import ConfigurationError, HandlerError, UnaddressableMessage
from idemp.identity import EffectiveId
from idemp.inbox.content import Handling, Sending
from idemp.inbox.document.port import OWN
from idemp.inbox.port import Claim
from idemp.inbox.sameness import is_same

if TYPE_CHECKING:
    from idemp.inbox.document.port import Document

IDS: Final = "idemp"
"""The field of state documents in which ids are kept, unless a `Place` says another."""


def _same(entity: str) -> str:
    return entity


@dataclass(frozen=True, slots=True)
class Place:
    """Where the state document of a message type's entity is, and where in it ids are kept.

    Attributes:
        document: makes the document's id of the entity. Default: it is the entity.
        ids: the field for ids, a dotted path. All types that share a document should agree on it.

    Raises:
        ConfigurationError: no field has such a name.

    Example:
        >>> Place(lambda entity: f"order:{entity}", ids="meta.handled").of("7")
        'order:7'
    """

    document: Callable[[str], str] = _same
    ids: str = IDS

    def __post_init__(self) -> None:
        if not all(self.ids.split(".")):
            raise ConfigurationError(
                f"Place(ids={self.ids!r}) names no field.",
                fix='Say one, as in "idemp", or "meta.handled".',
            )

    def of(self, entity: str | None) -> str:
        """The id of the entity's document.

        Raises:
            UnaddressableMessage: there is no entity, or its document would be one of idemp's own.
        """
        if entity is None:
            raise UnaddressableMessage(
                "The claim names no entity, and this store keeps a claim in its entity's document.",
                fix='Say it in the policy, as in Idempotent(entity="order_id"); outside of handlers use another store.',
            )
        id_ = self.document(entity)
        if not id_ or id_.startswith(OWN):
            raise UnaddressableMessage(
                f"The entity {entity!r} can't have the document {id_!r}: {OWN!r} is where idemp's own ids begin.",
                fix="Say where documents are with Place(document=lambda entity: …), or choose another entity.",
            )
        return id_


@dataclass(frozen=True, slots=True)
class Record:
    """What a state document says of a handled message.

    Attributes:
        claim: what was claimed.
        claimed_at: when.
        attempt: names the attempt that won, whose document has the outputs; `None` if there were none.
        outputs: how many there were.
    """

    claim: Claim
    claimed_at: datetime
    attempt: str | None
    outputs: int

    @classmethod
    def restored(cls, consumer: str, key: str, values: Mapping[str, Any]) -> Record:
        """One that was read back."""
        fingerprint = values.get("fingerprint")
        claim = Claim(
            consumer=consumer,
            id=EffectiveId(UUID(key), values.get("id", key)),
            message_type=values["type"],
            fingerprint=bytes.fromhex(fingerprint) if fingerprint is not None else None,
            wait=timedelta(0),
            position=values.get("position"),
        )
        return cls(claim, datetime.fromisoformat(values["at"]), values.get("attempt"), values.get("outputs", 0))

    def handling(self, sendings: Sequence[Sending]) -> Handling:
        """The handling that it stands for, with outputs."""
        return Handling(self.claim, self.claimed_at, list(sendings))

    def stored(self) -> dict[str, Any]:
        """As it stands in the document, without what need not be said."""
        claim = self.claim
        values = {
            "type": claim.message_type,
            "at": self.claimed_at.isoformat(),
            "id": claim.id.text if claim.id.text != str(claim.id.key) else None,
            "fingerprint": claim.fingerprint.hex() if claim.fingerprint is not None else None,
            "position": claim.position,
            "attempt": self.attempt,
            "outputs": self.outputs or None,
        }
        return {name: value for name, value in values.items() if value is not None}


class State:
    """A state document, or the place where one would be: its user's part and idemp's part.

    Args:
        id: the document's.
        found: the document, if it exists.
        path: where this claim's ids are kept; `None` without a claim.
        hidden: all the fields that are idemp's.

    Attributes:
        revision: the one that was read; `None` if the document did not exist.
        document: the user's part, to be changed.

    Example:
        >>> state = State("cart-7", None)
        >>> state.document["items"] = 3
        >>> state.body()
        {'items': 3}
    """

    def __init__(self, id: str, found: Document | None, path: str | None = IDS, hidden: Iterable[str] = ()) -> None:
        self.id = id
        self.revision = found.revision if found is not None else None
        self.document: dict[str, Any] = deepcopy(dict(found.body)) if found is not None else {}
        self._kept: dict[str, dict[str, Any]] = {}
        self._hidden = {*hidden, *([path] if path is not None else [])}
        for each in self._hidden:
            kept = _taken_out(self.document, each.split("."))
            if kept is not None:
                self._kept[each] = kept
        self._own = self._kept.setdefault(path, {}) if path is not None else {}
        self.exists = bool(self.document)
        self._read = found.body if found is not None else {}

    @property
    def read(self) -> Mapping[str, Any]:
        """The whole document, as it was read."""
        return self._read

    @property
    def changed(self) -> bool:
        """Whether it is no longer as it was read."""
        return not is_same(self.body(), dict(self._read))

    def find(self, consumer: str, key: UUID) -> Record | None:
        """What it says of a message."""
        values = self._own.get(consumer, {}).get("ids", {}).get(str(key))
        return Record.restored(consumer, str(key), values) if values is not None else None

    @property
    def ids(self) -> int:
        """How many messages it says something of, of all consumers."""
        return sum(len(own["ids"]) for kept in self._kept.values() for own in kept.values())

    @property
    def consumers(self) -> set[str]:
        """Those that have ids in it."""
        return {consumer for kept in self._kept.values() for consumer, own in kept.items() if own["ids"]}

    def keep(self, record: Record) -> None:
        """Note a handled message."""
        ids = self._own.setdefault(record.claim.consumer, {}).setdefault("ids", {})
        ids[str(record.claim.id.key)] = record.stored()

    def records(self, consumer: str) -> list[Record]:
        """Everything that it says of messages of this consumer."""
        ids = self._own.get(consumer, {}).get("ids", {})
        return [Record.restored(consumer, key, values) for key, values in ids.items()]

    def forget(self, records: Iterable[Record], now: datetime) -> None:
        """Take ids out, and note that some were."""
        for record in records:
            own = self._own[record.claim.consumer]
            del own["ids"][str(record.claim.id.key)]
            own["purged"] = now.isoformat()

    def purged(self, consumer: str) -> datetime | None:
        """When ids of this consumer were last taken out of this document."""
        moment = self._own.get(consumer, {}).get("purged")
        return datetime.fromisoformat(moment) if moment is not None else None

    def body(self) -> dict[str, Any]:
        """Both parts, as one JSON object.

        Raises:
            HandlerError: the user's part is no JSON object, or is in the way of idemp's.
        """
        _check_keys(self.id, self.document)
        try:
            text = json.dumps(self.document, allow_nan=False, ensure_ascii=False).encode()  # not half a surrogate pair
            body: dict[str, Any] = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise HandlerError(
                f"The document {self.id!r} can't be kept as JSON: {error}",
                fix="Use what JSON has; of a number with more digits than a float holds (a Decimal), its text.",
            ) from error
        for path in self._hidden:  # what looked like ids in any of them, nobody but idemp would see again
            names, kept = path.split("."), self._kept.get(path)
            if _taken_out(body, names) is not None or (kept is not None and not _put_in(body, names, kept)):
                raise HandlerError(
                    f"The document {self.id!r} has a field {path!r} of its own, where idemp keeps ids.",
                    fix="Use another field, or say Place(ids=…) for its type.",
                )
        return body


def _check_keys(document: str, value: Any) -> None:
    """Refuse keys that JSON would turn into text: the next handling would not find them, and add a second one."""
    pending: list[Any] = [value]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if not isinstance(value, dict | list | tuple) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise HandlerError(
                        f"The document {document!r} has the key {key!r}, a {type(key).__name__}: in JSON all keys are text.",
                        fix=f"Use its text, as in {str(key)!r}, to read it and to write it.",
                    )
            pending += value.values()
        else:
            pending += value


def _taken_out(body: dict[str, Any], path: list[str]) -> dict[str, Any] | None:
    """What stands there, which is then gone with whatever was around nothing but that."""
    name, *below = path
    found = body.get(name)
    if below:
        kept = _taken_out(found, below) if isinstance(found, dict) else None
        if kept is not None and not found:
            del body[name]
        return kept
    if _are_ids(found):
        del body[name]
        return found
    return None


def _are_ids(found: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a field is what `State.keep` and `State.forget` make, and no field of the user's with the same name."""
    return isinstance(found, dict) and bool(found) and all(map(_are_of_a_consumer, found.values()))


def _are_of_a_consumer(own: Any) -> bool:
    if not isinstance(own, dict) or not isinstance(ids := own.get("ids"), dict) or own.keys() - {"ids", "purged"}:
        return False
    if not ids:
        return isinstance(own.get("purged"), str)
    return all(
        isinstance(values, dict) and {"type", "at"} <= values.keys() and _is_key(key) for key, values in ids.items()
    )


def _is_key(key: str) -> bool:
    try:
        return str(UUID(key)) == key
    except ValueError:
        return False


def overlapping(paths: Iterable[str]) -> list[str]:
    """Fields of which one is within another.

    Example:
        >>> overlapping(["idemp", "meta.handled", "meta"])
        ['meta', 'meta.handled']
    """
    of_each = sorted(paths)
    return next(
        ([outer, inner] for outer in of_each for inner in of_each if inner.startswith(f"{outer}.")),
        [],
    )


def _put_in(body: dict[str, Any], path: list[str], kept: dict[str, Any]) -> bool:
    """Whether there is room for it; what is empty is not put in."""
    name, *below = path
    if below:
        found = body.setdefault(name, {}) if kept else body.get(name, {})
        return isinstance(found, dict) and _put_in(found, below, kept)
    if name in body:
        return False
    if kept:
        body[name] = kept
    return True
