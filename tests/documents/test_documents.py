"""Documents: the message id and the outputs are written with the change, and nothing is done twice."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from botocore.exceptions import ClientError
from sqlalchemy import select, text

from idemp import App, ConfigurationError, Context, Idempotent, Settings
from idemp.documents import Documents, Stored
from idemp.documents.couchdb import CouchDocuments
from idemp.documents.documents import DocumentStore
from idemp.documents.dynamodb import DynamoDocuments
from idemp.errors import HandlerError
from idemp.messages import Output, encode
from idemp.ports import Kind
from idemp.sql.broker import SqlBroker
from idemp.sql.engine import Database
from idemp.sql.scheduler import SqlScheduler
from idemp.sql.store import SqlStore
from idemp.streams import Streams
from idemp.testing import CrashPoints, StoreConformance
from idemp.testing.app import busy, let_pass, step
from idemp.testing.documents import DocumentDatabaseConformance
from idemp.worker import Worker
from tests.documents import POLICY, QUEUE, SINK, Add, Added, close_databases, document_server, dynamodb, open_database, shop
from tests.test_kills import run_until, some, watch

pytestmark = pytest.mark.slow
every_kind = pytest.mark.parametrize(
    ("kind", "place"), [("sqlite", "couchdb"), ("postgresql", "dynamodb"), ("mariadb", "couchdb")], indirect=True
)
one_kind = pytest.mark.parametrize("place", ["couchdb"], indirect=True)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    started: dict[str, str] = {}
    with ExitStack() as stack:

        def place(kind: str) -> str:
            if kind not in started:
                started[kind] = stack.enter_context(document_server(kind, tmp_path_factory.mktemp("documents")))
            return started[kind]

        yield place


@pytest.fixture
def place(request: pytest.FixtureRequest, places: Callable[[str], str]) -> Iterator[str]:
    """A database of this test's alone."""
    kind, url, _ = places(request.param).split()
    own = f"{kind} {url} carts-{os.urandom(8).hex()}"
    open_database(own).create()
    yield own
    close_databases()


@pytest.mark.parametrize("place", ["couchdb", "dynamodb"], indirect=True)
class TestDatabase(DocumentDatabaseConformance):
    @pytest.fixture
    def open_documents(self, place: str) -> Callable[[], Any]:
        return lambda: open_database(place)


@pytest.mark.parametrize(("kind", "place"), [("sqlite", "couchdb"), ("postgresql", "dynamodb")], indirect=True)
class TestStore(StoreConformance):
    @pytest.fixture
    def open_store(self, database: Database, place: str) -> Callable[[str], DocumentStore]:
        def open_store(worker: str) -> DocumentStore:
            store = SqlStore(database, worker)
            for consumer in ("billing", "shop"):
                store.register(consumer, ["shop.Pay", "shop.Order"], [])
            return DocumentStore(store, Documents(App("shop"), open_database(place)))

        return open_store

    @pytest.fixture
    def open_scheduler(self, database: Database) -> Callable[[str], SqlScheduler]:
        return lambda worker: SqlScheduler(database, worker, 30.0)


