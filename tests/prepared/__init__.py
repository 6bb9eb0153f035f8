"""Prepared messages."""
