"""The demo: two consumers, duplicates, killed processes, and a count of what is left."""

from idemp.demo.storm import Report, run

__all__ = ["Report", "run"]