class Shop:
    """Everything of one process."""

    def __init__(self, url: str, place: str) -> None:
        self.settings, self.database = Settings(database_url=url), Database(url)
        self.documents = open_database(place)
        self.app, self.carts = shop(self.documents, self.settings)
        broker = SqlBroker(self.database, "producer")
        broker.declare(QUEUE, [])
        broker.declare(SINK, ["carts.Added"])
        self.publisher = broker.publisher()
        self._worker: Worker | None = None

    def send(self, *ids: int, cart: str = "a") -> None:
        said = [({"message_id": f"m{id}", "type": "carts.Add"}, encode(Add(id=id, cart=cart))) for id in ids]
        outputs = [Output("", "send", "", QUEUE, properties, body) for properties, body in said]
        assert self.publisher.publish(outputs, 10.0) == [None] * len(outputs)

    def work(self) -> None:
        self._worker = self._worker or Worker(self.app)
        for _ in range(3):
            while step(self._worker) or busy(self._worker):
                pass
            let_pass(self.database, 60)

    def cart(self, name: str = "a") -> Any:
        return self.carts.read(f"cart {name}").get("items", [])

    def ids(self, name: str = "a") -> list[str]:
        """Return the ids that stand in a document."""
        return list(self.documents.read(f"cart {name}").data["idemp"]["handled"])

    def heard(self) -> dict[int, set[tuple[str, int]]]:
        """Return ids and contents of what was published for each message."""
        message, found = self.database.tables.message, dict[int, set[tuple[str, int]]]()
        with self.database.queue_engine.connect() as connection:
            for row in connection.execute(select(message).where(message.c.queue == SINK)):
                said = json.loads(row.body)
                found.setdefault(said["id"], set()).add((json.loads(row.headers)["message_id"], said["items"]))
        return found

    def stories(self) -> str:
        """Return why messages are retried or parked."""
        message = self.database.tables.message
        with self.database.queue_engine.connect() as connection:
            return "".join(
                row.history.decode() for row in connection.execute(select(message).where(message.c.history.is_not(None)))
            )

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self.app.close()
        self.database.close()


@pytest.fixture
def begin(url: str, place: str) -> Iterator[Callable[[], Shop]]:
    made: list[Shop] = []

    def begin() -> Shop:
        made.append(Shop(url, place))
        return made[-1]

    yield begin
    for each in made:
        each.close()


@every_kind
def test_a_message_is_in_its_document_once(begin: Callable[[], Shop]) -> None:
    shop = begin()
    shop.send(1, 1, 2, 3)
    shop.send(4, cart="b")
    shop.work()
    shop.send(2)
    shop.work()
    assert (sorted(shop.cart()), shop.cart("b")) == ([1, 2, 3], [4])
    assert {id: len(sent) for id, sent in shop.heard().items()} == {1: 1, 2: 1, 3: 1, 4: 1}
    assert len(shop.ids()) == 1  # those that the inbox has are gone


