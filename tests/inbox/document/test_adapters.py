"""CouchDB and DynamoDB as collections of documents: what the port says, and what faults of the line come to."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import time_machine

from idemp.errors import (
    CommitUnknown,
    ConfigurationError,
    GuaranteeError,
    HandlerError,
    SchemaError,
    StoreError,
    StoreUnavailable,
    TransientStoreError,
    UnaddressableMessage,
)
from idemp.inbox.document import DocumentInbox
from idemp.inbox.document.couchdb import CouchDocuments
from idemp.inbox.document.dynamodb import DynamoDocuments
from idemp.inbox.document.port import DocumentRefused, Documents, DocumentTooLarge, RevisionConflict, UnreadableDocument
from idemp.testing import FaultProxy
from tests.inbox.document.adapters import KINDS, SHORT, Adapter, Answering, Couch, Dynamo
from tests.servers.documents import PASSWORD, PouchDB, session


@pytest.fixture(scope="module", params=KINDS)
def adapter(request: pytest.FixtureRequest) -> Adapter:
    server, kind = KINDS[request.param]
    made: Adapter = kind(request.getfixturevalue(server))
    return made


def test_its_clock_is_the_servers(adapter: Adapter, collection: str) -> None:
    """Whatever the host's clock shows: claims of all processes are dated by one clock."""
    right = datetime.now(UTC)
    with time_machine.travel(right - timedelta(hours=3), tick=True), closing(adapter.open(collection)) as documents:
        inbox = DocumentInbox(documents)
        documents.read("nothing")
        assert abs(inbox.clock.now() - right) < timedelta(minutes=1)


@pytest.fixture(scope="module")
def collection(adapter: Adapter) -> str:
    """One for all tests of the module: each uses ids of its own."""
    with closing(adapter.open("carts")) as documents:
        documents.create()
        documents.create()  # nothing, where it exists
    return "carts"


@pytest.fixture(scope="module")
def documents(adapter: Adapter, collection: str) -> Iterator[Documents]:
    with closing(adapter.open(collection)) as opened:
        yield opened


@pytest.fixture(scope="module")
def line(adapter: Adapter) -> Iterator[FaultProxy]:
    where = urlsplit(adapter.url)
    with FaultProxy(str(where.hostname), int(where.port or 0)) as between:
        yield between


@pytest.fixture(scope="module")
def far(adapter: Adapter, collection: str, line: FaultProxy) -> Iterator[Documents]:
    """The same documents, by way of the proxy, for a client that does not wait for long."""
    with closing(adapter.open(collection, at=line.through(adapter.url), timeout=SHORT)) as opened:
        yield opened


@pytest.fixture
def proxy(line: FaultProxy) -> Iterator[FaultProxy]:
    yield line
    line.heal()


class TestPort:
    def test_scan_tells_each_once(self, documents: Documents, unique_name: str) -> None:
        wanted = {f"{unique_name}/{number}" for number in range(7)} | {
            f"{unique_name}/\uff01",
            f"{unique_name}/\U0001f600",
        }
        for name in (*wanted, f"{unique_name}0", f"{unique_name}."):
            documents.write(name, {"of": name}, None)
        found = everything(documents, f"{unique_name}/", limit=2)
        assert sorted(document.id for document in found) == sorted(wanted)
        assert all(document.body == {"of": document.id} and document.revision for document in found)

    @pytest.mark.parametrize("body", [{"a": float("nan")}, {"a": {1, 2}}, {"a": "\ud800"}])
    def test_what_is_no_json_is_refused(self, documents: Documents, unique_name: str, body: dict[str, Any]) -> None:
        with pytest.raises(StoreError, match="is no JSON") as told:
            documents.write(unique_name, body, None)
        assert told.value.committed == "no"

    def test_verified(self, documents: Documents, adapter: Adapter) -> None:
        documents.verify()
        documents.verify()
        with closing(adapter.open("nothing-here")) as absent, pytest.raises(SchemaError, match=r"create\(\)"):
            absent.verify()

    def test_absence_of_the_collection_is_not_that_of_a_document(self, adapter: Adapter) -> None:
        with closing(adapter.open("nothing-here")) as absent:
            for call in (lambda: absent.read("a"), lambda: absent.write("a", {}, None), lambda: absent.scan("a")):
                with pytest.raises(StoreUnavailable):
                    call()


