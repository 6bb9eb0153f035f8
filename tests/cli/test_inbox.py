"""`idemp inbox`, on claims that workers made."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import insert, select, update

from idemp import App, Context, Idempotent, Key, Refuse, Retry, Settings
from idemp.cli.main import Exit
from idemp.identity import uuid7
from idemp.messages import Refusal, encode
from idemp.worker import Worker
from tests.cli.test_commands import run
from tests.world import SINK, Order, Shipped, World


class Pay(BaseModel):
    __message_type__ = "shop.Pay"
    id: int | str | bool


class Pair(BaseModel):
    __message_type__ = "shop.Pair"
    shop: str
    id: int


class Noted(BaseModel):
    __message_type__ = "shop.Noted"


class Told(BaseModel):
    __message_type__ = "shop.Told"
    id: str = ""


KEYS: dict[type[BaseModel], Idempotent] = {
    Pay: Idempotent(key="id"),
    Pair: Idempotent(key=("shop", "id")),
    Noted: Idempotent(key=Key.header("x-id")),
    Told: Idempotent(retry=Retry(attempts=2, delays=("1h",), jitter=0)),
}


class Shop(World):
    """A world with handlers for each kind of key, and a second consumer, `sink`."""

    sink_fails = False

    def worker(self, points: Any = None) -> Worker:
        app = self.app()

        def told(message: Told, ctx: Context) -> None:
            if message.id == "refused":
                raise Refuse("never\u202e\x1b[2J")
            if message.id == "fails":
                raise RuntimeError("not yet")
            ctx.send(Shipped(order_id=message.id, part=0), to=SINK)

        def nothing(message: Any, ctx: Context) -> None: ...

        for model, policy in KEYS.items():
            app.handler(model, policy=policy)(told if model is Told else nothing)
        worker = Worker(app)
        self.receivers.append(worker.intake.receiver)
        worker.upkeep()
        return worker

    def handle_at_sink(self) -> None:
        app = App(SINK, settings=Settings(database_url=self.url))
        self.apps.append(app)

        def shipped(message: Shipped) -> None:
            if self.sink_fails:
                raise Refuse("no room")

        app.handler(Shipped, policy=Idempotent())(shipped)
        worker = Worker(app)
        self.receivers.append(worker.intake.receiver)
        worker.step(poll=0.0)
        worker.step(poll=0.0)

    def tell(self, model: BaseModel, message_id: str | None = None, **headers: Any) -> None:
        type: str = model.__message_type__  # type: ignore[attr-defined]
        self.send_raw(encode(model), {"message_id": message_id or uuid7(), "type": type, "headers": headers})

    def outputs(self) -> list[str]:
        output = self.database.tables.output
        with self.database.engine.connect() as connection:
            return list(connection.scalars(select(output.c.output_id).order_by(output.c.message_key, output.c.ordinal)))


@pytest.fixture
def shop(url: str, monkeypatch: pytest.MonkeyPatch) -> Shop:
    monkeypatch.setenv("IDEMP_DATABASE_URL", url)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", [])
    return Shop(url, policy=Idempotent(key="order_id", redispatch="always"))


class Commands:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: str, code: int = Exit.OK) -> str:
        self.capsys.readouterr()
        assert run("inbox", *arguments) == code
        captured = self.capsys.readouterr()
        assert "Traceback" not in captured.err
        return captured.out if code == Exit.OK else captured.err

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))


@pytest.fixture
def inbox(capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capsys)


def quarantine(worker: Worker, *ids: str) -> None:
    database = worker.adapters.scheduler.database  # type: ignore[attr-defined]
    for _ in range(6):  # each behind the pause of the last one
        with database.short() as connection:
            connection.execute(update(database.tables.pending).values(counts_at=None))
        worker.adapters.scheduler.refuse({id: Refusal("no queue takes\x1b[2J it", own=True) for id in ids})


def send_nowhere(message: Order, ctx: Context) -> None:
    for part, to in enumerate(("nowhere", SINK, SINK)):
        ctx.send(Shipped(order_id=message.order_id, part=part), to=to, delay="10m" if part == 2 else None)


def failed_entry(shop: Shop, number: int) -> dict[str, Any]:
    (row,) = [row for row in shop.rows() if row.id == number]
    entry: dict[str, Any] = json.loads(row.history)[-1]
    return entry


def sink_rows(shop: Shop) -> int:
    return len(shop.rows(SINK))


def test_claims_of_each_kind_of_id_are_found(shop: Shop, inbox: Commands) -> None:
    assert inbox("list") == "no claims\n"
    told, plain = uuid7(), "5f0c3b52-7f0e-4d5a-9a53-3c1d7a3c8b1e"
    shop.send("a")
    for message in (Pay(id=7), Pay(id="7"), Pay(id=True), Pay(id="i:9"), Pay(id="-1"), Pair(shop="ö", id=1)):
        shop.tell(message)
    shop.tell(Noted(), **{"x-id": "h h"})
    shop.tell(Told(id="t"), told)
    shop.tell(Told(id="u"), plain)
    shop.work(shop.worker())
    with shop.apps[0].initiate("nightly"):
        pass
    listed = inbox.json("list")
    assert not listed["more"]
    claims = {(claim["type"], claim["id"]): claim for claim in listed["claims"]}
    ids = {"a", "7", "i:7", "b:true", "s:i:9", "s:-1", '["s:ö", "i:1"]', "h h", told, plain, "nightly"}
    assert {id for _, id in claims} == ids
    for (_, id), claim in claims.items():  # an id of the list, a typed one, a key and an output's id lead to the claim
        for text in (id, claim["original_id"], claim["message_key"]):
            found = inbox.json("show", text)["claims"]
            assert claim["original_id"] in [each["original_id"] for each in found], text
            assert len(found) == 1 + (text == "7")
        for output in found[0]["outputs"]:
            assert inbox.json("show", output["output_id"])["claims"] == found
            assert inbox.json("explain", output["output_id"])["claims"][0]["original_id"] == claim["original_id"]
    assert inbox.json("show", "true")["claims"][0]["id"] == "b:true"
    assert inbox.json("show", '["s:ö","i:1"]')["claims"][0]["type"] == "shop.Pair"
    assert [claim["id"] for claim in inbox.json("list", "--type", "shop.Noted", "--consumer", "shop")["claims"]] == ["h h"]
    assert [claim["id"] for claim in inbox.json("list", "--pending")["claims"]] == ["a"]
    assert inbox("list", "--consumer", "ship", code=Exit.FAILED) == "idemp: there is no consumer ship: shop\n"
    assert inbox("list", "--limit", "1").endswith("… and more: --limit 10\n")
    assert inbox.json("list", "--limit", "1")["more"]


def test_an_ambiguous_id_is_refused_with_the_ids_to_use(shop: Shop, inbox: Commands) -> None:
    shop.tell(Pay(id=1))
    shop.tell(Pay(id="1"))
    shop.tell(Noted(), **{"x-id": "1"})
    shop.work(shop.worker())
    refused = inbox("erase", "1", code=Exit.FAILED)
    assert refused.startswith("idemp: 1 names 3 claims; use one of: ")
    assert set(refused.strip().partition("of: ")[2].split(", ")) == {"i:1", "s:1 --type shop.Pay", "s:1 --type shop.Noted"}
    assert inbox("redispatch", "i:1") == inbox("redispatch", "s:1", "--type", "shop.Pay") == "0 outputs made due\n"
    assert inbox("erase", "i:1", "--type", "shop.Noted", code=Exit.FAILED) == "idemp: i:1 names a claim only as: i:1\n"


def test_quarantined_and_confirmed_outputs_are_sent_again_with_the_same_id_and_bytes(shop: Shop, inbox: Commands) -> None:
    shop.handle = send_nowhere
    shop.send("a", "b")
    worker = shop.worker()
    for _ in range(2):
        worker.step(poll=0.0)
    lost = [
        output["output_id"] for id in "ab" for output in inbox.json("show", id)["claims"][0]["outputs"] if not output["ordinal"]
    ]
    assert {output["state"] for output in inbox.json("show", "a")["claims"][0]["outputs"]} == {"pending", "confirmed", "delayed"}
    quarantine(worker, *lost)
    assert {claim["id"] for claim in inbox.json("list", "--quarantined")["claims"]} == {"a", "b"}
    shown = inbox("explain", "a")
    assert "\n            quarantined\n            shop.Shipped, send to nowhere\n" in shown
    assert " refusals: no queue takes\\x1b[2J it\n" in shown
    assert shown.endswith("\n\nidemp inbox redispatch a\n")
    shop.work(worker)
    assert not shop.rows("nowhere")
    shop.broker.declare("nowhere", [])
    assert inbox("redispatch", "a") == "1 output made due\n1 output confirmed: --confirmed sends again\n"
    shop.work(worker)
    assert [json.loads(row.headers)["message_id"] for row in shop.rows("nowhere")] == lost[:1]
    assert inbox("redispatch", "--quarantined", "--consumer", "shop") == "1 output made due\n"
    assert inbox.json("redispatch", "--quarantined") == {"made_due": 0, "confirmed": 0}
    shop.work(worker)
    assert [json.loads(row.headers)["message_id"] for row in shop.rows("nowhere")] == lost
    sent = shop.sent()
    assert inbox.json("redispatch", lost[0], "--confirmed")["made_due"] == 2  # the delayed one waits
    shop.work(worker)
    assert (len(shop.rows("nowhere")), sink_rows(shop), shop.sent()) == (3, 3, sent)
    rows = [(row.headers, row.body) for row in shop.rows("nowhere")]
    assert rows[2] == rows[0]
    for wrong in ([], ["a", "--quarantined"], ["--quarantined", "--confirmed"]):
        assert "use --quarantined" in inbox("redispatch", *wrong, code=Exit.USAGE)


def test_an_erased_output_is_never_sent_and_its_redelivery_stays_a_duplicate(shop: Shop, inbox: Commands) -> None:
    shop.send("a", "b")
    worker = shop.worker()
    shop.work(worker)
    shop.send("a")
    shop.work(worker)
    assert (sink_rows(shop), shop.runs["a"]) == (6, 1)  # redispatch="always"
    assert "1 output not confirmed" in inbox("erase", "a", code=Exit.FAILED)
    assert inbox("erase", "a", "--force") == "3 outputs erased\n"
    assert inbox.json("erase", "a") == {"erased": 0}
    assert shop.pending() == 1  # of the other claim
    assert {output["state"] for output in inbox.json("show", "b")["claims"][0]["outputs"]} == {"confirmed", "delayed"}
    tables = shop.database.tables
    with shop.database.short() as connection:  # a row that another transaction inserted meanwhile
        place = [tables.output.c[name] for name in ("output_id", "consumer_id", "message_key", "ordinal")]
        row = connection.execute(select(*place).where(tables.output.c.body == b"")).first()
        assert row is not None
        connection.execute(insert(tables.pending), {**row._mapping, "due_at": 0.0})
    scheduler: Any = worker.adapters.scheduler
    assert not scheduler.lease_outputs(10, 60.0)
    assert inbox.json("redispatch", "a", "--confirmed")["made_due"] == 0
    shop.send("a")
    shop.pass_time(601)
    worker.step(poll=0.0)
    assert (sink_rows(shop), shop.runs["a"], shop.claims()) == (6, 1, 2)
    assert {output["state"] for output in inbox.json("show", "a")["claims"][0]["outputs"]} == {"erased"}
    assert "order_id" not in inbox("show", "a")
    with shop.database.short() as connection:
        connection.execute(tables.pending.delete())


def test_a_chain_is_explained_from_both_ends(shop: Shop, inbox: Commands) -> None:
    told = uuid7()
    shop.tell(Told(id="t"), told)
    shop.work(shop.worker())
    shop.handle_at_sink()
    (output,) = shop.outputs()
    cause, effect = inbox.json("explain", told)["claims"][0], inbox.json("explain", output)["claims"][0]
    assert [(claim["consumer"], claim["id"]) for claim in cause["caused"]] == [("sink", output)]
    assert (effect["consumer"], effect["caused_by"]["consumer"], effect["caused_by"]["id"]) == ("sink", "shop", told)
    assert f"caused      shop.Shipped, handled by sink\n            {output}\n" in inbox("explain", told)
    assert f"caused by   shop.Told, handled by shop\n            {told}\n" in inbox("explain", output)


def test_retries_dead_letters_and_hostile_text_are_shown(shop: Shop, inbox: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.tell(Told(id="fails"), "f")
    shop.tell(Told(id="refused"), "r")
    shop.tell(Told(id="t"), "t")
    shop.send("evil\x1b[2J\u202e")
    shop.work(shop.worker())
    shop.sink_fails = True
    shop.handle_at_sink()
    retry = inbox("explain", "f")
    assert "retry       shop.Told in shop, 1 failure\n            due " in retry
    (waits,) = inbox.json("explain", "f")["failures"]
    assert "\n            handler: RuntimeError: not yet\n" in retry
    assert 'raise RuntimeError("not yet")' in retry
    assert retry.endswith(f"\n            idemp dead show {waits['id']}\n")
    inbox.capsys.readouterr()
    assert run("dead", "show", str(waits["id"])) == Exit.OK
    shown = inbox.capsys.readouterr().out
    assert "\nretry       due " in shown
    assert 'raise RuntimeError("not yet")' in shown
    dead = inbox("explain", "r")
    (number,) = [row.id for row in shop.rows() if row.due_at is None]
    assert "refused: Refuse: never\\u202e\\x1b[2J\n" in dead
    assert dead.endswith(f"            idemp dead show {number}\n\nidemp dead replay {number}\n")
    (failed,) = inbox.json("explain", "r")["failures"]
    assert (failed["id"], failed["queue"], failed["due_at"], failed["rule"]) == (number, "shop", None, "refused")
    message = shop.database.tables.message
    with shop.database.short(queues=True) as connection:  # a failure notes the id that was read from the body
        history = json.dumps([{**failed_entry(shop, number), "id": "i:55"}]).encode()
        connection.execute(update(message).where(message.c.id == number).values(history=history))
    assert [inbox.json("explain", id)["failures"][0]["id"] for id in ("55", "i:55")] == [number, number]
    (later,) = inbox.json("explain", "t")["claims"][0]["caused_failures"]
    assert later["error"] == "Refuse: no room"
    assert f"idemp dead replay {later['id']}\n" in inbox("explain", "t")
    (evil,) = [claim for claim in inbox.json("list")["claims"] if claim["type"] == "shop.Order"]
    assert evil["original_id"] == "s:evil\x1b[2J\u202e"
    assert evil["id"] == evil["message_key"]
    assert inbox("list", "--type", "shop.Told").splitlines()[0].split() == [
        "id",
        "type",
        "consumer",
        "claimed",
        "outputs",
        "pending",
    ]
    for width in (80, 40):
        monkeypatch.setenv("COLUMNS", str(width))
        for arguments in (["explain", evil["id"]], ["show", evil["id"]], ["explain", "t"]):
            lines = inbox(*arguments).splitlines()
            assert all(line.isprintable() for line in lines)
            kept = ("{", evil["worker"], ".py", "raise ")  # these are not wrapped
            cut = [line for line in lines if not any(each in line for each in kept)]
            assert max(map(len, cut)) <= width, arguments
    assert inbox("list", "--type", "shop.Told").splitlines()[:2] == ["id        t", "type      shop.Told"]
    assert "evil\\u001b[2J\\u202e" in inbox("show", evil["id"])


@pytest.mark.parametrize(
    "id",
    [
        "",
        "7",
        "i:7",
        "[",
        '["\\ud800"]',
        "[" * 100_000,
        "\udc80",
        "6d0ea7ef-68f3-882d-b51a-94a378c53be1",
        "x" * 100_000,
        "a\x1b[2J",
    ],
)
def test_what_is_unknown_is_refused_in_one_line(shop: Shop, inbox: Commands, id: str) -> None:
    for command in ("explain", "show", "redispatch", "erase"):
        refused = inbox(command, id, code=Exit.FAILED)
        assert refused.startswith(("idemp: no claim, output, retry or dead letter has the id", "idemp: there is no claim of"))
        assert refused[:-1].isprintable()


def test_expired_claims_are_purged(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("IDEMP_DATABASE_URL", url)
    world = World(url, lambda message, ctx: None, Idempotent(key="order_id", retention="1h"))
    world.send("1", "2")
    world.work(world.worker())
    world.pass_time(3601)
    world.send("3")
    world.work(world.worker())
    assert (run("inbox", "purge"), world.claims()) == (Exit.OK, 1)
    assert capsys.readouterr().out == "2 claims deleted\n"
    assert run("inbox", "purge", "--json") == Exit.OK
    assert json.loads(capsys.readouterr().out) == {"deleted": 0}
