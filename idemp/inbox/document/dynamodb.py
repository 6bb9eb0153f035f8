"""Amazon DynamoDB. Needs the extra: `pip install 'idemp[dynamodb]'`."""

from __future__ import annotations

import json
from datetime import timedelta
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from idemp.errors import (
    ConfigurationError,
    GuaranteeError,
    SchemaError,
    StoreError,
    StoreUnavailable,
    TransientStoreError,
)
from idemp.forking import ForkAware
from idemp.inbox.document.port import Document, DocumentTooLarge, RevisionConflict, UnreadableDocument
from idemp.inbox.document.servertime import ServerClock
from idemp.inbox.document.wire import as_json, lost, usable

try:
    import boto3
    from botocore import exceptions
    from botocore.config import Config
except ModuleNotFoundError as error:
    raise ConfigurationError(f"DynamoDocuments needs {error.name}.", fix="pip install 'idemp[dynamodb]'") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

LARGEST: Final = 400_000
"""Bytes of one document: an item has 400 KiB, its id, its revision and the names of its attributes included."""
CONNECT_SECONDS: Final = 3.0
"""How long connecting may take."""
_SERVER_ERROR: Final = 500
_KEY: Final = [{"AttributeName": "id", "KeyType": "HASH"}]
_BUSY: Final = frozenset(
    {
        "LimitExceededException",
        "ProvisionedThroughputExceededException",
        "ReplicatedWriteConflictException",
        "RequestLimitExceeded",
        "ThrottlingException",
        "TransactionConflictException",
    }
)
_DENIED: Final = frozenset(
    {
        "AccessDeniedException",
        "ExpiredTokenException",
        "IncompleteSignature",
        "InvalidSignatureException",
        "MissingAuthenticationToken",
        "ResourceNotFoundException",
        "UnrecognizedClientException",
    }
)
_NOT_SENT: Final = (
    exceptions.ConnectTimeoutError,
    exceptions.EndpointConnectionError,
    exceptions.ProxyConnectionError,
    exceptions.NoCredentialsError,
    exceptions.PartialCredentialsError,
    exceptions.CredentialRetrievalError,
)