class TestFaults:
    @pytest.mark.parametrize("done", [True, False], ids=["answer lost", "request lost"])
    def test_a_lost_write_is_unknown_and_not_repeated(
        self, far: Documents, documents: Documents, proxy: FaultProxy, unique_name: str, done: bool
    ) -> None:
        mark = f"mark-{unique_name}"
        first = far.write(unique_name, {"n": 1}, None)
        cut = proxy.cut_when(mark.encode(), before=not done)
        with pytest.raises(CommitUnknown):
            far.write(unique_name, {"n": mark}, first)
        assert cut.wait_triggered(5.0)
        found = documents.read(unique_name)
        assert found is not None
        # Had it been sent again, the second would have met the first, and been told of a conflict.
        assert found.body["n"] == (mark if done else 1)

    def test_a_lost_delete_is_unknown(
        self, far: Documents, documents: Documents, proxy: FaultProxy, unique_name: str
    ) -> None:
        first = far.write(unique_name, {}, None)
        proxy.cut_when(unique_name.encode(), before=False)
        with pytest.raises(CommitUnknown):
            far.delete(unique_name, first)
        assert documents.read(unique_name) is None

    def test_silence(self, far: Documents, proxy: FaultProxy, unique_name: str) -> None:
        first = far.write(unique_name, {}, None)
        proxy.stall("to_client")
        with pytest.raises(StoreUnavailable) as told:
            far.read(unique_name)
        assert not isinstance(told.value, CommitUnknown)
        with pytest.raises(CommitUnknown):
            far.write(unique_name, {}, first)

    def test_server_gone_and_back(self, far: Documents, proxy: FaultProxy, unique_name: str) -> None:
        proxy.refuse()
        proxy.cut()
        calls = (lambda: far.read("a"), lambda: far.write(unique_name, {}, None), lambda: far.scan("a"), far.verify)
        for call in calls:
            with pytest.raises(StoreUnavailable) as told:
                call()
            assert told.value.committed == "no", "nothing was sent"
        proxy.heal()
        far.write(unique_name, {}, None)

    @pytest.mark.parametrize(("status", "answer", "write", "read"), [
        (429, "ProvisionedThroughputExceededException", TransientStoreError, TransientStoreError),
        (500, "InternalServerError", CommitUnknown, StoreUnavailable),
        (503, "ServiceUnavailable", CommitUnknown, StoreUnavailable),
        (401, "UnrecognizedClientException", StoreUnavailable, StoreUnavailable),
    ])  # fmt: skip
    def test_what_a_server_answers(
        self, adapter: Adapter, status: int, answer: str, write: type[Exception], read: type[Exception]
    ) -> None:
        """Each is asked once: whatever it says, the request is not sent again."""
        body = json.dumps({"__type": f"com.amazonaws#{answer}", "message": "no", "error": answer, "reason": "no"})
        # DynamoDB throttles with a 400.
        status = 400 if status == 429 and isinstance(adapter, Dynamo) else status
        with (
            Answering(status, body.encode()).serving() as server,
            closing(adapter.open("carts", at=server.url)) as asked,
        ):
            for call, error in (
                (lambda: asked.write("a", {}, None), write),
                (lambda: asked.delete("a", "1-a"), write),
                (lambda: asked.read("a"), read),
                (lambda: asked.scan("a"), read),
            ):
                with pytest.raises(error) as told:
                    call()
                assert type(told.value) is error
                assert "hush-hush" not in f"{told.value!r} {told.value} {asked!r}"
            assert server.asked == 4


