"""Fill the stock, and send each order twice."""

from orders import app
from shop import PlaceOrder, stock

with app.initiate(id="set-up") as unit:  # a second run changes nothing
    unit.connection.execute(stock.insert(), [{"sku": "chair", "left": 5}, {"sku": "lamp", "left": 0}])
for _ in range(2):
    with app.initiate() as unit:
        for order_id, sku in (("A1", "chair"), ("B2", "lamp")):
            unit.send(PlaceOrder(order_id=order_id, sku=sku), to="orders")
