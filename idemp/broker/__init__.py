"""The broker port, and its adapters."""
