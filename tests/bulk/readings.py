"""Messages of every kind of id and envelope, and an app that handles them, for each way by which a message can be read."""

from __future__ import annotations

import json
import random
from typing import Any, Final
from uuid import UUID

import pyarrow as pa
from pydantic import BaseModel
from sqlalchemy import insert, select

from idemp import App, Context, Idempotent, Key
from idemp.bulk import Row, SqlSet
from idemp.identity import uuid7
from idemp.sql.engine import Database
from tests.world import effect

STRUCTURED: Final = "application/cloudevents+json"
Message = tuple[dict[str, Any], bytes]
POLICIES: Final = {
    "shop.ById": Idempotent(),
    "shop.ByField": Idempotent(key="number"),
    "shop.ByFields": Idempotent(key=("shop.name", "number", "paid")),
    "shop.ByHeader": Idempotent(key=Key.header("x-id")),
    "shop.ByDigest": Idempotent(key=Key.digest()),
}


class Shop(BaseModel):
    name: str


class Order(BaseModel):
    number: int | str
    paid: bool
    shop: Shop
    price: float


class Told(BaseModel):
    number: str


app = App("readings")


def take(message: Order, ctx: Context) -> None:
    ctx.session.execute(insert(effect).values(what=str(message.number)))
    ctx.publish(Told(number=str(message.number)), type="shop.Told")
    ctx.send(Told(number=str(message.number)), type="shop.Told", to="sink")


for each in POLICIES:
    app.handler(Order, type=each, policy=POLICIES[each])(take)

OUTPUTS: Final = (
    "SELECT place, 'shop.Told' AS type, jsonb_build_object('number', body ->> 'number') AS body, queue "
    "FROM {fresh}, (VALUES (NULL, 1), ('sink', 2)) AS to_queue (queue, ordinal) ORDER BY place, ordinal"
)
SQL: Final = SqlSet(effects=["INSERT INTO effect (what) SELECT body ->> 'number' FROM {fresh}"], outputs=OUTPUTS)


def take_all(fresh: pa.Table, connection: Any) -> pa.Table:
    """The handler for all new rows at once."""
    numbers = [str(json.loads(body)["number"]) for body in fresh["body"].to_pylist()]
    connection.execute(insert(effect), [{"what": number} for number in numbers])
    places = fresh["place"].to_pylist()
    twice = [(place, number, queue) for place, number in zip(places, numbers, strict=True) for queue in (None, "sink")]
    return pa.table({
        "place": [place for place, _, _ in twice],
        "type": ["shop.Told"] * len(twice),
        "body": [json.dumps({"number": number}) for _, number, _ in twice],
        "queue": pa.array([queue for _, _, queue in twice], pa.string()),
    })  # fmt: skip


def messages(count: int = 500) -> list[Message]:
    """Return messages as a broker brings them: plain ones, and CloudEvents in both modes."""
    chance = random.Random(56)
    ids = (
        lambda n: uuid7(),
        lambda n: str(UUID(int=chance.getrandbits(128), version=4)),
        lambda n: uuid7().upper(),
        lambda n: f"order-{n}",
        lambda n: f'Auftrag "{n}"\\ ä€😀',
    )
    made: list[Message] = []
    for n in range(count):
        type = list(POLICIES)[n % 5]
        number = n if n % 3 else f"{n}-ä"
        data = json.dumps({"number": number, "paid": n % 2 == 0, "shop": {"name": "a/b"}, "price": n / 4}, indent=n % 2 or None)
        id, headers = ids[n // 5 % 5](n), {"x-id": f"header-{n}"}
        if n % 4 == 0:
            headers["traceparent"] = f"00-{n:032x}-{n:016x}-01"
        properties: dict[str, Any] = {"timestamp": 1_790_000_000.0 + n, "headers": headers}
        if n % 6 == 0:
            properties["correlation_id"] = f"cart-{n}"
        event = {"specversion": "1.0", "id": id, "source": f"/shop/{n % 7}", "type": type, "time": "2026-11-24T10:00:00.123456Z"}
        match n // 25 % 3:
            case 0:
                properties |= {"message_id": id, "type": type}
            case 1:
                headers |= {f"{('ce-', 'ce_')[n % 2]}{name}": value for name, value in event.items()}
                properties["content_type"] = "application/json"
            case 2:
                properties["content_type"] = STRUCTURED
                data = json.dumps(event)[:-1] + f', "data":{data}}}'
        made.append((properties, data.encode()))
    return made


def row(message: Message) -> Row:
    """Return a message as a row of an archive."""
    properties, body = message
    get = properties.get
    return Row(
        body, id=get("message_id"), type=get("type"), time=get("timestamp"), headers=get("headers"), content_type=get("content_type"),
        correlation_id=get("correlation_id"), reply_to=get("reply_to"),
    )  # fmt: skip


def stored(database: Database) -> tuple[list[Any], list[Any], list[str]]:
    """Return claims, outputs and effects, without the times at which they were made."""
    tables = database.tables
    inbox, output = tables.inbox, tables.output
    with database.engine.connect() as connection:
        claims = select(inbox.c.message_key, inbox.c.type_id, inbox.c.original_id, inbox.c.fingerprint).order_by(
            inbox.c.message_key
        )
        outputs = []
        for each in connection.execute(select(output).order_by(output.c.message_key, output.c.ordinal)).mappings():
            properties = json.loads(each["headers"])
            assert properties.pop("timestamp") > 1_700_000_000
            outputs.append({**each, "headers": properties, "body": json.loads(each["body"])})
        effects = sorted(connection.scalars(select(effect.c.what)))
        return [tuple(found) for found in connection.execute(claims)], outputs, effects
