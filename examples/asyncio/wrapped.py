"""The same consumer with an inbox: the loop, the channel and the acknowledgements stay as they are."""

import asyncio

import aio_pika
from payments import BROKER, DATABASE, QUEUE, PaymentTaken, TakePayment, payment
from sqlalchemy.ext.asyncio import create_async_engine

from idemp import AsyncContext, AsyncInbox, Idempotent

engine = create_async_engine(DATABASE, pool_size=20)


async def take_payment(message: TakePayment, ctx: AsyncContext) -> None:
    await ctx.session.execute(payment.insert(), {"id": message.payment_id, "cents": message.cents})
    ctx.send(PaymentTaken(payment_id=message.payment_id), to="receipts")


async def main() -> None:
    handle = AsyncInbox(engine).wrap(take_payment, message=TakePayment, consumer="billing", policy=Idempotent(key="payment_id"))
    connection = await aio_pika.connect_robust(BROKER)
    channel = await connection.channel()
    await channel.set_qos(20)

    async def on_message(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        async with message.process(requeue=True):  # acknowledges if the call returns
            await handle(message.body, {"message_id": message.message_id, "timestamp": message.timestamp})

    queue = await channel.declare_queue(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
    await queue.consume(on_message)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
