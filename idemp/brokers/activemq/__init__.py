"""ActiveMQ Classic over STOMP 1.2: a receipt for each message, each acknowledged by itself."""

from idemp.errors import needs

with needs("activemq"):
    from idemp.brokers.activemq.broker import ActivemqBroker

__all__ = ["ActivemqBroker"]
