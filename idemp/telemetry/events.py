"""The log events, in one table: their names, levels and fields are stable, their texts are for people.

Each log line of idemp at `info` or above is one of these: `record.event` says which, the fields stand beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

MESSAGE: Final = ("consumer", "message_id", "message_type")
"""The fields by which an event says which message it is about."""
_OUTPUT: Final = ("output_id", "destination")
_EFFECT: Final = ("message_id", "output_id", "effect")


@dataclass(frozen=True, slots=True)
class Event:
    """One log event.

    Attributes:
        levels: the levels that it is logged at.
        meaning: one sentence.
        fields: what stands beside the event's name; a value may be null.
    """

    levels: tuple[str, ...]
    meaning: str
    fields: tuple[str, ...] = ()


EVENTS: Final[Mapping[str, Event]] = MappingProxyType({
    # Deliveries
    "delivery": Event(
        ("debug", "warning", "error"),
        "How a delivery ended, one line each: `parked` as error, `retried` as warning, others for debugging; times in s",
        (
            *MESSAGE, "outcome", "queue", "attempt", "attempts", "redelivered", "duration", "delay", "reason", "because"
        ),
    ),
    "late_message_handled": Event(
        ("warning",), 'Handled by `late = "handle"`, though it may have been handled before the window', MESSAGE
    ),
    "guard_read": Event(("info",), "The file of the guard against late duplicates was read", ("path", "ids")),
    "guard_unusable": Event(
        ("warning",), "That file is missing or altered: late messages of types that ask it are parked", ("path",)
    ),
    "delivery_lost": Event(
        ("warning",), "The connection was lost while the handler ran; committed, the next delivery is a duplicate", MESSAGE
    ),
    "fork_not_followed": Event(
        ("error",), "A connection or file was not prepared for a fork, by an error; `by` is its kind", ("by",)
    ),
    "forked_child_ended": Event(
        ("warning", "error"), "A child that a handler forked was ended where the handler's end was", ("handler", "code")
    ),
    "given_back": Event(("warning",), "No copy could be made: the message went back to its queue (`Inbox.wrap`)", MESSAGE),
    "copy_refused": Event(
        ("warning",),
        "The broker refused copies for a delay tier or dead letters: their messages come again",
        ("kind", "queues", "message_ids", "count", "pause"),
    ),
    "key_held": Event(
        ("info",), "A message failed whose type keeps an order: those after it with an equal `ordered_by` wait", MESSAGE
    ),
    "key_let_go": Event(
        ("info",),
        "It was handled or parked: the `waiting` ones behind it go on, after `seconds`",
        (*MESSAGE, "waiting", "seconds"),
    ),
    "claim_withdrawn": Event(
        ("error",), "A handler committed by itself; its claim was taken back, the message is parked", ("message_key",)
    ),
    "batch_taken_apart": Event(
        ("warning",),
        "A batch failed as a whole: its deliveries share smaller transactions, or run alone",
        ("deliveries", "error"),
    ),
    "late_rows_handled": Event(
        ("warning",),
        "Rows of a chunk are handled though claims of their time may have been purged, as their type's policy says",
        ("consumer", "message_type", "rows"),
    ),
    "claims_not_withdrawn": Event(
        ("warning",), "The same, but the database was away: they are taken back before the next claim", ("claims",)
    ),
    "after_commit_failed": Event(
        ("error",),
        "A listener of SQLAlchemy's `after_commit` failed; the handling is committed, its outputs go out",
        ("message_key",),
    ),
    "handler_ended_worker": Event(
        ("critical",), "A handler raised beyond `Exception`; the worker ends, the message returns", MESSAGE
    ),
    # Handlings in several databases
    "branch_unfinished": Event(
        ("error",),
        "Committed in the inbox's database, and prepared in `databases`: redelivery or recovery completes it",
        ("message_key", "databases"),
    ),
    "branch_recovered": Event(
        ("info",), "Recovery ended what a worker had left prepared", ("consumer", "message_key", "databases", "decision")
    ),
    "branch_left": Event(
        ("warning",),
        "Recovery could not end it yet, and tries again; `idemp recover` says why",
        ("consumer", "message_key", "databases"),
    ),
    "decision_forgotten": Event(
        ("warning",),
        "A person gave up what nobody can commit any more in `databases`: `idemp recover --forget`",
        ("consumer", "message_key", "databases"),
    ),
    "recovery_waits": Event(
        ("warning",), "A database can't be asked what is in doubt there; its handlings wait", ("databases",)
    ),
    # Outputs
    "output_unconfirmed": Event(
        ("warning",),
        "An output has no confirm; it waits for a relay, or for the redelivery",
        (*MESSAGE, *_OUTPUT, "refusal"),
    ),
    "output_unsendable": Event(
        ("error",), "The publisher itself failed of this output; `message_id` is that of its cause", ("message_id", *_OUTPUT)
    ),
    "output_quarantined": Event(
        ("error",),
        "A relay gave an output up; `idemp inbox redispatch` sends it again",
        ("message_id", *_OUTPUT, "refusal", "attempts", "refusals"),
    ),
    "marks_kept": Event(("warning",), "Confirms could not be recorded yet; nothing is lost", ("marks",)),
    # Prepared messages
    "prepared_unconfirmed": Event(
        ("warning",), "A committed message has no confirm; the checker publishes it", (*MESSAGE, "refusal")
    ),
    "prepared_unrecorded": Event(
        ("warning",), "That it was published could not be noted: it is published again, under the same id", MESSAGE
    ),
    "prepared_commit_found": Event(
        ("warning",), "The COMMIT of local work failed, and took place all the same: its message was published", MESSAGE
    ),
    "prepared_left": Event(
        ("warning",), "Its producer left without a decision, and the barrier does not tell yet: the checker decides", MESSAGE
    ),
    "prepared_decided": Event(
        ("info",), "The checker decided, after so many `checks` that did not know", (*MESSAGE, "decision", "checks")
    ),
    "prepared_check_failed": Event(("warning",), "The app's checker raised: its answer is unknown", (*MESSAGE, "error")),
    "prepared_opposite": Event(
        ("warning",), "The checker disagrees with what was decided meanwhile, which stays", (*MESSAGE, "decision")
    ),
    "prepared_parked": Event(
        ("error",),
        "Asked too often without an answer: neither dropped nor published; `idemp prepared resume` has it checked again",
        (*MESSAGE, "checks", "reason"),
    ),
    "prepared_home_away": Event(("warning",), "The home of prepared messages is away; one line per outage"),
    "prepared_home_back": Event(("info",), "It is back"),
    "prepared_not_purged": Event(
        ("warning",), "Old ones, or old rows of the barrier, could not be deleted; tried again in a minute"
    ),
    "barrier_away": Event(("warning",), "Barriers can't be asked; one line per outage, and no check is counted"),
    "barrier_back": Event(("info",), "They can be asked again"),
    "prepared_needless": Event(
        ("warning",), "Messages, local work and inbox share a database: an initiation does it without them", ("consumer",)
    ),
    "prepared_unreadable": Event(
        ("error",),
        "A message in a home's queue is none that idemp prepared, or of a later release: it was set aside",
        ("queue", "message_id"),
    ),
    # Effects
    "effect_failed": Event(
        ("warning",),
        "An effect did not take place, and is tried again after `delay` seconds",
        (*_EFFECT, "attempt", "reason", "delay"),
    ),
    "effect_quarantined": Event(
        ("error",),
        "An effect was refused, or had its attempts; `idemp inbox redispatch` runs it again",
        (*_EFFECT, "attempt", "reason"),
    ),
    "effect_unknown": Event(
        ("error",), "No function is registered for a stored effect: it stays pending; told once for each name", _EFFECT
    ),
    "effects_held_up": Event(
        ("error",),
        "Ten effects of a thread run on past their timeouts, and no other begins there: restart the process",
        ("consumer",),
    ),
    "effects_store_away": Event(("warning",), "Effects are not run: the database is away; one line per outage"),
    "effects_store_back": Event(("info",), "It is back"),
    # Servers
    "outage": Event(
        ("warning",), "The broker or the database is away (`error` says which); consumption pauses", ("consumer", "error")
    ),
    "outage_over": Event(("info",), "It is back", ("consumer",)),
    "relay_broker_away": Event(("warning",), "The relay gets no confirms; one line per outage", ("refusal",)),
    "relay_store_away": Event(("warning",), "The relay does not reach the database; one line per outage"),
    "relay_back": Event(("info",), "The relay has its `server` back, `broker` or `database`", ("server",)),
    "listening_lost": Event(("warning",), "Relays are not woken, and look by themselves until the database answers again"),
    "polling_behind_pooler": Event(
        ("info",), "A connection pooler stands before the database: relays are not woken by other processes, they poll"
    ),
    "beat_failed": Event(("warning",), "The heartbeat did not reach the database; a worker tells it once", ("consumer",)),
    "beat_again": Event(("info",), "A worker's heartbeat reaches the database again", ("consumer",)),
    "retire_failed": Event(("warning",), "The heartbeat could not be taken back at the end", ("consumer",)),
    # Upkeep
    "purged": Event(("info",), "Expired claims were deleted", ("consumer", "claims")),
    "orphans_collected": Event(
        ("info",), "In documents: outputs of attempts that never counted were deleted", ("consumer", "attempts")
    ),
    "unconfirmed_expired": Event(
        ("warning",),
        "In documents: a claim was deleted two windows after its last refusal, with outputs whose confirm nobody recorded",
        ("consumer", "message_id", "message_type", "outputs"),
    ),
    "entity_shared": Event(
        ("warning",),
        "Two consumers keep what they handled in one stream or one document",
        ("consumer", "other", "entity"),
    ),
    "document_nearly_full": Event(
        ("warning",),
        "A document has more than four fifths of the bytes that its store takes",
        ("consumer", "document", "bytes", "largest", "ids"),
    ),
    "outputs_resent": Event(
        ("info",),
        "In documents and streams: a worker died before it recorded confirms; its outputs went out once more",
        ("outputs",),
    ),
    "archived": Event(
        ("info",),
        "A run of the archive was verified, and its claims deleted",
        ("consumer", "run", "claims", "outputs", "deleted"),
    ),
    "purge_failed": Event(("warning",), "Purging was put off", ("consumer",)),
    "daily_not_ours": Event(
        ("warning",),
        "The worker's user does not own the tables, or may make none beside them: `idemp db partition` and "
        "`idemp inbox purge` have to be run",
        ("consumer", "made_until"),
    ),
    "daily_failed": Event(
        ("warning",), "Daily tables could not be made or dropped; other expired claims are deleted", ("consumer",)
    ),
    "tables_made_anew": Event(("warning",), "Tables that somebody had dropped were made again, empty", ("tables",)),
    "tables_newer": Event(("info",), "The tables are of a later release; nothing was changed", ("version",)),
    # The spool
    "spool_full": Event(
        ("warning",),
        "A queue's spool holds as much as it may: spooling pauses, the messages wait in the queue",
        ("queue", "messages", "bytes"),
    ),
    "spool_room": Event(("info",), "It has room again", ("queue",)),
    "not_spooled": Event(
        ("error",),
        "A message that no spool can hold was parked: too large, or refused by the database for what it contains",
        ("queue", "message_id", "message_type", "reason"),
    ),
    # Processes
    "worker_runs": Event(("info",), "A worker process starts to consume", ("consumers",)),
    "queue_not_consumed": Event(
        ("warning",), "An app without handlers runs effects or prepared messages alone", ("consumer", "queue")
    ),
    "types_unhandled": Event(
        ("warning",),
        "At start: claims of these types still count, and no handler takes them any more; a renamed one is handled again",
        ("consumer", "message_types"),
    ),
    "prefetch_fixed": Event(
        ("warning",), "`prefetch` of the settings is not heeded, since a type keeps an order", ("consumer", "prefetch")
    ),
    "worker_stopped": Event(("info",), "It ended cleanly; `by` is the signal", ("by",)),
    "worker_failed": Event(("critical",), "A thread of the worker ended by an error; `by` is its name", ("by",)),
    "relay_runs": Event(("info",), "A relay process runs"),
    "pipeline_batch": Event(
        ("info",),
        "Spark handled a batch: messages (`rows`) by what became of them",
        ("batch", "rows", "new", "replay", "duplicate", "conflict", "parked", "skipped", "outputs"),
    ),
    "arrivals_kept": Event(
        ("warning",), "What Spark's tasks staged could not be deleted yet; a later micro-batch does it, after a day"
    ),
    "stopping": Event(("info",), "Asked to stop", ("signal",)),
    "stopped_at_once": Event(("warning",), "A second signal ended it without the grace time", ("signal",)),
    "handler_abandoned": Event(
        ("warning",),
        "A handler outlasted the grace time, or a second signal came: the database rolls back, the message comes again",
        (*MESSAGE, "seconds"),
    ),
    "session_changed": Event(("debug",), "A handler changed its database session; the connection is closed after it"),
    "handler_runs_long": Event(
        ("warning",), "A delivery's handling has been running for more than a minute; told once", (*MESSAGE, "seconds")
    ),
    "process_started": Event(("info",), "The parent started a worker process", ("pid",)),
    "process_died": Event(
        ("error",), "A worker process ended unasked, and is started again after `pause` seconds", ("pid", "code", "pause")
    ),
    "metrics_served": Event(("info",), "Where the metrics are", ("url",)),
    "telemetry_failed": Event(("error",), "Metrics or traces failed; deliveries are not affected", ("method",)),
})  # fmt: skip


def markdown() -> str:
    """The table of the reference page.

    Example:
        >>> print(markdown().splitlines()[0])
        | event | level | fields | meaning |
    """
    lines = ["| event | level | fields | meaning |", "|---|---|---|---|"]
    for name, event in EVENTS.items():
        fields = ", ".join(f"`{field}`" for field in event.fields) or "none"
        lines.append(f"| `{name}` | {', '.join(event.levels)} | {fields} | {event.meaning} |")
    return "\n".join(lines) + "\n"
