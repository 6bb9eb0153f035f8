"""The dispatcher: sends the outputs of committed handlings, and records which of them the broker has confirmed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from idemp.errors import Undelivered, describe_error
from idemp.events import log
from idemp.failures import Phase
from idemp.handling import Handling
from idemp.messages import Output, Refusal
from idemp.ports import Publisher, Scheduler

__all__ = ["Dispatcher", "Sent", "publish"]


@dataclass(slots=True)
class Sent:
    """A group whose outputs were sent.

    Attributes:
        handlings: Its deliveries.
        outputs: What was sent: each output once, also if two copies of a message brought it.
        stored: Ids of outputs that have a pending row.
        refused: Outputs that the broker did not take, by id; known when the confirms have been waited for.

    Example:
        >>> Sent([], [], []).refused
        {}
    """

    handlings: Sequence[Handling]
    outputs: list[Output]
    stored: list[str]
    refused: Mapping[str, Refusal] = field(default_factory=dict)


@dataclass
class Dispatcher:
    """Sends what is due, waits for the confirms once, and forgets the pending rows of what was confirmed.

    Attributes:
        publisher: Sends; None refuses all outputs, so that a relay sends them.
        scheduler: Keeps the pending rows.
        timeout: Seconds to wait for confirms.

    Example:
        >>> Dispatcher(None, None).dispatch([])
        {}
    """

    publisher: Publisher | None
    scheduler: Scheduler
    timeout: float = 10.0

    def dispatch(self, handlings: Sequence[Handling]) -> Mapping[str, Refusal]:
        """Send, wait and record; return what was refused."""
        return self.record(self.confirm(self.send(handlings)))

    def send(self, handlings: Sequence[Handling]) -> Sent:
        """Begin to send what is due, and wait for nothing."""
        outputs: dict[str, Output] = {}
        stored: list[str] = []
        for handling in handlings:
            for output in handling.outputs:
                if output.sendable and output.id not in outputs:
                    outputs[output.id] = output
                    if handling.claim is not None:
                        stored.append(output.id)
        sent = Sent(handlings, list(outputs.values()), stored)
        if outputs and self.publisher is not None:
            with suppress(Exception):  # confirm() finds out
                self.publisher.send(sent.outputs)
        return sent

    def confirm(self, sent: Sent) -> Sent:
        """Wait for the confirms of what was sent. Needs no database."""
        if sent.outputs:
            sent.refused = publish(self.publisher, sent.outputs, self.timeout)
        return sent

    def record(self, sent: Sent) -> Mapping[str, Refusal]:
        """Forget the pending rows of what was confirmed, postpone what was refused, and return that.

        An output without a pending row is one of a type that is not opted in: if it is refused, its delivery has failed.
        """
        if not sent.outputs:
            return {}
        refused, stored = sent.refused, sent.stored
        try:
            self.scheduler.confirm([id for id in stored if id not in refused] if refused else stored)
            if refused:
                self.scheduler.refuse({id: refused[id] for id in stored if id in refused})
        except Exception as error:  # noqa: BLE001 - they stay pending, so they are sent again
            log("output.unrecorded", error=error)
        for handling in sent.handlings if refused else ():
            refusals = [refused[output.id] for output in handling.outputs if output.id in refused]
            if refusals and handling.claim is None:
                text = f"the handling is committed, and the broker did not take an output: {refusals[0].reason}"
                handling.phase = Phase.DISPATCH  # in which the error is idemp's own, not the handler's
                handling.fail(Undelivered(text, own=all(each.own for each in refusals)))
        return refused


def publish(publisher: Publisher | None, outputs: Sequence[Output], timeout: float) -> dict[str, Refusal]:
    """Publish outputs and return the refused ones by id. After COMMIT nothing may escape: any error is a refusal.

    Example:
        >>> publish(None, [Output("1", "send", "", "stock", {}, b"{}")], 1.0)
        {'1': Refusal(reason='there is no publisher', own=False)}
    """
    if publisher is None:
        return dict.fromkeys((output.id for output in outputs), Refusal("there is no publisher"))
    deadline = time.monotonic() + timeout
    try:
        answers = publisher.publish(outputs, timeout)
        if len(answers) == len(outputs) and not any(answers):
            return {}
        return {output.id: answer for output, answer in zip(outputs, answers, strict=True) if answer is not None}
    except Exception as error:  # noqa: BLE001
        refused = dict.fromkeys((output.id for output in outputs), Refusal(describe_error(error)))
    if len(outputs) > 1:  # one of them may be to blame
        for output in outputs:
            if (left := deadline - time.monotonic()) > 0 and not publish(publisher, [output], left):
                del refused[output.id]
    return refused
