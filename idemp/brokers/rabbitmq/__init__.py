"""RabbitMQ through py-amqp: quorum queues, confirms for each message, one acknowledgement a group."""

from idemp.errors import needs

with needs("rabbitmq"):
    from idemp.brokers.rabbitmq.broker import RabbitBroker

__all__ = ["RabbitBroker"]
