"""Two consumers, `app` for orders and `stock` for the stock, which send each other messages.

```
PlaceOrder ──► place_order ──ReserveStock──► reserve_stock ──StockReserved──► confirm_order ──► OrderConfirmed
```
Each opted-in handler runs once for each key, whatever broker and processes go through: its changes to the tables, the
claim of its message's id and the messages that it sends are committed together, or not at all.
"""

from __future__ import annotations

from sqlalchemy import select, update

from idemp import App, Context, Idempotent, Refuse

from .messages import (
    GetOrder,
    OrderConfirmed,
    OrderPlaced,
    OrderView,
    PlaceOrder,
    ReserveStock,
    StockReserved,
)
from .models import PREFIX, Order, Reservation, Stock

app = App("orders", queue=f"{PREFIX}orders")
stock = App("stock", queue=f"{PREFIX}stock")


@app.handler(PlaceOrder, policy=Idempotent(key="order_id", retention="7d"))
def place_order(command: PlaceOrder, ctx: Context) -> None:
    """The key is the shop's order number: the same order under another message id is a duplicate, too."""
    ctx.session.add(Order(order_id=command.order_id, sku=command.sku, quantity=command.quantity))
    ctx.send(ReserveStock(**command.model_dump()), to=stock.queue)
    ctx.publish(OrderPlaced(order_id=command.order_id), mandatory=False)  # it is fine if nobody listens


@stock.handler(ReserveStock, policy=Idempotent(key="order_id", retention="7d"))
def reserve_stock(command: ReserveStock, ctx: Context) -> StockReserved:
    """Taking pieces from the stock is the effect that nobody wants twice."""
    taken = ctx.connection.execute(
        update(Stock)
        .where(Stock.sku == command.sku, Stock.quantity >= command.quantity)
        .values(quantity=Stock.quantity - command.quantity)
    )
    if taken.rowcount == 0:
        raise Refuse(f"{command.sku} is sold out.")  # parked at once, with this reason
    ctx.session.add(Reservation(**command.model_dump()))
    return StockReserved(**command.model_dump())  # a returned message is published after COMMIT


@app.handler(StockReserved, policy=Idempotent(retention="7d"))
def confirm_order(event: StockReserved, ctx: Context) -> None:
    """Without `key=` the message id counts. Outputs have stable ids, so a redispatched one is known here."""
    order = ctx.session.scalars(select(Order).where(Order.order_id == event.order_id)).one()
    order.confirmations += 1
    ctx.publish(OrderConfirmed(order_id=order.order_id), mandatory=False)


@app.handler(GetOrder, replies=True)
def get_order(query: GetOrder, ctx: Context) -> OrderView:
    """Not opted in: a question may be answered again at each delivery."""
    order = ctx.session.scalars(select(Order).where(Order.order_id == query.order_id)).first()
    return OrderView(order_id=query.order_id, status=order.status if order else "unknown")
