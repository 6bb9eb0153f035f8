"""Consuming through losses: of the connection, the channel, the queue, the broker, and of time."""
