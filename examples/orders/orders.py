"""The app that places orders."""

import json

from shop import MAILS, PlaceOrder, ReserveStock, SendMail, StockMissing, StockReserved, order

from idemp import App, Context, Idempotent

app = App("orders", policy=Idempotent())  # by the id of the message, unless a handler says otherwise


@app.handler(PlaceOrder, policy=Idempotent(key="order_id"))
def place(message: PlaceOrder, ctx: Context) -> None:
    ctx.connection.execute(order.insert().values(id=message.order_id, state="placed"))
    ctx.send(ReserveStock(order_id=message.order_id, sku=message.sku), to="stock")
    print(f"{message.order_id} is placed", flush=True)


@app.handler(StockReserved)
def confirm(message: StockReserved, ctx: Context) -> None:
    end(message.order_id, "confirmed", ctx)


@app.handler(StockMissing)
def cancel(message: StockMissing, ctx: Context) -> None:
    end(message.order_id, "cancelled", ctx)


def end(order_id: str, state: str, ctx: Context) -> None:
    ctx.connection.execute(order.update().where(order.c.id == order_id).values(state=state))
    ctx.send(SendMail(order_id=order_id, text=f"Your order is {state}."), to=app.name)
    print(f"{order_id} is {state}", flush=True)


@app.handler(SendMail)
def mail(message: SendMail, ctx: Context) -> None:
    # A mail server would be given the message id as idempotency key: if this process dies here, the handler runs again.
    line = json.dumps({"key": ctx.message_id, "order": message.order_id, "text": message.text})
    with MAILS.open("a") as file:
        file.write(f"{line}\n")
    print(f"mail for {message.order_id}", flush=True)
