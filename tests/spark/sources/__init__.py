"""Sources that can be read again."""
