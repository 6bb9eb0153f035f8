"""Messages that fail among messages that do not."""
