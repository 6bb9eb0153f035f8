"""A typical consumer without idemp: aio-pika and SQLAlchemy. A redelivery takes the payment again."""

import asyncio

import aio_pika
from payments import BROKER, DATABASE, QUEUE, PaymentTaken, TakePayment, payment
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

engine = create_async_engine(DATABASE, pool_size=20)


async def take_payment(message: TakePayment, session: AsyncSession) -> PaymentTaken:
    await session.execute(payment.insert(), {"id": message.payment_id, "cents": message.cents})
    return PaymentTaken(payment_id=message.payment_id)


async def main() -> None:
    connection = await aio_pika.connect_robust(BROKER)
    channel = await connection.channel()
    await channel.set_qos(20)

    async def on_message(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        async with message.process(requeue=True):
            async with AsyncSession(engine) as session, session.begin():
                taken = await take_payment(TakePayment.model_validate_json(message.body), session)
            # If the process dies here, this message is never sent, and the redelivery takes the payment again.
            await channel.default_exchange.publish(aio_pika.Message(taken.model_dump_json().encode()), "receipts")

    queue = await channel.declare_queue(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
    await queue.consume(on_message)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
