"""Adapters of message brokers."""
