"""One standard queue of Amazon SQS: made, filled, read, emptied."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from idemp.errors import BrokerError, BrokerUnavailable, ConfigurationError

try:
    from botocore import exceptions
except ModuleNotFoundError as error:
    raise ConfigurationError(f"SqsHome needs {error.name}.", fix="pip install 'idemp[sqs]'") from error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LARGEST: Final = 256 * 1024
"""Bytes of one message, its attributes with their names and types included; queues of newer accounts take more."""
LONGEST_DELAY: Final = 900
"""Seconds for which SQS holds a message back."""
KEPT_SECONDS: Final = 14 * 24 * 3600
"""SQS forgets a message after 14 days, whoever still needs it."""
MOST_AT_ONCE: Final = 10
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,80}")
_DENIED: Final = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "ExpiredToken",
        "IncompleteSignature",
        "InvalidClientTokenId",
        "InvalidSecurity",
        "MissingAuthenticationToken",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)
_MISSING: Final = frozenset({"AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist"})
_OTHER: Final = frozenset({"QueueAlreadyExists", "QueueNameExists"})
_SERVER_ERROR: Final = 500


@dataclass(frozen=True, slots=True)
class Received:
    """A message that is hidden from others for a while.

    Attributes:
        text: the body.
        attributes: message attributes, as texts.
        receipt: by which it is deleted or hidden for longer.
    """

    text: str
    attributes: Mapping[str, str]
    receipt: str = field(repr=False)


class SqsQueue:
    """A standard queue. Safe to share between threads, as boto3's clients are.

    Args:
        client: boto3's, for `sqs`.
        name: of the queue: 1 to 80 letters, digits, hyphens and underscores.
        attributes: those that it is made with.

    Raises:
        ConfigurationError: no queue can have that name.
    """

    def __init__(self, client: Any, name: str, attributes: Mapping[str, int]) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"A queue of SQS can't be called {name!r}.",
                fix="Take 1 to 80 letters, digits, hyphens and underscores.",
            )
        self.name = name
        self.client = client
        self._attributes = {key: str(value) for key, value in attributes.items()}
        self._url: str | None = None

    def declare(self) -> None:
        """Make it, or make sure that it is as it would be made.

        Raises:
            BrokerUnavailable: SQS can't be reached, or does not let us.
            ConfigurationError: it exists with other attributes.
        """
        self._url = self._ask("create_queue", QueueName=self.name, Attributes=self._attributes)["QueueUrl"]

    def send(self, text: str, attributes: Mapping[str, str], *, delay: int | None = None) -> None:
        """Send a message; at return SQS has it on several servers.

        Args:
            text: characters that XML has, at least one.
            attributes: beside it.
            delay: seconds for which nobody receives it; default the queue's own.
        """
        held = {} if delay is None else {"DelaySeconds": delay}
        told = {name: {"DataType": "String", "StringValue": value} for name, value in attributes.items()}
        self._ask_queue("send_message", MessageBody=text, MessageAttributes=told, **held)

    def receive(self, limit: int, *, hidden: int, wait: int = 0) -> list[Received]:
        """Up to `limit` messages, hidden from others for `hidden` seconds; fewer if the queue gives none.

        Args:
            limit: how many.
            hidden: seconds.
            wait: seconds to wait for the first; with 0 SQS asks only some of its servers.
        """
        found: list[Received] = []
        while len(found) < limit:
            answer = self._ask_queue(
                "receive_message",
                MaxNumberOfMessages=min(MOST_AT_ONCE, limit - len(found)),
                VisibilityTimeout=hidden,
                WaitTimeSeconds=0 if found else wait,
                MessageAttributeNames=["All"],
            )
            if not answer.get("Messages"):
                break
            found += map(_received, answer["Messages"])
        return found

    def delete(self, messages: Sequence[Received]) -> None:
        """Forget messages for good."""
        for some in _tens(messages):
            entries = [{"Id": str(number), "ReceiptHandle": each.receipt} for number, each in enumerate(some)]
            self._all_done(self._ask_queue("delete_message_batch", Entries=entries))

    def hide(self, messages: Sequence[Received], seconds: int) -> None:
        """Hide messages from others for so long from now on; 0 shows them at once."""
        for some in _tens(messages):
            entries = [
                {"Id": str(number), "ReceiptHandle": each.receipt, "VisibilityTimeout": seconds}
                for number, each in enumerate(some)
            ]
            self._all_done(self._ask_queue("change_message_visibility_batch", Entries=entries))

    def __repr__(self) -> str:
        return f"SqsQueue({self.name!r})"

    def _all_done(self, answer: Mapping[str, Any]) -> None:
        failed: Sequence[Mapping[str, Any]] = answer.get("Failed") or ()
        for each in failed:
            if "ReceiptHandle" not in each["Code"] and each["Code"] != "MessageNotInflight":
                raise BrokerUnavailable(f"Queue {self.name}: {each['Code']}: {each.get('Message', '')[:200]}.")
        # A receipt whose time was over: the message comes again, or is gone.

    def _ask_queue(self, call: str, **parameters: Any) -> dict[str, Any]:
        if self._url is None:
            self._url = self._ask("get_queue_url", QueueName=self.name)["QueueUrl"]
        return self._ask(call, QueueUrl=self._url, **parameters)

    def _ask(self, call: str, **parameters: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = getattr(self.client, call)(**parameters)
        except (exceptions.ClientError, exceptions.BotoCoreError) as error:
            raise self._meaning(error) from error
        return answer

    def _meaning(self, error: Exception) -> Exception:
        """What an exception of boto3's means."""
        if not isinstance(error, exceptions.ClientError):
            return BrokerUnavailable(f"Queue {self.name} gives no answer: {error}.", fix="Try again.")
        code, said = error.response["Error"].get("Code", ""), error.response["Error"].get("Message", "")[:200]
        if code in _MISSING:
            return ConfigurationError(f"There is no queue {self.name}.", fix="Make it: `SqsHome(...).verify()`.")
        if code in _OTHER:
            return ConfigurationError(
                f"Queue {self.name} exists with other attributes than {self._attributes}.",
                fix="Give yours another name, or empty that one and delete it.",
            )
        if code in _DENIED:
            return BrokerUnavailable(f"Queue {self.name} can't be used: {code}: {said}.", fix="Grant the rights.")
        if error.response["ResponseMetadata"]["HTTPStatusCode"] >= _SERVER_ERROR or "Throttl" in code:
            return BrokerUnavailable(f"Queue {self.name} is too busy: {code}: {said}.", fix="Try again.")
        return BrokerError(f"Queue {self.name} refuses: {code}: {said}.")


def _received(message: Mapping[str, Any]) -> Received:
    attributes = {
        name: value["StringValue"]
        for name, value in (message.get("MessageAttributes") or {}).items()
        if "StringValue" in value
    }
    return Received(message["Body"], attributes, message["ReceiptHandle"])


def _tens(messages: Sequence[Received]) -> Iterator[Sequence[Received]]:
    for start in range(0, len(messages), MOST_AT_ONCE):
        yield messages[start : start + MOST_AT_ONCE]
