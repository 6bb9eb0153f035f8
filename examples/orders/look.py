"""Print what the apps have done."""

import json

from shop import MAILS, order, stock
from sqlalchemy import select

from idemp import Settings
from idemp.sql.engine import Database

keys: dict[str, set[str]] = {}
for line in MAILS.read_text().splitlines():
    mail = json.loads(line)
    keys.setdefault(mail["order"], set()).add(mail["key"])
with Database(Settings().database_url).engine.connect() as connection:
    for row in connection.execute(select(order).order_by(order.c.id)):
        print(f"{row.id} {row.state}, {len(keys[row.id])} mail")
    print("stock:", {row.sku: row.left for row in connection.execute(select(stock).order_by(stock.c.sku))})
