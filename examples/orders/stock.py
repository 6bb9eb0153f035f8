"""The app that reserves stock."""

from shop import ReserveStock, StockMissing, StockReserved, stock

from idemp import App, Context, Idempotent

app = App("stock")


@app.handler(ReserveStock, policy=Idempotent(key="order_id"))
def reserve(message: ReserveStock, ctx: Context) -> StockReserved | StockMissing:
    some = (stock.c.sku == message.sku, stock.c.left > 0)
    if ctx.connection.execute(stock.update().where(*some).values(left=stock.c.left - 1)).rowcount:
        print(f"reserved {message.sku} for {message.order_id}", flush=True)
        return StockReserved(order_id=message.order_id)
    print(f"nothing left of {message.sku} for {message.order_id}", flush=True)
    return StockMissing(order_id=message.order_id)