class DynamoDocuments(ForkAware):
    """A DynamoDB table as `Documents`. Reads are strongly consistent, each request is sent once, nothing is tried again.

    The table's key is a string `id`, and nothing else. An item holds the document as JSON in `body`, so that its numbers
    stay what they were, and a random `revision` for each write, which the next one is conditional on. Other programs that
    change `body` must do the same; further attributes of an item are theirs, and no write changes them. A global table will
    do only if it is strongly consistent across regions.

    Args:
        table: its name, or its ARN.
        session: where credentials and region come from; default boto3's own.
        endpoint: a URL, for servers that speak DynamoDB's protocol.
        timeout: how long an answer may take; connecting takes 3 s at most.
        connections: how many are kept at most; one per thread that works is enough.

    Raises:
        ConfigurationError: there is no region, or another setting of boto3's is wrong.

    Example:
        >>> DynamoDocuments("carts", session=boto3.Session(region_name="eu-central-1"))
        DynamoDocuments('carts')
    """

    largest: int = LARGEST

    def __init__(
        self,
        table: str,
        *,
        session: boto3.Session | None = None,
        endpoint: str | None = None,
        timeout: timedelta = timedelta(seconds=10),
        connections: int = 50,
    ) -> None:
        config = Config(
            retries={"total_max_attempts": 1, "mode": "standard"},
            connect_timeout=CONNECT_SECONDS,
            read_timeout=timeout.total_seconds(),
            max_pool_connections=connections,
        )
        self._table = table
        self.clock = ServerClock()
        try:
            made = partial((session or boto3.Session()).client, "dynamodb", endpoint_url=endpoint, config=config)
            self._make_client: Callable[[], Any] = made
            self._client = made()
        except (exceptions.BotoCoreError, ValueError) as error:
            raise ConfigurationError(f"No client for DynamoDB: {error}.") from error
        self.track()

    def after_fork_in_child(self) -> None:
        """Take other connections than the parent."""
        self._client = self._make_client()

    def __repr__(self) -> str:
        return f"DynamoDocuments({self._table!r})"

    def read(self, id: str) -> Document | None:
        """The latest committed version; `None` if there is none."""
        answer = self._ask("get_item", Key={"id": {"S": usable(id)}}, ConsistentRead=True)
        return _document(answer["Item"]) if "Item" in answer else None

    def write(self, id: str, body: Mapping[str, Any], expected: str | None) -> str:
        """Write `body` if `expected` is its present revision, or with `None` if there is no item; other attributes stay."""
        content, revision = as_json(id, body, self.largest), uuid4().hex
        update = _condition(expected)
        update["ExpressionAttributeValues"] = {
            **update.get("ExpressionAttributeValues", {}),
            ":body": {"S": content},
            ":revision": {"S": revision},
        }
        key, expression = {"id": {"S": usable(id)}}, "SET body = :body, revision = :revision"
        self._ask("update_item", writes=True, Key=key, UpdateExpression=expression, **update)
        return revision

    def delete(self, id: str, expected: str) -> None:
        """Delete the document if `expected` is its present revision."""
        self._ask("delete_item", writes=True, Key={"id": {"S": usable(id)}}, **_condition(expected))

    def scan(self, prefix: str, cursor: str | None = None, limit: int = 500) -> tuple[Sequence[Document], str | None]:
        """Documents among the next `limit` of the table whose ids begin with `prefix`, in no order.

        It reads the whole table, page by page: give idemp's own documents a table of their own.
        """
        within: dict[str, Any] = {"ConsistentRead": True, "Limit": limit}
        if prefix:
            within |= {
                "FilterExpression": "begins_with(id, :prefix)",
                "ExpressionAttributeValues": {":prefix": {"S": prefix}},
            }
        if cursor is not None:
            within["ExclusiveStartKey"] = {"id": {"S": cursor}}
        page = self._ask("scan", **within)
        after = page.get("LastEvaluatedKey")
        return [_document(item) for item in page["Items"]], after["id"]["S"] if after else None

    def verify(self) -> None:
        """Look whether the table is there, has the right key, and is consistent wherever it is written.

        Raises:
            SchemaError: there is no such table, or it has another key.
            GuaranteeError: it is a global table whose regions agree only in time.
            StoreUnavailable: it can't be reached, or must not be looked at.
        """
        try:
            table = self._client.describe_table(TableName=self._table)["Table"]
        except self._client.exceptions.ResourceNotFoundException as error:
            raise SchemaError(
                f"There is no table {self._table}.", fix="Make it: `DynamoDocuments(...).create()`."
            ) from error
        except (exceptions.ClientError, exceptions.BotoCoreError) as error:
            raise self._meaning(error, writes=False) from error
        types = {attribute["AttributeName"]: attribute["AttributeType"] for attribute in table["AttributeDefinitions"]}
        if table["KeySchema"] != _KEY or types["id"] != "S":
            raise SchemaError(f"The key of table {self._table} is not a string `id` alone.", fix="Make another table.")
        if table.get("Replicas") and table.get("MultiRegionConsistency") != "STRONG":
            raise GuaranteeError(
                f"{self._table} is a global table whose regions agree only in time: two writers may both succeed.",
                fix="Make it with multi-Region strong consistency, or use a table of one region.",
            )

    def create(self) -> None:
        """Make the table, billed by request, and wait until it is there; nothing if it exists."""
        try:
            self._client.create_table(
                TableName=self._table,
                KeySchema=_KEY,
                AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
                BillingMode="PAY_PER_REQUEST",
            )
        except self._client.exceptions.ResourceInUseException:
            pass
        except (exceptions.ClientError, exceptions.BotoCoreError) as error:
            raise self._meaning(error, writes=True) from error
        self._client.get_waiter("table_exists").wait(TableName=self._table, WaiterConfig={"Delay": 1})

    def close(self) -> None:
        """Give connections back."""
        self._client.close()

    def _ask(self, call: str, *, writes: bool = False, **parameters: Any) -> dict[str, Any]:
        """One request."""
        try:
            answer: dict[str, Any] = getattr(self._client, call)(TableName=self._table, **parameters)
        except (exceptions.ClientError, exceptions.BotoCoreError) as error:
            raise self._meaning(error, writes=writes) from error
        self.clock.hear(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date"))
        return answer

    def _meaning(self, error: Exception, *, writes: bool) -> StoreError | DocumentTooLarge:
        """What an exception of boto3's means."""
        name = f"Table {self._table}"
        if isinstance(error, _NOT_SENT):
            return StoreUnavailable(f"{name} can't be reached: {error}.")
        if not isinstance(error, exceptions.ClientError):
            return lost(name, error, writes=writes)
        code, said = error.response["Error"].get("Code", ""), error.response["Error"].get("Message", "")[:200]
        if code == "ConditionalCheckFailedException":
            return RevisionConflict(f"{name}: another revision is there.")
        if code in _BUSY:
            return TransientStoreError(f"{name} is too busy ({code}); nothing was changed.")
        if code in _DENIED:
            return StoreUnavailable(
                f"{name} can't be used: {code}: {said}.", fix="Grant the rights (docs/how-to/least-privilege.md)."
            )
        if error.response["ResponseMetadata"]["HTTPStatusCode"] >= _SERVER_ERROR:
            # DynamoDB says of a 500 that the write may have succeeded.
            return lost(name, f"it answered {code}: {said}", writes=writes)
        if code == "ValidationException" and "size" in said and "exceeded the maximum" in said:
            return DocumentTooLarge(f"{name}: {said}.", fix="Keep less in the document.")
        return StoreError(f"{name} refuses: {code}: {said}; nothing was changed.")


def _condition(expected: str | None) -> dict[str, Any]:
    if expected is None:
        return {"ConditionExpression": "attribute_not_exists(id)"}
    return {
        "ConditionExpression": "revision = :expected",
        "ExpressionAttributeValues": {":expected": {"S": expected}},
    }


def _document(item: dict[str, Any]) -> Document:
    id_ = item["id"]["S"]
    texts = {name: item.get(name, {}).get("S") for name in ("body", "revision")}
    if lacking := [name for name, text in texts.items() if text is None]:
        raise _unreadable(id_, f"has no text in {' and '.join(f'`{name}`' for name in lacking)}")
    try:
        body = json.loads(texts["body"], parse_float=_exact, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise _unreadable(id_, f"has a `body` that can't be kept as it is: {error}") from error
    if not isinstance(body, dict):
        raise _unreadable(id_, "has a `body` that is no JSON object")
    return Document(id_, body, texts["revision"])


def _unreadable(id: str, why: str) -> UnreadableDocument:
    return UnreadableDocument(
        f"The item {id!r} {why}: it was made before idemp, or something else wrote it.",
        fix="Give it a text `revision` and, as `body`, a JSON object whose numbers are integers or have 15 digits at most.",
    )


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON's")


def _exact(text: str) -> float:
    """A number of a document, if writing it again leaves it as it is.

    Raises:
        ValueError: it has more digits than a float, or is too large for one.

    Example:
        >>> _exact("1.10")
        1.1
    """
    number = float(text)
    if Decimal(text) != Decimal(repr(number)):
        raise ValueError(f"the number {text[:64]} is not what a float makes of it, {number!r}")
    return number
