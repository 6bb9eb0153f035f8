"""RabbitMQ through kombu, against a real RabbitMQ."""
