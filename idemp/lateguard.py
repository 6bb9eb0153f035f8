"""The late-duplicate guard: a file that says of an id whether it may have been handled, long after its claim was purged.

It is a Bloom filter over the ids of archived claims: two bytes an id. "No" is certain, "perhaps" is wrong for fewer than one
in a thousand ids. The file is mapped into memory, and asked with the standard library alone.

```
segment 0 │ segment 1 │ … │ description (JSON) │ its length and CRC-32 │ magic and version
```

An id's digest chooses a segment, and in it the bits. Segments can be made apart from each other, so that a file of any size
takes little memory to make (`idemp pipeline archive`). A file is written beside the old one, then takes its name: whoever
has the old one open keeps it whole.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from idemp.canonical import encode
from idemp.errors import GuardUnusable

if TYPE_CHECKING:
    from uuid import UUID

GUARD_VERSION: Final = 1
SEGMENT_BYTES: Final = 1 << 20
BITS_PER_ID: Final = 16
PROBES: Final = 11
"""For 16 bits an id: 0.046 % of the ids that it does not hold answer "perhaps"."""

_DERIVATION: Final = f"idemp-guard-{GUARD_VERSION}"
_MAGIC: Final = b"IDEMPGRD" + GUARD_VERSION.to_bytes(4, "little")
_SIZES: Final = struct.Struct("<II")  # of the description: length, CRC-32
_TAIL_BYTES: Final = _SIZES.size + len(_MAGIC)
_WORDS: Final = struct.Struct("<3Q")


@dataclass(frozen=True, slots=True)
class Span:
    """What a guard file holds of one consumer.

    Attributes:
        since: claims from before this moment may be missing.
        until: how far the consumer's claims were purged when the file was made: it holds whatever was purged up to then.
        ids: how many.
    """

    since: datetime
    until: datetime
    ids: int


@dataclass(frozen=True, slots=True)
class Description:
    """What a guard file says of itself.

    Attributes:
        segments: how many there are.
        ids: how many were put in.
        made_at: when.
        consumers: whose.
        digest: SHA-256 of all segments, in hex digits.
    """

    segments: int
    ids: int
    made_at: datetime
    consumers: Mapping[str, Span] = field(default_factory=dict)
    digest: str = ""

    def to_json(self) -> bytes:
        """As the file has it."""
        return json.dumps(asdict(self), default=datetime.isoformat, sort_keys=True).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Out of a file.

        Raises:
            GuardUnusable: it says too little.
        """
        try:
            said = json.loads(text)
            spans = {
                name: Span(_moment(span["since"]), _moment(span["until"]), int(span["ids"]))
                for name, span in said["consumers"].items()
            }
            return cls(int(said["segments"]), int(said["ids"]), _moment(said["made_at"]), spans, str(said["digest"]))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise GuardUnusable(f"The guard file's description can't be read: {error!r}.", fix=_MAKE) from None


_MAKE: Final = "Make it anew: `idemp pipeline archive … --guard FILE`."


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def scope_of(consumer: str) -> bytes:
    """What a consumer's keys are put behind before they are digested.

    Example:
        >>> scope_of("shop").hex()
        '730000000d6964656d702d67756172642d31730000000473686f70'
    """
    return encode((_DERIVATION, consumer))


