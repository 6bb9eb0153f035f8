"""Homes of prepared messages that are brokers."""
