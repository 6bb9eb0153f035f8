"""A home in two queues of Amazon SQS, for producers without tables of idemp.

Messages wait in the *transaction queue*, delayed until their check is due. SQS gives the sender no handle by which it could
delete a message, so a producer writes ids of ended ones to the *operation log*, and the checker deletes these without asking. A lost
note costs one more check, and perhaps a second message under the same id.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from idemp.errors import ConfigurationError, Unavailable, needs
from idemp.messages import Output
from idemp.prepared.ports import Prepared

with needs("sqs"):
    from botocore.exceptions import BotoCoreError, ClientError

__all__ = ["SqsHome"]

LONGEST_DELAY: Final = 900  # seconds for which SQS can delay a message
LEASE: Final = 60  # seconds for which a checker owns a message
KEPT: Final = 14 * 86_400  # seconds after which SQS deletes a message
NOTED: Final = 4 * LONGEST_DELAY  # seconds after which SQS deletes a note; its message has been checked by then
NOTES: Final = 10_000  # that a checker remembers
ROUNDS: Final = 100  # of ten notes, before it checks
AT_ONCE: Final = 10


class SqsHome:
    """Two standard queues, `NAME-prepared` and `NAME-operations`. The checker's answer alone decides.

    SQS delays a message for 15 minutes at most, and deletes it after 14 days, so a checker has to run in that time. A message that was
    checked too often, or is committed and not confirmed, moves to the tables of the app. A message has at most 256 KiB with its
    properties.

    Args:
        name: Prefix of the queues' names, which must be unique to this home.
        client: boto3's client for SQS.

    Example:
        >>> import boto3
        >>> home = SqsHome("orders", boto3.client("sqs", region_name="eu-central-1"))
        >>> home.names
        ('orders-prepared', 'orders-operations')
    """

    def __init__(self, name: str, client: Any) -> None:
        self._client, self.names = client, (f"{name}-prepared", f"{name}-operations")
        self._urls: dict[str, str] = {}
        self._ended: dict[str, None] = {}  # ids that notes name, oldest first

    def create(self) -> None:
        """Create the queues, unless they exist.

        Raises:
            Unavailable: SQS gives no answer, or refuses.
        """
        for name, kept in zip(self.names, (KEPT, NOTED), strict=True):
            self._call("create_queue", QueueName=name, Attributes={"MessageRetentionPeriod": str(kept)})

    def prepare(self, prepared: Prepared, wait: float) -> None:
        """Send a delayed message. A second one under its key is not detected here, but in the inboxes of its consumers.

        Raises:
            ConfigurationError: SQS cannot delay the message for so long.
            Unavailable: SQS gives no answer, or refuses, for instance a message that is too large.
        """
        if wait > LONGEST_DELAY:
            raise ConfigurationError(f"SQS delays a message for {LONGEST_DELAY} seconds at most: lower check_after")
        fields = asdict(prepared.output) | {"body": prepared.output.body.decode()}
        text = json.dumps({"app": prepared.app, "key": prepared.key, "output": fields, "checks": prepared.checks})
        self._on(self.names[0], "send_message", MessageBody=text, DelaySeconds=round(wait))

    def lease(self, limit: int) -> Sequence[Prepared]:
        """Read the notes, and receive due messages that have none."""
        self._read_notes()
        leased: list[Prepared] = []
        while len(leased) < limit and (some := self._receive(self.names[0], AT_ONCE)):
            for message in some:
                fields = json.loads(message["Body"])
                output = Output(**fields["output"] | {"body": fields["output"]["body"].encode()})
                prepared = Prepared(fields["app"], fields["key"], output, fields["checks"], message["ReceiptHandle"])
                if output.id in self._ended:
                    self.end(prepared)
                else:
                    leased.append(prepared)
        return leased

    def commit(self, prepared: Prepared) -> None:
        """Do nothing: the checker gives the same answer again."""

    def end(self, prepared: Prepared) -> None:
        """Delete the message, or leave a note if the caller has no handle of it."""
        if prepared.handle is None:
            self._on(self.names[1], "send_message", MessageBody=prepared.output.id)
        else:
            self._on(self.names[0], "delete_message", ReceiptHandle=prepared.handle)

    def postpone(self, prepared: Prepared, wait: float) -> None:
        """Send a copy with the count, then delete the message. A crash in between leaves two copies, which get the same answer."""
        self.prepare(Prepared(prepared.app, prepared.key, prepared.output, prepared.checks + 1), wait)
        self.end(prepared)

    def _read_notes(self) -> None:
        for _ in range(ROUNDS):
            notes = self._receive(self.names[1], AT_ONCE)
            for note in notes:
                self._ended[note["Body"]] = None
                self._on(self.names[1], "delete_message", ReceiptHandle=note["ReceiptHandle"])
            if not notes:
                break
        for id in list(self._ended)[:-NOTES]:
            del self._ended[id]

    def _receive(self, name: str, count: int) -> list[dict[str, Any]]:
        answer = self._on(name, "receive_message", MaxNumberOfMessages=count, VisibilityTimeout=LEASE)
        return list(answer.get("Messages", ()))

    def _on(self, name: str, call: str, **parameters: Any) -> dict[str, Any]:
        if name not in self._urls:
            self._urls[name] = self._call("get_queue_url", QueueName=name)["QueueUrl"]
        return self._call(call, QueueUrl=self._urls[name], **parameters)

    def _call(self, call: str, **parameters: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = getattr(self._client, call)(**parameters)
        except (BotoCoreError, ClientError) as error:
            raise Unavailable(f"SQS does not {call.replace('_', ' ')}: {error}; nothing was committed by that") from error
        return answer