@pytest.mark.parametrize(("module", "package"), [("couchdb", "httpx"), ("dynamodb", "boto3")])
def test_a_missing_package_names_the_extra(module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"idemp.inbox.document.{module}")
    with pytest.raises(ConfigurationError, match=rf"needs {package}.*pip install 'idemp\[{module}\]'"):
        importlib.import_module(f"idemp.inbox.document.{module}")


class TestCouchDB:
    def test_a_member_is_let_in_and_nobody_else(self, pouchdb: PouchDB, unique_name: str) -> None:
        """As the how-to about rights says."""
        with httpx.Client(base_url=pouchdb.url) as admin:
            admin.put(f"/{unique_name}").raise_for_status()
            for name in ("worker", "other"):
                user = {"name": name, "password": "open", "roles": [], "type": "user"}
                admin.put(
                    f"/_users/org.couchdb.user:{name}-{unique_name}", json=user | {"name": f"{name}-{unique_name}"}
                )
            members = {"names": [f"worker-{unique_name}"], "roles": []}
            security = {"admins": {"names": [], "roles": ["_admin"]}, "members": members}
            admin.put(f"/{unique_name}/_security", json=security).raise_for_status()
        address = f"127.0.0.1:{pouchdb.port}/{unique_name}"
        with closing(CouchDocuments(f"http://worker-{unique_name}:open@{address}")) as worker:
            worker.verify()
            worker.delete("a", worker.write("a", {}, None))
        for user in (f"other-{unique_name}:open", f"worker-{unique_name}:wrong"):
            with closing(CouchDocuments(f"http://{user}@{address}")) as other:
                with pytest.raises(StoreUnavailable, match=r"least-privilege\.md"):
                    other.read("a")
                with pytest.raises(StoreUnavailable, match=r"least-privilege\.md"):
                    other.verify()

    @pytest.mark.parametrize("id", ["_all_docs", "_design/a", ".", ".."])
    def test_ids_that_are_its_own(self, id: str) -> None:
        with closing(CouchDocuments("http://127.0.0.1:1/carts")) as couch, pytest.raises(UnaddressableMessage):
            couch.read(id)

    def test_attachments_that_changed_meanwhile_are_a_conflict(self, pouchdb: PouchDB, unique_name: str) -> None:
        """Added, replaced or deleted after the read: the write changes nothing, and they stay as they are."""
        adapter = Couch(pouchdb)
        with closing(adapter.open(unique_name)) as couch, httpx.Client(base_url=couch._shown) as other:
            other.auth = ("admin", PASSWORD)
            couch.create()
            couch.write("cart", {"n": 1}, None)
            adapter.put_beside(unique_name, "cart")
            for method, options in (("PUT", {"content": b"other"}), ("DELETE", {}), ("PUT", {"content": b"new"})):
                found = couch.read("cart")
                assert found is not None
                other.request(method, "/cart/photo.jpg", params={"rev": found.revision}, **options).raise_for_status()
                kept = adapter.beside(unique_name, "cart")
                for expected in (found.revision, str(found.revision)):
                    with pytest.raises(RevisionConflict):
                        couch.write("cart", {"n": 2}, expected)
                assert adapter.beside(unique_name, "cart") == kept

    @pytest.mark.parametrize("name", ["_deleted", "_id", "_rev", "_attachments", "_mine"])
    def test_fields_that_are_its_own(self, name: str) -> None:
        with closing(CouchDocuments("http://127.0.0.1:1/carts")) as couch, pytest.raises(HandlerError, match=name):
            couch.write("a", {name: True}, None)

    @pytest.mark.parametrize(
        "url", ["couch/carts", "ftp://couch/carts", "https://couch.example.com/", "https:///carts"]
    )
    def test_urls_that_name_no_database(self, url: str) -> None:
        with pytest.raises(ConfigurationError, match="https://user:password@"):
            CouchDocuments(url)

    @pytest.mark.parametrize(("told", "complaint"), [
        ({"cluster": {"n": 3, "q": 2, "r": 2, "w": 2}}, "3 copies"),
        ({"cluster": {"n": 1, "q": 2}, "props": {"partitioned": True}}, "is partitioned"),
    ])  # fmt: skip
    def test_databases_that_cannot_keep_the_promises(self, told: dict[str, Any], complaint: str) -> None:
        with (
            Answering(200, json.dumps(told).encode()).serving() as server,
            closing(CouchDocuments(f"{server.url}/carts")) as couch,
            pytest.raises(GuaranteeError, match=complaint),
        ):
            couch.verify()

    def test_reads_that_are_stale_are_noticed(self) -> None:
        """Behind a balancer the read goes elsewhere, to where the write did not come yet."""
        answer = {"_id": "idemp/probe", "_rev": "1-a", "mark": "old", "rev": "2-b", "ok": True}
        with (
            Answering(200, json.dumps(answer).encode()).serving() as server,
            closing(CouchDocuments(f"{server.url}/carts")) as couch,
            pytest.raises(GuaranteeError, match="did not see the write before it"),
        ):
            couch.verify()

    @pytest.mark.parametrize(
        ("status", "writes"), [(202, CommitUnknown), (403, DocumentRefused), (412, RevisionConflict)]
    )
    def test_answers_of_its_own(self, status: int, writes: type[Exception]) -> None:
        """Written on too few nodes; refused by the database's own validation; without an attachment that it names."""
        with (
            Answering(status, b'{"error": "forbidden", "reason": "no"}').serving() as server,
            closing(CouchDocuments(f"{server.url}/carts")) as couch,
        ):
            with pytest.raises(writes) as told:
                couch.write("a", {}, None)
            assert type(told.value) is writes

    def test_an_answer_of_something_else(self) -> None:
        with (
            Answering(200, b"<html>Welcome</html>").serving() as server,
            closing(CouchDocuments(f"{server.url}/carts")) as couch,
        ):
            with pytest.raises(CommitUnknown, match="no JSON"):
                couch.write("a", {}, None)
            with pytest.raises(StoreUnavailable, match="no JSON"):
                couch.read("a")


