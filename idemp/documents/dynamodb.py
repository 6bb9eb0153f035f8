"""Documents in DynamoDB, by a client of boto3."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from idemp.documents.documents import FIELD, Changed, Stored
from idemp.errors import ConfigurationError, HandlerError, needs
from idemp.ports import Kind

with needs("dynamodb"):
    from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

__all__ = ["DynamoDocuments"]

BUSY: Final = ("ProvisionedThroughputExceededException", "RequestLimitExceeded", "ThrottlingException")
OWN: Final = "ValidationException"  # the fault of a document, in any state of the table
LARGEST: Final = 390_000  # bytes of body and outputs; an item has 400 KB at most, with the attributes of other programs


class DynamoDocuments:
    """A table of DynamoDB whose key is the string `id` alone.

    An item has the document's fields as JSON in `body`, so that numbers stay exact, a random `revision`, and in `idemp` what idemp
    stores, so that a program that updates `body` and `revision` does not change that. Further attributes are kept.

    Args:
        table: Name of the table.
        client: boto3's client for `dynamodb`.

    Example:
        >>> import boto3
        >>> DynamoDocuments("carts", boto3.client("dynamodb", region_name="eu-central-1")).table
        'carts'
    """

    def __init__(self, table: str, client: Any) -> None:
        self.table, self._client = table, client

    def create(self) -> None:
        """Create the table, billed by request, unless it exists."""
        with suppress(self._client.exceptions.ResourceInUseException):
            self._client.create_table(
                TableName=self.table,
                KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
                AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
                BillingMode="PAY_PER_REQUEST",
            )
        self._client.get_waiter("table_exists").wait(TableName=self.table)

    def verify(self) -> None:
        """Check the key of the table.

        Raises:
            ConfigurationError: The table is missing or has another key.
        """
        try:
            table = self._client.describe_table(TableName=self.table)["Table"]
        except self._client.exceptions.ResourceNotFoundException:
            raise ConfigurationError(
                f"DynamoDB has no table {self.table}: DynamoDocuments({self.table!r}, client).create()"
            ) from None
        if [attribute["AttributeName"] for attribute in table["KeySchema"]] != ["id"]:
            raise ConfigurationError(f"the key of the table {self.table} is not `id` alone")

    def read(self, id: str) -> Stored:
        """Return a document, by a consistent read.

        Raises:
            HandlerError: Another program has written or removed one of `body` and `revision` without the other.
        """
        answer = self._client.get_item(TableName=self.table, Key={"id": {"S": id}}, ConsistentRead=True)
        item = answer.get("Item", {})
        if not {"body", "revision", FIELD} & set(item):
            return Stored({}, None)
        if missing := sorted({"body", "revision"} - set(item)):
            raise HandlerError(f"another program has left the item {id!r} without {missing[0]!r}: nothing is changed")
        own = {FIELD: json.loads(item[FIELD]["S"])} if FIELD in item else {}
        return Stored({**json.loads(item["body"]["S"]), **own}, item["revision"]["S"])

    def write(self, id: str, data: Mapping[str, Any], stored: Stored) -> None:
        """Write a document if its revision is unchanged.

        Raises:
            Changed: The document has another revision.
            HandlerError: The document is too large.
        """
        body, own = json.dumps({name: value for name, value in data.items() if name != FIELD}), json.dumps(data.get(FIELD))
        if (size := len(body) + len(own)) > LARGEST:
            raise HandlerError(f"the document {id!r} would have {size} bytes with its outputs: at most {LARGEST}")
        update, values = "SET body = :body, revision = :new", {":body": {"S": body}, ":new": {"S": secrets.token_hex(16)}}
        if FIELD in data:
            update, values = f"{update}, {FIELD} = :own", {**values, ":own": {"S": own}}
        else:
            update = f"{update} REMOVE {FIELD}"
        condition = "attribute_not_exists(revision)"
        if stored.revision is not None:
            condition, values = "revision = :old", {**values, ":old": {"S": stored.revision}}
        try:
            self._client.update_item(
                TableName=self.table,
                Key={"id": {"S": id}},
                UpdateExpression=update,
                ConditionExpression=condition,
                ExpressionAttributeValues=values,
            )
        except self._client.exceptions.ConditionalCheckFailedException:
            raise Changed(f"the document {id!r} has changed since it was opened") from None

    def classify(self, error: BaseException) -> Kind | None:
        """Return what an error of boto3 means. A missing privilege or table counts as an outage, because it may come back."""
        if isinstance(error, ClientError):
            answer: Mapping[str, Any] = error.response
            code = answer.get("Error", {}).get("Code")
            return Kind.TRANSIENT if code in BUSY else Kind.OTHER if code == OWN else Kind.LOST
        if isinstance(error, BotoCoreError):
            return Kind.OTHER if isinstance(error, ParamValidationError) else Kind.LOST
        return None
