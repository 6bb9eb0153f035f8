"""Seeded faults: what the suite must catch. `python -m tests.mutants --help`."""
