"""kombu's virtual transports: queues made of what a store has, Redis lists above all."""