def segments_for(ids: int) -> int:
    """How many segments so many ids take.

    Example:
        >>> segments_for(0), segments_for(10_000_000)
        (1, 20)
    """
    return max(1, -(-ids * BITS_PER_ID // (SEGMENT_BYTES * 8)))


def places_of(scope: bytes, key: bytes, segments: int) -> tuple[int, list[int]]:
    """Where an id is noted: its segment, and its bits there.

    Example:
        >>> segment, bits = places_of(scope_of("shop"), bytes(16), 20)
        >>> segment, bits[:3]
        (19, [3575789, 6028522, 92647])
    """
    first, position, step = _WORDS.unpack_from(hashlib.sha256(scope + key).digest())
    step |= 1  # odd, so that no bit comes twice
    mask = SEGMENT_BYTES * 8 - 1
    return first % segments, [(position + number * step) & mask for number in range(PROBES)]


class Guard:
    """An open guard file. Safe to share between threads.

    Raises:
        GuardUnusable: it is missing, cut off, altered or of another version.

    Example:
        >>> import tempfile, uuid
        >>> from datetime import timedelta
        >>> key, now = uuid.uuid4(), datetime.now(UTC)
        >>> segment, bits = places_of(scope_of("shop"), key.bytes, 1)
        >>> content = bytearray(SEGMENT_BYTES)
        >>> for bit in bits:
        ...     content[bit >> 3] |= 1 << (bit & 7)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "guard")
        ...     write(path, [bytes(content)], {"shop": Span(now - timedelta(days=400), now, ids=1)})
        ...     guard = Guard(path)
        ...     guard.perhaps("shop", key), guard.perhaps("shop", uuid.uuid4())
        (True, False)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: it is empty
            raise GuardUnusable(f"The guard file {path} can't be read: {error}.", fix=_MAKE) from None
        self.description = self._described()
        self._segments = self.description.segments
        self._scopes = {name: scope_of(name) for name in self.description.consumers}

    def covers(self, consumer: str, moment: datetime, purged_before: datetime | None) -> bool:
        """Whether it holds whatever was purged of this consumer's claims from this moment on.

        Args:
            consumer: whose claims.
            moment: when the message was made: it can't have been claimed before.
            purged_before: how far they are purged by now; `None` for not at all.
        """
        if purged_before is None:
            return True
        span = self.description.consumers.get(consumer)
        return span is not None and span.since <= moment and span.until >= purged_before

    def perhaps(self, consumer: str, key: UUID) -> bool:
        """Whether this id may have been handled by that consumer, within what the file covers. "No" is certain.

        A consumer that it knows nothing of has handled nothing: ask `covers` first.
        """
        scope = self._scopes.get(consumer)
        if scope is None:
            return False
        # `places_of`, bit by bit: most ids that it does not hold end at the first or second.
        first, position, step = _WORDS.unpack_from(hashlib.sha256(scope + key.bytes).digest())
        content, start, mask = self._content, first % self._segments * SEGMENT_BYTES, SEGMENT_BYTES * 8 - 1
        step |= 1
        for _ in range(PROBES):
            bit = position & mask
            if not content[start + (bit >> 3)] >> (bit & 7) & 1:
                return False
            position += step
        return True

    def _described(self) -> Description:
        content, size = self._content, len(self._content)
        if size < _TAIL_BYTES or content[-len(_MAGIC) :] != _MAGIC:
            raise GuardUnusable(f"{self.path} is no guard file of version {GUARD_VERSION}, or was cut off.", fix=_MAKE)
        length, checksum = _SIZES.unpack_from(content, size - _TAIL_BYTES)
        text = content[size - _TAIL_BYTES - length : size - _TAIL_BYTES]
        if zlib.crc32(text) != checksum:
            raise GuardUnusable(f"The guard file {self.path} was altered: its description.", fix=_MAKE)
        described = Description.from_json(text)
        body = size - _TAIL_BYTES - length
        if body != described.segments * SEGMENT_BYTES:
            raise GuardUnusable(f"The guard file {self.path} was cut off.", fix=_MAKE)
        with memoryview(content) as view, view[:body] as segments:
            if hashlib.sha256(segments).hexdigest() != described.digest:
                raise GuardUnusable(f"The guard file {self.path} was altered: its segments.", fix=_MAKE)
        return described


def write(path: Path, segments: Iterable[bytes], consumers: Mapping[str, Span]) -> None:
    """Write a guard file, which takes the place of the one that is there, at once and whole.

    Args:
        path: where.
        segments: in order, each `SEGMENT_BYTES` long.
        consumers: whose ids they hold.

    Raises:
        ValueError: a segment of another length; the file is as it was.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    digest, count = hashlib.sha256(), 0
    try:
        with beside.open("wb") as file:
            for segment in segments:
                if len(segment) != SEGMENT_BYTES:
                    raise ValueError(f"segment {count} has {len(segment)} bytes, not {SEGMENT_BYTES}")
                file.write(segment)
                digest.update(segment)
                count += 1
            ids = sum(span.ids for span in consumers.values())
            text = Description(count, ids, datetime.now(UTC), dict(consumers), digest.hexdigest()).to_json()
            file.write(text + _SIZES.pack(len(text), zlib.crc32(text)) + _MAGIC)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        _sync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """So that the new name outlives a power cut."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