class TestDynamoDB:
    def test_tables_with_another_key(self, moto: Any) -> None:
        client = session().client("dynamodb", endpoint_url=moto.url)
        client.create_table(
            TableName="ranged",
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}, {"AttributeName": "n", "KeyType": "RANGE"}],
            AttributeDefinitions=[
                {"AttributeName": "id", "AttributeType": "S"}, {"AttributeName": "n", "AttributeType": "N"}
            ],
            BillingMode="PAY_PER_REQUEST",
        )  # fmt: skip
        client.close()
        with (
            closing(DynamoDocuments("ranged", session=session(), endpoint=moto.url)) as dynamo,
            pytest.raises(SchemaError, match="not a string `id` alone"),
        ):
            dynamo.verify()

    @pytest.mark.parametrize(("consistency", "refused"), [("EVENTUAL", True), (None, True), ("STRONG", False)])
    def test_global_tables(self, consistency: str | None, refused: bool) -> None:
        table = {
            "KeySchema": [{"AttributeName": "id", "KeyType": "HASH"}],
            "AttributeDefinitions": [{"AttributeName": "id", "AttributeType": "S"}],
            "Replicas": [{"RegionName": "eu-west-1"}],
            **({"MultiRegionConsistency": consistency} if consistency else {}),
        }
        with (
            Answering(200, json.dumps({"Table": table}).encode()).serving() as server,
            closing(DynamoDocuments("carts", session=session(), endpoint=server.url)) as dynamo,
        ):
            if not refused:
                dynamo.verify()
                return
            with pytest.raises(GuaranteeError, match="two writers"):
                dynamo.verify()

    @pytest.mark.parametrize(
        ("item", "lacking"),
        [
            ({}, "`body` and `revision`"),
            ({"body": {"S": "{}"}}, "`revision`"),
            ({"body": {"N": "1"}, "revision": {"S": "1"}}, "`body`"),
        ],
    )
    def test_items_of_somebody_else(self, moto: Any, unique_name: str, item: dict[str, Any], lacking: str) -> None:
        with closing(DynamoDocuments("others", session=session(), endpoint=moto.url)) as dynamo:
            dynamo.create()
            client = session().client("dynamodb", endpoint_url=moto.url)
            client.put_item(TableName="others", Item={"id": {"S": unique_name}, **item})
            client.close()
            with pytest.raises(UnreadableDocument, match=f"no text in {lacking}: it was made before idemp"):
                dynamo.read(unique_name)

    @pytest.mark.parametrize(
        ("body", "told"),
        [
            ('{"price": 0.12345678901234567890}', "0.12345678901234567890"),
            ('{"price": 1e400}', "1e400"),
            ('{"price": Infinity}', "Infinity"),
            ("[" * 100_000, "recursion"),
            ("[1]", "JSON object"),
            ("{", "can't be kept as it is"),
        ],
    )
    def test_bodies_that_would_not_stay_as_they_are(self, moto: Any, unique_name: str, body: str, told: str) -> None:
        """Of another program's: the read refuses what the next write would change."""
        with closing(DynamoDocuments("others", session=session(), endpoint=moto.url)) as dynamo:
            dynamo.create()
            client = session().client("dynamodb", endpoint_url=moto.url)
            item = {"id": {"S": unique_name}, "revision": {"S": "1"}, "body": {"S": body}}
            client.put_item(TableName="others", Item=item)
            client.close()
            with pytest.raises(UnreadableDocument, match=told):
                dynamo.read(unique_name)

    def test_numbers_that_stay_as_they_are(self, moto: Any, unique_name: str) -> None:
        with closing(DynamoDocuments("others", session=session(), endpoint=moto.url)) as dynamo:
            dynamo.create()
            client = session().client("dynamodb", endpoint_url=moto.url)
            written = {"S": '{"n": [1.10, -0.0, 1e3, 12345678901234567890, 0.1]}'}
            client.put_item(
                TableName="others", Item={"id": {"S": unique_name}, "revision": {"S": "1"}, "body": written}
            )
            client.close()
            found = dynamo.read(unique_name)
            assert found is not None
            assert found.body == {"n": [1.1, 0, 1000, 12345678901234567890, 0.1]}

    def test_items_that_are_too_large_by_what_others_keep_in_them(self, moto: Any, unique_name: str) -> None:
        """The limit of DynamoDB is one of the whole item, and its answer has other words for a change than for a new one."""
        with closing(DynamoDocuments("others", session=session(), endpoint=moto.url)) as dynamo:
            dynamo.create()
            first = dynamo.write(unique_name, {"n": 1}, None)
            client = session().client("dynamodb", endpoint_url=moto.url)
            client.update_item(
                TableName="others",
                Key={"id": {"S": unique_name}},
                UpdateExpression="SET photo = :photo",
                ExpressionAttributeValues={":photo": {"B": b"x" * 300_000}},
            )
            client.close()
            with pytest.raises(DocumentTooLarge):
                dynamo.write(unique_name, {"text": "x" * 200_000}, first)
            found = dynamo.read(unique_name)
            assert found is not None
            assert found.body == {"n": 1}

    def test_no_region(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
        with pytest.raises(ConfigurationError, match="region"):
            DynamoDocuments("carts")


def everything(documents: Documents, prefix: str, limit: int = 500) -> list[Any]:
    """All pages of a scan."""
    found, cursor = documents.scan(prefix, None, limit)
    everything = list(found)
    while cursor is not None:
        found, cursor = documents.scan(prefix, cursor, limit)
        assert len(found) <= limit
        everything += found
    return everything