def die_behind_the_write(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker write a document, and no COMMIT follow."""
    write = shop.documents.write

    def dies(*arguments: Any) -> None:
        write(*arguments)
        raise ConnectionResetError("the answer is lost")

    monkeypatch.setattr(shop.documents, "write", dies)
    monkeypatch.setattr(shop.documents, "classify", lambda error: Kind.LOST if isinstance(error, OSError) else None)
    monkeypatch.setattr(DocumentStore, "probe", lambda _: False)  # so it is held
    worker = Worker(shop.app)
    step(worker)
    worker.close()
    monkeypatch.undo()


@every_kind
@pytest.mark.parametrize("answer", ["passes", "swallows", "raises"])
def test_what_was_written_before_the_process_died_is_not_done_again(
    begin: Callable[[], Shop], monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """The document holds the outputs, whatever the handler would emit now."""
    shop, runs = begin(), []
    shop.send(1)
    die_behind_the_write(shop, monkeypatch)
    assert (shop.cart(), shop.heard()) == ([1], {})
    other = App(QUEUE, policy=POLICY, settings=shop.settings)
    documents = Documents(other, shop.documents)

    @other.handler(Add)
    def add(message: Add, ctx: Context) -> Added | None:
        runs.append(message.id)
        try:
            documents.open(ctx, f"cart {message.cart}").data["items"] = []
        except Exception:
            if answer == "passes":
                raise
            if answer == "raises":
                raise RuntimeError("another error") from None
        return Added(id=message.id, items=-1)

    let_pass(shop.database, 60)
    worker = Worker(other)
    while step(worker) or busy(worker):
        pass
    worker.close()
    other.close()
    assert (shop.cart(), runs) == ([1], [1])
    assert [items for ((_, items),) in shop.heard().values()] == [1]
    shop.send(1, 2)
    shop.work()
    assert (shop.cart(), shop.ids()) == ([1, 2], shop.ids())
    assert len(shop.ids()) == 1


@one_kind
def test_a_handling_that_loses_the_race_runs_again(begin: Callable[[], Shop], monkeypatch: pytest.MonkeyPatch) -> None:
    shop = begin()
    read, races = shop.documents.read, 0

    def raced(id: str) -> Stored:
        nonlocal races
        stored: Stored = read(id)
        if races < 3 and id.startswith("cart"):
            races += 1
            shop.documents.write(id, {"of": "another program", **stored.data}, stored)
        return stored

    monkeypatch.setattr(shop.documents, "read", raced)
    shop.send(1)
    shop.work()
    assert (shop.cart(), shop.carts.read("cart a")["of"], races) == ([1], "another program", 3)
    assert len(shop.heard()) == 1


@pytest.mark.parametrize("place", ["couchdb", "dynamodb"], indirect=True)
def test_a_program_that_knows_no_ids_does_not_drop_them(
    begin: Callable[[], Shop], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes the fields that it knows, while only the document says that the message was handled."""
    shop = begin()
    shop.send(1)
    die_behind_the_write(shop, monkeypatch)
    refused = rewrite(place, "cart a", {"items": [1], "owner": "ada"})
    let_pass(shop.database, 60)
    shop.work()
    assert (shop.cart(), len(shop.heard()), len(shop.ids())) == ([1], 1, 1)
    assert ("owner" not in shop.carts.read("cart a")) == refused == place.startswith("couchdb")
    kept = shop.documents.read("cart a")
    shop.documents.write("cart a", {**kept.data, "owner": "bob"}, kept)  # of a program that keeps them
    assert (shop.carts.read("cart a")["owner"], shop.ids()) == ("bob", list(kept.data["idemp"]["handled"]))


def rewrite(place: str, id: str, data: dict[str, Any]) -> bool:
    """Write a document as other programs do, by its last revision; return whether that was refused."""
    kind, url, name = place.split()
    if kind == "couchdb":
        document = f"{url}/{name}/{id}"
        answer = httpx.put(document, json={**data, "_rev": httpx.get(document).json()["_rev"]})
        return answer.status_code == httpx.codes.FORBIDDEN and "keep the field idemp" in answer.text
    values = {":body": {"S": json.dumps(data)}, ":revision": {"S": "another"}}
    update = "SET body = :body, revision = :revision"
    key = {"id": {"S": id}}
    dynamodb(url).update_item(TableName=name, Key=key, UpdateExpression=update, ExpressionAttributeValues=values)
    return False


@one_kind
def test_a_database_that_lets_ids_be_dropped_is_refused(place: str) -> None:
    _, url, name = place.split()
    database, design = open_database(place), f"{url}/{name}/_design/idemp"
    httpx.delete(design, params={"rev": httpx.get(design).json()["_rev"]}).raise_for_status()
    with pytest.raises(ConfigurationError, match=r"lets other programs drop the field 'idemp'.*create\(\)"):
        database.verify()
    httpx.put(design, json={"validate_doc_update": "function () {}"}).raise_for_status()  # of a former release
    for _ in range(2):
        database.create()
        database.verify()


@pytest.mark.parametrize("place", ["dynamodb"], indirect=True)
@pytest.mark.parametrize("missing", ["body", "revision"])
def test_an_item_that_another_program_has_left_in_parts_is_refused(place: str, missing: str) -> None:
    _, url, name = place.split()
    database = open_database(place)
    database.write("cart a", {"items": [1]}, Stored({}, None))
    dynamodb(url).update_item(TableName=name, Key={"id": {"S": "cart a"}}, UpdateExpression=f"REMOVE {missing}")
    with pytest.raises(HandlerError, match=f"without '{missing}'"):
        database.read("cart a")


@one_kind
@pytest.mark.parametrize(
    ("handle", "reason"),
    [
        (lambda documents, message, ctx: (documents.open(ctx, "a"), documents.open(ctx, "b")), "is about the document 'a'"),
        (lambda documents, message, ctx: (documents.open(ctx, "a"), ctx.session.execute(text("SELECT 1"))), "leave ctx.session"),
        (lambda documents, message, ctx: documents.open(ctx, "a").data.update(idemp=1), "is idemp's"),
        (lambda documents, message, ctx: documents.open(ctx, "a").data.update(_x=1), "is reserved for CouchDB"),
        (lambda documents, message, ctx: documents.open(ctx, ""), "the id of a document"),
        (lambda documents, message, ctx: documents.open(ctx, "foreign"), "is not idemp's"),
    ],
    ids=["two", "session", "field", "underscore", "empty", "foreign"],
)
def test_what_cannot_be_kept_is_refused(begin: Callable[[], Shop], handle: Any, reason: str) -> None:
    shop = begin()
    shop.documents.write("foreign", {"idemp": 7}, shop.documents.read("foreign"))
    app = App(QUEUE, policy=Idempotent(key="id"), settings=shop.settings)
    documents = Documents(app, shop.documents)

    @app.handler(Add)
    def add(message: Add, ctx: Context) -> None:
        handle(documents, message, ctx)

    shop.send(1)
    worker = Worker(app)
    while step(worker) or busy(worker):
        pass
    worker.close()
    app.close()
    assert reason in shop.stories()
    assert (shop.documents.read("a"), shop.documents.read("foreign").data) == (Stored({}, None), {"idemp": 7})


@one_kind
def test_what_does_not_fit_is_refused(begin: Callable[[], Shop], place: str) -> None:
    shop = begin()
    app = App(QUEUE, settings=shop.settings)
    documents = Documents(app, shop.documents)
    seen: list[Exception] = []

    @app.handler(Add)
    def add(message: Add, ctx: Context) -> None:
        with pytest.raises(HandlerError, match="plain handlers") as refused:
            documents.open(ctx, "a")
        seen.append(refused.value)

    shop.send(1)
    worker = Worker(app)
    while step(worker):
        pass
    worker.close()
    assert len(seen) == 1
    with app.initiate() as unit, pytest.raises(HandlerError, match="plain handlers"):
        documents.open(unit, "a")
    batched = App("batched", settings=shop.settings)
    Documents(batched, shop.documents)
    batched.handler(Add, policy=Idempotent(batch=5))(lambda message: None)
    with pytest.raises(ConfigurationError, match="leave out batch"):
        batched.adapters()
    both = App("both", settings=shop.settings)
    Documents(both, shop.documents)
    Streams(both)
    with pytest.raises(ConfigurationError, match="use another App"):
        both.adapters()
    missing = App("missing", settings=shop.settings)
    Documents(missing, open_database(f"{place}-missing"))
    with pytest.raises(ConfigurationError, match="create"):
        missing.adapters()
    for each in (app, batched, both, missing):
        each.close()


@one_kind
def test_a_database_that_is_gone_pauses_consumption(begin: Callable[[], Shop], place: str) -> None:
    shop = begin()
    _, url, name = place.split()
    shop.send(1)
    worker = Worker(shop.app)
    httpx.delete(f"{url}/{name}").raise_for_status()
    for _ in range(3):
        step(worker)
    assert (shop.stories(), shop.heard()) == ("", {})
    shop.documents.create()
    let_pass(shop.database, 60)
    worker.close()
    shop.work()
    assert (shop.cart(), len(shop.heard())) == ([1], 1)


@one_kind
def test_attachments_and_foreign_fields_stay(begin: Callable[[], Shop], place: str) -> None:
    shop = begin()
    _, url, name = place.split()
    attached = {"a.txt": {"content_type": "text/plain", "data": base64.b64encode(b"hello").decode()}}
    httpx.put(f"{url}/{name}/cart a", json={"owner": "ada", "_attachments": attached}).raise_for_status()
    shop.send(1)
    shop.work()
    assert (shop.cart(), shop.carts.read("cart a")["owner"]) == ([1], "ada")
    assert httpx.get(f"{url}/{name}/cart a/a.txt").content == b"hello"


@pytest.mark.parametrize("place", ["dynamodb"], indirect=True)
def test_attributes_stay_and_what_is_too_long_is_refused(begin: Callable[[], Shop], place: str) -> None:
    shop = begin()
    _, url, name = place.split()
    client = dynamodb(url)
    client.put_item(TableName=name, Item={"id": {"S": "cart a"}, "owner": {"S": "ada"}})
    shop.send(1)
    shop.work()
    item = client.get_item(TableName=name, Key={"id": {"S": "cart a"}})["Item"]
    assert (shop.cart(), item["owner"]) == ([1], {"S": "ada"})
    with pytest.raises(HandlerError, match="at most"):
        shop.documents.write("cart b", {"text": "x" * 400_000}, Stored({}, None))


def test_errors_of_the_servers() -> None:
    nowhere = CouchDocuments("http://127.0.0.1:9/carts")
    with pytest.raises(httpx.TransportError) as lost:
        nowhere.read("a")
    assert nowhere.classify(lost.value) is Kind.LOST
    for status, kind in ((503, Kind.LOST), (429, Kind.LOST), (403, Kind.LOST), (404, Kind.LOST), (413, Kind.OTHER)):
        request = httpx.Request("GET", "http://localhost")
        error = httpx.HTTPStatusError("", request=request, response=httpx.Response(status, request=request))
        assert nowhere.classify(error) is kind
    away = DynamoDocuments("carts", dynamodb("http://127.0.0.1:9"))
    with pytest.raises(Exception, match="connect") as unreached:
        away.read("a")
    assert away.classify(unreached.value) is Kind.LOST
    busy = ClientError({"Error": {"Code": "ThrottlingException"}}, "UpdateItem")
    denied = ClientError({"Error": {"Code": "AccessDeniedException"}}, "UpdateItem")
    wrong = ClientError({"Error": {"Code": "ValidationException"}}, "UpdateItem")
    assert [away.classify(error) for error in (busy, denied, wrong)] == [Kind.TRANSIENT, Kind.LOST, Kind.OTHER]
    assert not DocumentStore(None, Documents(App("shop"), nowhere)).probe()
    nowhere.close()
    close_databases()


@pytest.mark.parametrize("place", ["couchdb"], indirect=True)
def test_errors_show_no_password(place: str) -> None:
    _, url, name = place.split()
    database = CouchDocuments(f"{url.replace('//', '//ada:secret@')}/{name}/nowhere")
    with pytest.raises(httpx.HTTPStatusError) as raised:
        database.write("a/b", {"": 1}, Stored({}, "nonsense"))
    assert "secret" not in f"{raised.value} {raised.value!r} {raised.value.request.url}"
    database.close()


STEPS: dict[Any, tuple[str, ...]] = {
    SqlStore: ("claim", "store_on", "finish"),
    Documents: ("open", "write"),
    CouchDocuments: ("write",),
    DynamoDocuments: ("write",),
    SqlScheduler: ("confirm", "settle"),
}


def live(points: CrashPoints, url: str, place: str) -> None:
    """The body of a process."""
    shop = Shop(url, place)
    watch(points, STEPS)
    shop.work()


@every_kind
def test_a_process_is_killed_at_each_step(begin: Callable[[], Shop], url: str, place: str) -> None:
    shop = begin()
    expected: list[int] = []
    for at in some(3):
        expected.append(at)
        shop.send(at, at)
        name = run_until(at, live, url, place)
        let_pass(shop.database, 60)
        shop.work()
        assert shop.cart() == expected, name
        assert {id: [items for _, items in sent] for id, sent in shop.heard().items()} == {
            id: [number] for number, id in enumerate(expected, 1)
        }, name
        if not name:
            break
    assert at > 10
