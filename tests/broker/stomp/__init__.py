"""ActiveMQ, over STOMP."""
