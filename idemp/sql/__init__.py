"""Store, scheduler and broker on SQL databases."""
