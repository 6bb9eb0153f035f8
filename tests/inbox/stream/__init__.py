"""Event streams as inbox."""
