"""kombu's virtual transports, against a real Redis."""
