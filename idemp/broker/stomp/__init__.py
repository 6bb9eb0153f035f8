"""ActiveMQ over STOMP 1.2: every send has a receipt, and what moves between queues does so in a broker's transaction."""

from idemp.broker.stomp.broker import StompBroker

__all__ = ["StompBroker"]
