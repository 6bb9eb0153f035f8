"""What a run of the redelivery machine did: as sentences for people, and as a schedule that runs again."""

from __future__ import annotations

import pprint
from typing import TYPE_CHECKING, Any, Final

from idemp.messages import Message
from idemp.testing.findings import NotIdempotent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from idemp.outcome import Outcome
    from idemp.testing.execution import Step

Action = tuple[Any, ...]
"""A step of a schedule: its name, and what it needs; a Python literal."""

_MOST_SHOWN: Final = 80
_WIDTH: Final = 100
_HEADING: Final = "What happened:"

_TOLD: Final = {
    "HANDLED": "The worker handled {name}",
    "REDISPATCHED": "{name} came again, a duplicate: the handler was skipped, its stored outputs were sent again",
    "SKIPPED": "{name} came again, a duplicate: the handler was skipped, and nothing was left to send",
    "PENDING": "{name} is committed, but an output has no confirm yet",
    "IN_FLIGHT": "{name} was in another worker's hands; it comes again after a delay",
    "RETRIED": "The handling of {name} failed{error}; it comes again after a delay",
    "PARKED": "{name} was parked in the dead-letter queue{error}",
}


class Story:
    """The steps of one run, so far.

    Attributes:
        schedule: the steps, for `idemp.testing.machine.replay`.
        sentences: what became of each.

    Example:
        >>> story = Story()
        >>> story.add(("deliver",), "The worker handled orders.Place 'message-1'.")
        >>> print(story)
        What happened:
          1. The worker handled orders.Place 'message-1'.
        Keep it as a regression test: idemp.testing.replay(app, schedule), with the machine's other arguments and
          schedule = [('deliver',)]
    """

    def __init__(self) -> None:
        self.schedule: list[Action] = []
        self.sentences: list[str] = []

    def add(self, action: Action, sentence: str) -> None:
        """One more step, and what became of it."""
        self.schedule.append(action)
        self.sentences.append(sentence)

    def note_on(self, error: BaseException) -> None:
        """Have an error tell this story, once, however often it passes by."""
        if not any(note.startswith(_HEADING) for note in getattr(error, "__notes__", ())):
            error.add_note(self._told("schedule, rehearse=True" if isinstance(error, NotIdempotent) else "schedule"))

    def __str__(self) -> str:
        return self._told("schedule")

    def _told(self, arguments: str) -> str:
        numbered = "".join(f"  {number}. {sentence}\n" for number, sentence in enumerate(self.sentences, start=1))
        literal = pprint.pformat(self.schedule, width=_WIDTH).replace("\n", "\n             ")
        return (
            f"{_HEADING}\n{numbered}Keep it as a regression test: idemp.testing.replay(app, {arguments}), with the "
            f"machine's other arguments and\n  schedule = {literal}"
        )


def named(message: Message) -> str:
    """A message, as sentences name it.

    Example:
        >>> named(Message(body=b"{}", type="orders.Place", message_id="message-1"))
        "orders.Place 'message-1'"
    """
    return f"{message.type} {message.message_id!r}"


def shown(body: bytes) -> str:
    """A body, shortened for a sentence.

    Example:
        >>> shown(b'{"sku":"A-1"}')
        '{"sku":"A-1"}'
    """
    text = body.decode("utf-8", "backslashreplace")
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…"


def delivered(step: Step | None, error: BaseException | None = None, *, sent: int = 0) -> str:
    """What became of one delivery.

    Args:
        step: what the harness says of it.
        error: what the handler raised.
        sent: how many outputs reached the broker.

    Example:
        >>> delivered(None)
        'The worker looked for a message; there was none.'
    """
    if step is None:
        return "The worker looked for a message; there was none."
    name = named(step.delivery.message)
    if step.died is not None:
        return f"The worker died {step.died} of {name}."
    if step.outcome is None:
        return f"The database was away, and {name} stayed in the queue."
    ending = became(step.outcome, name, error or getattr(step.settlement, "reason", None))
    return f"{ending}{_sending(sent) if step.outcome.name == 'HANDLED' else ''}."


def became(outcome: Outcome, name: str, error: object = None) -> str:
    """How a handling ended, without a full stop.

    Example:
        >>> from idemp import Outcome
        >>> became(Outcome.HANDLED, "orders.Place 'message-1'")
        "The worker handled orders.Place 'message-1'"
    """
    why = "" if not error else f": {error}" if isinstance(error, str) else f": {error!r:.120}"
    return _TOLD[outcome.name].format(name=name, error=why)


def published(message: Message) -> Action:
    """The step that publishes a message, with those of its properties that a machine would not give it.

    Example:
        >>> published(Message(body=b'{"sku":"A-1"}', type="orders.Place"))
        ('publish', 'orders.Place', '{"sku":"A-1"}')
    """
    names = ("message_id", "content_type", "correlation_id", "reply_to", "headers", "ttl", "priority")
    plain = Message(body=b"")
    more = {name: getattr(message, name) for name in names if getattr(message, name) != getattr(plain, name)}
    if message.timestamp is not None:
        more["timestamp"] = message.timestamp.isoformat()
    try:
        body: str | bytes = message.body.decode("utf-8")
    except UnicodeDecodeError:
        body = message.body
    return ("publish", message.type, body, more) if more else ("publish", message.type, body)


def differing(run: Sequence[UUID], reference: Sequence[UUID]) -> str:
    """Which outputs the one has and the other has not, in short; empty where there are none.

    Example:
        >>> from uuid import UUID
        >>> differing([UUID(int=1)], [])
        '1 that only the run sent'
    """
    only_run, only_reference = len(set(run) - set(reference)), len(set(reference) - set(run))
    told = [
        f"{only_run} that only the run sent" if only_run else "",
        f"{only_reference} that the run never sent" if only_reference else "",
    ]
    return ", ".join(part for part in told if part)


def _sending(sent: int) -> str:
    return "" if not sent else " and 1 output was sent" if sent == 1 else f" and {sent} outputs were sent"
