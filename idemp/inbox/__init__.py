"""The store port, and one adapter per kind of store."""
