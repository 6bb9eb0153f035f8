"""The durable spool."""
