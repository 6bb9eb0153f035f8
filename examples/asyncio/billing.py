"""The same handler in an app: idemp's worker consumes, retries, and keeps dead letters."""

from payments import PaymentTaken, TakePayment, payment

from idemp import App, AsyncContext, Idempotent

app = App("billing")  # the consumer of the wrapped handler, so that its claims count; and a queue of this name


@app.handler(TakePayment, policy=Idempotent(key="payment_id"), default=True)  # producers do not say the type
async def take_payment(message: TakePayment, ctx: AsyncContext) -> None:
    await ctx.session.execute(payment.insert(), {"id": message.payment_id, "cents": message.cents})
    ctx.send(PaymentTaken(payment_id=message.payment_id), to="receipts")
