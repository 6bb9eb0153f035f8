"""The consumer in the storm: an effect that shows when it is doubled or overwritten, and two outputs of the same run."""

from __future__ import annotations

from uuid import uuid4

from idemp import App, Context, Idempotent
from idemp.inbox.document import document_of
from tests.storms.documents.messages import AUDIT_QUEUE, CONSUMER, Charge, Charged, Invoice, inbox

app = App(CONSUMER, store=inbox())


@app.handler(Charge, policy=Idempotent(key="order_id", entity="account"))
def charge(message: Charge, ctx: Context) -> Charged:
    """Write the effect, send the invoice, publish the event."""
    account, run = document_of(ctx), uuid4().hex
    account.setdefault("charged", []).append([str(message.order_id), run])
    account["balance"] = account.get("balance", 0) + message.cents
    ctx.send(Invoice(order_id=message.order_id, run=run), to=AUDIT_QUEUE)
    return Charged(order_id=message.order_id, run=run)
