"""Small random worlds, and what plain Python says of them: the rules of reconciliation, written a second time."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from idemp.errors import MessageError
from idemp.fingerprint import Fingerprint
from idemp.identity import Key, effective_id
from idemp.initiation import INITIATION_TYPE
from idemp.messages import Message, parse_json
from idemp.spark.reconcile import Terms

NOW = datetime(2026, 3, 8, 12, tzinfo=UTC)
TERMS = Terms(
    as_of=NOW,
    since=NOW - timedelta(days=3),
    until=NOW - timedelta(minutes=5),
    grace=timedelta(minutes=15),
    retention=timedelta(days=2),
    windows={"short": timedelta(hours=6)},
)
TICK = timedelta(microseconds=1)
# Times at which something changes, and one moment before and after each.
EDGES = [
    TERMS.since, TERMS.claims_since, TERMS.until, TERMS.settled, NOW - TERMS.retention, NOW - timedelta(hours=6),
    NOW - timedelta(hours=1),
]  # fmt: skip
TIMES = [edge + shift for edge in EDGES for shift in (-TICK, timedelta(0), TICK)]
BODIES = [b'{"a": 1}', b'{ "a":1 }', b'{"a": 2}', b"no json", None]
IDS = ["1", "2", "0192c8a4-7d3e-7000-8000-000000000001", "", None]
TYPES = ["long", "short", ""]


@dataclass(frozen=True)
class Row:
    """A row of the log."""

    id: str | None
    type: str
    body: bytes | None
    time: datetime | None
    position: str | None


@dataclass(frozen=True)
class Claim:
    """A row of the inbox."""

    key: bytes
    id: str
    type: str
    claimed_at: datetime
    fingerprint: bytes | None


@dataclass(frozen=True)
class World:
    """What one consumer was sent, and what it did."""

    consumer: str
    sent: list[Row] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    outputs: list[tuple[bytes, bool, bool]] = field(default_factory=list)


def world(seed: int) -> World:
    """Rows that meet each other often, at times where something changes."""
    rng = random.Random(seed)
    made = World(f"w{seed}")
    for _ in range(rng.randint(0, 6)):
        body, position = rng.choice(BODIES), rng.choice([None, "log#1", "log#2"])
        time = rng.choice([*TIMES, None])
        made.sent.append(Row(rng.choice(IDS), rng.choice(TYPES), body, time, position))
    for name in rng.sample([each for each in IDS if each], k=rng.randint(0, 3)):
        fingerprint = None if rng.random() < 0.3 else Fingerprint().of({"a": rng.choice([1, 1, 2])})
        other = Fingerprint.parse({"except": ["b"]}).of({"a": 9})
        effective = effective_id("envelope", name)
        claim_type = rng.choice([*TYPES[:2], INITIATION_TYPE])
        stored = rng.choice([fingerprint, fingerprint, other])
        made.claims.append(Claim(effective.key.bytes, name, claim_type, rng.choice(TIMES), stored))
        for _ in range(rng.choice([0, 0, 1, 3])):
            pending = rng.random() < 0.5
            made.outputs.append((effective.key.bytes, pending, pending and rng.random() < 0.4))
    return made


Verdict = tuple[str, tuple[str, ...], int]


def oracle(made: World) -> dict[str, Verdict]:
    """By the key in hex (or the fault with what the row says): fate, kinds in order, rows of the log."""
    sent: dict[str, list[Row]] = defaultdict(list)
    for row in made.sent:
        sent[_name(row)].append(row)
    claims = {claim.key.hex(): claim for claim in made.claims}
    outputs: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for key, pending, quarantined in made.outputs:
        outputs[key.hex()].append((pending, quarantined))
    verdicts = {}
    for name in sorted({*sent, *claims}):
        rows, claim = sent[name], claims.get(name)
        verdicts[name] = (_fate(name, rows, claim), tuple(_kinds(name, rows, claim, outputs[name])), len(rows))
    return verdicts


def _name(row: Row) -> str:
    try:
        return Key.message_id().effective(Message(body=b"", message_id=row.id), None, row.type).key.hex
    except MessageError as error:
        return repr((type(error).__name__, row.id, row.position, row.time))


def _is_faulty(name: str) -> bool:
    return name.startswith("(")


def _fate(name: str, sent: list[Row], claim: Claim | None) -> str:
    if not sent:
        assert claim is not None
        if not TERMS.since + TERMS.grace <= claim.claimed_at <= TERMS.until:
            return "outside"
        return "initiated" if claim.type == INITIATION_TYPE else "unknown_origin"
    first = min((row.time for row in sent if row.time is not None), default=None)
    if first is not None and not TERMS.since <= first <= TERMS.until:
        return "outside"
    if _is_faulty(name):
        return "unusable"
    if claim is not None:
        return "handled"
    if first is not None and first < TERMS.as_of - _window(sent):
        return "unknown"
    if first is not None and first > TERMS.as_of - TERMS.grace:
        return "not_yet"
    return "lost"


def _window(sent: list[Row]) -> timedelta:
    """Of the greatest type name, where the rows of one id disagree."""
    return TERMS.windows.get(max(row.type for row in sent), TERMS.retention)


def _kinds(name: str, sent: list[Row], claim: Claim | None, outputs: list[tuple[bool, bool]]) -> Iterator[str]:
    fate = _fate(name, sent, claim)
    if fate == "outside":
        return
    conflicting = not _is_faulty(name) and _conflicts(sent, claim)
    overdue = claim is not None and claim.claimed_at <= TERMS.as_of - TERMS.grace
    if fate == "lost":
        yield "lost"
    if conflicting:
        yield "conflicting"
    if claim is not None and any(quarantined or (pending and overdue) for pending, quarantined in outputs):
        yield "undispatched"
    if fate in {"unknown_origin", "unusable"}:
        yield fate
    places = [row.position for row in sent]
    if (
        not _is_faulty(name)
        and not conflicting
        and (len({*places} - {None}) > 1 or (None in places and len(places) > 1))
    ):
        yield "duplicated"
    first = min((row.time for row in sent if row.time is not None), default=None)
    if fate == "handled" and claim is not None and first is not None and claim.claimed_at > first + TERMS.grace:
        yield "late"


def _conflicts(sent: list[Row], claim: Claim | None) -> bool:
    digests = {_digest(row.body or b"") for row in sent}
    if len(digests) > 1:
        return True
    if not digests or claim is None or claim.fingerprint is None:
        return False
    (digest,) = digests
    return isinstance(digest, bytes) and digest[:3] == claim.fingerprint[:3] and digest != claim.fingerprint


def _digest(body: bytes) -> object:
    try:
        return Fingerprint().of(parse_json(Message(body=body)))
    except MessageError:
        return "no JSON", body
