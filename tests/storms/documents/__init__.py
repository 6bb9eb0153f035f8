"""Workers on document stores, killed at random: `python -m tests.storms.documents` at full size, smaller in the suite."""
